"""The draft in the folder of an export: a smaller model, of which its decoder takes proposals."""

from typing import Any

from transformers.modeling_utils import PreTrainedModel, load_state_dict
from transformers.utils import cached_file

from blr.compressor.modeling.settings import warn_once

FOLDER = "draft"  # in that of the export
WEIGHTS = f"{FOLDER}/model.safetensors"
ENDS = ("model.embed_tokens.weight", "lm_head.weight")  # which may be stored once for both models


def load_draft(model: Any, name: str) -> PreTrainedModel | None:
    """The draft of class `name` in the folder of `model`, on its device and in its dtype; None, with a
    warning, where the folder has none any more. Ends that it lacks are those of `model`."""
    cls, folder = type(model).make_model(name), model.config._name_or_path
    revision = {"revision": getattr(model.config, "_commit_hash", None) or "main"}
    try:
        config = cls.config_class.from_pretrained(folder, subfolder=FOLDER, **revision)
        stored = load_state_dict(str(cached_file(folder, WEIGHTS, **revision)), map_location="cpu")
    except OSError as error:
        warn_once(f"no draft in {folder} ({error}): decoding without it")
        return None
    own = dict(model.named_parameters(remove_duplicate=False))
    ends = {key: own[key] for key in ENDS if key in own and key not in stored}
    if "lm_head.weight" in ends and config.tie_word_embeddings:
        del ends["lm_head.weight"]
    draft = cls.from_pretrained(None, config=config, state_dict=stored | ends, dtype=model.dtype)
    draft = draft.to(model.device).eval()
    for key, tensor in ends.items():
        module, _, leaf = key.rpartition(".")
        setattr(draft.get_submodule(module), leaf, tensor)
    draft.tie_weights()
    return draft
