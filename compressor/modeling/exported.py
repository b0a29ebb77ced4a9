"""Models of a self-contained export: those of `modeling_blr.py`, decoding in the runtime beside it."""

import transformers

from blr.compressor.modeling.cuda_graphs import CapturedForward
from blr.compressor.modeling.generation import FusedGeneration
from blr.compressor.modeling.modeling_blr import PREFIX, StructuredModel, native_name
from blr.compressor.modeling.modeling_blr import model_class as structured_class


class ExportedModel(StructuredModel):
    """Mixin of models of a self-contained export."""


def model_class(name: str, mixin: type = ExportedModel) -> type:
    """Make ``Blr<Native>``, which decodes in the runtime or replays its passes as CUDA graphs."""
    generates = issubclass(getattr(transformers, native_name(name)), transformers.GenerationMixin)
    return structured_class(name, (FusedGeneration if generates else CapturedForward, mixin))


ExportedModel.make_model = staticmethod(model_class)


def __getattr__(name: str) -> type:
    if not name.startswith(PREFIX):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return model_class(name)
