"""What layers read that are rounded to float8 once they are trained: errors there cost by it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

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
        keeper = _Keeper(mask)
        handles = [m.register_forward_pre_hook(keeper.hook(parts[name])) for name, m in layers.items()]
        try:
            with torch.compiler.set_stance("force_eager"):  # compiled blocks know nothing of hooks
                out = pair.student.base_model(input_ids=ids.clamp_min(0), attention_mask=mask.long())
        finally:
            for handle in handles:
                handle.remove()
        for name, module in layers.items():
            if module is head:  # behind the base model
                parts[name].append(keeper.real(out.last_hidden_state))
    return {name: torch.cat(found) for name, found in parts.items() if any(map(len, found))}


def metric_of(inputs: Tensor, device: torch.device) -> Metric:
    """Of inputs [n, i]."""
    x = inputs.to(device, torch.float64)
    return Metric(x.mT @ x / len(x))


class _Keeper:
    """Copies what layers read of the tokens in `mask` [m, w], once where several read one tensor."""

    def __init__(self, mask: Tensor) -> None:
        self.mask = mask
        self.last: tuple[Any, Tensor] | None = None

    def real(self, x: Tensor) -> Tensor:
        """Of [..., d] the rows [n, d] of real tokens, on the CPU; all where there is not one a token, as
        of what some tokens are routed to."""
        rows = x.flatten(0, -2)
        return (rows[self.mask.flatten()] if len(rows) == self.mask.numel() else rows).cpu()

    def hook(self, kept: list[Tensor]) -> Callable[..., None]:
        """A hook that adds to `kept`."""

        def keep(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            if self.last is None or self.last[0] is not inputs[0]:
                self.last = inputs[0], self.real(inputs[0])
            kept.append(self.last[1])

        return keep
