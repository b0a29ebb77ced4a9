"""How fields of packed words become numbers in half precision: the text of the instructions, made here.

A register of 32 bits holds two numbers of 16 bits, of neighbouring words. A field is moved into the
mantissa of a number whose exponent gives the field's last bit the value 1; then the middle of the grid,
with the same exponent, is taken away, which is exact, and the scale multiplied, which rounds once.
"""

import functools

from blr.kernels.decode.quantized.formats import LevelGrid, grid_of

MANTISSA = {"bf16": (7, 127, 16256), "f16": (10, 15, 15360)}  # bits, offset of exponents, and 1.0


def pieces_of(bits: int) -> int:
    """Pieces of a step: of four fields of its words each (of 8 bits two)."""
    return {8: 2, 4: 2, 3: 4, 2: 4}[bits]


@functools.cache
def instructions(bits: int, curved: bool, name: str, scaled: bool = True) -> tuple[tuple[str, str], ...]:
    """By piece: (instructions, constraints) that turn two words into four pairs (two) of numbers.

    Operands: the pairs; the two words (of 3 bits: two of the nibbles of even fields, two of odd ones);
    the pair of scales.

    Args:
        curved: which of the grids of 3 bits. name: "bf16" or "f16".
        scaled: False leaves levels as they are, without the last operand; not of 8 bits.
    """
    found, grid = [], grid_of(bits, curved)
    for piece in range(pieces_of(bits)):
        lines = _bytes(piece, name) if bits == 8 else _nibbles(bits, grid, piece, name, scaled)
        outputs, inputs = 2 if bits == 8 else 4, (4 if bits == 3 else 2) + scaled
        text = "\n".join(f"{line};" for line in lines)
        found.append((f"{{\n{text}\n}}", ",".join(["=&r"] * outputs + ["r"] * inputs)))
    return tuple(found)


def _nibbles(bits: int, grid: LevelGrid, piece: int, name: str, scaled: bool) -> list[str]:
    """Of 4, 3 and 2 bits."""
    width = 2 if bits == 2 else 4
    first = int(grid.offset % 1 != 0)  # middles between two integers need another bit below
    mantissa, bias, _ = MANTISSA[name]
    each = (mantissa - first) // width  # fields that one shift brings into the mantissa
    sources, pieces = 2 if bits == 3 else 1, pieces_of(bits) // 2
    chosen = "0x7632" if piece >= pieces else "0x5410"
    lines, moved = [".reg .b32 h<2>, t, m"], None
    for n in range(sources):
        lines.append(f"prmt.b32 h{n}, ${4 + 2 * n}, ${5 + 2 * n}, {chosen}")
    for out in range(4):
        field = piece % pieces * 4 + out
        place, source = field // sources, field % sources
        shift, at = place // each * each * width - first, place % each * width + first
        exponent = (mantissa - at + bias) << mantissa
        middle = exponent + (int(2 * grid.offset) << at) // 2
        if (shift, source) != moved:
            how = "shl" if shift < 0 else "shr"
            lines.append(f"{how}.b32 t, h{source}, {abs(shift)}")
            moved = shift, source
        mask = ((1 << width) - 1) << at
        lines += [
            f"lop3.b32 ${out}, t, {_both(mask)}, {_both(exponent)}, 0xEA",
            f"mov.b32 m, {_both(middle)}",
            f"sub.{name}x2 ${out}, ${out}, m",
        ]
        if grid.curve:
            lines += _curve(out, grid.curve, name)
            moved = None
        if scaled:
            lines.append(f"mul.{name}x2 ${out}, ${out}, ${4 + 2 * sources}")
    return lines


def _curve(field: int, curve: float, name: str) -> list[str]:
    """x becomes x + curve · x³."""
    mantissa, bias, one = MANTISSA[name]
    steepness = round(curve * 2 ** (6 + mantissa)) - 2**mantissa + ((bias - 6) << mantissa)
    return [
        f"mul.{name}x2 m, ${field}, ${field}",
        f"mov.b32 t, {_both(one)}",
        f".reg .b32 c{field}",
        f"mov.b32 c{field}, {_both(steepness)}",
        f"fma.rn.{name}x2 m, m, c{field}, t",
        f"mul.{name}x2 ${field}, ${field}, m",
    ]


def _bytes(piece: int, name: str) -> list[str]:
    """Of 8 bits: through float32, whose mantissa holds a byte under 2^23."""
    lines = [
        ".reg .b32 a, b, magic",
        ".reg .f32 x, y, p, q, middle",
        ".reg .b16 low, high",
        "xor.b32 a, $2, 0x80808080",
        "xor.b32 b, $3, 0x80808080",
        "mov.b32 magic, 0x4B000000",
        "mov.f32 middle, 0f4B000080",  # 2^23 + 128
        "mov.b32 {low, high}, $4",
        f"cvt.f32.{name} p, low",
        f"cvt.f32.{name} q, high",
    ]
    for field in range(2):
        chosen = f"0x744{field + 2 * piece}"
        lines += [
            f"prmt.b32 $0, a, magic, {chosen}".replace("$0", f"${field}"),
            f"mov.b32 x, ${field}",
            "sub.f32 x, x, middle",
            "mul.f32 x, x, p",
            f"prmt.b32 ${field}, b, magic, {chosen}",
            f"mov.b32 y, ${field}",
            "sub.f32 y, y, middle",
            "mul.f32 y, y, q",
            f"cvt.rn.{name}x2.f32 ${field}, y, x",
        ]
    return lines


def _both(half: int) -> str:
    """A half in both places of 32 bits."""
    return hex(half * 65537)
