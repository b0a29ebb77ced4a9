"""The bandwidth of sums over the GPUs of a host: what `scaling.py` predicts more GPUs from.

    python scripts/bench/collectives.py [--gpus 2] [--mib 256] [--rounds 20]

Prints one object of JSON: GB/s of an all-reduce by NCCL (gloo where there is no GPU) as its algorithm
moves them, 2 (N − 1) / N of the bytes in and out of every GPU, in bfloat16 and float32.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as processes


def bandwidth(rank: int, count: int, mib: int, rounds: int, found: Any) -> None:
    """One of `count` processes; the first keeps what it measured."""
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "29513"}
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(rank)
    dist.init_process_group("nccl" if cuda else "gloo", rank=rank, world_size=count)
    for dtype in (torch.bfloat16, torch.float32):
        tensor = torch.ones((mib << 20) // dtype.itemsize, dtype=dtype, device="cuda" if cuda else "cpu")
        seconds = _timed(tensor, rounds)
        if rank == 0:
            found[str(dtype)[6:]] = 2 * (count - 1) / count * tensor.nbytes / seconds / 1e9
    dist.destroy_process_group()


def _timed(tensor: torch.Tensor, rounds: int) -> float:
    """Seconds of one sum."""
    for _ in range(3):
        dist.all_reduce(tensor.fill_(1))
    _wait(tensor)
    started = time.perf_counter()
    for _ in range(rounds):
        dist.all_reduce(tensor)
    _wait(tensor)
    return (time.perf_counter() - started) / rounds


def _wait(tensor: torch.Tensor) -> None:
    if tensor.is_cuda:
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=20)
    given = parser.parse_args()
    with processes.Manager() as manager:
        found = manager.dict()
        processes.spawn(bandwidth, (given.gpus, given.mib, given.rounds, found), given.gpus)
        print(json.dumps({"gpus": given.gpus, "mib": given.mib, "gb_a_second": dict(found)}))


if __name__ == "__main__":
    main()
