"""What float8 costs a model: its weights in float8, and inputs and what lies between products too, as a
GPU computes it, over the same in its own numbers.

    python scripts/bench/fp8_loss.py PLAIN FLOAT8 --text FILE [--tokens 8192] [--skip 0]
    python scripts/bench/fp8_loss.py PLAIN FLOAT8 --sts FILE

PLAIN and FLOAT8 are outputs of `blr compress` by the same settings, but for `--quantize fp8`. All of it
is plain torch in float32, on any device; products are those of the kernels' reference. Printed are nats
a token with their standard error, differences taken window by window, or Spearman in percent.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from blr.compressor.evaluate import read_tokens, sts_spearman
from blr.compressor.loading.load import load_model, load_tokenizer
from blr.compressor.loading.sentences import read_sentences
from blr.compressor.modeling import float8, float8_makers
from blr.compressor.progress import Progress

WINDOW, BATCH = 512, 8


@contextmanager
def rounded(everything: bool) -> Iterator[None]:
    """Inside, layers with float8 weights take their inputs in float8, too, in plain torch."""
    modules: tuple[Any, ...] = (float8, float8_makers)
    kept = [(m, n, getattr(m, n)) for m in modules for n in ("fp8_device", "HALF")]
    if everything:
        for module in modules:
            module.fp8_device, module.HALF = lambda device: True, (torch.float32,)
    yield
    for module, name, value in kept:
        setattr(module, name, value)


@torch.inference_mode()
def losses(model: Any, ids: Tensor) -> Tensor:
    """Mean nats of every window [m]."""
    found = []
    for rows in ids[: len(ids) // WINDOW * WINDOW].view(-1, WINDOW).split(BATCH):
        logits = model(rows, use_cache=False).logits[:, :-1]
        lost = torch.nn.functional.cross_entropy(logits.mT, rows[:, 1:], reduction="none")
        found.append(lost.mean(-1))
    return torch.cat(found)


def of_text(models: tuple[Any, Any], tokenizer: Any, asked: argparse.Namespace) -> None:
    """Print the losses of both on a text."""
    ids = read_tokens(asked.text, tokenizer, asked.skip + asked.tokens)[asked.skip :]
    plain = losses(models[0], ids)
    print(f"plain: {plain.mean():.4f} nats a token, {len(plain)} windows of {WINDOW}")
    for everything in (False, True):
        with rounded(everything):
            more = losses(models[1], ids) - plain
        error = more.std() / len(more) ** 0.5
        print(f"{_name(everything)}: {more.mean():+.4f} ± {error:.4f}", flush=True)


def of_pairs(models: tuple[Any, Any], tokenizer: Any, asked: argparse.Namespace) -> None:
    """Print the rank correlations of both on a file of pairs."""
    head, progress = read_sentences(asked.plain), Progress(quiet=True)

    def spearman(model: Any) -> float:
        return sts_spearman(model, tokenizer, asked.sts, BATCH, progress, head).spearman

    plain = spearman(models[0])
    print(f"plain: {plain:.2f}")
    for everything in (False, True):
        with rounded(everything):
            print(f"{_name(everything)}: {spearman(models[1]) - plain:+.2f} points", flush=True)


def _name(everything: bool) -> str:
    return "weights and inputs in float8" if everything else "weights in float8"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("plain", type=Path)
    parser.add_argument("float8", type=Path)
    parser.add_argument("--text", type=Path)
    parser.add_argument("--sts", type=Path)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--skip", type=int, default=0)
    asked = parser.parse_args()
    if (asked.text is None) == (asked.sts is None):
        parser.error("give --text or --sts")
    task = "AutoModel" if asked.sts else "AutoModelForCausalLM"
    folders = asked.plain, asked.float8
    plain, float8_ = (load_model(f, task, dtype="float32", device="auto") for f in folders)
    tokenizer = load_tokenizer(asked.plain)
    (of_pairs if asked.sts else of_text)((plain, float8_), tokenizer, asked)


if __name__ == "__main__":
    main()
