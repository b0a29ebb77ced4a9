"""Predicts the time of a layer from its spec and a GPU's ceilings: a kernel takes at least the time of
its bytes at the measured copy bandwidth, and of its products at the measured throughput: what good
kernels can take, not what today's do."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from math import prod

from blr.compressor.base.device import Card, installed_card
from blr.compressor.base.errors import UsageError
from blr.compressor.recipe.architectures import read_config_table
from blr.compressor.structures.spec import Spec
from blr.compressor.structures.specs import BlastSpec, KroneckerSpec, LowRankSpec, MonarchSpec

USUAL = "h200"  # the GPU that times are predicted for if nothing else is known
ASKED = "asked for"
MEMORY = 0.9  # least memory of a card of a kind, relative to the kind's
REACHED = 0.8  # of a datasheet's peak: 790 of 989 TFLOP/s on an H200
ELEMENT = 2  # bytes of a bf16 number
DECODE, PREFILL = 1, 4096  # tokens of the two predicted times


@dataclass(frozen=True)
class Gpu:
    """The ceilings of a GPU, "measured" or of a "datasheet"; `sm_ghz` is multiprocessors times clock."""

    name: str
    source: str
    copy_tbps: float
    bf16_tflops: float
    launch_us: float
    memory_gb: float
    sm_ghz: float

    @property
    def reached_tflops(self) -> float:
        """The TFLOP/s that bf16 products reach; a datasheet gives a peak."""
        return self.bf16_tflops * (1.0 if self.source == "measured" else REACHED)


@dataclass(frozen=True)
class Kernel:
    """What one kernel does: numbers that it reads and writes, and multiply-adds."""

    moved: int
    products: int

    def time_us(self, gpu: Gpu, launch: bool) -> float:
        """The kernel's roofline in microseconds, with its `launch` or without."""
        bytes_us = self.moved * ELEMENT / gpu.copy_tbps * 1e-6
        return max(bytes_us, 2 * self.products / gpu.bf16_tflops * 1e-6) + launch * gpu.launch_us


def chosen_gpu(name: str | None) -> tuple[Gpu, str]:
    """The GPU `name`, or this machine's, or `USUAL`; and the reason in words. Raises UsageError."""
    if name is not None:
        return find_gpu(name), ASKED
    if (here := gpu_of(installed_card())) is not None:
        return here, "the one of this machine"
    return find_gpu(USUAL), "none of configs/gpus.yaml is here"


def gpu_of(card: Card | None) -> Gpu | None:
    """The known ceilings of a card. None for an unknown one, a part of one, or one with less memory."""
    if card is None:
        return None
    words = re.findall(r"[a-z0-9]+", card.name.lower())
    if {"mig", "laptop"} & {*words}:
        return None
    named = [gpu for name, gpu in gpus().items() if f"-{name}-" in f"-{'-'.join(words)}-"]
    return next((gpu for gpu in named if card.memory >= MEMORY * gpu.memory_gb * 1e9), None)


def find_gpu(name: str) -> Gpu:
    """The GPU `name` of configs/gpus.yaml. Raises UsageError that lists the known ones."""
    known = gpus()
    if name.lower() not in known:
        raise UsageError(f"gpu {name!r} is not in configs/gpus.yaml; known: {', '.join(known)}")
    return known[name.lower()]


@cache
def gpus() -> dict[str, Gpu]:
    return {name: Gpu(name, **fields) for name, fields in read_config_table("gpus.yaml").items()}


def layer_time(spec: Spec, tokens: int, gpu: Gpu, launch: bool = True) -> float:
    return sum(kernel.time_us(gpu, launch) for kernel in kernels(spec, tokens))


def kernels(spec: Spec, tokens: int) -> Iterator[Kernel]:
    """The kernels of a layer for `tokens` inputs. Packed weights are unpacked as they are read. A
    structure that is not in `KERNELS` is one kernel that uses every number once."""
    if spec.corrected:
        for _, part in spec.parts():
            yield from kernels(part, tokens)
    elif spec.packing is not None:
        unpacked = list(kernels(spec.plain, tokens))
        spared = spec.parameters - spec.stored_bits() / (8 * ELEMENT)
        share = 1 - spared / sum(kernel.moved for kernel in unpacked)
        yield from (replace(kernel, moved=round(kernel.moved * share)) for kernel in unpacked)
    else:
        yield from KERNELS.get(spec.structure, _one)(spec, tokens)


def _one(spec: Spec, n: int) -> Iterator[Kernel]:
    moved = n * spec.in_features + spec.parameters + n * spec.out_features
    yield Kernel(moved, n * spec.parameters)


def _low_rank(spec: LowRankSpec, n: int) -> Iterator[Kernel]:
    inner = spec.rank * spec.groups
    U, V = (prod(shape) for shape in spec.shapes().values())
    yield Kernel(n * spec.in_features + V + n * inner, n * V)
    yield Kernel(n * inner + U + n * spec.out_features, n * U)


def _blocked(spec: MonarchSpec | BlastSpec, n: int) -> Iterator[Kernel]:
    """Monarch and BLAST, whose mix with S is part of the second product for one token."""
    o, i, rank, inner = spec.out_features, spec.in_features, spec.rank, n * spec.blocks * spec.rank
    mix = prod(spec.shapes().get("S", (0,)))
    fused = mix if n == DECODE else 0
    yield Kernel(n * i + rank * i + inner, n * rank * i)
    if mix and not fused:
        yield Kernel(2 * inner + mix, n * mix)
    yield Kernel(inner + fused + rank * o + n * o, n * (rank * o + fused))


def _kronecker(spec: KroneckerSpec, n: int) -> Iterator[Kernel]:
    for a, b, c, d in reversed(spec.patterns):
        yield Kernel(n * a * c * d + a * b * c * d + n * a * b * d, n * a * b * c * d)


KERNELS: dict[str, Callable[..., Iterator[Kernel]]] = {
    **{"svd": _low_rank, "monarch": _blocked, "blast": _blocked},
    "ks": _kronecker,
}
