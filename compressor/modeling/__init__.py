"""Importing this teaches `transformers` to load structured checkpoints without remote code.

After ``import blr.compressor.modeling``, ``AutoModelForCausalLM.from_pretrained(OUT)`` works for every
model type that transformers has, and
``save_pretrained`` writes folders that load where `blr` is not installed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from blr.compressor.modeling.after_import import after_import
from blr.compressor.modeling.configuration_blr import MAKERS, ON_SAVE
from blr.compressor.modeling.exported import model_class
from blr.compressor.modeling.registry import register_on_demand


def _write_code(config: Any, folder: Path) -> None:
    from blr.compressor.loading.save_pretrained import write_code

    write_code(config, folder)


def _register_lora() -> None:
    from blr.compressor.integrations.peft import register

    register()


ON_SAVE.append(_write_code)
MAKERS.append(model_class)
after_import("peft", _register_lora)
register_on_demand()
