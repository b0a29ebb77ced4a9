"""What a forward pass is predicted to take, in bytes: activations that live at one time.

Source: "FlashSVD", table 1 and theorems 8.11, 8.17 (attention), 8.34 and 8.36 (FFN): dense attention
holds 3·BM·D of queries, keys and values, a dense FFN BM·D_F; with FlashSVD the first is r(BM + D), the
second r(BM + D_F). Scores are never held: all arms attend by a fused kernel. Added here is what the
blocks of transformers hold around them: input, residual, result, and what an activation makes.
"""

from __future__ import annotations

from blr.compressor.bench.memory.models import Subject, rank_spec
from blr.compressor.modeling.slices import BESIDE

DENSE, NAIVE, WHOLE, OURS, FLASHSVD = "dense", "naive", "whole", "ours", "flashsvd"


def predicted(
    subject: Subject, arm: str, batch: int, length: int, keep: float, itemsize: int, bound: int
) -> int:
    """Bytes beside the weights.

    Args:
        arm: of the four above. batch, length: B and M. bound: bytes that ours gives its chunks.
    """
    tokens = batch * length
    width, inner = subject.width, int(subject.settings["intermediate_size"])
    rank = rank_spec(width, width, keep, 1).rank if arm != DENSE else 0
    wide = rank_spec(width, inner, keep, 1).rank if arm != DENSE else 0
    held = (4 if subject.gated else 3) * width * tokens * itemsize
    result = width * tokens * itemsize
    if arm == FLASHSVD:
        attention = itemsize * rank * 3 * (tokens + width)
        return held + result + max(attention, itemsize * wide * (tokens + inner))
    heads = subject.settings["num_attention_heads"]
    share = 1 + 2 * subject.settings.get("num_key_value_heads", heads) / heads
    attention = int(result * (share + (2 if subject.gated else 0)))
    ffn = tokens * itemsize * inner * (3 if subject.gated else 2)
    norm = 2 * width * tokens * 4 if subject.gated else 3 * result
    if arm == OURS and batch > 1:  # blocks of some sequences, MLPs in them of some tokens
        taken = BESIDE * result + attention
        share = min(max(bound / taken, 1 / batch), 1)
        middle = min(share * ffn, bound)
        return 2 * result + int(max(share * taken, share * BESIDE * result + middle))
    if arm == OURS:
        ranks = 3 * length * itemsize * rank if attention > bound * batch else 0
        chunk = [min(whole, bound) for whole in (attention, ffn, norm)]
        return held + result + max(*chunk, chunk[0] + ranks)
    return held + max(attention + result, ffn, norm)
