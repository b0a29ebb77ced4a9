"""Launches of one token by products of bytes: 4 bits in one launch, 2 and 3 in one for the inputs, left
as words of bytes, and one for the rows."""

from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from blr.kernels.common.available import interpreted, multiprocessors
from blr.kernels.common.launching import run_kernel
from blr.kernels.decode.gemv.launch import launch_options, numbered, power_of_two, three
from blr.kernels.decode.gemv.segments import QuantizedSegment, Run, in_turn
from blr.kernels.decode.quantized.formats import OFFSET, form_of
from blr.kernels.decode.quantized.launch import (
    QuantizedStage,
    QuantizedTile,
    complete,
    quantized_tile,
    stage,
)

# Curved levels of three bits as bytes: x (1 + x²/50) of x = q − 3.5, times a number that brings all of
# them near whole ones. Their error, .18% (rms of Gaussian weights), is that of rounding to bfloat16.
THREE = (14, 44, 79, 122)
THREE_SCALE = 28.0447
PLACES = 4  # words of bytes that a word, or a pair of nibbles' words, comes apart into
WIDEST = {2: 512, 3: 512, 4: 256}  # quads of a row at most: each has a thread
# Weights of a launch from which it is faster, on an H200: two bits at 2048 × 2048 (3.4 µs for 8.6) and
# wherever it was tried above, four at 512 × 2048 (2.6 for 3.8), but for rows of few quads that leave
# threads without one (3072 × 3072: 4.6 for 4.0). Shorter rows were not tried.
LEAST = {2: 1 << 22, 3: 1 << 22, 4: 1 << 20}
SHORTEST, FEW, LARGE = 64, 128, 1 << 25  # quads; few quads; weights from which those are faster, too
DEEPEST = 8  # rows of a thread at most
PROGRAMS = 528  # that a launch has at least, if it can: four for each multiprocessor of an H200
PACKED = 8  # quads of inputs of a program that makes them
DEEP = 4  # rows of a thread at once in four bits
REGISTER_FILE = 1 << 16  # of a multiprocessor
REGISTERS = 128  # of a thread at most in four bits


# One token's inputs as products read them: words [PLACES · 2, quads, 4] int32, of each place the high
# bytes, then the low ones; sums [2, quads] float32, what a product of integers is multiplied with, and
# what is taken from it before. Quads are a power of two, zero where a row has none.
Inputs = tuple[Tensor, Tensor]


def taken(segments: Sequence[QuantizedSegment]) -> bool:
    """Whether stages have the same inputs and are of a kind that products of bytes take."""
    first = segments[0]
    kinds = {(s.x.data_ptr(), s.x.shape, s.bits, s.group, s.K, s.curved) for s in segments}
    fits = first.bits in WIDEST and form_of(first.bits, first.group).WORDS >= 4
    fits = fits and _lanes(first) <= WIDEST[first.bits] and len(kinds) == 1 and len(segments) <= 3
    fits = fits and (first.bits < 4 or all(s.correction is None for s in segments))
    return fits and len(first.x) == 1 and first.x.shape[1] == first.K and all(map(_is_plain, segments))


def _is_plain(s: QuantizedSegment) -> bool:
    """Whether a stage has one block, and half precision."""
    return s.mix is None and s.packed.shape[0] == 1 and s.scale.dtype.itemsize <= 2


def pays(segments: Sequence[QuantizedSegment]) -> bool:
    """Whether it was measured to be faster so."""
    first, weights = segments[0], sum(s.packed.shape[1] * s.K for s in segments)
    if first.bits < 4:
        return weights >= LEAST[first.bits]
    quads = form_of(first.bits, first.group).quads(first.K)
    return quads >= SHORTEST and weights >= (LARGE if quads < _lanes(first) <= FEW else LEAST[4])


def takes_first(s: QuantizedSegment) -> bool:
    """Whether a first stage can be made beside the inputs."""
    return s.mix is None and s.packed.shape[0] == 1 and len(s.x) == 1 and s.correction is None


