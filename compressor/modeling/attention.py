"""The attention implementation "blr" of transformers: its scaled dot product attention by that name."""

from __future__ import annotations

from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

NAME = "blr"


def register_attention() -> None:
    """Make transformers know ``attn_implementation="blr"``."""
    AttentionInterface.register(NAME, sdpa_attention_forward)
    AttentionMaskInterface.register(NAME, sdpa_mask)
