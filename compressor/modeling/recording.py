"""What models do to the output of a layer before it is consumed, written down. Shipped inside every
checkpoint.

Each function gives a node, or NotImplemented for a use that acts on more than the part it is given.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from blr.compressor.modeling.expressions import (
    Expanded,
    Heads,
    Like,
    Narrow,
    Node,
    Permuted,
    Repeated,
    Replayed,
    leaves,
    mapped,
)

# Functions of torch by name, of every element by itself, without the underscores of operators.
POINTWISE = {
    *("add", "sub", "mul", "div", "true_divide", "truediv", "neg", "pow", "square", "abs", "exp", "erf"),
    *("radd", "rsub", "rmul", "rdiv", "rtruediv", "rpow", "sqrt", "rsqrt", "reciprocal", "clamp"),
    *("sigmoid", "tanh", "gelu", "silu", "relu", "relu6", "leaky_relu", "elu", "mish", "softplus"),
    *("hardtanh", "hardswish", "float", "half", "bfloat16", "double", "type_as"),
}
# Those that can write over their first argument, which saves a copy of the widest intermediates.
OVER: dict[str, Callable[..., Any]] = {
    **{"gelu": torch.ops.aten.gelu_, "silu": lambda x, inplace=False: torch.ops.aten.silu_(x)},
    **{"relu": lambda x, inplace=False: torch.relu_(x), "tanh": torch.tanh_, "sigmoid": torch.sigmoid_},
    **{"mul": Tensor.mul_, "add": Tensor.add_},
}
# What kernels call a function of one tensor, by its `approximate`.
ACTIVATIONS: dict[tuple[str, str | None], str] = {
    **{("gelu", None): "gelu", ("gelu", "none"): "gelu", ("gelu", "tanh"): "gelu_tanh"},
    **{("silu", None): "silu", ("relu", None): "relu"},
}
# Of every row of the last dimension by itself.
ROWWISE = {"mean", "sum", "var", "norm", "rms_norm", "layer_norm"}
MOST_TRIALS = 1024
_TRIALS: dict[Any, Like] = {}
_CASTS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def record(func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The node, or the tuple of nodes, that `func` gives; NotImplemented if only whole tensors do."""
    bare = name.strip("_")
    if bare in POINTWISE:
        return _pointwise(func, args, kwargs)
    if bare in ROWWISE:
        return _rowwise(func, args, kwargs)
    if bare not in RECORDED or not isinstance(args[0] if args else None, Node | list | tuple):
        return NotImplemented
    return RECORDED[bare](func, args, kwargs)


def _pointwise(func: Any, args: Any, kwargs: Any) -> Any:
    nodes = leaves((args, kwargs), Node)
    like = _trial(func, args, kwargs)
    labels = nodes[0].labels
    if any(node.labels != labels for node in nodes) or len(like.shape) != len(labels):
        return NotImplemented
    if not any(like.shape == node.shape for node in nodes):
        return NotImplemented
    name = getattr(func, "__name__", "").strip("_")
    return Replayed(func, (args, kwargs), like, labels, OVER.get(name), _activation(name, args, kwargs))


def _activation(name: str, args: Any, kwargs: Any) -> str:
    """What kernels call it, "" for what they have not."""
    known = len(args) == 1 and kwargs.keys() <= {"approximate", "inplace"}
    return ACTIVATIONS.get((name, kwargs.get("approximate")), "") if known else ""


def _rowwise(func: Any, args: Any, kwargs: Any) -> Any:
    """Sums over the last dimension, kept, where that is nobody's features."""
    node = args[0]
    if not isinstance(node, Node) or node.labels[-1] is not None:
        return NotImplemented
    like = _trial(func, args, kwargs)
    if like.shape[:-1] != node.shape[:-1] or like.shape[-1] not in (1, node.shape[-1]):
        return NotImplemented
    return Replayed(func, (args, kwargs), like, node.labels)


