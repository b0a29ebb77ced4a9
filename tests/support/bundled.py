"""The bundled checkpoint compressed and exported by each method, and what it says: made once a run."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from fresh import SAMPLE, TINY, blr, shared
from greedy import Prompt, separated

from blr.compressor.loading.load import load_model, load_tokenizer
from blr.compressor.planning.roofline import gpus
from blr.kernels.common.available import gpu_key

METHODS: dict[str, tuple[str, ...] | None] = {
    "dense": None,
    "svd": (),
    "blast": ("--blocks", "4", "--rounds", "5"),
    "monarch": ("--blocks", "4"),
    "ks": (),
}
BATCH, CONTEXT, NEW = 8, 512, 48  # what is exported for; tokens that follow every prompt
POSITIONS = 1024  # of the bundled checkpoint
LENGTHS = (40, 23, 57, 8, 31, 49, 16, 60, 12)  # one more than BATCH
SHORT, LONG = 30, 490  # of passages; the second fits the model but, with `NEW`, not the export
CANDIDATES, APART = 4, 130  # prompts to choose from, and tokens from one to the next in the text
FOREIGN = "blr: exported for"  # begins what is said on another GPU than exported for
END = 0  # ends a text of the bundled checkpoint


def compressed(work: Path, method: str) -> Path:
    """The bundled checkpoint compressed by `method`, or as it is ("dense")."""
    options = METHODS[method]
    if options is None:
        return TINY

    def make(folder: Path) -> None:
        given = ("--method", method, "--cf", 1.25, *options, "--device", "cpu", "--quiet", "--force")
        blr("compress", TINY, "-o", folder, *given)

    return shared(work / f"tiny-{method}", make)


def exported(work: Path, method: str, gpu: str) -> Path:
    """Its export for `gpu`, copied to another folder, the first one gone."""
    source, name = compressed(work, method), f"{method}-{gpu}"

    def make(copy: Path) -> None:
        made = work / "made" / name
        made.parent.mkdir(exist_ok=True)
        given = ("--gpu", gpu, "--batch", BATCH, "--context", CONTEXT, "--self-contained", "--quiet")
        blr("export", source, "-o", made, *given)
        shutil.copytree(made, copy)
        shutil.rmtree(made)

    return shared(work / "elsewhere" / name, make)


def gpu_here(other: bool = False) -> str:
    """The name that `blr export` has for this GPU, h200 if it has none; or that of any other one."""
    key = gpu_key(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    here = next((name for name in gpus() if name.replace("-", "") == key), "h200")
    return next(name for name in ("a100", "h200") if name != here) if other else here


@dataclass(frozen=True)
class Passage(Prompt):
    """A prompt with its `text`, and the text with all that follows up to its end as `whole`."""

    text: str
    whole: str


@dataclass(frozen=True)
class Expected:
    """Prompts of `LENGTHS` and two passages of `SHORT` and `LONG` tokens or so, with what transformers
    says on the CPU in float32."""

    rows: list[Prompt]
    short: Passage
    long: Passage


def expected(work: Path, method: str) -> Expected:
    """What every run of the checkpoint must give."""
    source = compressed(work, method)
    made = shared(work / f"expected-{method}.json", partial(save_expected, source))
    found = json.loads(made.read_text("utf-8"))
    rows = [Prompt(**each) for each in found["rows"]]
    return Expected(rows, Passage(**found["short"]), Passage(**found["long"]))


def save_expected(source: Path, path: Path) -> None:
    """See `expected`."""
    model = load_model(source, "AutoModelForCausalLM", dtype="float32", device="cpu")
    tokenizer = load_tokenizer(source)
    text = tokenizer(SAMPLE.read_text("utf-8"))["input_ids"]
    starts = iter(range(0, APART * len(LENGTHS) * CANDIDATES, APART))
    groups = [[text[at : at + length] for at in islice(starts, CANDIDATES)] for length in LENGTHS]
    passages = [passage(model, tokenizer, text, length) for length in (SHORT, LONG)]
    told = Expected(separated(model, groups, NEW), *passages)
    path.write_text(json.dumps(asdict(told)), "utf-8")


def passage(model: Any, tokenizer: Any, text: list[int], length: int) -> Passage:
    """One of `length` tokens of `text`, or as many as their words have when they are read again."""
    texts = [tokenizer.decode(text[at : at + length]) for at in range(0, APART * CANDIDATES, APART)]
    candidates = [tokenizer(each)["input_ids"] for each in texts]
    (found,) = separated(model, [candidates], NEW)
    end = found.tokens.index(END) if END in found.tokens else NEW
    whole = tokenizer.decode(found.ids + found.tokens[:end], skip_special_tokens=True)
    return Passage(**asdict(found), text=texts[candidates.index(found.ids)], whole=whole)
