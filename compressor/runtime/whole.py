"""Makes one launch (`kernels/decode/token`) of the phases of all layers, for one token of one row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from blr.compressor.modeling.stages import Packed
from blr.compressor.runtime.failures import StalledError, UnsupportedError
from blr.compressor.runtime.memory import DecoderState
from blr.compressor.runtime.plan import Columns, Heads, Phase, TokenPlan
from blr.kernels.common.available import HALF, has_triton, multiprocessors
from blr.kernels.decode.token.tables import (
    GATE,
    KINDS,
    NORM,
    PARTS,
    Product,
    Step,
    cdiv,
    fits,
    parts_of,
)

if TYPE_CHECKING:
    from blr.kernels.decode.token.launch import Token

KNOWN = ("stages", "dual", "gate", "attention")
INSTEAD = "use mode 'graph', or unset BLR_DECODE"
APART = 256  # numbers between the beginnings of two buffers, at least


def ends(plan: TokenPlan) -> tuple[list[Phase], list[Phase]]:
    """The phases before the layers and behind them."""
    inside = [i for i, phase in enumerate(plan.phases) if phase.name.startswith("layer.")]
    return plan.phases[: inside[0]], plan.phases[inside[-1] + 1 :]


def layers(plan: TokenPlan) -> list[Phase]:
    """The phases of all layers, which follow one another."""
    return [phase for phase in plan.phases if phase.name.startswith("layer.")]


def lacks(plan: TokenPlan, state: DecoderState, programs: int) -> str | None:
    """Why one launch of so many programs cannot compute the layers of a plan, in one line; None if it
    can."""
    phases, dtype, batch = layers(plan), state.kv.data.dtype, state.kv.data.shape[2]
    heads = [phase.heads for phase in phases if phase.heads]
    parts = [part for phase in phases for part in phase.parts]
    if batch > 1:
        return f"a decoder for {batch} sequences: expected one for 1 (--batch 1)"
    if dtype not in HALF:
        return f"keys and values in {dtype}: expected whole ones in bfloat16 or float16"
    if any(phase.kind not in KNOWN or phase.activation not in ("", "silu") for phase in phases):
        return "experts, modules of their own or another activation: expected dense or low-rank layers"
    for stage in (part.stage for part in parts):
        if isinstance(stage.w, Packed) or stage.w.shape[0] > 1 or stage.mix is not None:
            return "blocks or packed weights: expected plain dense or low-rank layers"
        if not fits(stage.w[0]) or stage.w.dtype != dtype or stage.part is not None:
            shape = list(stage.w.shape[1:])
            said = "128 rows and columns at least, and columns in multiples of 8"
            return f"weights {shape} in {stage.w.dtype}: expected {dtype}, {said}"
    if any(part.stage.bias is not None and part.target.name != "qkv" for part in parts):
        return "biases beside those of queries, keys and values: expected none"
    if (
        heads[0].width not in (64, 128)
        or state.cos.shape[1] != heads[0].width
        or heads[0].sinks is not None
    ):
        return f"heads of {heads[0].width}, or sinks: expected 64 or 128, rotated as a whole, no sinks"
    if len({(head.scale, head.eps, head.q_gain is None) for head in heads}) > 1:
        return "layers whose attention differs: expected the same settings"
    if len({w.stride(1) for w in (part.stage.w for part in parts) if isinstance(w, Tensor)}) > KINDS:
        return f"rows of more than {KINDS} lengths: expected fewer ranks"
    if parts_of(plan.buffers["heads"] // heads[0].width, programs) == 0:
        return f"more heads than the {programs} multiprocessors: expected fewer"
    return None


class Whole:
    """The launch. Norms' gains and biases are copied, in float32; matrices are read where they are.

    Raises UnsupportedError for layers, or a device, that the kernel does not run."""

    def __init__(self, plan: TokenPlan, state: DecoderState) -> None:
        device = state.tokens.device
        programs = multiprocessors(device)
        reason = _no_kernel(device) or lacks(plan, state, programs)
        if reason is not None:
            raise UnsupportedError(f"mode 'token': {reason}; {INSTEAD}")
        try:
            self.token = make_token(plan, state, programs)
        except ValueError as error:
            raise UnsupportedError(f"mode 'token': {error}; {INSTEAD}") from error
        self.ends = ends(plan)

    def __call__(self) -> None:
        self.token.launch()

    def check(self) -> None:
        """Raises StalledError if a launch gave up waiting."""
        step = self.token.take_stall()
        if step is not None:
            raise StalledError(
                f"programs of the kernel of a whole token waited in vain before step {step}: expected "
                f"all of them to run at once; decode again on a GPU of its own, or {INSTEAD}"
            )


def _no_kernel(device: torch.device) -> str | None:
    """Why the kernel does not run on a device, in one line; None if it does."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != 9:
        return f"found {device}, expected a GPU of capability 9"
    if not has_triton():
        return "found no Triton, expected version 3.6 or later"
    from triton import __version__ as version

    if tuple(map(int, version.split(".")[:2])) < (3, 6):
        return f"found Triton {version}, expected 3.6 or later"
    return None


