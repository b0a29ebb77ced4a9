"""Launches of stages of 4 bits by products of bytes, each program with many tiles (`loop.py`)."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from blr.kernels.common.available import interpreted, multiprocessors
from blr.kernels.common.launching import run_kernel
from blr.kernels.decode.gemv.launch import launch_options, power_of_two
from blr.kernels.decode.integer.form import lanes, offset_of, row_warps
from blr.kernels.decode.integer.launch import ends_of, three
from blr.kernels.decode.quantized.launch import complete, quantized_tile, stage
from blr.kernels.decode.quantized.segments import QuantizedSegment, QuantizedTile

DEEP = 4  # rows of a thread at once
REGISTER_FILE = 1 << 16  # of a multiprocessor
REGISTERS = 128  # of a thread at most


@dataclass(frozen=True)
class Loop:
    """Stages of the same inputs. gain, eps: of the norm of these, if there is one. pdl: see
    `launch_options`."""

    segments: Sequence[QuantizedSegment]
    gain: Tensor | None = None
    eps: float = 0.0
    pdl: bool = False


def run_loop(loop: Loop, add: bool = False, activation: str = "") -> None:
    """Rows times inputs, stored or added to what the results hold; with an activation
    ``act(gate) ⊙ up`` of two segments of as many rows into the second's result."""
    if activation:
        _run_pair(loop, activation)
    else:
        _run_rows(loop, add)


def _run_rows(loop: Loop, add: bool) -> None:
    from blr.kernels.decode.integer.loop import loop_kernel

    segments = loop.segments
    stages, tiles = [stage(s) for s in segments], [_tile(s, loop.gain) for s in segments]
    ends = ends_of(stages, tiles, _resident(segments[0]))
    run_kernel(
        loop_kernel,
        (ends[-1],),
        *(*three(stages, stages[0]), ends, *_inputs(loop)),
        **{"COUNT": len(stages), "ADD": add},
        **dict(zip(("T0", "T1", "T2"), three(tiles, tiles[0]), strict=True)),
        **_options(loop),
    )


def _run_pair(loop: Loop, activation: str) -> None:
    from blr.kernels.decode.integer.loop import pair_kernel

    gate, up = loop.segments
    stages, tiles = [stage(s) for s in (gate, up)], [_tile(s, loop.gain) for s in (gate, up)]
    programs = ends_of(stages[:1], tiles[:1], _resident(gate))[-1]
    run_kernel(
        pair_kernel,
        (programs,),
        *(*stages, programs, *_inputs(loop)),
        **{"T0": tiles[0], "T1": tiles[1], "ACT": activation},
        **_options(loop),
    )


def _inputs(loop: Loop) -> tuple[Tensor, Tensor, float]:
    x = loop.segments[0].x
    return x, x if loop.gain is None else loop.gain, loop.eps


def _options(loop: Loop) -> dict[str, object]:
    s, limit = loop.segments[0], {} if interpreted() else {"maxnreg": REGISTERS}
    fixed = {"OFFSET": offset_of(s.bits), "ASM": not interpreted(), "num_warps": row_warps(s)}
    return {**fixed, **limit, **launch_options(loop.pdl)}


def shape_of(s: QuantizedSegment) -> dict[str, int]:
    """Rows BR, quads BQ, rows T side by side of a tile."""
    quads, warps = lanes(s), row_warps(s)
    beside = 32 * warps // quads
    rows = min(DEEP * beside, max(power_of_two(s.packed.shape[1]), beside))
    return complete({"BR": rows, "BQ": quads}, warps)


def _tile(s: QuantizedSegment, gain: Tensor | None) -> QuantizedTile:
    return quantized_tile(s, shape_of(s), gain)


def _resident(s: QuantizedSegment) -> int:
    """Programs that a GPU holds at once."""
    each = max(REGISTER_FILE // (REGISTERS * 32 * row_warps(s)), 1)
    return each * multiprocessors(s.x.device)
