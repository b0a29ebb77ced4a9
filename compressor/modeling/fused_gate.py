"""Gated MLPs whose activation and product are one kernel.

The two kernels of transformers read and write the widest activations of a block twice, which for long
prompts takes a twentieth of the time of a compressed model in eager mode (scripts/log). Under
`torch.compile`, for gradients, on a CPU and in single precision the native module computes.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from blr.compressor.modeling.extended import Extension, extend
from blr.compressor.modeling.fused_norm import is_fused
from blr.compressor.modeling.probes import gate_of
from blr.kernels.fused.gated.launch import gated


class FusedGate(Extension):
    """Mixin before an MLP ``down_proj(act_fn(gate_proj(x)) * up_proj(x))``. fused_gate: its name in
    `kernels.fused.gated.reference.GATES`."""

    fused_gate: str

    def forward(self: Any, x: Tensor) -> Any:
        """As of the module, [..., d]."""
        if not is_fused(x, x):
            return super().forward(x)  # type: ignore[misc]
        return self.down_proj(_product(self, x))


def _product(mlp: Any, x: Tensor) -> Any:
    """What `down_proj` reads; gate and up are gone when it does."""
    gate, up = mlp.gate_proj(x), mlp.up_proj(x)
    if is_fused(gate, up) and type(up) is Tensor and gate.shape == up.shape:
        return gated(gate, up, mlp.fused_gate)
    return mlp.act_fn(gate) * up


def fuse_gates(model: nn.Module) -> None:
    """Let the gated MLPs of `model` that compute as above do so by one kernel."""
    for module in model.modules():
        if (found := gate_of(module)) is not None:
            extend(module, FusedGate)
            module.fused_gate = found  # type: ignore[assignment]
