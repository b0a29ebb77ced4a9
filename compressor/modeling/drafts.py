"""The draft in the folder of an export: a smaller model, of which its decoder takes proposals."""

from __future__ import annotations

from typing import Any

from transformers.modeling_utils import PreTrainedModel

from blr.compressor.modeling.modeling_blr import misloaded
from blr.compressor.modeling.settings import warn_once

FOLDER = "draft"  # in that of the export


def load_draft(model: Any, name: str) -> PreTrainedModel | None:
    """The draft of class `name` in the folder of `model`, on its device and in its dtype; None, with a
    warning, where the folder has none any more. Tensors that it lacks are those of `model`."""
    cls, config = type(model).make_model(name), model.config
    try:
        draft, info = cls.from_pretrained(
            config._name_or_path,
            subfolder=FOLDER,
            revision=getattr(config, "_commit_hash", None) or "main",
            dtype=model.dtype,
            output_loading_info=True,
        )
    except OSError as error:
        warn_once(f"no draft in {config._name_or_path} ({error}): decoding without it")
        return None
    draft = draft.to(model.device).eval()
    own = dict(model.named_parameters())
    missing = set(info["missing_keys"])
    if found := misloaded(draft, {**info, "missing_keys": missing - own.keys()}):
        raise ValueError(f"the draft has {found}; export it again")
    for key in missing:
        module, _, leaf = key.rpartition(".")
        setattr(draft.get_submodule(module), leaf, own[key])
    draft.tie_weights()
    return draft