def make_token(plan: TokenPlan, state: DecoderState, programs: int) -> Token:
    """The launch of a plan that lacks nothing."""
    from blr.kernels.decode.token.launch import Attention, Token

    phases, kv = layers(plan), state.kv.data
    found = [phase.heads for phase in phases if phase.heads]
    one, width, device = found[0], plan.buffers["qkv"], kv.device
    heads = plan.buffers["heads"] // one.width
    split = parts_of(heads, programs)
    steps, gains, sums = make_steps(plan, heads * split * one.width)
    bias = _biases(phases, len(found), width)
    attention = Attention(
        *(kv[:, 0, 0], kv[:, 1, 0], state.cos, state.sin, heads, one.scale),
        *(None if bias is None else bias.to(device), _head_gains(found), one.eps),
    )
    eps = next(phase.eps for phase in phases if phase.gain is not None)
    x = state.view(Columns("x", gains.shape[1]), 1)[0]
    return Token(steps, x, gains, attention, state.pos, state.start, eps, sums, split, programs)


def make_steps(plan: TokenPlan, exponents: int) -> tuple[list[Step], Tensor, int]:
    """The steps of all layers, gains [norms, hidden] of their norms, and how many sums they need.
    exponents: where those of attention lie."""
    places = _Places(plan.buffers, exponents)
    steps: list[Step] = []
    gains: list[Tensor] = []
    for phase in layers(plan):
        _, index, name = phase.name.split(".", 2)
        if phase.heads is not None:
            window = phase.heads.window or 1 << 30
            steps.append(
                Step(int(index), 0, gain=window, x=places.of("qkv"), up=exponents, attention=True)
            )
        elif phase.kind != "gate":  # whoever reads its results computes them
            flags = 0 if phase.gain is None else NORM
            if phase.gain is not None:
                gains.append(phase.gain.float())
            steps.append(_products(int(index), name, phase, places, flags, max(len(gains) - 1, 0)))
    return steps, torch.stack(gains), places.size


class _Places:
    """Where buffers of a plan begin among the sums, "x" first; those of first stages one for each group
    of layers. exponents: where those of attention lie among its parts."""

    def __init__(self, widths: dict[str, int], exponents: int) -> None:
        self.widths, self.exponents, self.size = widths, exponents, 0
        self.found: dict[str, int] = {}
        self.of("x")

    def at(self, columns: Columns, group: str) -> int:
        return self.of(columns.name, group if columns.name[:1] == "z" else "") + columns.start

    def of(self, name: str, group: str = "") -> int:
        """Where the buffer `name` begins; a new one gets a place behind the last."""
        key = name + group
        if key not in self.found:
            width = self.widths.get(name, 0) or 2 * self.widths["inner"]  # gate and up
            self.found[key] = self.size
            self.size += cdiv(width, APART) * APART
        return self.found[key]


def _products(layer: int, name: str, phase: Phase, places: _Places, flags: int, gain: int) -> Step:
    group, products = name.split(".")[0], []  # "qkv.V" and "qkv.U" share z
    for i, part in enumerate(phase.parts):
        source, target, up = part.source, part.target, 0
        if source.name == "heads":
            flags, x, up = flags | PARTS, 0, places.exponents
        elif source.name == "inner":
            flags, x = flags | GATE, places.of("gate_up")
            up = x + source.width
        else:
            x = places.at(source, group)
        paired = phase.kind == "dual"
        y = places.of("gate_up") + i * target.width if paired else places.at(target, group)
        products.append(Product(part.stage.w[0], x, y, up))
    y = min(p.y for p in products)
    size = 0 if phase.add else max(p.y + len(p.w) for p in products) - y
    return Step(layer, y, size, flags, gain, products=products)


def _biases(phases: Sequence[Phase], layers: int, width: int) -> Tensor | None:
    """[layers, width] of queries, keys and values in float32; None where no layer has any."""
    found = torch.zeros(layers, width)
    for phase in phases:
        for part in phase.parts:
            if part.stage.bias is not None:
                at = part.target.start
                found[int(phase.name.split(".")[1]), at : at + part.target.width] = part.stage.bias
    return found if found.any() else None


def _head_gains(heads: Sequence[Heads]) -> Tensor | None:
    """[layers, 2, D] of queries and keys in float32; None where they have no norms."""
    pairs = [(head.q_gain, head.k_gain) for head in heads]
    found = [torch.stack((q, k)).float() for q, k in pairs if q is not None and k is not None]
    return torch.stack(found) if found else None
