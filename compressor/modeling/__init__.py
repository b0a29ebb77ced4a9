"""Importing this teaches `transformers` to load structured checkpoints without remote code.

After ``import blr.compressor.modeling``, ``AutoModelForCausalLM.from_pretrained(OUT)`` works for every
model type that transformers has, and
``save_pretrained`` writes folders that load where `blr` is not installed.
"""

from __future__ import annotations

from blr.compressor.modeling.after_import import after_import
from blr.compressor.modeling.registry import register_on_demand


def _register_lora() -> None:
    from blr.compressor.integrations.peft import register

    register()


after_import("peft", _register_lora)
register_on_demand()
