"""Model classes made on demand, ``Blr<Native>``: a mixin of ours over a native class of transformers.

Shipped inside every checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from functools import partial
from typing import Any

import transformers
from torch import nn
from transformers.conversion_mapping import (
    USER_REGISTERED_MAPPINGS,
    get_checkpoint_conversion_mapping,
    get_model_conversion_mapping,
    register_checkpoint_conversion_mapping,
)
from transformers.core_model_loading import WeightRenaming, rename_source_key

from blr.compressor.modeling.configuration_blr import PREFIX, config_class, native_name
from blr.compressor.modeling.native_names import name_beside

EMBEDDING = "embed_tokens"  # as transformers itself adds to plans
_made: dict[tuple[str, type], type[Any]] = {}
_outermost: ContextVar[Any] = ContextVar("outermost", default=None)  # the model of ours being built


class NestedMixin:
    """A model that knows whether it is built inside another of ours: classifiers of decoders let
    AutoModel make what is inside them, of the same configuration, whose layers are placed once."""

    def __init__(self, config: Any, *arguments: Any, **options: Any) -> None:
        _let_heads_make(type(self), type(config))
        held = _outermost.get()
        token = _outermost.set(self if held is None else held)
        try:
            native: Any = super()
            native.__init__(config, *arguments, **options)
        finally:
            _outermost.reset(token)

    @property
    def is_outermost(self) -> bool:
        """While it is built: whether no other model of ours is."""
        return _outermost.get() is self


def made_class(name: str, mixin: type, module: str) -> type[Any]:
    """The model class `name` of `mixin`, made once, in `module`; its tensors keep their names on disk.

    Raises AttributeError for a name that is not ``Blr<Native>``.
    """
    if (name, mixin) not in _made:
        native: Any = getattr(transformers, native_name(name))
        config = config_class(PREFIX + native.config_class.__name__)
        _keep_conversions(native, name)
        name_beside(native.__name__, PREFIX)
        _made[name, mixin] = type(
            name,
            (mixin, native),
            {
                "__module__": module,
                "__doc__": f"{native.__name__} with structured layers.",
                "config_class": config,
                "made_of": native,
                "make": partial(made_class, mixin=mixin, module=module),
            },
        )
    return _made[name, mixin]


def _let_heads_make(cls: Any, config: type) -> None:
    """Give AutoModel the class of what is inside a `cls`, unless it has one for this configuration:
    whoever loads a folder has trusted its code, and transformers would ask again."""
    mapping: Any = transformers.AutoModel._model_mapping
    native = cls.made_of
    inner = getattr(mapping.get(native.config_class, None), "__name__", "")
    if config not in mapping and inner != native.__name__ and hasattr(transformers, inner):
        mapping.register(config, cls.make(PREFIX + inner))


def _keep_conversions(native: Any, name: str) -> None:
    """Give our class the native renamings: transformers skips them for custom code otherwise."""
    conversions = get_checkpoint_conversion_mapping(native.__name__)
    if conversions is not None:
        register_checkpoint_conversion_mapping(name, conversions, overwrite=True)
    USER_REGISTERED_MAPPINGS.add(name)  # those of the native model type count for it, too


def module_names(model: Any, stored_names: Iterable[str]) -> dict[str, str]:
    """The modules of `model` that hold the layers stored on disk as `stored_names`, by these.

    Applies the renamings that transformers applies to tensors of this architecture, then adds
    or strips the base model's prefix, as its loader does.
    """
    renamings = [r for r in get_model_conversion_mapping(model) if isinstance(r, WeightRenaming)]
    modules = {name for name, _ in model.named_modules()}
    prefix, found = f"{model.base_model_prefix}.", {}
    for stored in stored_names:
        name = rename_source_key(f"{stored}.weight", renamings, [])[0].removesuffix(".weight")
        candidates = (name, name.removeprefix(prefix), prefix + name)
        found[stored] = next((each for each in candidates if each in modules), name)
    return found


def module_name(model: Any, stored_name: str) -> str:
    """The one of `module_names` for a layer alone."""
    return module_names(model, [stored_name])[stored_name]


def by_module(model: Any, table: dict[str, Any]) -> dict[str, Any]:
    """`table` of layers, as stored on disk, by the modules of `model`: without a head that the class
    named in the configuration has and this one has not."""
    found = {name: table[stored] for stored, name in module_names(model, table).items()}
    named = next(iter(getattr(model.config, "architectures", None) or ()), type(model).__name__)
    if named == type(model).__name__:
        return found
    modules = dict(model.named_modules())
    return {name: entry for name, entry in found.items() if name in modules}


def planned(model: Any) -> Iterator[tuple[str, Any, str]]:
    """Name with `*` for numbers, module and style of every module that the native plan of tensor
    parallelism names, which in our configuration is empty, and of the embedding, to which a head that
    is split may be tied."""
    native = _native_plan(model.config)
    native = {EMBEDDING: "embedding_rowwise", **native} if native else {}
    base = "" if model.base_model is model else f"{model.base_model_prefix}."
    for name, module in model.named_modules():
        generic = ".".join("*" if part.isdecimal() else part for part in name.split("."))
        style = native.get(generic.removeprefix(base)) if generic.startswith(base) else None
        if style is not None:
            yield generic, module, style


def table_plan(model: Any) -> dict[str, str]:
    """How the embedding and the head are split over processes, which may be one tensor: both or neither.
    Empty without a native plan for the embedding."""
    tables = {n: style for n, module, style in planned(model) if isinstance(module, nn.Embedding)}
    if not tables:
        return {}
    modules, heads = dict(model.named_modules()), type(model).made_of._tp_plan or {}
    return tables | {n: style for n, style in heads.items() if isinstance(modules.get(n), nn.Linear)}


def _native_plan(config: Any) -> dict[str, str]:
    plans = (cls.__dict__.get("base_model_tp_plan") for cls in type(config).__mro__)
    return next((plan for plan in plans if plan), {})
