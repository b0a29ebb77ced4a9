"""How the blocks of a model are run in training: checkpointed, compiled."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn


def blocks_of(model: Any) -> list[Any]:
    """The model's blocks: its longest list of modules."""
    lists = [list(m) for m in model.modules() if type(m) is nn.ModuleList and len(m) > 1]
    return max(lists, key=len, default=[])


def checkpoint_blocks(model: Any) -> None:
    """Keep only the inputs of the model's blocks for the backward pass.

    transformers' own checkpointing needs training mode, with its dropout.
    """
    from torch.utils.checkpoint import checkpoint

    for block in blocks_of(model):
        block.forward = partial(checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False)


def compile_blocks(model: Any) -> None:
    """Compile the model's blocks, each on its own."""
    torch._dynamo.config.cache_size_limit = 64  # ranks differ from block to block
    for block in blocks_of(model):
        block.compile(dynamic=False)
