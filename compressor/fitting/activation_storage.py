"""Where tensors of all batches lie between two passes: on the GPU as long as they fit there."""

from __future__ import annotations

import torch

from blr.compressor.planning.training_sizes import KEPT_SHARE


def home(size: int, device: torch.device) -> torch.device:
    """`device` if `size` bytes are a small part of its free memory, else the CPU."""
    return device if size <= KEPT_SHARE * free_bytes(device) else torch.device("cpu")


def free_bytes(device: torch.device) -> int:
    """Of a GPU's memory what nothing holds, torch's own cache included; 0 of other devices."""
    if device.type != "cuda":
        return 0
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + cached
