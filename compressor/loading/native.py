"""The transformers class that a checkpoint names, checked before anything of it is called."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    MODEL_FOR_TEXT_ENCODING_MAPPING_NAMES,
)

from blr.compressor.base.errors import CapabilityError
from blr.compressor.base.exhaustion import raise_exhausted
from blr.compressor.base.quoting import first_line, quote
from blr.compressor.checkpoint.config import REMEDY
from blr.compressor.checkpoint.context import context_of
from blr.compressor.checkpoint.extras import is_number
from blr.compressor.checkpoint.regular import refuse
from blr.compressor.checkpoint.source import Source
from blr.compressor.modeling.modeling_blr import PREFIX


def native_class(source: Source) -> Any:
    """The model class named first under `architectures`. Raises as `check_type`, and InputError for
    none, or one that transformers does not have."""
    check_type(source)
    path, names = source.folder / "config.json", source.config.get("architectures")
    if not names:
        refuse(path, "no architectures", "the name of a model class of transformers", REMEDY)
    named = None if names[0].startswith(PREFIX) else getattr(transformers, names[0], None)
    if not isinstance(named, type) or not issubclass(named, transformers.PreTrainedModel):
        refuse(path, f"architecture {quote(names[0])}", "a model class of transformers", REMEDY)
    return named


def check_type(source: Source) -> None:
    """Raise InputError for a model type that transformers does not have, CapabilityError for one whose
    classes are another family's."""
    path, model_type = source.folder / "config.json", source.config["model_type"]
    if model_type not in CONFIG_MAPPING:
        refuse(path, f"model type {quote(model_type)}", "one that transformers has", REMEDY)
    _check_own(source)


def _check_own(source: Source) -> None:
    """Refuse a type that transformers makes of another family's classes, as EXAONE 3 of Llama's. Of code
    that comes with a checkpoint it demands that class and configuration belong together: what we write
    would load where `blr` is installed and nowhere else."""
    kind, classes = source.model_type, transformers.AutoModel._model_mapping
    own: Any = CONFIG_MAPPING[kind]
    try:
        found: Any = classes.get(own, None)
        found = found[0] if isinstance(found, tuple | list) else found
        theirs = getattr(found, "config_class", None) or own
    except (ImportError, ValueError):  # whoever asks for the class will hear why
        return
    if theirs is not own and theirs not in own.sub_configs.values():
        raise CapabilityError(
            f"{source.folder}: transformers makes {quote(kind)} of another family's classes "
            f"({found.__name__}); expected a type that has its own; take another model"
        )


def continues_text(source: Source) -> bool:
    """Whether the class named first under `architectures`, ours or a native one, is a causal language
    model, also one that reads images beside text."""
    return _among(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, source) or sees_and_writes(source)


def sees_and_writes(source: Source) -> bool:
    """Whether that class is of those that read images beside text and transformers does not list among
    the causal language models."""
    if _among(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, source):
        return False
    return _among(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES, source)


def has_encoder(source: Source) -> bool:
    """Whether its type is an encoder-decoder whose encoder transformers has as a class of its own, as
    T5's: what embeds sentences."""
    kind = source.model_type.removeprefix(f"{PREFIX.lower()}_")
    return MODEL_FOR_TEXT_ENCODING_MAPPING_NAMES.get(kind, "").endswith("EncoderModel")


def _among(known: Mapping[str, Any], source: Source) -> bool:
    names = source.config.get("architectures") or [""]
    classes = {n for name in known.values() for n in ((name,) if isinstance(name, str) else name)}
    return names[0].removeprefix(PREFIX) in classes


def read_context(source: Source) -> int:
    """Tokens that the model has positions for, by its configuration with all that transformers adds.
    Raises InputError for a configuration that it cannot be built from."""
    return context_of(made_config(source).to_dict())


def made_config(source: Source) -> Any:
    """The configuration as transformers makes it. Raises InputError where it cannot."""
    with native_errors(source):
        return CONFIG_MAPPING[source.model_type].from_dict(decoded(source.config))


@contextmanager
def native_errors(source: Source) -> Iterator[None]:
    """Turn what transformers raises while it builds a model from a config into InputError."""
    try:
        yield
    except Exception as error:  # the values of a config are passed on unchecked
        raise_exhausted(error)
        reason = quote(first_line(error), 160)[1:-1]
        found = f"values that {quote(source.model_type)} cannot be built from ({reason})"
        refuse(source.folder / "config.json", found, "those of a trained model", REMEDY)


def decoded(value: Any) -> Any:
    """A configuration as transformers reads it: {"__float__": "Infinity"} is a number."""
    if is_number(value):
        return float(value["__float__"])
    if isinstance(value, Mapping):
        return {key: decoded(item) for key, item in value.items()}
    return [decoded(item) for item in value] if isinstance(value, list) else value
