"""Our classes beside the native ones in the tables by which transformers, and packages with it, decide.
Shipped inside every checkpoint.

Trainer shifts labels for classes that it finds among the causal language models, pipelines and model
cards look for the name of a class, processors are found by the class of a configuration. A class of
ours stands wherever its native one does, and what is asked of a configuration's model type is answered
with the native one.
"""

from __future__ import annotations

from typing import Any


class ModelType:
    """What `model_type` is of a configuration class of ours: `ours` of the class, which is what files
    say and what Auto classes go by; `native` of an instance, by which others decide."""

    def __init__(self, ours: str, native: str) -> None:
        self.ours, self.native = ours, native

    def __get__(self, config: Any, owner: type) -> str:
        return self.ours if config is None else self.native

    def __set__(self, config: Any, value: str) -> None:
        """What a file says: known already."""


def find_processors(native: type, name: str) -> None:
    """Let a configuration class called `name` have the tokenizer and the processors of `native`."""
    from transformers.models.auto import (
        feature_extraction_auto,
        image_processing_auto,
        processing_auto,
        tokenization_auto,
        video_processing_auto,
    )

    mappings: tuple[Any, ...] = (
        feature_extraction_auto.FEATURE_EXTRACTOR_MAPPING,
        image_processing_auto.IMAGE_PROCESSOR_MAPPING,
        processing_auto.PROCESSOR_MAPPING,
        tokenization_auto.TOKENIZER_MAPPING,
        video_processing_auto.VIDEO_PROCESSOR_MAPPING,
    )
    for mapping in mappings:
        types = mapping._reverse_config_mapping  # of classes, by name
        if native.__name__ in types:
            types[name] = types[native.__name__]


def name_beside(native: str, prefix: str) -> None:
    """Put `prefix` + `native`, a model class, into every table of names that has `native`."""
    from transformers.models.auto import modeling_auto

    for names in [n for key, n in vars(modeling_auto).items() if key.endswith("_NAMES")]:
        for kind, classes in list(names.items()):
            listed = classes if isinstance(classes, tuple | list) else (classes,)
            if native in listed and not kind.startswith(f"{prefix.lower()}_"):
                ours = tuple(prefix + name for name in listed)
                names[f"{prefix.lower()}_{kind}"] = ours if classes is listed else ours[0]
