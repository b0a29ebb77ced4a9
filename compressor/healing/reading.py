"""What layers read that are rounded to float8 once they are trained: errors there cost by it."""

from __future__ import annotations

import torch
from torch import Tensor

from blr.compressor.fitting.block_passes import watched
from blr.compressor.fitting.rounding import Metric
from blr.compressor.healing.embedding import PADDING
from blr.compressor.healing.student_and_teacher import Pair

TOKENS = 8192
BATCH = 4  # rows at once


@torch.no_grad()
def read_inputs(pair: Pair, rows: Tensor) -> dict[str, Tensor]:
    """Inputs [n, i], on the CPU, of the layers of the student that are stored in float8, by name; of
    those that a token reaches.

    Args:
        rows: [m, w] of token ids and padding, of which the first are read.
    """
    layers = {name: t.module for name, t in pair.twins.items() if getattr(t.spec, "fp8", False)}
    parts: dict[str, list[Tensor]] = {name: [] for name in layers}
    if not layers:
        return {}
    head = pair.student.get_output_embeddings()
    for some in rows[: max(TOKENS // rows.shape[1], 1)].split(BATCH):
        ids = some.to(pair.device)
        mask = ids != PADDING
        last: list[Tensor] = []  # what was read last, and its rows: several layers read one tensor

        def keep(name: str, x: Tensor, mask: Tensor = mask, last: list[Tensor] = last) -> None:
            if not last or last[0] is not x:
                last[:] = x, _real(x, mask)
            parts[name].append(last[1])

        # Compiled blocks know nothing of hooks
        with watched(layers, keep), torch.compiler.set_stance("force_eager"):
            out = pair.student.base_model(input_ids=ids.clamp_min(0), attention_mask=mask.long())
        for name, module in layers.items():
            if module is head:  # behind the base model
                keep(name, out.last_hidden_state)
    return {name: torch.cat(found) for name, found in parts.items() if any(map(len, found))}


def metric_of(inputs: Tensor, device: torch.device) -> Metric:
    """Of inputs [n, i]."""
    x = inputs.to(device, torch.float64)
    return Metric(x.mT @ x / len(x))


def _real(x: Tensor, mask: Tensor) -> Tensor:
    """Of [..., d] the rows [n, d] of the tokens in `mask` [m, w], on the CPU; all where there is not one
    a token, as of what some tokens are routed to."""
    rows = x.flatten(0, -2)
    return (rows[mask.flatten()] if len(rows) == mask.numel() else rows).cpu()
