"""The dense weight of a structured layer, made when something computes with it. Shipped inside every
checkpoint.

Models of transformers read the weights of their layers for the dtype alone (T5: `self.wo.weight.dtype`),
or hand them to a function of torch (`multi_head_attention_forward`). Written it cannot be: the product
would change and the factors would not, so that what is written were lost in silence.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

# Functions of torch that ask what is known before there are values.
FACTS = {
    getattr(Tensor, name).__get__
    for name in ("dtype", "device", "shape", "ndim", "layout", "requires_grad", "is_cuda", "is_meta")
} | {
    Tensor.size,
    Tensor.dim,
    Tensor.numel,
    Tensor.element_size,
    Tensor.is_floating_point,
    Tensor.__len__,
}
HARMLESS = {Tensor.requires_grad_}  # of functions that end as those do which write


class DenseWeight(Tensor):
    """W [o, i] of a layer with `composed`, `in_features` and `out_features`: dtype, device and shape
    cost nothing, every function of torch takes the product of the factors, with gradients to them."""

    _is_hf_initialized = True  # `init_weights` of transformers leaves it: the factors have values

    layer: Any

    @staticmethod
    def __new__(cls, layer: Any, like: Tensor) -> DenseWeight:
        """Of the dtype and device of `like`."""
        shape = (layer.out_features, layer.in_features)
        made = Tensor._make_wrapper_subclass(cls, shape, dtype=like.dtype, device=like.device)
        made.layer = layer
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in FACTS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs or {})
        if _written(func, args, kwargs or {}):
            weight = (kwargs or {}).get("out", args[0])
            raise RuntimeError(
                f"the weight of a {type(weight.layer).__name__} is made of what it stores and cannot be "
                "written: change its factors, or take the dense model"
            )
        args, kwargs = torch.utils._pytree.tree_map_only(
            DenseWeight, lambda weight: weight.layer.composed(), (args, kwargs or {})
        )
        return func(*args, **kwargs)

    @classmethod  # torch's own is none
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise RuntimeError(f"{func} reached a weight that has no values: pass it to functions of torch")


def _written(func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether a function of torch would write into a weight."""
    name = getattr(func, "__name__", "")
    in_place = name.endswith("_") and not name.endswith("__") and func not in HARMLESS
    operator = name.startswith("__i") and name not in ("__invert__", "__index__", "__int__", "__iter__")
    named = operator or name == "__setitem__" or "out" in kwargs or bool(kwargs.get("inplace"))
    sets = in_place or named or func == vars(torch._C.TensorBase)["data"].__set__
    return sets and isinstance(kwargs.get("out", args[0]), DenseWeight)
