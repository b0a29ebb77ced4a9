"""What pydantic says of a wrong value, in the words of our errors."""

from __future__ import annotations

from typing import Any

from blr.compressor.base.quoting import quote

INPUT, OURS = "Input should ", "Value error, "
AGAIN = "; give such a value"


def said_of(error: Any, found: str) -> str:
    """One of `ValidationError.errors()` as ``FOUND 'x', expected it to be …; give such a value``, or
    what a check of ours says. `found` stands before the value."""
    value, message = quote(repr(error["input"]), 60)[1:-1], quote(error["msg"], 240)[1:-1]
    if message.startswith(INPUT):
        return f"{found} {value}, expected it to {message.removeprefix(INPUT)}{AGAIN}"
    said = message.removeprefix(OURS)
    return f"{found} {value}: {said}" if isinstance(error["input"], str) else said