def _to(func: Any, args: Any, kwargs: Any) -> Any:
    given = [*args[1:], *(value for key, value in kwargs.items() if key != "dtype")]
    dtype = kwargs.get("dtype")
    if dtype is None and len(given) == 1:
        dtype = given.pop()
    return _pointwise(func, args, kwargs) if not given and dtype in _CASTS else NotImplemented


def _same(func: Any, args: Any, kwargs: Any) -> Any:
    return args[0] if len(args) == 1 and not kwargs else NotImplemented


def _dropout(func: Any, args: Any, kwargs: Any) -> Any:
    node, p, training = _bound(args, kwargs, ("input", None), ("p", 0.5), ("training", True))
    return node if not training or p == 0 else NotImplemented


def _view(func: Any, args: Any, kwargs: Any) -> Any:
    """[..., o] as heads; the end of `repeat_kv`."""
    node, shape = args[0], _sizes(args[1:])
    if kwargs or not shape or not isinstance(node, Node):
        return NotImplemented
    if isinstance(node, Expanded):
        rows, heads, times, *rest = node.shape
        fits = tuple(shape) == (rows, heads * times, *rest)
        return Repeated(node.of[0], node.times) if fits else NotImplemented
    if node.labels[-1] != "o" or len(shape) != len(node.shape) + 1:
        return NotImplemented
    width = shape[-1] if shape[-1] > 0 else node.shape[-1] // max(shape[-2], 1)
    same = all(a in (b, -1) for a, b in zip(shape[:-2], node.shape[:-1], strict=True))
    heads = node.shape[-1] // max(width, 1)
    if not same or heads * width != node.shape[-1] or shape[-2] not in (heads, -1):
        return NotImplemented
    return Heads(node, heads, width)


def _transpose(func: Any, args: Any, kwargs: Any) -> Any:
    node, a, b = _bound(args, kwargs, ("input", None), ("dim0", 0), ("dim1", 1))
    order = list(range(len(node.shape)))
    order[a], order[b] = order[b], order[a]
    return Permuted(node, order)


def _permute(func: Any, args: Any, kwargs: Any) -> Any:
    order = _sizes(args[1:])
    return NotImplemented if kwargs or not order else Permuted(args[0], [d % len(order) for d in order])


def _expand(func: Any, args: Any, kwargs: Any) -> Any:
    node, shape = args[0], _sizes(args[1:])
    if not isinstance(node, Replayed) or node.labels != (0, "h", None, 1, None) or len(shape) != 5:
        return NotImplemented
    there = zip(shape, node.shape, strict=True)
    fits = all(a in (-1, b) for d, (a, b) in enumerate(there) if d != 2)
    return Expanded(node.of[0], shape[2]) if fits and shape[2] > 0 else NotImplemented


def _getitem(func: Any, args: Any, kwargs: Any) -> Any:
    node, index = args
    if not isinstance(node, Node) or not isinstance(index, tuple):
        return NotImplemented
    whole, full = slice(None), (slice(None),)
    if index == (whole, whole, None, whole, whole) and node.labels == (0, "h", 1, None):
        return Replayed(func, (args, kwargs), _trial(func, args, kwargs), (0, "h", None, 1, None))
    lead = len(index) - 1
    if not (index[:-1] == (Ellipsis,) or (index[:-1] == full * lead and lead == len(node.shape) - 1)):
        return NotImplemented
    if not isinstance(index[-1], slice) or index[-1].step not in (None, 1):
        return NotImplemented
    return _narrow(node, *index[-1].indices(node.shape[-1])[:2])


def _split(func: Any, args: Any, kwargs: Any) -> Any:
    node, size, dim = _bound(args, kwargs, ("tensor", None), ("split_size", 0), ("dim", 0))
    if dim % len(node.shape) != len(node.shape) - 1:
        return NotImplemented
    width = node.shape[-1]
    sizes = size if isinstance(size, Sequence) else [min(size, width - a) for a in range(0, width, size)]
    ends = [sum(sizes[: n + 1]) for n in range(len(sizes))]
    return tuple(_narrow(node, end - part, end) for part, end in zip(sizes, ends, strict=True))


