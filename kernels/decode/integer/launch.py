"""Launches of stages of 2 and 3 bits whose inputs are made once, as words of bytes: one for them, one
for the rows."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from torch import Tensor

from blr.kernels.common.available import interpreted
from blr.kernels.common.launching import run_kernel
from blr.kernels.decode.gemv.launch import launch_options, power_of_two
from blr.kernels.decode.integer.form import (
    PLACES,
    THREE,
    Inputs,
    lanes,
    make_inputs,
    offset_of,
    row_warps,
    unit_of,
)
from blr.kernels.decode.quantized.formats import form_of
from blr.kernels.decode.quantized.launch import complete, quantized_tile, stage
from blr.kernels.decode.quantized.segments import QuantizedSegment, QuantizedStage, QuantizedTile

DEEPEST = 8  # rows of a thread at most
PROGRAMS = 528  # that a launch has at least, if it can: four for each multiprocessor of an H200
PACKED = 8  # quads of inputs of a program that makes them


@dataclass(frozen=True)
class ByteLaunch:
    """Stages of the same inputs, and the first stages of their corrections that are made beside those.

    gain, eps: of the norm of the inputs, if there is one. activation: of a pair, whose gated product is
    the second's result. pdl: see `launch_options`.
    """

    segments: Sequence[QuantizedSegment]
    firsts: Sequence[QuantizedSegment]
    inputs: Inputs
    gain: Tensor | None
    eps: float
    activation: str
    pdl: bool


def make_launch(
    segments: Sequence[QuantizedSegment],
    firsts: Sequence[QuantizedSegment] = (),
    *,
    gain: Tensor | None = None,
    eps: float = 0.0,
    activation: str = "",
    pdl: bool = False,
) -> ByteLaunch:
    """With room for the inputs, which `form.taken` says are the same."""
    return ByteLaunch(segments, firsts, make_inputs(segments[0]), gain, eps, activation, pdl)


def takes_first(s: QuantizedSegment) -> bool:
    """Whether a first stage can be made beside the inputs."""
    return s.mix is None and s.packed.shape[0] == 1 and len(s.x) == 1 and s.correction is None


def fill(launch: ByteLaunch) -> None:
    """Make the inputs, and z of the corrections."""
    from blr.kernels.decode.integer.inputs import inputs_kernel

    s, gain = launch.segments[0], launch.gain
    form, quads = form_of(s.bits, s.group), lanes(s)
    warps = max((_warps(v) for v in launch.firsts), default=4)
    stages = [stage(v) for v in launch.firsts]
    tiles = [_first_tile(v, warps, gain) for v in launch.firsts]
    ends = ends_of(stages, tiles)
    packers = max(quads // PACKED, 1)
    run_kernel(
        inputs_kernel,
        (ends[-1] + packers,),
        *(s.x, s.x if gain is None else gain, launch.eps, *launch.inputs, s.K, quads),
        *(*three(stages, stage(s)), ends),
        **{"OFFSET": offset_of(s.bits), "STEP": 1 / unit_of(s.bits, s.curved), "PLACES": PLACES[s.bits]},
        **{"BQ": min(PACKED, quads), "T": form, "NORM": gain is not None, "COUNT": len(stages)},
        **dict(zip(("V0", "V1", "V2"), three(tiles, _tile(s)), strict=True)),
        ASM=not interpreted(),
        num_warps=warps,
        **launch_options(launch.pdl),
    )


def multiply(launch: ByteLaunch, add: bool = False) -> None:
    """Rows times the inputs that are there, plus U z, stored or added to what the results hold; of a
    pair the gated product."""
    from blr.kernels.decode.integer.rows import gated_kernel, rows_kernel

    segments = launch.segments
    stages = [stage(s) for s in segments]
    tiles = [_tile(s, segments, bool(launch.activation)) for s in segments]
    if launch.activation:
        run_kernel(
            gated_kernel,
            (ends_of(stages[:1], tiles[:1])[-1],),
            *(*stages, *launch.inputs, lanes(segments[0])),
            **{"T0": tiles[0], "T1": tiles[1], "ACT": launch.activation},
            **_options(launch),
        )
        return
    run_kernel(
        rows_kernel,
        (ends_of(stages, tiles)[-1],),
        *(*three(stages, stages[0]), ends_of(stages, tiles), *launch.inputs, lanes(segments[0])),
        **{"COUNT": len(stages), "ADD": add},
        **dict(zip(("T0", "T1", "T2"), three(tiles, tiles[0]), strict=True)),
        **_options(launch),
    )


def _options(launch: ByteLaunch) -> dict[str, object]:
    low, high = table(launch.segments[0].curved)
    fixed = {"LOW": low, "HIGH": high, "ASM": not interpreted()}
    return {**fixed, "num_warps": row_warps(launch.segments[0]), **launch_options(launch.pdl)}


def run(launch: ByteLaunch, add: bool = False) -> None:
    """`fill`, then `multiply`."""
    fill(launch)
    multiply(launch, add)


def table(curved: bool = True) -> tuple[int, int]:
    """The bytes of the eight levels of three bits, as two words of 32 bits."""
    found = [*(-level for level in reversed(THREE)), *THREE] if curved else [*range(-4, 4)]
    words = (bytes(level % 256 for level in found[i : i + 4]) for i in (0, 4))
    low, high = (int.from_bytes(word, "little", signed=True) for word in words)
    return low, high


def shape_of(s: QuantizedSegment, total: int, paired: bool = False) -> dict[str, int]:
    """Rows BR, quads BQ, rows T side by side of a program in a launch of `total` rows; of a pair each
    has half as many."""
    quads, warps = lanes(s), row_warps(s)
    beside = 32 * warps // quads
    deep = min(power_of_two(max(total // (PROGRAMS * beside), 1) + 1) // 2, DEEPEST) // (1 + paired)
    rows = min(max(deep, 1) * beside, max(power_of_two(s.packed.shape[1]), beside))
    return complete({"BR": rows, "BQ": quads}, warps)


def _tile(
    s: QuantizedSegment, segments: Sequence[QuantizedSegment] = (), paired: bool = False
) -> QuantizedTile:
    total = sum(other.packed.shape[1] for other in segments or (s,))
    return quantized_tile(s, shape_of(s, total, paired), None)


def _warps(v: QuantizedSegment) -> int:
    """Warps of a program of a first stage, which reads a row at once if it can."""
    return min(max(power_of_two(form_of(v.bits, v.group).quads(v.K)) // 32, 4), 16)


def _first_tile(v: QuantizedSegment, warps: int, gain: Tensor | None) -> QuantizedTile:
    quads = max(power_of_two(form_of(v.bits, v.group).quads(v.K)), 4)
    return quantized_tile(v, complete({"BR": 1, "BQ": min(quads, 32 * warps)}, warps), gain)


def ends_of(
    stages: Sequence[QuantizedStage], tiles: Sequence[QuantizedTile], most: int | None = None
) -> tuple[int, int, int]:
    """Programs up to the end of each of three stages; the last of fewer stands for those missing. most:
    programs of all, each with as many tiles as the fullest has; by default one tile each."""
    counts = [s.blocks * -(-s.rows // tile.BR) for s, tile in zip(stages, tiles, strict=True)]
    turns = 1 if most is None else -(-sum(counts) // most)
    counts = [-(-count // turns) for count in counts]
    first, second, third = [*accumulate([*counts, 0, 0, 0])][:3]
    return first, second, third


def three(found: Sequence[object], other: object) -> list[object]:
    return [*found, other, other, other][:3]
