"""Times of the phases of a token, of a model of an 8B's layers but few of them, on one GPU.

    python scripts/bench/phases.py -o phases.json [--arms dense,lowrank,dense-int4] [--batches 1,4,8]
        [--layers 4] [--old] [--seconds 60] [--cf 2]

Arms are dense, lowrank, pivoted, monarch, blast and corrected, with the bits behind. Logits are checked
first against transformers in eager mode on the same weights. `--old` leaves skinny products out. "whole"
is a token of 32 such layers: what the layers take, and what is left over once.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from time import monotonic
from typing import Any

import torch

from blr.compressor.bench.decode.arms import OursArm, reference_logits
from blr.compressor.bench.decode.models import Models, find_subject, prompt

DEVICE = torch.device("cuda")


def measured(models: Models, arm: str, batch: int, layers: int, steps: int) -> dict[str, Any]:
    """Error of the logits and microseconds of phases of one arm and batch."""
    structure, _, kind = arm.partition("-")
    model = models.get(structure, kind)
    ids = prompt(models.subject, model, batch, 120)
    ours = OursArm(model, ids, steps + 4, "triton", "graph")
    ours.prefill()
    tokens = torch.randint(1000, (batch,), device=DEVICE)
    expected = reference_logits(model, ids, tokens).double()
    error = float((ours.step(tokens).double() - expected).norm() / expected.norm())
    ours.prefill()
    found = ours.decoder.profile(steps)
    times = {name: us for name, us, _ in found}
    own = sum(us for name, us in times.items() if name.startswith("layer."))
    token = times["token"]
    whole = token + (32 - layers) * (token - times["lm_head"]) / layers
    sizes = {name: size for name, _, size in found}
    return {
        **{"arm": arm, "batch": batch, "error": error, "us": times, "bytes": sizes},
        **{"layer": own, "token": token, "whole": whole},
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--arms", default="dense,lowrank,dense-int4,lowrank-int4,corrected-int2")
    parser.add_argument("--batches", default="1,4,8")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--cf", type=float, default=2.0)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--plain-from", type=int, help="rows from which plain weights are skinny")
    parser.add_argument("--old", action="store_true")
    given = parser.parse_args()
    if given.old:
        import blr.kernels.decode.skinny.bound as bound

        bound._taken = lambda *_: False
    if given.plain_from:
        import blr.compressor.runtime.bind as bind
        import blr.kernels.decode.skinny.bound as bound

        bound.PLAIN_FROM = bind.PLAIN_FROM = given.plain_from
    begun, rows = monotonic(), []
    subject = find_subject("8b")
    subject = type(subject)("8b", {**subject.settings, "num_hidden_layers": given.layers})
    models = Models(subject, DEVICE, torch.bfloat16, 256, given.cf)
    for arm in given.arms.split(","):
        for batch in map(int, given.batches.split(",")):
            if monotonic() - begun > given.seconds:
                print("stopped by time", file=sys.stderr)
                break
            try:
                row = measured(models, arm, batch, given.layers, given.steps)
            except Exception as error:  # the others are told
                print(f"{arm} batch {batch}: {type(error).__name__} {error}"[:2000])
                continue
            rows.append(row)
            given.output.write_text(json.dumps(rows, indent=1))
            head = f"{arm:15} batch {batch:2} error {row['error']:.4f}"
            whole = f"{batch * 1e6 / row['whole']:7.1f} tokens/s of 32 layers, {row['whole']:6.0f} us"
            phases = ", ".join(f"{n.removeprefix('layer.*.')} {us:.1f}" for n, us in row["us"].items())
            print(f"{head} {whole}: {phases}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
