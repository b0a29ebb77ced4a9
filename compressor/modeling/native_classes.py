"""What happens where a native class is named for one of our folders. Shipped inside every checkpoint.

``LlamaForCausalLM.from_pretrained(folder)`` has no place for structured layers: transformers would fill
the dense ones with random numbers and write so into a log. Without any code of ours `guard`, an entry of
config.json that native configurations alone read, stops it. Where our code runs, a native class that is
given a configuration of ours becomes our class, and a model that was filled all the same is refused.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

from blr.compressor.modeling.after_import import after_import

GUARD = "for_native_classes"
REMEDY = (
    "load it by AutoModelForCausalLM or the Auto class of its task, after blr.compressor.register() or "
    "with trust_remote_code=True"
)


def guard(native_type: str) -> dict[str, str]:
    """The entry `GUARD` of config.json.

    A native configuration class that meets a file of another type takes the part of it that has its own
    type, as for the text model of a larger one: this. Its `dtype` is none, which raises AttributeError
    with the words below.
    """
    found = "the layers of this folder are structured, native classes have no place for them"
    return {"model_type": native_type, "dtype": f"{found}; {REMEDY}"}


def watch_native_classes() -> None:
    """Let native model classes answer for folders of ours as said above, once transformers has any."""
    after_import("transformers.modeling_utils", _watch)


def _watch() -> None:
    from transformers.modeling_utils import PreTrainedModel

    native: Any = PreTrainedModel.from_pretrained.__func__  # type: ignore[attr-defined]
    if hasattr(native, "is_watched"):  # by another copy of this code
        return

    @wraps(native)
    def from_pretrained(cls: Any, *arguments: Any, **options: Any) -> Any:
        if hasattr(cls, "made_of"):
            return native(cls, *arguments, **options)
        if hasattr(options.get("config"), "structured_class"):
            ours = options["config"].structured_class(cls)
            return ours.from_pretrained(*arguments, **options)
        found = native(cls, *arguments, **options)
        model = found[0] if isinstance(found, tuple) else found
        if getattr(model.config, "blr", None):
            found = f"the structured layers of {model.name_or_path}"
            raise ValueError(f"{cls.__name__} has no place for {found}; {REMEDY}")
        return found

    from_pretrained.is_watched = True  # type: ignore[attr-defined]
    PreTrainedModel.from_pretrained = classmethod(from_pretrained)  # type: ignore[assignment]
