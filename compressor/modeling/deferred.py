"""A tensor whose values are made where they are used, a part at a time. Shipped inside every checkpoint.

A structured layer inside a model gives one in the place of a large output: queries, keys and values of
an attention, the wide middle of an MLP. What a model does to it until it is consumed (heads, rotary
embeddings, activations) is recorded by `recording.py`; attention and the next layer take it in
chunks (`chunked.py`). Everything else gets the whole tensor, as if there were none of this.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from blr.compressor.modeling.chunked import CONSUMERS
from blr.compressor.modeling.expressions import Node, Source, leaves, mapped
from blr.compressor.modeling.modeling_blr import FACTS, writes
from blr.compressor.modeling.recording import record
from blr.compressor.modeling.settings import warn_once
from blr.kernels.common.transient import bound_for


class Deferred(Tensor):
    """A tensor of the shape, dtype and device of `node`, whose values are asked of it."""

    node: Node

    @staticmethod
    def __new__(cls, node: Node) -> Deferred:
        """Of a node."""
        made = Tensor._make_wrapper_subclass(cls, node.shape, dtype=node.dtype, device=node.device)
        made.node = node
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in FACTS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if writes(func, kwargs):
            return _written(func, args, kwargs)
        nodes = mapped(Deferred, _node, (args, kwargs))
        if all(node.value is None for node in leaves(nodes, Node)):
            consumer = CONSUMERS.get(name)
            result = consumer(*nodes[0], **nodes[1]) if consumer else record(func, name, *nodes)
            if result is not NotImplemented:
                return mapped(Node, Deferred, result)
            if name != "cat":  # a cache of keys and values, which holds them anyway
                _say_whole(name)
        return func(*_whole(args), **_whole(kwargs))

    @classmethod  # torch's own is none
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return func(*_whole(args), **_whole(kwargs or {}))


def deferred(x: Tensor, outputs: int, bound: Any, always: bool = False) -> Deferred | None:
    """The output of a layer for x [..., i] as a tensor without values, where it is worth that.

    It is not with gradients, under tracing or autocast, or if all that is made of `x` fits
    BLR_TRANSIENT: q, k and v as wide as x, or the output and what an activation makes of it.

    Args:
        bound: gives `StructuredLinear.bound`; called only if the result is a tensor.
        always: of any size.
    """
    if type(x) is not Tensor or torch.is_grad_enabled() or x.dim() < 2:
        return None
    if torch.compiler.is_compiling() or torch.jit.is_tracing():
        return None
    limit = bound_for(x)
    width = max(3 * x.shape[-1], 2 * outputs) * x.element_size()
    if not always and (limit is None or x.numel() // x.shape[-1] * width <= limit):
        return None
    if torch.is_autocast_enabled(x.device.type):
        return None
    return Deferred(Source(x, bound(), outputs))


def _written(func: Any, args: Any, kwargs: Any) -> Any:
    """Call a function that writes on whole tensors, which stand for the arguments from then on."""
    held = leaves((args, kwargs), Deferred)
    for source in set().union(*(leaf.node.sources for leaf in held)):
        for node in list(source.dependents):
            node.settle()
    result = func(*_whole(args), **_whole(kwargs))
    return next((leaf for leaf in held if leaf.node.value is result), result)


def _node(held: Deferred) -> Node:
    return held.node


def _whole(tree: Any) -> Any:
    return mapped(Deferred, lambda held: held.node.part({}, {}), tree)


def _say_whole(name: str) -> None:
    warn_once(
        f"this model applies {name or 'a function'} to whole outputs of layers: right, but they take "
        "the memory that BLR_TRANSIENT would save"
    )
