"""Variables of the environment that libraries read, and end with a bare ValueError where they cannot."""

import linecache
import os
import re
from collections.abc import Iterator
from pathlib import Path
from types import CodeType

from blr.compressor.base.errors import UsageError
from blr.compressor.base.quoting import quote

# What the hub's client takes as whole numbers of seconds when it is imported, as most commands do
SECONDS = ("HF_HUB_DOWNLOAD_TIMEOUT", "HF_HUB_ETAG_TIMEOUT")
_NAMED = re.compile(r"""["']([A-Z][A-Z0-9_]+)["']""")
_QUOTED = re.compile(r"""["']([^"']{2,})["']""")
_READING = re.compile(r"env", re.IGNORECASE)
_OURS = os.path.realpath(Path(__file__).parents[1])
INNERMOST = 3  # calls between where a variable is read and where its value is refused


def check_variables() -> None:
    """Raise UsageError for what the hub's client would refuse whatever the command."""
    for name in SECONDS:
        text = os.environ.get(name)
        if text is not None and re.fullmatch(r"[0-9]{1,9}", text) is None:
            raise UsageError(
                f"{name} is {quote(text, 60)}: expected a whole number of seconds; correct or unset it"
            )


def wrong_variable(error: BaseException, foreseen: bool) -> str | None:
    """A line on the variable that a library was reading when it raised `error`; None if none is found.
    Of errors that are not `foreseen` the text is searched, too."""
    for cause in _causes(error):
        name = _read_by(cause) or (None if foreseen else _told_by(cause))
        if name is not None:
            value, reason = quote(os.environ.get(name, ""), 60), quote(cause, 120)[1:-1]
            return f"{name} is {value}, which a library does not take ({reason}); correct or unset it"
    return None


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _read_by(error: BaseException) -> str | None:
    """The variable that the innermost calls of a traceback read."""
    for code, instruction in reversed(_places(error)[-INNERMOST:]):
        ours = os.path.realpath(code.co_filename).startswith(_OURS)
        if not ours and (found := _read_at(code, instruction, str(error))):
            return found[0]
    return None


def _told_by(error: BaseException) -> str | None:
    """The variable that an error names, or the only one whose whole value it quotes."""
    said = str(error)
    words, quoted = set(re.findall(r"\w+", said)), set(_QUOTED.findall(said.lower()))
    named = [name for name in os.environ if "_" in name and name in words]
    refused = quoted if isinstance(error, ValueError) else set[str]()
    held = [name for name, value in os.environ.items() if value.lower() in refused]
    return named[0] if named else held[0] if len(held) == 1 else None


def _read_at(code: CodeType, instruction: int, said: str) -> list[str]:
    """Variables that the expression reads, or its function if the error has `said` a value."""
    positions = list(code.co_positions())
    first, last, *_ = positions[instruction // 2]
    lines = range(first or 0, (last or first or 0) + 1)
    text = "".join(linecache.getline(code.co_filename, number) for number in lines)
    found = [name for name in _NAMED.findall(text) if name in os.environ]
    if found and _READING.search(text):
        return found
    if "<" in code.co_name or not {"environ", "getenv"} & set(code.co_names):
        return []
    values = {name: os.environ.get(name) for name in code.co_consts if isinstance(name, str)}
    return [name for name, value in values.items() if value and value in said]


def _places(error: BaseException) -> list[tuple[CodeType, int]]:
    """The code of every frame of a traceback and the instruction that it was at."""
    found, trace = [], error.__traceback__
    while trace is not None:
        found.append((trace.tb_frame.f_code, trace.tb_lasti))
        trace = trace.tb_next
    return found
