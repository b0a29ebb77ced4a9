"""Structured models of diffusers: native ones whose named layers are structured.

Shipped inside every checkpoint of such a model. ``BlrDiTTransformer2DModel`` is
``DiTTransformer2DModel`` with one more entry in its configuration, ``blr``, as in a configuration of
transformers. Classes are made on demand (`diffusion_class`), for any model that diffusers has.
"""

from __future__ import annotations

import inspect
from functools import cache
from pathlib import Path
from typing import Any

import diffusers

from blr.compressor.modeling.layers import prepare_layers
from blr.compressor.modeling.table import replace_layers

MARK = "Blr"  # what the names of the classes begin with
HOME = "diffusion_blr"  # the file of this module in a checkpoint
# In config.json, so that the native class refuses the folder: it would take random weights instead
GUARD = {"quant_method": "blr"}
FILES = (HOME, "layers_blr", "kernels_blr")  # what travels


class StructuredDiffusionMixin:
    """Loads and saves what the table of layers in the configuration says."""

    @classmethod
    def from_pretrained(
        cls: Any, *arguments: Any, output_loading_info: bool = False, **options: Any
    ) -> Any:
        """As of diffusers; weights that were loaded onto a GPU are given their kernel layout.

        Raises ValueError when tensors are missing, left over or of another shape; who asks for the
        loading info judges it himself.
        """
        native: Any = super()
        model, info = native.from_pretrained(*arguments, output_loading_info=True, **options)
        prepare_layers(model)
        if output_loading_info:
            return model, info
        for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
            if names := info.get(kind):
                raise ValueError(
                    f"{kind.replace('_', ' ')} {', '.join(map(str, names[:3]))} ({len(names)} in all); "
                    "expected the tensors that config.json describes, copy them again"
                )
        return model

    @classmethod
    def load_config(cls: Any, *arguments: Any, **options: Any) -> Any:
        """As of diffusers, without the `GUARD`."""
        native: Any = super()
        found = native.load_config(*arguments, **options)
        config = found[0] if isinstance(found, tuple) else found
        if config.get("quantization_config") == GUARD:
            del config["quantization_config"]
        return found

    def save_pretrained(self: Any, folder: Any, *arguments: Any, **options: Any) -> Any:
        """As of diffusers, with the Python files beside the weights."""
        native: Any = super()
        self.register_to_config(auto_map=auto_map(type(self).__name__))
        native.save_pretrained(folder, *arguments, **options)
        for name, data in _code().items():
            (Path(folder) / name).write_bytes(data)


def auto_map(name: str) -> dict[str, str]:
    """What config.json says of where the class `name` is."""
    return {"AutoModel": f"{HOME}.{name}"}


@cache
def diffusion_class(name: str) -> type[Any]:
    """The model class ``Blr<Native>``. Raises AttributeError for a name that is none."""
    native = getattr(diffusers, name.removeprefix(MARK), None) if name.startswith(MARK) else None
    if native is None:
        raise AttributeError(f"no structured variant of {name!r} in diffusers {diffusers.__version__}")
    members = {
        "__module__": HOME,  # what a pipeline that is saved says of it
        "__doc__": f"{native.__name__} with structured layers.",
        "__init__": _initializer(native),
    }
    return type(name, (StructuredDiffusionMixin, native), members)


def _initializer(native: Any) -> Any:
    """``__init__`` of a structured class, which takes what configurations hold: with `blr` and
    `auto_map` what the native class declares, as diffusers reads it off the signature."""

    def __init__(
        self: Any, *arguments: Any, blr: Any = None, auto_map: Any = None, **options: Any
    ) -> None:
        native.__init__(self, *arguments, **options)
        self.register_to_config(blr=blr, auto_map=auto_map, quantization_config=GUARD)
        replace_layers(self, (blr or {}).get("layers", {}))

    declared = inspect.signature(native.__init__)
    more = [
        inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY, default=None) for n in ("blr", "auto_map")
    ]
    signed: Any = __init__
    signed.__signature__ = declared.replace(parameters=[*declared.parameters.values(), *more])
    return __init__


def _code() -> dict[str, bytes]:
    """The Python files that a folder needs; those beside this one where that is a copy in a folder."""
    try:
        from blr.compressor.loading.vendor import diffusion_files

        return diffusion_files()
    except ImportError:
        here = Path(__file__).parent
        return {f"{name}.py": (here / f"{name}.py").read_bytes() for name in FILES}


def __getattr__(name: str) -> type[Any]:
    if not name.startswith(MARK):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return diffusion_class(name)
