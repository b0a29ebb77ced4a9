"""Models of diffusers whose linear layers are structured: carried beside `modeling_blr.py`, which holds
the layers, by checkpoints of such models alone.

``BlrDiTTransformer2DModel`` is ``DiTTransformer2DModel`` with one more entry in its configuration,
``blr``, as in a configuration of transformers. Classes are made on demand, for any model of diffusers.
"""

import inspect
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import diffusers
from torch import nn

from .modeling_blr import PREFIX, LoudModel, linear_of, replace_layers, write_code

HOME = "diffusion_blr"  # the name of this file, which `auto_map` in config.json gives
# In config.json, so that the native class refuses the folder: it would take random weights instead
DIFFUSION_GUARD = {"quant_method": "blr"}


class StructuredDiffusion(LoudModel):
    """Mixin of models of diffusers. make_layer: makes a layer from an entry of the table of layers."""

    make_layer: Callable[..., nn.Module] = staticmethod(linear_of)

    def finish_loading(self) -> None:
        """Do nothing: the weights are there."""

    @classmethod
    def load_config(cls, *arguments: object, **options: object) -> object:
        """Load a configuration as diffusers does, but for the `DIFFUSION_GUARD`."""
        found = super().load_config(*arguments, **options)
        config = found[0] if isinstance(found, tuple) else found
        if config.get("quantization_config") == DIFFUSION_GUARD:
            del config["quantization_config"]
        return found

    def save_pretrained(self, folder: str | Path, *arguments: object, **options: object) -> None:
        """Save as diffusers does, with both Python files beside the weights."""
        self.register_to_config(auto_map=auto_map(type(self).__name__))
        super().save_pretrained(folder, *arguments, **options)
        write_code(Path(folder), Path(__file__))


def auto_map(name: str) -> dict[str, str]:
    """The entry of config.json that says in which file the class `name` is."""
    return {"AutoModel": f"{HOME}.{name}"}


@cache
def diffusion_class(name: str, mixin: type = StructuredDiffusion) -> type:
    """Make the model class ``Blr<Native>`` of diffusers. Raises AttributeError for another name."""
    native: Any = getattr(diffusers, name.removeprefix(PREFIX), None)
    if not name.startswith(PREFIX) or native is None:
        raise AttributeError(f"no structured variant of {name!r} in diffusers {diffusers.__version__}")

    def __init__(
        self: Any, *arguments: object, blr: Any = None, auto_map: object = None, **options: object
    ) -> None:
        native.__init__(self, *arguments, **options)
        self.register_to_config(blr=blr, auto_map=auto_map, quantization_config=DIFFUSION_GUARD)
        replace_layers(self, (blr or {}).get("layers", {}), self.make_layer)

    signed: Any = __init__  # diffusers reads off the signature what a configuration may hold
    declared, named = inspect.signature(native.__init__), inspect.Parameter.KEYWORD_ONLY
    more = [inspect.Parameter(entry, named, default=None) for entry in ("blr", "auto_map")]
    signed.__signature__ = declared.replace(parameters=[*declared.parameters.values(), *more])
    # a pipeline that is saved says that the class is in this file
    members = {"__module__": HOME, "__doc__": f"{native.__name__} structured.", "__init__": __init__}
    return type(name, (mixin, native), members)


def __getattr__(name: str) -> type:
    if not name.startswith(PREFIX):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return diffusion_class(name)
