"""What float8 costs a model: its weights in float8, and inputs and what lies between products too, as a
GPU computes it, over the same in its own numbers.

    python scripts/bench/fp8_loss.py PLAIN FLOAT8… --text FILE [--tokens 8192] [--skip 0]
    python scripts/bench/fp8_loss.py PLAIN FLOAT8… --sts FILE

PLAIN and every FLOAT8 are outputs of `blr compress` by the same settings, but for `--quantize fp8`. All
of it is plain torch in float32, on any device; products are those of the kernels' reference. Printed
are nats a token, differences taken window by window, or Spearman in percent, and the standard errors
of what float8 adds: of windows, or of pairs drawn again. Of a text also the divergence of what is
predicted from what PLAIN predicts, whose chance is a tenth of that.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from blr.compressor.base.progress import Progress
from blr.compressor.commands.evaluate import embed, rank_correlation, read_pairs, read_tokens
from blr.compressor.loading.load import load_model, load_tokenizer
from blr.compressor.loading.sentences import read_sentences
from blr.compressor.modeling import float8
from blr.kernels.common import dispatch

WINDOW, BATCH = 512, 4
DRAWS = 200  # of pairs
Judge = Callable[[Any], str]


@contextmanager
def rounded(everything: bool) -> Iterator[None]:
    """Inside, layers with float8 weights take their inputs in float8, too, in plain torch."""
    module: Any = float8
    kept = module.fp8_device, module.HALF
    dispatch.forget()
    if everything:
        module.fp8_device, module.HALF = lambda device: True, (torch.float32,)
    try:
        yield
    finally:
        module.fp8_device, module.HALF = kept
        dispatch.forget()


def predictions(model: Any, rows: Tensor) -> Tensor:
    """Log-probabilities [m, n - 1, v] of the tokens behind those of windows [m, n]."""
    return torch.log_softmax(model(rows, use_cache=False).logits[:, :-1].float(), -1)


def of_next(found: Tensor, rows: Tensor) -> Tensor:
    """What predictions say of the tokens that follow, the mean of every window [m]."""
    return found.gather(-1, rows[:, 1:, None]).mean((1, 2))


def of_windows(parts: list[Tensor]) -> str:
    """The mean of windows and its standard error."""
    found = torch.cat(parts)
    return f"{found.mean():+.5f} ± {found.std() / len(found) ** 0.5:.5f}"


def of_text(plain: Any, tokenizer: Any, asked: argparse.Namespace) -> Judge:
    """Prints the loss on a text; what float8 adds to it, and the divergence."""
    ids = read_tokens(asked.text, tokenizer, asked.skip + asked.tokens)[asked.skip :]
    batches = ids[: len(ids) // WINDOW * WINDOW].view(-1, WINDOW).split(BATCH)
    start = torch.cat([-of_next(predictions(plain, rows), rows) for rows in batches])
    print(f"plain: {start.mean():.4f} nats a token, {len(start)} windows of {WINDOW}")

    def judge(model: Any) -> str:
        more, apart = [], []
        for rows in batches:
            expected, found = predictions(plain, rows), predictions(model, rows)
            more.append(of_next(expected, rows) - of_next(found, rows))
            apart.append((expected.exp() * (expected - found)).sum(-1).mean(-1))
        return f"{of_windows(more)} nats; divergence {of_windows(apart)}"

    return judge


def of_pairs(plain: Any, tokenizer: Any, asked: argparse.Namespace) -> Judge:
    """The same of the rank correlation of a file of pairs."""
    head, pairs = read_sentences(asked.plain), read_pairs(asked.sts)
    sentences = [sentence for first, second, _ in pairs for sentence in (first, second)]
    gold = torch.tensor([score for *_, score in pairs], dtype=torch.float64)

    def cosines(model: Any) -> Tensor:
        found = embed(model, tokenizer, sentences, BATCH, Progress(quiet=True), head).double()
        return torch.nn.functional.cosine_similarity(found[0::2], found[1::2])

    start = cosines(plain)
    print(f"plain: {rank_correlation(start, gold):.2f}, {len(pairs)} pairs")

    def judge(model: Any) -> str:
        found, generator = cosines(model), torch.Generator().manual_seed(0)

        def more(rows: Tensor) -> float:
            return rank_correlation(found[rows], gold[rows]) - rank_correlation(start[rows], gold[rows])

        draws = torch.randint(len(pairs), (DRAWS, len(pairs)), generator=generator)
        error = torch.tensor([more(rows) for rows in draws]).std()
        return f"{more(torch.arange(len(pairs))):+.3f} ± {error:.3f} points"

    return judge


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("plain", type=Path)
    parser.add_argument("float8", type=Path, nargs="+")
    parser.add_argument("--text", type=Path)
    parser.add_argument("--sts", type=Path)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--skip", type=int, default=0)
    asked = parser.parse_args()
    if (asked.text is None) == (asked.sts is None):
        parser.error("give --text or --sts")
    task = "AutoModel" if asked.sts else "AutoModelForCausalLM"
    plain = load_model(asked.plain, task, dtype="float32", device="auto")
    judge = (of_pairs if asked.sts else of_text)(plain, load_tokenizer(asked.plain), asked)
    for folder in asked.float8:
        model = load_model(folder, task, dtype="float32", device="auto")
        for everything in (False, True):
            with rounded(everything):
                what = "weights and inputs" if everything else "weights"
                print(f"{folder.name}, {what} in float8: {judge(model)}", flush=True)


if __name__ == "__main__":
    main()
