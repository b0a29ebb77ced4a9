"""What the last pass of a fit brings: one fit, then the pass with each of the settings, from one start.

    python scripts/bench/finish.py MODEL --calibration TEXT --texts A.txt B.txt [--from-token 98304]
        [--recipe '{"base": "int2", "method": "svd", "rank": 16}'] [--settings 4:.001 8:.001:scales …]

Nats a token over the dense model on tokens of each text from --from-token on (the tables report the
first 65,536: settings are chosen on others), in windows of --window, before the pass and after it with
each setting EPOCHS:RATE[:scales], "scales" leaving packed weights as they are. Seconds are the pass's.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any

import torch
from torch import Tensor

from blr.compressor.base.progress import Progress
from blr.compressor.checkpoint.source import open_source
from blr.compressor.commands.evaluate import read_tokens
from blr.compressor.fitting import engine, refit
from blr.compressor.fitting.block_passes import Batch, Blocks, run_block
from blr.compressor.fitting.student import FitRun
from blr.compressor.fitting.work import Work
from blr.compressor.loading.load import load_tokenizer
from blr.compressor.planning.plan import make_plan
from blr.compressor.recipe.schema import Recipe
from blr.compressor.structures.latent import Latent, Trained
from blr.compressor.text.reading import Calibration
from blr.compressor.workspace.journal import Journal

BATCH = 8


def main() -> None:
    """Fit, then try."""
    given = _arguments()
    torch.manual_seed(0)
    folder = Path(given.model)
    sizes = {"samples": given.samples, "seq_len": given.seq_len, "finish": 1}
    recipe = Recipe(**json.loads(given.recipe), **sizes)
    with tempfile.TemporaryDirectory() as place:
        source, progress = open_source(folder), Progress(quiet=True)
        work = Work(source, recipe, Journal(Path(place)), progress, given.device)
        started = monotonic()
        engine.finish_blocks = partial(_try_all, given, started)  # type: ignore[assignment]
        engine.compress_calibrated(
            work, partial(make_plan, source, recipe, calibrated=True), given.calibration
        )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--calibration", required=True)
    parser.add_argument("--texts", nargs="+", required=True)
    parser.add_argument("--recipe", default='{"base": "int2", "method": "svd", "rank": 16}')
    parser.add_argument("--settings", nargs="+", default=["4:.001"])
    parser.add_argument("--samples", type=int, default=512)
    parser.add_argument("--seq-len", type=int, default=512)
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--from-token", type=int, default=98304)
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--device", default="auto")
    return parser.parse_args()


def _try_all(given: argparse.Namespace, started: float, run: FitRun, starts: list[Batch]) -> None:
    tokens = sum(batch.tokens for batch in starts)
    _say(f"fit {monotonic() - started:.0f} s, {run.plan.bits:.3f} bits, {tokens} tokens")
    tokenizer = load_tokenizer(run.work.source.folder)
    texts = [_text(tokenizer, Path(name), given) for name in given.texts]
    dense = [
        _loss(run, text, [run.model.load_block(n) for n in range(len(run.model))]) for text in texts
    ]
    _say("dense " + " ".join(f"{value:.4f}" for value in dense))
    blocks = [student.block for student in run.students]
    trained = [part for student in run.students for part in student.trained]
    kept = [[master.detach().clone() for master, _ in part.masters] for part in trained]
    _report(run, texts, dense, blocks, "before")
    for setting in given.settings:
        epochs, rate, *what = setting.split(":")
        _restore(trained, kept)
        began = monotonic()
        pass_ = _pass(run, starts, trained, float(rate), "scales" in what)
        before, after = pass_.run(int(epochs), 0)
        said = f"{setting} held-back {before:.4f} -> {after:.4f}, {monotonic() - began:.0f} s"
        del pass_
        _report(run, texts, dense, blocks, said)


def _pass(run: FitRun, starts: list[Batch], trained: list[Trained], rate: float, scales: bool) -> Any:
    found = refit.Finishing(run, trained, starts, {n: b.hidden for n, b in run.mine.items()}, rate)
    if scales:
        packed = [
            len(part.masters) == 2 and n == 0 for part in trained for n in range(len(part.masters))
        ]
        rates = found.optimizer.rates
        found.optimizer.rates = [0.0 if p else r for p, r in zip(packed, rates, strict=True)]
    return found


@torch.no_grad()
def _restore(trained: list[Trained], kept: list[list[Tensor]]) -> None:
    for part, values in zip(trained, kept, strict=True):
        if isinstance(part, Latent):
            part.latent, part.scale = (value.clone() for value in values)
        else:
            part.masters[0][0].copy_(values[0])
        part.publish()


def _report(run: FitRun, texts: list[Any], dense: list[float], blocks: list[Any], said: str) -> None:
    lost = [_loss(run, text, blocks) - start for text, start in zip(texts, dense, strict=True)]
    _say(" / ".join(f"{value:.4f}" for value in lost) + "  " + said)


def _text(tokenizer: Any, path: Path, given: argparse.Namespace) -> Calibration:
    ids = read_tokens(path, tokenizer)
    start = min(given.from_token, max(len(ids) - given.tokens, 0))
    ids = ids[start : start + given.tokens]
    rows = ids[: len(ids) // given.window * given.window].view(-1, given.window)
    batches = list(rows.split(BATCH))
    return Calibration(batches, [torch.ones_like(part) for part in batches], "")


@torch.no_grad()
def _loss(run: FitRun, text: Calibration, blocks: list[Any]) -> float:
    whole = Blocks(blocks)
    values = []
    for ids, batch in zip(text.ids, run.model.start(text), strict=True):
        out = run.model.logits(run_block(whole, batch.hidden.to(run.model.device), batch))
        wanted = ids[:, 1:].flatten().to(out.device)
        values.append(
            torch.nn.functional.cross_entropy(out[:, :-1].flatten(0, 1), wanted, reduction="none")
        )
    return float(torch.cat(values).mean())


def _say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    main()
