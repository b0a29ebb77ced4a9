"""Exported folders copied elsewhere, in processes where `blr` is not installed: the fused runtime on
a GPU, everything that it falls back from, and everything that is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from features.reference import Prompt, separated
from features.report import Row, first_difference, row
from features.work import CALL, SAMPLE, TINY, blr, fresh, shared

from blr.compressor.load import load_model, load_tokenizer
from blr.compressor.roofline import gpus
from blr.kernels.common.available import gpu_key

METHODS = {"svd": (), "blast": ("--blocks", "4", "--rounds", "5"), "monarch": ("--blocks", "4")}
METHODS["ks"] = ()
BATCH, CONTEXT, NEW = 8, 512, 48  # what is exported for; tokens that follow every prompt
POSITIONS = 1024  # of the bundled checkpoint
LENGTHS = (40, 23, 57, 8, 31, 49, 16, 60, 12)  # one more than BATCH
SHORT, LONG = 30, 490  # of passages; the second fits the model but, with `NEW`, not the export
CANDIDATES, APART = 4, 130  # prompts to choose from, and tokens from one to the next in the text
ON_CPU = "the model is not on a GPU"
FOREIGN = "blr: exported for"  # begins what is said on another GPU than exported for
END = 0  # ends a text of the bundled checkpoint

# In a fresh process: each call of `generate`, and whether transformers answered it.
GENERATE = f"""
import torch, transformers
native, counted = transformers.GenerationMixin.generate, []
def count(self, *args, **kwargs):
    counted.append(1)
    return native(self, *args, **kwargs)
transformers.GenerationMixin.generate = count
load = transformers.AutoModelForCausalLM.from_pretrained
model = load(job["folder"], trust_remote_code=True, dtype=torch.float32)
model = model.to("cuda" if job["device"] == "cuda" and torch.cuda.is_available() else "cpu").eval()
options = {{"do_sample": False, "eos_token_id": None, "pad_token_id": 0}}
found = []
for number, (rows, new) in enumerate(job["calls"]):
    print("{CALL}", number, file=sys.stderr, flush=True)
    counted.clear()
    longest = max(map(len, rows))
    ids = torch.tensor([[0] * (longest - len(r)) + r for r in rows], device=model.device)
    mask = torch.tensor([[0] * (longest - len(r)) + [1] * len(r) for r in rows], device=model.device)
    try:
        tokens = model.generate(ids, attention_mask=mask, max_new_tokens=new, **options)
        found.append({{"tokens": tokens[:, longest:].tolist(), "native": bool(counted), "error": ""}})
    except ValueError as error:
        found.append({{"tokens": [], "native": bool(counted), "error": str(error)}})
