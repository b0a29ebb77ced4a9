"""Configurations of structured models: a native configuration plus the table of its layers.

Shipped inside every checkpoint. ``BlrLlamaConfig`` is ``LlamaConfig`` with the model type
``blr_llama`` in files and one more entry, ``blr``::

    "blr": {"format": 1, "layers": {"model.layers.0.mlp.up_proj": {"structure": "blast", …}}}

The classes are made on demand from whatever ``transformers`` provides, so no model's names are
written here; the type of our own, and the entry for native classes (`native_classes`), make a loader
without this code fail loudly instead of filling a dense model with random weights.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import transformers
from transformers.dynamic_module_utils import get_class_from_dynamic_module

from blr.compressor.modeling.native_classes import GUARD, guard, watch_native_classes
from blr.compressor.modeling.native_names import ModelType, find_processors

PREFIX = "Blr"
FORMAT = 1
# What else is done when a configuration is saved, with it and the folder: where `blr` is installed it
# writes the Python files that travel; a copy of this code leaves them to transformers.
ON_SAVE: list[Callable[[Any, Path], None]] = []
# What makes a model class by its name where `blr` is installed; a copy of this code finds the file of
# models beside it.
MAKERS: list[Callable[[str], type[Any]]] = []
_classes: dict[str, type[Any]] = {}


class SavedConfig:
    """Mixin of the configurations: a folder that transformers saves says so and where from, and a
    native class that is given one becomes a class of ours."""

    def save_pretrained(self: Any, save_directory: Any, *arguments: Any, **options: Any) -> Any:
        """As of transformers, with ``blr["saved"]`` and the Python files in the folder."""
        native: Any = super()
        origin = Path(str(getattr(self, "_name_or_path", None) or "")).name or None
        saved = {"by": f"transformers {transformers.__version__}", "from": origin}
        self.blr = {**(self.blr or {}), "saved": saved}
        setattr(self, GUARD, guard(self.model_type))
        for write in ON_SAVE:
            write(self, Path(save_directory))
        return native.save_pretrained(save_directory, *arguments, **options)

    def structured_class(self: Any, native: type[Any]) -> type[Any]:
        """Our variant of the model class `native`. Raises ValueError for one that has none."""
        name = PREFIX + native.__name__
        try:
            if MAKERS:
                return MAKERS[0](name)
            classes = (value for auto, value in self.auto_map.items() if auto != "AutoConfig")
            file = next(classes).rpartition(".")[0]
            return get_class_from_dynamic_module(f"{file}.{name}", self.name_or_path)
        except AttributeError as error:
            raise ValueError(
                f"{native.__name__} has no structured variant, which this configuration needs; take a "
                "class that transformers itself names, or an Auto class"
            ) from error


def native_name(name: str) -> str:
    """``BlrLlamaConfig`` -> ``LlamaConfig``. Raises AttributeError for any other kind of name."""
    if not name.startswith(PREFIX) or not hasattr(transformers, name.removeprefix(PREFIX)):
        raise AttributeError(f"no structured variant of {name!r} in transformers")
    return name.removeprefix(PREFIX)


def config_class(name: str) -> type[Any]:
    """The configuration class ``Blr<Native>Config``, made once.

    It has no plan of tensor parallelism: the native one shards ``weight`` matrices that a structured
    layer does not have. Each model gets its own as it is distributed (`splitting.py`).
    """
    if name not in _classes:
        native: Any = getattr(transformers, native_name(name))
        _classes[name] = type(
            name,
            (SavedConfig, native),
            {
                "__module__": __name__,
                "__doc__": f"{native.__name__} of a model with structured layers.",
                "__annotations__": {"blr": "dict | None"},
                "blr": None,
                "model_type": ModelType(f"{PREFIX.lower()}_{native.model_type}", native.model_type),
                "base_model_tp_plan": None,
            },
        )
        find_processors(native, name)
    return _classes[name]


def __getattr__(name: str) -> type[Any]:
    if not name.startswith(PREFIX) or not name.endswith("Config"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return config_class(name)


watch_native_classes()
