"""Importing this teaches `transformers` to load structured checkpoints without remote code.

After ``import blr.compressor.modeling``, ``AutoModelForCausalLM.from_pretrained(OUT)`` works.
"""

from __future__ import annotations

from blr.compressor.families import families
from blr.compressor.modeling.registry import register

for _family in families():
    for _model_type in _family.model_types:
        register(_model_type)
