"""Text from elsewhere, made fit for one line of ours: names and values out of files."""


def quote(text: object, limit: int = 80) -> str:
    """`text` as one short printable line: escaped, and cut in the middle beyond `limit`."""
    plain = str(text)
    escaped = plain if plain.isprintable() and plain.isascii() else ascii(plain)[1:-1]
    if len(escaped) > limit:
        escaped = f"{escaped[: limit // 2]}...{escaped[-limit // 2 :]}"
    return f"'{escaped}'"


def printable(text: str) -> str:
    """`text` with line ends, control characters and undecodable bytes escaped."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def printable_all(value: object) -> object:
    """A result of plain data with every text in it printable."""
    if isinstance(value, dict):
        return {printable_all(key): printable_all(held) for key, held in value.items()}
    if isinstance(value, list | tuple):
        return [printable_all(item) for item in value]
    return printable(value) if isinstance(value, str) else value


def is_numeral(text: str) -> bool:
    """Whether `text` reads as a number, finite or not."""
    try:
        float(text)
    except ValueError:
        return False
    return True


def is_text(text: str) -> bool:
    """Whether `text` can be written as UTF-8: no half of a surrogate pair in it."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def first_line(error: BaseException, limit: int | None = None) -> str:
    """The first line of what an error says, its class where it says nothing; cut behind `limit`."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:limit]


def named_line(error: BaseException) -> str:
    """The same behind the error's class, for what nobody foresaw."""
    return f"{type(error).__name__}: {first_line(error, 200)}"