def _chunk(func: Any, args: Any, kwargs: Any) -> Any:
    node, count, dim = _bound(args, kwargs, ("input", None), ("chunks", 1), ("dim", 0))
    return _split(func, (node, -(-node.shape[dim] // count), dim), {})


def _cat(func: Any, args: Any, kwargs: Any) -> Any:
    """Of heads' own features, as in rotary embeddings."""
    parts, dim = _bound(args, kwargs, ("tensors", ()), ("dim", 0))
    if not all(isinstance(part, Node) and part.labels[-1] is None for part in parts):
        return NotImplemented
    labels = parts[0].labels
    if dim % len(labels) != len(labels) - 1 or any(part.labels != labels for part in parts):
        return NotImplemented
    return Replayed(func, (args, kwargs), _trial(func, args, kwargs), labels)


def _narrow(node: Node, start: int, stop: int) -> Node:
    if node.labels[-1] == "o":
        return Narrow(node, start, stop)
    arguments: Any = ((node, (Ellipsis, slice(start, stop))), {})
    return Replayed(Tensor.__getitem__, arguments, _trial(Tensor.__getitem__, *arguments), node.labels)


RECORDED: dict[str, Callable[[Any, Any, Any], Any]] = {
    **{"to": _to, "contiguous": _same, "detach": _same, "dropout": _dropout},
    **{"view": _view, "reshape": _view, "transpose": _transpose, "permute": _permute},
    **{"expand": _expand, "getitem": _getitem, "split": _split, "chunk": _chunk},
    **{"cat": _cat, "concat": _cat},
}


def _trial(func: Any, args: Any, kwargs: Any) -> Like:
    """Shape and dtype of what `func` gives, from the meta device, once for all arguments alike."""
    key = (func, _outline(args), _outline(kwargs))
    try:
        found = _TRIALS.get(key)
    except TypeError:  # an argument that has no hash
        return _tried(func, args, kwargs)
    if found is None:
        if len(_TRIALS) >= MOST_TRIALS:
            _TRIALS.clear()
        found = _TRIALS[key] = _tried(func, args, kwargs)
    return found


def _outline(tree: Any) -> Any:
    """`tree` with shapes and dtypes in place of tensors, as a key. Numbers count with their types,
    which decide about a result's."""
    if isinstance(tree, Node | Tensor):
        return tuple(tree.shape), tree.dtype
    if isinstance(tree, tuple | list):
        return tuple(_outline(leaf) for leaf in tree)
    if isinstance(tree, dict):
        return tuple((name, _outline(leaf)) for name, leaf in tree.items())
    return (tree.start, tree.stop, tree.step) if isinstance(tree, slice) else (type(tree), tree)


def _tried(func: Any, args: Any, kwargs: Any) -> Like:
    def empty(leaf: Any) -> Tensor:
        return torch.empty(tuple(leaf.shape), dtype=leaf.dtype, device="meta")

    made = mapped((Node, Tensor), empty, (args, kwargs))
    result: Tensor = func(*made[0], **made[1])
    return Like(result.shape, result.dtype)


def _sizes(given: tuple[Any, ...]) -> tuple[int, ...]:
    """The sizes of ``view(2, -1)`` or ``view((2, -1))``; () for anything else."""
    sizes = given[0] if len(given) == 1 and isinstance(given[0], tuple | list) else given
    return tuple(sizes) if all(isinstance(size, int) for size in sizes) else ()


def _bound(args: Any, kwargs: Any, *names: tuple[str, Any]) -> tuple[Any, ...]:
    """Arguments by position, else by name, else the default."""
    given = dict(zip((name for name, _ in names), args, strict=False))
    if "split_size_or_sections" in kwargs:
        kwargs = {**kwargs, "split_size": kwargs["split_size_or_sections"]}
    return tuple({**dict(names), **kwargs, **given}[name] for name, _ in names)
