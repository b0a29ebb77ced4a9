"""How many bytes a cache of keys and values takes for ranks."""

KV_CACHES = ("ranks", "int8", "int4")  # in the model's dtype, or rounded, the last but for the first
LEADING = 4  # one in so many ranks is in int8 beside int4, at least


def leading(rank: int) -> int:
    """How many of `rank` ranks are in int8 beside int4: an even number is left, two a byte."""
    return rank - (rank - -(-rank // LEADING)) // 2 * 2


def held_bytes(rank: int, kind: str, width: int) -> int:
    """The bytes of a token's ranks and scales. kind: of `KV_CACHES`. width: bytes of an unrounded
    number."""
    if kind == "ranks":
        return width * rank
    first = rank if kind == "int8" else leading(rank)
    scales = 1 + (rank > first)
    return first + (rank - first) // 2 + width * scales
