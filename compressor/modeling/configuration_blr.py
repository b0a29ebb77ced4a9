"""Configurations of structured models: a native configuration plus the table of its layers.

Shipped inside every checkpoint. ``BlrLlamaConfig`` is ``LlamaConfig`` with the model type
``blr_llama`` and one more entry, ``blr``::

    "blr": {"format": 1, "layers": {"model.layers.0.mlp.up_proj": {"structure": "blast", …}}}

The classes are made on demand from whatever ``transformers`` provides, so no model's names are
written here; the type of our own makes a loader without this code fail loudly instead of
filling a dense model with random weights.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import transformers

PREFIX = "Blr"
FORMAT = 1
# What else is done when a configuration is saved, with it and the folder: where `blr` is installed it
# writes the Python files that travel; a copy of this code leaves them to transformers.
ON_SAVE: list[Callable[[Any, Path], None]] = []
_classes: dict[str, type[Any]] = {}


class SavedConfig:
    """Mixin of the configurations: a folder that transformers saves says so and where from."""

    def save_pretrained(self: Any, save_directory: Any, *arguments: Any, **options: Any) -> Any:
        """As of transformers, with ``blr["saved"]`` and the Python files in the folder."""
        native: Any = super()
        origin = Path(str(getattr(self, "_name_or_path", None) or "")).name or None
        saved = {"by": f"transformers {transformers.__version__}", "from": origin}
        self.blr = {**(self.blr or {}), "saved": saved}
        for write in ON_SAVE:
            write(self, Path(save_directory))
        return native.save_pretrained(save_directory, *arguments, **options)


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
                "model_type": f"blr_{native.model_type}",
                "base_model_tp_plan": None,
            },
        )
    return _classes[name]


def __getattr__(name: str) -> type[Any]:
    if not name.startswith(PREFIX) or not name.endswith("Config"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return config_class(name)
