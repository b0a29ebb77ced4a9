"""Tables on standard output: laid out by rich, plain text wherever it goes."""

from collections.abc import Collection, Sequence
from io import StringIO

WIDE = 100_000  # columns: a table is never folded, since programs and people search it by line


def aligned(rows: Sequence[Sequence[str] | str], numbers: Collection[int] = ()) -> str:
    """Rows of cells in columns, `numbers` aligned right; a string is a heading."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2))
    cells = [row for row in rows if not isinstance(row, str)]
    for n in range(max(map(len, cells), default=0)):
        table.add_column(justify="right" if n in numbers else "left", no_wrap=True)
    for row in cells:
        table.add_row(*(Text(cell.replace("\n", " ")) for cell in row))
    out = StringIO()
    Console(file=out, width=WIDE, color_system=None, force_terminal=False).print(table)
    lines = iter(out.getvalue().splitlines())
    return "\n".join(row if isinstance(row, str) else next(lines).rstrip() for row in rows)


def size_text(size: float) -> str:
    """Bytes in three digits: "1.24 MB"."""
    for unit, one in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= one:
            return f"{size / one:.3g} {unit}" if size < 999.5 * one else f"{size / one:,.0f} {unit}"
    return f"{size:g} B"


def amount(size: float) -> str:
    """Bytes as a table tells them: "12 MB", "1.5 GB"."""
    return f"{size / 1e6:,.0f} MB" if size < 999_500_000 else f"{size / 1e9:,.1f} GB"
