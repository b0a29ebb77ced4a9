"""The structured layers and models: what travels inside a checkpoint. Importing it changes nothing."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any


@cache
def register() -> None:
    """Teach transformers and peft about structured checkpoints, once for this process.

    From then on ``AutoModelForCausalLM.from_pretrained(OUT)`` loads outputs of blr without remote code,
    `save_pretrained` of such a model writes a folder that loads where blr is not installed, and LoRA of
    peft, whenever that is imported, takes structured layers.
    """
    from blr.compressor.modeling.after_import import after_import
    from blr.compressor.modeling.configuration_blr import MAKERS, ON_SAVE
    from blr.compressor.modeling.exported import model_class
    from blr.compressor.modeling.registry import register_on_demand

    ON_SAVE.append(_write_code)
    MAKERS.append(model_class)
    after_import("peft", _register_lora)
    register_on_demand()


def _write_code(config: Any, folder: Path) -> None:
    from blr.compressor.loading.save_pretrained import write_code

    write_code(config, folder)


def _register_lora() -> None:
    from blr.compressor.integrations.peft import register as register_lora

    register_lora()