assert all(sys.modules.get(name) is None for name in job["hidden"])
print(json.dumps({{"device": model.device.type, "calls": found}}))
"""


def compressed(work: Path, method: str) -> Path:
    """The bundled checkpoint compressed by `method`."""

    def make(folder: Path) -> None:
        given = ("--method", method, "--cf", 1.25, *METHODS[method], "--device", "cpu", "--quiet")
        blr("compress", TINY, "-o", folder, *given)

    return shared(work / f"tiny-{method}", make)


def exported(work: Path, method: str, gpu: str) -> Path:
    """Its export for `gpu`, copied to another folder, the first one gone."""
    source, name = compressed(work, method), f"{method}-{gpu}"

    def make(copy: Path) -> None:
        made = work / "made" / name
        made.parent.mkdir(exist_ok=True)
        given = ("--gpu", gpu, "--batch", BATCH, "--context", CONTEXT, "--quiet")
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


@dataclass(frozen=True)
class Step:
    """A call of `generate`: who should answer it, and what blr should say at it ("": nothing).

    fused: the runtime, if there is a GPU.
    """

    name: str
    prompts: Sequence[Prompt]
    fused: bool = True
    message: str = ""


def take(
    folder: Path,
    device: str,
    steps: Sequence[Step],
    hidden: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> Iterator[Row]:
    """A row a step, in a process where neither `blr` nor `hidden` are installed.

    Where the model lands on the CPU nothing is fused, and the first message says just that.
    """
    calls = [([prompt.ids for prompt in step.prompts], NEW) for step in steps]
    job = {"folder": str(folder), "device": device, "calls": calls}
    found, said = fresh(GENERATE, job, ("blr", *hidden), **(environment or {}))
    if found["device"] == "cpu":
        steps = [replace(step, fused=False, message="") for step in steps]
        steps[0] = replace(steps[0], message=ON_CPU)
    said = [said[0] + said[1], *said[2:]]  # loading is silent, or else the first call is blamed
    for step, call, heard in zip(steps, found["calls"], said, strict=True):
        yield judged(step, call, heard, found["device"])


def judged(step: Step, call: Mapping[str, Any], heard: Sequence[str], place: str) -> Row:
    """PASS for the tokens of the reference by the right one, with the one message there should be."""
    told = [line for line in heard if FOREIGN not in line or FOREIGN in step.message]
    good = call["native"] != step.fused and len(told) == bool(step.message)
    good &= all(step.message in line for line in told)
    same = first_difference(call["tokens"], [prompt.tokens for prompt in step.prompts])
    by = f"by {'transformers' if call['native'] else 'the runtime'} on {place}"
    what = call["error"] or same or f"{NEW * len(step.prompts)} tokens"
    return row(good and not same, step.name, ", ".join((what, by, "; ".join(told) or "no message")))


def check_batches(work: Path, device: str, method: str) -> Iterator[Row]:
    """Batches of 1 to 8, all by the runtime if there is a GPU."""
    rows = expected(work, method).rows
    steps = [Step(f"export {method} batch {n}", rows[:n]) for n in range(1, BATCH + 1)]
    yield from take(exported(work, method, gpu_here()), device, steps)


def check_fallback(
    work: Path, device: str, name: str, hidden: Sequence[str], environment: Mapping[str, str], why: str
) -> Iterator[Row]:
    """No runtime for the reason `why`: the tokens are the same, and one message says so."""
    rows = expected(work, "blast").rows
    steps = [Step(f"{name} batch 1", rows[:1], False, why), Step(f"{name} batch 3", rows[:3], False)]
    steps.append(Step(f"{name} batch 1 again", rows[:1], False))
    yield from take(exported(work, "blast", gpu_here()), device, steps, hidden, environment)


def check_other_gpu(work: Path, device: str) -> Iterator[Row]:
    """An export for another GPU runs in the runtime and says so once."""
    rows, other = expected(work, "svd").rows, gpu_here(other=True)
    steps = [Step(f"export for {other} batch 1", rows[:1], message=f"{FOREIGN} {other}, running on")]
    steps.append(Step(f"export for {other} batch 8", rows[:8]))
    yield from take(exported(work, "svd", other), device, steps)


def check_limits(work: Path, device: str, method: str) -> Iterator[Row]:
    """More rows or tokens than exported for, between calls that the runtime takes."""
    given = expected(work, method)
    most, more = f"{method} made for batch {BATCH}", f"{BATCH + 1} sequences, exported for {BATCH}"
    room, length = f"{method} made for context {CONTEXT}", f"exported for a context of {CONTEXT}"
    steps = [
        Step(f"{most}, batch 2", given.rows[:2]),
        Step(f"{most}, batch {BATCH + 1}", given.rows, False, more),
        Step(f"{most}, batch {BATCH + 1} again", given.rows, False),
        Step(f"{room}, {len(given.long.ids)}+{NEW} tokens", [given.long], False, length),
        Step(f"{room}, the same again", [given.long], False),
        Step(f"{room}, batch 2 afterwards", given.rows[:2]),
    ]
    yield from take(exported(work, method, gpu_here()), device, steps)


def check_positions(work: Path, device: str) -> Iterator[Row]:
    """More tokens than the model has positions: an error that says so, and nothing generated."""
    folder, ids = exported(work, "svd", gpu_here()), expected(work, "svd").rows[0].ids
    job = {"folder": str(folder), "device": device, "calls": [([ids], POSITIONS)]}
    found, _ = fresh(GENERATE, job)
    (call,) = found["calls"]
    good = f"exceed the {POSITIONS} positions" in call["error"] and not call["tokens"]
    yield row(good, f"beyond the model's positions on {found['device']}", call["error"] or "no error")
