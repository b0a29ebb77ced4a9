"""What compressed models do in one kernel where transformers takes several."""

from __future__ import annotations

from torch import nn

from blr.compressor.modeling.fused_gate import fuse_gates
from blr.compressor.modeling.fused_norm import fuse_norms
from blr.compressor.modeling.fused_rotary import fuse_rotary


def fuse(model: nn.Module) -> None:
    """Let the norms, gates and rotations of `model` be one kernel each, in eager mode on a GPU."""
    fuse_norms(model)
    fuse_gates(model)
    fuse_rotary(model)
