"""The text on which a quantized export is compared with its source, and how much it may lose there."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from blr.compressor.errors import InputError, NumericsError

if TYPE_CHECKING:
    from torch import Tensor

    from blr.compressor.checkpoint.source import Source
    from blr.compressor.text.beginning import Beginning

SAMPLES, LENGTH = 8, 64  # of the model's own text; of a file as many tokens in one piece
MOST = 1.0  # nats a token that an export may lose without --force


def sample_text(source: Source, text: Path | None) -> Tensor | None:
    """Tokens of `text` [1, w], or what a causal language model writes itself [n, w].

    Returns None without `text` for a model whose weights are too many to write by.

    Raises InputError for a text that cannot be read.
    """
    from blr.compressor.loading.checked import OURS
    from blr.compressor.loading.streamed import is_small, load_written, whole_model

    if text is not None:
        return _of_file(source, text)
    if not is_small(source):
        return None
    ours = source.model_type.startswith(OURS)
    model = load_written(source.folder) if ours else whole_model(source)
    return _own(model, _beginning(source.folder))


def check_loss(loss: float | None, kind: str, folder: Path) -> None:
    """Raise NumericsError when an export in `kind` loses more than `MOST`."""
    if loss is not None and loss > MOST:
        raise NumericsError(
            f"{folder}: {kind} loses {loss:.2f} nats a token, expected at most {MOST:g}; take int8, "
            "heal or calibrate the checkpoint first, or export with --force"
        )


def _of_file(source: Source, text: Path) -> Tensor:
    from blr.compressor.checkpoint.context import context_of
    from blr.compressor.loading.load import load_tokenizer
    from blr.compressor.text.beginning import beginning_of
    from blr.compressor.text.reading import read_first_text

    start = read_first_text(text)
    tokenizer = load_tokenizer(source.folder, text=start)
    ids = tokenizer(start, add_special_tokens=False, verbose=False)["input_ids"]
    if len(ids) < 2:
        raise InputError(f"{text}: {len(ids)} tokens, expected at least 2; give a longer text")
    ids = [*beginning_of(tokenizer), *ids]
    return torch.tensor(ids[: min(context_of(source.config), LENGTH * SAMPLES)])[None]


def _beginning(folder: Path) -> Beginning:
    """Of a text; nothing where there is no tokenizer that loads."""
    from blr.compressor.loading.load import load_tokenizer
    from blr.compressor.text.beginning import beginning_of

    try:
        return beginning_of(load_tokenizer(folder))
    except InputError:
        return ()


def _own(model: Any, beginning: Beginning) -> Tensor:
    from blr.compressor.checkpoint.context import context_of
    from blr.compressor.loading.tokenizer import check_ids
    from blr.compressor.loading.trial import plain_tokens
    from blr.compressor.text.beginning import begun
    from blr.compressor.text.own import OwnText, continued

    length = min(LENGTH, context_of(model.config.to_dict()))
    generator = torch.Generator().manual_seed(0)
    usable = plain_tokens(model.config)
    starts = usable[torch.randint(len(usable), (SAMPLES, 1), generator=generator)]
    wanted = OwnText(SAMPLES * LENGTH, length, 0, "")
    prompts = begun(starts, beginning)
    check_ids(model, prompts)
    return continued(model, prompts, 0, wanted).long()
