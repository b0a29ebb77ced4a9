"""Launches of one token by products of bytes: 4 bits in one launch, 2 and 3 in one for the inputs, left
as words of bytes, and one for the rows."""

from collections.abc import Sequence
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor

from blr.kernels.common.available import interpreted, multiprocessors
from blr.kernels.common.launching import TritonKernel, run_kernel
from blr.kernels.decode.gemv.launch import launch_options, numbered, power_of_two, three
from blr.kernels.decode.gemv.segments import USUAL, How, QuantizedSegment, Run, in_turn
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
DEEPEST = 8  # rows of a thread at most
PROGRAMS = 528  # that a launch has at least, if it can: four for each multiprocessor of an H200
PACKED = 8  # quads of inputs of a program that makes them
DEEP = 4  # rows of a thread at once in four bits
REGISTER_FILE = 1 << 16  # of a multiprocessor
REGISTERS = 128  # of a thread at most in four bits
# Of a thread at most in eight warps of rows, by bits: three programs a multiprocessor, four of int2.
EIGHT_WARPS = {2: 64, 3: 80}


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
    fits = fits and all(s.mix is None and s.packed.shape[0] == 1 for s in segments)
    fits = fits and all(s.scale.dtype.itemsize <= 2 for s in segments)
    return fits and len(first.x) == 1 and first.x.shape[1] == first.K


def takes_first(s: QuantizedSegment) -> bool:
    """Whether a first stage can be made beside the inputs."""
    return s.mix is None and s.packed.shape[0] == 1 and len(s.x) == 1 and s.correction is None


def byte_stages(
    segments: Sequence[QuantizedSegment], firsts: Sequence[QuantizedSegment] = (), how: How = USUAL
) -> Run:
    """What runs stages that are `taken`. firsts: of 2 and 3 bits, the first stages of their corrections,
    made beside the inputs."""
    s = segments[0]
    if s.bits == 4:
        return partial(_loop, segments, how)
    words = torch.empty(2 * PLACES, _lanes(s), 4, dtype=torch.int32, device=s.x.device)
    inputs = words, torch.empty(2, _lanes(s), dtype=torch.float32, device=s.x.device)
    return partial(
        in_turn, [partial(_fill, s, firsts, inputs, how), partial(_multiply, segments, inputs, how)]
    )


def _fill(s: QuantizedSegment, firsts: Sequence[QuantizedSegment], inputs: Inputs, how: How) -> None:
    """Make the inputs of `s`, and z of the corrections."""
    from blr.kernels.decode.integer.rows import inputs_kernel

    form, quads, gain = form_of(s.bits, s.group), _lanes(s), how.gain
    warps = max((_first_warps(v) for v in firsts), default=4)
    stages, tiles = [stage(v) for v in firsts], [_first_tile(v, warps, gain) for v in firsts]
    ends = _ends(stages, tiles)
    run_kernel(
        inputs_kernel,
        (ends[-1] + max(quads // PACKED, 1),),
        *(s.x, s.x if gain is None else gain, how.eps, *inputs, s.K, quads),
        *(*three(stages, stage(s)), ends),
        **{"OFFSET": offset_of(s.bits), "STEP": 1 / _unit(s), "PLACES": PLACES},
        **{"BQ": min(PACKED, quads), "T": form, "NORM": gain is not None, "COUNT": len(stages)},
        **numbered("V", tiles, _row_tile(s, s.packed.shape[1], gain)),
        ASM=not interpreted(),
        num_warps=warps,
        **launch_options(how.pdl),
    )


def _multiply(segments: Sequence[QuantizedSegment], inputs: Inputs, how: How) -> None:
    """Rows times the inputs that are there, plus U z."""
    from blr.kernels.decode.integer.rows import gated_kernel, rows_kernel

    s, total = segments[0], sum(s.packed.shape[1] for s in segments)
    tiles = [_row_tile(s, total, how.gain, bool(how.activation)) for s in segments]
    low, high = table(s.curved)
    given = *inputs, _lanes(s)
    limited = _warps(s) == 8 and not how.activation and not interpreted()
    fixed = {"maxnreg": EIGHT_WARPS[s.bits]} if limited else {}
    _run(rows_kernel, gated_kernel, segments, tiles, given, how, LOW=low, HIGH=high, **fixed)


def _loop(segments: Sequence[QuantizedSegment], how: How) -> None:
    """4 bits: as many programs as a GPU holds, each with many tiles."""
    from blr.kernels.decode.integer.loop import loop_kernel, pair_kernel

    s = segments[0]
    tiles = [quantized_tile(s, _shape(s, DEEP), how.gain) for s in segments]
    given = s.x, s.x if how.gain is None else how.gain, how.eps
    fixed = {} if interpreted() else {"maxnreg": REGISTERS}
    most = max(REGISTER_FILE // (REGISTERS * 32 * _warps(s)), 1) * multiprocessors(s.x.device)
    _run(loop_kernel, pair_kernel, segments, tiles, given, how, most, OFFSET=offset_of(s.bits), **fixed)


def _run(
    rows: TritonKernel, pair: TritonKernel, segments: Sequence[QuantizedSegment],
    tiles: Sequence[QuantizedTile], given: tuple[object, ...], how: How, most: int | None = None,
    **fixed: object,
) -> None:  # fmt: skip
    """Stages by the kernel of rows or of a pair. most: as of `_ends`."""
    stages = [stage(s) for s in segments]
    fixed |= {"ASM": not interpreted(), "num_warps": _warps(segments[0]), **launch_options(how.pdl)}
    ends = _ends(stages[:1] if how.activation else stages, tiles, most)
    if how.activation:
        given = given if most is None else (ends[-1], *given)
        fixed |= {"T0": tiles[0], "T1": tiles[1], "ACT": how.activation}
        run_kernel(pair, (ends[-1],), *stages, *given, **fixed)
        return
    fixed |= {"COUNT": len(stages), "ADD": how.add, **numbered("T", tiles)}
    run_kernel(rows, (ends[-1],), *three(stages), ends, *given, **fixed)


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


def _row_tile(
    s: QuantizedSegment, total: int, gain: Tensor | None, paired: bool = False
) -> QuantizedTile:
    """The tile of 2 and 3 bits in a launch of `total` rows; of a pair each has half as many. gain: of
    the inputs that were made."""
    wanted = max(total // (PROGRAMS * (32 * _warps(s) // _lanes(s))), 1)
    deep = min(power_of_two(wanted + 1) // 2, DEEPEST) // (1 + paired)
    return quantized_tile(s, _shape(s, max(deep, 1)), gain)


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
