"""Models of exported folders: structured models whose factors lie as the kernels read them.

Shipped in every export, where `auto_map` names this module. A model whose configuration has no
``blr["export"]`` is the plain structured model.
"""

from __future__ import annotations

from typing import Any

from transformers import GenerationMixin

from blr.compressor.modeling.classes import by_module
from blr.compressor.modeling.configuration_blr import PREFIX
from blr.compressor.modeling.cuda_graphs import CapturedForward
from blr.compressor.modeling.generation import FusedGeneration
from blr.compressor.modeling.kernel_layout import to_kernel_layout
from blr.compressor.modeling.layers import StructuredLinear
from blr.compressor.modeling.modeling_blr import model_class as structured_class
from blr.compressor.modeling.quantized import QuantizedStructured, replace_quantized
from blr.compressor.modeling.settings import export_settings
from blr.compressor.structures.entries import packed_entries

_classes: dict[str, type[Any]] = {}


class ExportedModelMixin:
    """Gives the structured layers kernel layout, or their packed form, as soon as they are in place."""

    def _place_layers(self: Any) -> None:
        structured: Any = super()
        structured._place_layers()
        settings = export_settings(self.config)
        if settings is None:
            return
        made = settings.plain, settings.dense, settings.head
        packed = packed_entries(self.config.blr["layers"], settings.bits, *made)
        replace_quantized(self, by_module(self, packed))
        for layer in [m for m in self.modules() if isinstance(m, StructuredLinear)]:
            if not isinstance(layer, QuantizedStructured):
                to_kernel_layout(layer)


def model_class(name: str) -> type[Any]:
    """The class ``Blr<Native>``, made once: for exports and for what `blr compress` writes."""
    if name not in _classes:
        structured = structured_class(name)
        # transformers wraps remote code with a `generate` of its own in a class that no pickle finds,
        # but for one that names its mixin
        generates = issubclass(structured, GenerationMixin)
        runtime, last = (FusedGeneration, (GenerationMixin,)) if generates else (CapturedForward, ())
        _classes[name] = type(
            name,
            (runtime, ExportedModelMixin, structured, *last),
            {
                "__module__": __name__,
                "__doc__": structured.__doc__,
                "config_class": structured.config_class,
                "make": model_class,  # of what heads let AutoModel make
            },
        )
    return _classes[name]


def __getattr__(name: str) -> type[Any]:
    if not name.startswith(PREFIX):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return model_class(name)