def byte_stages(
    segments: Sequence[QuantizedSegment],
    firsts: Sequence[QuantizedSegment] = (),
    *,
    gain: Tensor | None = None,
    eps: float = 0.0,
    add: bool = False,
    activation: str = "",
    pdl: bool = False,
) -> Run:
    """What runs stages that are `taken`.

    Args:
        firsts: of 2 and 3 bits, the first stages of their corrections, made beside the inputs.
        gain, eps: of the norm of the inputs, if there is one. add: to what the results hold.
        activation: of a pair, whose gated product is the second's result. pdl: see `launch_options`.
    """
    if segments[0].bits == 4:
        return partial(_loop, segments, gain, eps, add, activation, pdl)
    s = segments[0]
    words = torch.empty(2 * PLACES, _lanes(s), 4, dtype=torch.int32, device=s.x.device)
    inputs = words, torch.empty(2, _lanes(s), dtype=torch.float32, device=s.x.device)
    fill = partial(_fill, s, firsts, inputs, gain, eps, pdl)
    return partial(in_turn, [fill, partial(_multiply, segments, inputs, add, activation, pdl)])


def _fill(
    s: QuantizedSegment, firsts: Sequence[QuantizedSegment], inputs: Inputs, gain: Tensor | None,
    eps: float, pdl: bool,
) -> None:  # fmt: skip
    """Make the inputs of `s`, and z of the corrections."""
    from blr.kernels.decode.integer.rows import inputs_kernel

    form, quads = form_of(s.bits, s.group), _lanes(s)
    warps = max((_first_warps(v) for v in firsts), default=4)
    stages, tiles = [stage(v) for v in firsts], [_first_tile(v, warps, gain) for v in firsts]
    ends = _ends(stages, tiles)
    run_kernel(
        inputs_kernel,
        (ends[-1] + max(quads // PACKED, 1),),
        *(s.x, s.x if gain is None else gain, eps, *inputs, s.K, quads),
        *(*three(stages, stage(s)), ends),
        **{"OFFSET": offset_of(s.bits), "STEP": 1 / _unit(s), "PLACES": PLACES},
        **{"BQ": min(PACKED, quads), "T": form, "NORM": gain is not None, "COUNT": len(stages)},
        **numbered("V", tiles, _row_tile(s, s.packed.shape[1])),
        ASM=not interpreted(),
        num_warps=warps,
        **launch_options(pdl),
    )


def _multiply(
    segments: Sequence[QuantizedSegment], inputs: Inputs, add: bool, activation: str, pdl: bool
) -> None:
    """Rows times the inputs that are there, plus U z."""
    from blr.kernels.decode.integer.rows import gated_kernel, rows_kernel

    s, stages = segments[0], [stage(s) for s in segments]
    total = sum(s.packed.shape[1] for s in segments)
    tiles = [_row_tile(s, total, bool(activation)) for s in segments]
    given = (*inputs, _lanes(s))
    low, high = table(s.curved)
    fixed = {"LOW": low, "HIGH": high, "ASM": not interpreted(), "num_warps": _warps(s)}
    fixed |= launch_options(pdl)
    if activation:
        names: dict[str, Any] = {"T0": tiles[0], "T1": tiles[1], "ACT": activation}
        run_kernel(gated_kernel, (_ends(stages[:1], tiles)[-1],), *stages, *given, **names, **fixed)
        return
    ends = _ends(stages, tiles)
    names = {"COUNT": len(stages), "ADD": add, **numbered("T", tiles)}
    run_kernel(rows_kernel, (ends[-1],), *three(stages), ends, *given, **names, **fixed)


def _loop(
    segments: Sequence[QuantizedSegment], gain: Tensor | None, eps: float, add: bool, activation: str,
    pdl: bool,
) -> None:  # fmt: skip
    """4 bits: as many programs as a GPU holds, each with many tiles."""
    from blr.kernels.decode.integer.loop import loop_kernel, pair_kernel

    s, stages = segments[0], [stage(s) for s in segments]
    tiles = [quantized_tile(s, _shape(s, DEEP), gain) for s in segments]
    given = (s.x, s.x if gain is None else gain, eps)
    fixed = {"OFFSET": offset_of(s.bits), "ASM": not interpreted(), "num_warps": _warps(s)}
    fixed |= {} if interpreted() else {"maxnreg": REGISTERS}
    fixed |= launch_options(pdl)
    most = max(REGISTER_FILE // (REGISTERS * 32 * _warps(s)), 1) * multiprocessors(s.x.device)
    if activation:
        programs = _ends(stages[:1], tiles, most)[-1]
        names: dict[str, Any] = {"T0": tiles[0], "T1": tiles[1], "ACT": activation}
        run_kernel(pair_kernel, (programs,), *stages, programs, *given, **names, **fixed)
        return
    ends = _ends(stages, tiles, most)
    names = {"COUNT": len(stages), "ADD": add, **numbered("T", tiles)}
    run_kernel(loop_kernel, (ends[-1],), *three(stages), ends, *given, **names, **fixed)


def offset_of(bits: int) -> float:
    """What is taken from levels as bytes."""
    return 0.0 if bits == 3 else OFFSET[bits]


def _unit(s: QuantizedSegment) -> float:
    """What a level as byte is of what it stands for."""
    return THREE_SCALE if s.bits == 3 and s.curved else 1.0


def table(curved: bool = True) -> tuple[int, int]:
    """The bytes of the eight levels of three bits, as two words of 32 bits."""
    found = [*(-level for level in reversed(THREE)), *THREE] if curved else [*range(-4, 4)]
    words = (bytes(level % 256 for level in found[i : i + 4]) for i in (0, 4))
    low, high = (int.from_bytes(word, "little", signed=True) for word in words)
    return low, high


def _lanes(s: QuantizedSegment) -> int:
    """Quads of a row, and of its inputs, as a power of two."""
    return max(power_of_two(form_of(s.bits, s.group).quads(s.K)), 4)


def _warps(s: QuantizedSegment) -> int:
    """Warps of a program of rows, of which every quad has a thread."""
    return max(_lanes(s) // 32, 4)


def _shape(s: QuantizedSegment, deep: int) -> dict[str, int]:
    """Rows BR, quads BQ, rows T side by side of a program whose threads have `deep` rows."""
    quads, warps = _lanes(s), _warps(s)
    beside = 32 * warps // quads
    rows = min(deep * beside, max(power_of_two(s.packed.shape[1]), beside))
    return complete({"BR": rows, "BQ": quads}, warps)


def _row_tile(s: QuantizedSegment, total: int, paired: bool = False) -> QuantizedTile:
    """The tile of 2 and 3 bits in a launch of `total` rows; of a pair each has half as many."""
    wanted = max(total // (PROGRAMS * (32 * _warps(s) // _lanes(s))), 1)
    deep = min(power_of_two(wanted + 1) // 2, DEEPEST) // (1 + paired)
    return quantized_tile(s, _shape(s, max(deep, 1)), None)


def _first_warps(v: QuantizedSegment) -> int:
    """Warps of a program of a first stage, which reads a row at once if it can."""
    return min(max(power_of_two(form_of(v.bits, v.group).quads(v.K)) // 32, 4), 16)


def _first_tile(v: QuantizedSegment, warps: int, gain: Tensor | None) -> QuantizedTile:
    return quantized_tile(v, complete({"BR": 1, "BQ": min(_lanes(v), 32 * warps)}, warps), gain)


def _ends(
    stages: Sequence[QuantizedStage], tiles: Sequence[QuantizedTile], most: int | None = None
) -> tuple[int, int, int]:
    """Programs up to the end of each of three stages; the last of fewer stands for those missing. most:
    programs of all, each with as many tiles as the fullest has; by default one tile each."""
    counts = [s.blocks * -(-s.rows // tile.BR) for s, tile in zip(stages, tiles, strict=False)]
    turns = 1 if most is None else -(-sum(counts) // most)
    first, second, third = [*accumulate([*(-(-count // turns) for count in counts), 0, 0, 0])][:3]
    return first, second, third
