"""What the layers of a trained block read: the metrics in which its factors are rounded to float8."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from blr.compressor.base.processes import rounds
from blr.compressor.fitting.moments import Inputs, MomentSums
from blr.compressor.fitting.rounding import Metric
from blr.compressor.fitting.running import captured_inputs, run_block
from blr.compressor.fitting.student import Student


def rounds_to_float8(student: Student) -> bool:
    """Whether the block has layers that are rounded to float8 once it is trained."""
    return any(getattr(twin.spec, "fp8", False) for twin in student.twins.values())


@torch.no_grad()
def read_by(
    student: Student, states: Mapping[int, Tensor]
) -> tuple[dict[str, Metric], dict[int, Tensor]]:
    """Metrics of the inputs of every layer, by name in the block, over the batches of all processes; and
    the states behind the block.

    Args:
        states: that enter the block, of this process's batches by number.
    """
    run, processes = student.run, student.run.work.processes
    groups = [group.modules for group in run.model.groups(student.block)]
    sums = {names[0]: MomentSums(processes, len(run.batches), 1) for names in groups}
    behind: dict[int, Tensor] = {}
    for turn in rounds(processes, len(run.batches)):
        n, kept = turn * processes.count + processes.rank, dict[str, Tensor]()
        if n in states:
            with captured_inputs(student.block, list(sums)) as kept:
                out = run_block(student.block, states[n].to(run.model.device), run.batches[n])
            behind[n] = out.to(states[n].device)
        for name, total in sums.items():
            total.add(Inputs(run.batches[n].rows(kept[name])) if kept else None)
    found = {name: total.moments().metric for name, total in sums.items()}
    return {name: found[names[0]] for names in groups for name in names}, behind
