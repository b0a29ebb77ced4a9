"""What this process can run: Triton, a GPU that its kernels are for, programmatic launch."""

import os
import re
from functools import cache

import torch
from torch import Tensor

from blr.kernels.common.mode import NO_TRITON, kernels_mode

# Bytes of shared memory of a block on sm_86 and sm_89, the least of the GPUs that kernels are for.
SMALLEST_SHARED = 99 * 1024
HALF = (torch.bfloat16, torch.float16)  # dtypes that tensor cores multiply at full speed
TRAINED = (*HALF, torch.float32)  # dtypes that models compute in while they are trained
# A model number as vendors write it: H200, GH200, A100, L40S, RTX 4090, RTX A6000.
_MODEL = re.compile(r"\b(?:RTX (?:PRO )?)?(?:GH|GB|[ABHLPTV])?\d{1,4}S?\b")


@cache
def has_triton() -> bool:
    """Whether Triton can be imported."""
    try:
        import triton.language  # noqa: F401
    except ImportError:
        return False
    return True


def kernel_device(tensor: Tensor) -> bool:
    """Whether Triton kernels take `tensor`: `kernels_on` its device."""
    return kernels_on(tensor.device)


def kernels_on(device: torch.device) -> bool:
    """Whether Triton kernels run on a device, by what it is and BLR_KERNELS.

    Raises RuntimeError when BLR_KERNELS insists on Triton and there is none.
    """
    mode = kernels_mode()
    if mode == "torch":
        return False
    if mode == "triton" and not has_triton():
        raise RuntimeError(NO_TRITON)
    if device.type == "cuda":
        return _gpu_runs_kernels(device)
    return mode == "triton" and device.type == "cpu" and interpreted()


def interpreted() -> bool:
    """Whether kernels imported from now on run in Triton's interpreter."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@cache
def _gpu_runs_kernels(device: torch.device) -> bool:
    capable = torch.version.cuda is not None and torch.cuda.get_device_capability(device) >= (8, 0)
    return capable and has_triton()


@cache
def supports_pdl(device: torch.device) -> bool:
    """Whether `device` starts a kernel before the one ahead of it ends (capability 9 and later).

    Kernels launched so load weights before they wait. That is safe unless the kernel ahead writes
    these weights and itself lets its successor start early: ours write none, and one that makes no
    such request is waited for whole.
    """
    if device.type != "cuda" or torch.version.cuda is None:
        return False
    return torch.cuda.get_device_capability(device) >= (9, 0)


@cache
def gpu_key(device: torch.device) -> str:
    """The short name of a GPU that tables are kept under: "h200", "a100", "rtx4090"; "sm_90" for one
    of unknown name or a slice of one; "cpu" for everything that is no GPU."""
    if device.type != "cuda":
        return "cpu"
    return gpu_name_key(torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device))


def gpu_name_key(name: str, capability: tuple[int, int]) -> str:
    """`gpu_key` of what the driver calls a GPU, as "NVIDIA A100-SXM4-80GB", (8, 0)."""
    found = _MODEL.search(name)
    if found is None or " MIG " in f" {name} ":
        return f"sm_{capability[0]}{capability[1]}"
    return found[0].replace(" ", "").lower()


@cache
def shared_limit(device: torch.device) -> int:
    """Bytes of shared memory that one block may use on `device` (the least we know of off the GPU)."""
    if device.type != "cuda":
        return SMALLEST_SHARED
    properties = torch.cuda.get_device_properties(device)
    return getattr(properties, "shared_memory_per_block_optin", SMALLEST_SHARED)


@cache
def multiprocessors(device: torch.device) -> int:
    """Of a GPU; four of an interpreted one."""
    if device.type != "cuda":
        return 4
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
