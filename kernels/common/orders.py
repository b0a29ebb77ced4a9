"""Order of the axes of stored factors in memory, by name. No torch."""

Order = tuple[int, ...]


def order_of(name: str, dims: int) -> Order:
    """The order of the `dims` canonical axes of a factor in memory, the last one with stride 1.

    Input factors lie with the features that a product sums over last, so that rows are read in one
    piece: V as [r, i], [G, r, i] or [b, r, p], S as [r, k, l], Kronecker-sparse ones as [a, d, b, c].
    Others lie as they are.
    """
    axes = tuple(range(dims))
    swapped = (*axes[:-2], dims - 1, dims - 2)
    orders = {"V": swapped, "S": (2, 0, 1), "factors": (0, 3, 1, 2)}
    return orders.get(name.partition(".")[0], axes)
