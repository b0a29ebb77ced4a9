"""Variables of the environment that libraries read, and end with a bare ValueError where they cannot."""

import linecache
import os
import re
import traceback
from collections.abc import Iterator
from pathlib import Path

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
            expected = "expected a whole number of seconds; correct or unset it"
            raise UsageError(f"{name} is {quote(text, 60)}: {expected}")


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
    """The variable that the innermost calls of a traceback read: in the expression that they were at, or
    in its function if the error says the value."""
    trace = error.__traceback__
    calls = [*zip(traceback.walk_tb(trace), traceback.extract_tb(trace), strict=True)][-INNERMOST:]
    for (frame, _), place in reversed(calls):
        if os.path.realpath(place.filename).startswith(_OURS):
            continue
        first, code = place.lineno or 1, frame.f_code
        text = "".join(linecache.getlines(place.filename)[first - 1 : place.end_lineno or first])
        found = [name for name in _NAMED.findall(text) if name in os.environ]
        if found and _READING.search(text):
            return found[0]
        if "<" not in code.co_name and {"environ", "getenv"} & set(code.co_names):
            for name in (name for name in code.co_consts if isinstance(name, str)):
                if (value := os.environ.get(name)) and value in str(error):
                    return name
    return None


def _told_by(error: BaseException) -> str | None:
    """The variable that an error names, or the only one whose whole value it quotes."""
    said = str(error)
    words, quoted = set(re.findall(r"\w+", said)), set(_QUOTED.findall(said.lower()))
    named = [name for name in os.environ if "_" in name and name in words]
    refused = quoted if isinstance(error, ValueError) else set[str]()
    held = [name for name, value in os.environ.items() if value.lower() in refused]
    return named[0] if named else held[0] if len(held) == 1 else None
