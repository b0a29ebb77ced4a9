"""The environment variable BLR_TRANSIENT: how much memory intermediates of one computation may take.

A number is MiB, `off` is no bound at all: every intermediate is made whole. What is over the bound is
computed in chunks of tokens, of sequences or of heads, with the same results up to rounding. Where the
variable is not set it is 64 MiB on a CPU, and none on a GPU: chunks cost time there (scripts/log).
"""

import os
from collections.abc import Iterator

VARIABLE = "BLR_TRANSIENT"
DEFAULT = 64  # MiB, about what the last cache of a large GPU holds
UNBOUNDED = ("cuda",)  # types of devices that have no bound unless one is asked for
LEAST = 512  # tokens that are worth a product of their own
_MIB = 1 << 20


def transient_bytes(device: str = "cpu") -> int | None:
    """The bound in bytes on a type of device, None for none. Raises RuntimeError for a value that is
    neither."""
    text = os.environ.get(VARIABLE) or ("off" if device in UNBOUNDED else str(DEFAULT))
    if text == "off":
        return None
    try:
        bound = int(float(text) * _MIB)
    except (ValueError, OverflowError):
        bound = 0
    if bound <= 0:
        raise RuntimeError(
            f"{VARIABLE} is {text!r}: expected MiB such as {DEFAULT}, or off; set one, or unset it"
        )
    return bound


def chunks(total: int, most: int) -> Iterator[tuple[int, int]]:
    """Equal stretches (start, stop) of at most `most`, at least one, that make up range(total)."""
    count = -(-total // max(most, 1))
    for n in range(count):
        yield total * n // count, total * (n + 1) // count


def tokens_within(bound: int, width: int) -> int:
    """Tokens of `width` bytes each that fit `bound`, at least `LEAST`."""
    return max(bound // max(width, 1), LEAST)
