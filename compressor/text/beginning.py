"""What a tokenizer puts before every text: nothing, BOS, or several tokens.

A model reads no text without it, so every window that stands for a text begins with it. It is no part
of the text: no loss counts a prediction of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

from blr.compressor.base.errors import InputError
from blr.compressor.loading.tokenizer import PROBE

if TYPE_CHECKING:
    from torch import Tensor

Beginning: TypeAlias = tuple[int, ...]  # token ids


def beginning_of(tokenizer: Any) -> Beginning:
    """The ids before those of the text itself, as the tokenizer gives them by default. It is asked, for
    neither `bos_token` nor `add_bos_token` decides that in all of them. What it puts behind a text is
    left out."""
    plain = tokenizer(PROBE, add_special_tokens=False, verbose=False)["input_ids"]
    whole = tokenizer(PROBE, verbose=False)["input_ids"]
    starts = range(len(whole) - len(plain) + 1)
    return tuple(whole[: next((n for n in starts if whole[n : n + len(plain)] == plain), 0)])


def begun(rows: Tensor, beginning: Beginning) -> Tensor:
    """Token ids [m, w] with the beginning before each row [m, p + w]."""
    import torch

    return torch.cat([rows.new_tensor(beginning).expand(len(rows), -1), rows], 1)


def room_in(window: int, beginning: Beginning) -> int:
    """Tokens of text in a window. Raises InputError for one without any."""
    room = window - len(beginning)
    if room < 1:
        raise InputError(
            f"a window of {window} tokens, and the tokenizer begins every text with {len(beginning)}; "
            "expected room for text behind them; take longer windows"
        )
    return room


def idle_predictions(beginning: Beginning) -> int:
    """Positions at a window's start that predict a token of the beginning: no loss counts them. The last
    of the beginning predicts the first of the text."""
    return max(len(beginning) - 1, 0)
