"""What each phase of a decoded token takes, in a model of an 8B's layers but few of them.

    python scripts/bench/phases.py [--arms dense,lowrank,corrected-int2] [--batches 1,4,8] [--layers 4]
        [--contexts 120,32768]

Arms are those of `blr bench decode` that are ours, without "ours-". Logits are checked first. A time is
that of a token; "whole" is a token of 32 such layers: what the layers take, and what is left over once;
the phases follow in microseconds.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import torch
from case_files import numbers, options, run, step_case

from blr.compressor.base.device import float_dtype, pick_device
from blr.compressor.bench.decode import LIMITS, logits_error
from blr.compressor.bench.decode_arms import OursArm, parse_arm
from blr.compressor.bench.harness import Case
from blr.compressor.bench.models import Models, find_model, prompt
from blr.compressor.bench.timing import Sampler


def profiled(
    models: Models, arm: str, batch: int, context: int, steps: int, cuda: bool
) -> Callable[[dict[str, Any]], tuple[Sampler, float]]:
    """The check of an arm, whose sampler profiles a token."""

    def check(told: dict[str, Any]) -> tuple[Sampler, float]:
        name, layers = parse_arm(f"ours-{arm}"), models.model.settings["num_hidden_layers"]
        model = models.get(name.structure, name.kind, head=name.head)
        ids = prompt(None, model, batch, context)
        ops, mode = ("triton", "graph") if cuda else ("torch", "eager")
        ours = OursArm(model, ids, steps + 4, ops, mode, name.cache)
        error = logits_error(ours, model)

        def sample() -> float:
            ours.prefill()
            times = {name: us for name, us, _ in ours.decoder.profile(steps)}
            token = times["token"]
            told["whole"] = token + (32 - layers) * (token - times["lm_head"]) / layers
            told.update({name.removeprefix("layer.*."): us for name, us in times.items()})
            return token / 1e3

        return sample, error

    return check


def main() -> int:
    parser = options(__doc__)
    parser.add_argument("--model", default="8b")
    parser.add_argument("--arms", default="dense,lowrank,dense-int4,lowrank-int4,corrected-int2")
    parser.add_argument("--batches", default="1,4,8")
    parser.add_argument("--contexts", default="120")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--cf", type=float, default=2.0)
    parser.add_argument("--blocks", type=int, default=16)
    parser.add_argument("--steps", type=int, default=20)
    given = parser.parse_args()
    device, whole = pick_device(given.device), find_model(given.model)
    few = replace(whole, settings={**whole.settings, "num_hidden_layers": given.layers})
    dtype, cuda = float_dtype(given.dtype), device.type == "cuda"
    contexts = numbers(given.contexts)
    models = Models(few, device, dtype, max(contexts) + given.steps + 8, given.cf, given.blocks)

    def case(batch: int, context: int) -> Case:
        title = f"{given.model}, batch {batch}, context {context}"
        arms = given.arms.split(",")
        checks = {arm: profiled(models, arm, batch, context, given.steps, cuda) for arm in arms}
        limits = {arm: LIMITS[torch.bfloat16 if "kv8" in arm else dtype] for arm in arms}
        return step_case(title, checks, limits)

    return run(given, [case(*each) for each in product(numbers(given.batches), contexts)])


if __name__ == "__main__":
    sys.exit(main())
