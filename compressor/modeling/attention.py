"""The attention implementation "blr" of transformers. Shipped inside every checkpoint.

It is scaled dot product attention of queries, keys and values that are reconstructed from the space of
ranks a few sequences or heads at a time. `attn_implementation="sdpa"`, transformers' default, does the
same with the layers of this package; "blr" is for who wants to ask for it by name.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn import functional
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

NAME = "blr"


def rank_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention of query [B, H, T, D], key and value [B, H_kv, T', D], as transformers calls it.

    Returns [B, T, H, D] and None: no weights are kept. What it does not know is left to transformers'.
    """
    given: Any = {"dropout": dropout, "scaling": scaling, "is_causal": is_causal}
    if any(options.get(name) is not None for name in ("position_bias", "softcap", "cache")):
        found: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, **given, **options
        )
        return found
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    causal = causal and query.shape[2] > 1 and attention_mask is None
    if causal and key.shape[2] > query.shape[2]:  # an empty static cache: slots that nobody sees
        key, value = (tensor[:, :, : query.shape[2]] for tensor in (key, value))
    out = functional.scaled_dot_product_attention(
        *(query, key, value),
        attn_mask=attention_mask,
        dropout_p=dropout,
        is_causal=causal,
        scale=scaling,
        enable_gqa=key.shape[1] != query.shape[1],
    )
    return out.transpose(1, 2).contiguous(), None


def register_attention() -> None:
    """Make transformers know ``attn_implementation="blr"``."""
    AttentionInterface.register(NAME, rank_attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)
