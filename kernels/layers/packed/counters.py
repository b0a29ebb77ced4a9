"""Zeros in which programs of one launch count each other; a launch leaves zeros behind.

Launches of a stream share theirs; one that a CUDA graph captures, which may run beside others, has its
own.
"""

import torch
from torch import Tensor

CAPTURED = 1 << 20  # numbers on a device for all that graphs capture; 4 MiB
MOST = 1 << 12  # of a launch
_streams: dict[tuple[int, int], Tensor] = {}
_captured: dict[int, Tensor] = {}


def zero_counters(device: torch.device, count: int) -> Tensor | None:
    """`count` zeros in int32 for the next launch on the current stream of a GPU.

    None for more than `MOST`, and while a graph is captured where none were prepared or are left.
    """
    if count > MOST:
        return None
    number = device.index if device.index is not None else torch.cuda.current_device()
    if torch.cuda.is_current_stream_capturing():
        left = _captured.get(number)
        count = -(-count // 4) * 4  # the next ones begin at a multiple of 16 bytes
        if left is None or len(left) < count:
            return None
        _captured[number] = left[count:]
        return left[:count]
    if number not in _captured:
        _captured[number] = torch.zeros(CAPTURED, dtype=torch.int32, device=device)
    key = number, torch.cuda.current_stream(device).cuda_stream
    found = _streams.get(key)
    if found is None:
        found = _streams[key] = torch.zeros(MOST, dtype=torch.int32, device=device)
    return found
