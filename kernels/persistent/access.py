"""What the phases of the persistent kernel share: the barrier, descriptors, loads."""

try:
    import triton
    import triton.language as tl
except ImportError as error:
    raise ImportError("these kernels need triton") from error

from blr.kernels.persistent.fields import Product

UP_W = tl.constexpr(int(Product.UP_W))
UP_STRIDES = tl.constexpr(int(Product.UP_STRIDES))
UP_BLOCK = tl.constexpr(int(Product.UP_BLOCK))
GAIN = tl.constexpr(int(Product.GAIN))
X = tl.constexpr(int(Product.X))
X_STRIDES = tl.constexpr(int(Product.X_STRIDES))
UP_X = tl.constexpr(int(Product.UP_X))
UP_X_STRIDES = tl.constexpr(int(Product.UP_X_STRIDES))
Y = tl.constexpr(int(Product.Y))
Y_TOKEN = tl.constexpr(int(Product.Y_TOKEN))
BIAS = tl.constexpr(int(Product.BIAS))
UP_BIAS = tl.constexpr(int(Product.UP_BIAS))
PARTS = tl.constexpr(int(Product.PARTS))
NORM = tl.constexpr(int(Product.NORM))
MIX = tl.constexpr(int(Product.MIX))
MIX_BLOCKS = tl.constexpr(int(Product.MIX_BLOCKS))
MIX_RANK = tl.constexpr(int(Product.MIX_RANK))


@triton.jit
def wait(counter, target, SYNC: tl.constexpr):
    """Until the programs have arrived `target` times in all; one thread polls (`ld.acquire`)."""
    if SYNC:
        seen = tl.atomic_add(counter, 0, sem="acquire")
        while seen < target:
            seen = tl.atomic_add(counter, 0, sem="acquire")


@triton.jit
def arrive(counter, SYNC: tl.constexpr):
    """Everything that this program stored is there for those that wait for its arrival."""
    if SYNC:
        tl.debug_barrier()  # all stores of the program before its one arrival
        tl.atomic_add(counter, 1, sem="release")


@triton.jit
def low(word):
    """The lower 32 bits of a word, a number below 2³¹."""
    return (word & 0x7FFFFFFF).to(tl.int32)


@triton.jit
def high(word):
    """The upper 32 bits of a word."""
    return (word >> 32).to(tl.int32)


@triton.jit
def real(bits):
    """The float32 of the lower 32 bits of a word."""
    return bits.to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def typed(address, like, A: tl.constexpr):
    """A pointer of the type of `like` to an address, which 16 divides if A is 8."""
    pointer = address.to(like.dtype)
    return tl.multiple_of(pointer, 16 if A == 8 else 1)


@triton.jit
def share(head):
    """First tile of a program in its segment, and the tile after its last."""
    first = ((head >> 8) & 0xFFFFFFF).to(tl.int32)
    return first, first + (head >> 36).to(tl.int32)


@triton.jit
def opened(ahead, like, A: tl.constexpr):
    """(first tile, the one after the last, w, row stride, block stride, rows, K) of `fields.Ahead`."""
    first, end = share(ahead.head)
    w, w_row, w_block = typed(ahead.w, like, A), low(ahead.strides) * A, high(ahead.sizes) * A
    return first, end, w, w_row, w_block, low(ahead.sizes), high(ahead.strides) * A


@triton.jit
def advance(t, chunk, chunks):
    """The chunk after a chunk of tile `t`, maybe of the next tile."""
    last = chunk + 1 == chunks
    return tl.where(last, t + 1, t), tl.where(last, 0, chunk + 1)


@triton.jit
def weights(w, w_block, w_row, rows, K, tiles, t, end, chunk, BR: tl.constexpr, BK: tl.constexpr,
            PLAIN: tl.constexpr):  # fmt: skip
    """[BR, BK] weights of a chunk of tile `t`, zero where there are none: none from tile `end` on.

    w: first weight of the segment, whose blocks have `tiles` tiles each; PLAIN: there is one block.
    They are read once, so only through the second-level cache.
    """
    if not PLAIN:
        w += (t // tiles).to(tl.int64) * w_block
    row = (t if PLAIN else t % tiles) * BR + tl.arange(0, BR)
    cols = chunk * BK + tl.arange(0, BK)
    ok = (row < tl.where(t < end, rows, 0))[:, None] & (cols < K)[None, :]
    at = w + row.to(tl.int64)[:, None] * w_row + cols[None, :]
    return tl.load(at, mask=ok, other=0.0, cache_modifier=".cg")


@triton.jit
def operands(d, A: tl.constexpr):
    """(x, x_token, x_block, y, y_token, bias, gain, eps, width) of a descriptor, addresses as words."""
    of_x, norm = tl.load(d + X_STRIDES), tl.load(d + NORM)
    x, y, bias, gain = tl.load(d + X), tl.load(d + Y), tl.load(d + BIAS), tl.load(d + GAIN)
    y_token = low(tl.load(d + Y_TOKEN))
    return x, low(of_x) * A, high(of_x) * A, y, y_token, bias, gain, real(norm), high(norm)


@triton.jit
def inputs(x, like, single, offset, cols, K, HALF: tl.constexpr, A: tl.constexpr):
    """[BK] inputs in float32 from `offset` on, zero outside; of the type of `like` if HALF."""
    if HALF:
        return tl.load(typed(x, like, A) + offset + cols, mask=cols < K, other=0.0).to(tl.float32)
    return tl.load(typed(x, single, A) + offset + cols, mask=cols < K, other=0.0)


@triton.jit
def placed(t, tiles, rows, part, blocks, BR: tl.constexpr, PLAIN: tl.constexpr):
    """[BR] outputs of the rows of tile `t`, and which exist; PLAIN: one block, in its own order.

    With part = rows and blocks = 1, several blocks follow each other.
    """
    if PLAIN:
        row = t * BR + tl.arange(0, BR)
        return row, row < rows
    else:
        row = (t % tiles) * BR + tl.arange(0, BR)
        return (row // part) * (blocks * part) + (t // tiles) * part + row % part, row < rows


@triton.jit
def store(y, like, single, out, value, ok, HALF: tl.constexpr):
    """Store float32 results, as the type of `like` if HALF."""
    if HALF:
        tl.store(y.to(like.dtype) + out, value.to(like.dtype.element_ty), mask=ok)
    else:
        tl.store(y.to(single.dtype) + out, value, mask=ok)
