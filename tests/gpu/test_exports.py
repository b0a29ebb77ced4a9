"""Exported folders copied elsewhere, in processes where `blr` is not installed: the fused runtime on
a GPU, everything that it falls back from, and everything that is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from bundled import (
    BATCH,
    CONTEXT,
    FOREIGN,
    METHODS,
    NEW,
    POSITIONS,
    compressed,
    expected,
    exported,
    gpu_here,
)
from fresh import CALL, blr, fresh
from greedy import Prompt
from rows import Row, first_difference, row

pytestmark = pytest.mark.gpu
Judge = Callable[[Iterator[Row]], None]
ON_CPU = "the model is not on a GPU"

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
    """The tokens of the reference by the right one, with the one message there should be."""
    told = [line for line in heard if FOREIGN not in line or FOREIGN in step.message]
    good = call["native"] != step.fused and len(told) == bool(step.message)
    good &= all(step.message in line for line in told)
    same = first_difference(call["tokens"], [prompt.tokens for prompt in step.prompts])
    by = f"by {'transformers' if call['native'] else 'the runtime'} on {place}"
    what = call["error"] or same or f"{NEW * len(step.prompts)} tokens"
    detail = ", ".join((what, by, "; ".join(told) or "no message"))
    return row(good and not same, "exports", step.name, detail)


@pytest.mark.parametrize("method", METHODS)
def test_batches(method: str, device: str, work: Path, judge: Judge) -> None:
    """Batches of 1 to 8, all by the runtime if there is a GPU."""
    rows = expected(work, method).rows
    steps = [Step(f"{method} batch {n}", rows[:n]) for n in range(1, BATCH + 1)]
    judge(take(exported(work, method, gpu_here()), device, steps))


@pytest.mark.parametrize("method", METHODS)
def test_copies_on_the_cpu(method: str, work: Path, judge: Judge) -> None:
    """An export for this GPU says on the CPU what it says here."""
    rows = expected(work, method).rows
    judge(take(exported(work, method, gpu_here()), "cpu", [Step(f"{method} on the CPU", rows[:1])]))


@pytest.mark.parametrize(("method", "kind"), [("dense", "int4"), ("svd", "int8"), ("svd", "int4")])
def test_quantized(method: str, kind: str, device: str, work: Path, judge: Judge) -> None:
    """Tokens of the export on the CPU, by the runtime if there is a GPU."""
    folder, ids = work / f"{method}-{kind}", expected(work, method).rows[0].ids
    given = ("--quantize", kind, "--self-contained", "--quiet")
    blr("export", compressed(work, method), "-o", folder, *given)
    job = {"folder": str(folder), "calls": [([ids], NEW)]}
    (right,), (found,) = (
        fresh(GENERATE, {**job, "device": place})[0]["calls"] for place in ("cpu", device)
    )
    same = first_difference(found["tokens"], right["tokens"]) or found["error"]
    by = "transformers" if found["native"] else "the runtime"
    good = not same and found["native"] == (device == "cpu") and len(right["tokens"][0]) == NEW
    judge(iter([row(good, "exports", f"{method} {kind}", f"{same or 'same tokens'}, by {by}")]))


# hidden modules, environment, message
FALLBACKS: dict[str, tuple[tuple[str, ...], dict[str, str], str]] = {
    "no-triton": (("triton",), {}, "triton is not installed"),
    "no-kernels": ((), {"BLR_KERNELS": "torch"}, "BLR_KERNELS not torch"),
    "no-gpu": ((), {"CUDA_VISIBLE_DEVICES": ""}, "the model is not on a GPU"),
}


@pytest.mark.parametrize("name", FALLBACKS)
def test_fallbacks(name: str, device: str, work: Path, judge: Judge) -> None:
    """No runtime for a reason: the tokens are the same, and one message says so."""
    hidden, environment, why = FALLBACKS[name]
    rows = expected(work, "blast").rows
    steps = [Step(f"{name} batch 1", rows[:1], False, why), Step(f"{name} batch 3", rows[:3], False)]
    steps.append(Step(f"{name} batch 1 again", rows[:1], False))
    judge(take(exported(work, "blast", gpu_here()), device, steps, hidden, environment))


def test_for_another_gpu(device: str, work: Path, judge: Judge) -> None:
    """An export for another GPU runs in the runtime and says so once."""
    rows, other = expected(work, "svd").rows, gpu_here(other=True)
    steps = [Step(f"for {other} batch 1", rows[:1], message=f"{FOREIGN} {other}, running on")]
    steps.append(Step(f"for {other} batch 8", rows[:8]))
    judge(take(exported(work, "svd", other), device, steps))


def test_limits(device: str, work: Path, judge: Judge) -> None:
    """More rows or tokens than exported for, between calls that the runtime takes."""
    given = expected(work, "svd")
    most, more = f"made for batch {BATCH}", f"{BATCH + 1} sequences, exported for {BATCH}"
    room, length = f"made for context {CONTEXT}", f"exported for a context of {CONTEXT}"
    steps = [
        Step(f"{most}, batch 2", given.rows[:2]),
        Step(f"{most}, batch {BATCH + 1}", given.rows, False, more),
        Step(f"{most}, batch {BATCH + 1} again", given.rows, False),
        Step(f"{room}, {len(given.long.ids)}+{NEW} tokens", [given.long], False, length),
        Step(f"{room}, the same again", [given.long], False),
        Step(f"{room}, batch 2 afterwards", given.rows[:2]),
    ]
    judge(take(exported(work, "svd", gpu_here()), device, steps))


def test_positions(device: str, work: Path) -> None:
    """More tokens than the model has positions: an error that says so, and nothing generated."""
    folder, ids = exported(work, "svd", gpu_here()), expected(work, "svd").rows[0].ids
    job = {"folder": str(folder), "device": device, "calls": [([ids], POSITIONS)]}
    (call,) = fresh(GENERATE, job)[0]["calls"]
    assert f"exceed the {POSITIONS} positions" in call["error"] and not call["tokens"]
