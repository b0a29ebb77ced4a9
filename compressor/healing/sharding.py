"""Checkpoints, compiles or shards the blocks of a model for training.

A sharded model (FSDP2) is whole in no process. Each process keeps a slice of every tensor in the
blocks, in float32 with its moments, and a block is put together while it computes. What is outside of
the blocks (embeddings, last norm, head) is whole in every process, and its gradients are summed as
without sharding. Source: PyTorch FSDP (arXiv 2304.11277).
"""

from __future__ import annotations

import os
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from blr.compressor.base.errors import CapabilityError, UsageError
from blr.compressor.base.processes import Processes
from blr.compressor.exporting.origin import Checkpoint
from blr.compressor.recipe.heal_settings import HealOptions
from blr.compressor.structures.latent import Plain, add_gradients

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ACCELERATE = "ACCELERATE_USE_FSDP"  # set by `accelerate launch --use_fsdp`


def blocks_of(model: PreTrainedModel) -> list[nn.Module]:
    """The model's blocks: its longest list of modules."""
    lists = [list(m) for m in model.modules() if type(m) is nn.ModuleList and len(m) > 1]
    return max(lists, key=len, default=[])


def checkpoint_blocks(model: PreTrainedModel) -> None:
    """Let the backward pass keep only the blocks' inputs. transformers' own way needs training mode,
    with its dropout."""
    from torch.utils.checkpoint import checkpoint

    for block in blocks_of(model):
        block.forward = partial(checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False)


def compile_blocks(model: PreTrainedModel) -> None:
    """Compile each of the model's blocks."""
    torch._dynamo.config.cache_size_limit = 64  # ranks differ from block to block
    for block in blocks_of(model):
        block.compile(dynamic=False)


class Slice(Plain):
    """This process's slice of a parameter of a block. The master shares the slice's memory."""

    def __init__(self, parameter: Any) -> None:
        super().__init__(parameter, parameter.to_local().detach().requires_grad_())
        self.mesh: DeviceMesh = parameter.device_mesh

    @torch.no_grad()
    def collect(self) -> None:
        """Add the gradient to the master's. The backward pass leaves the mean over processes; the sum
        is needed."""
        if (found := self.parameter.grad) is not None:
            assert isinstance(found, DTensor)
            add_gradients([self.master], [found.to_local() * self.mesh.size()])
            self.parameter.grad = None

    def whole(self, part: Tensor) -> Tensor:
        """The whole tensor on the CPU, where each process gives its slice as `part`."""
        parameter = self.parameter
        placed = DTensor.from_local(
            part.to(self.master.device), self.mesh, [Shard(0)],
            run_check=False, shape=parameter.shape, stride=parameter.stride(),
        )  # fmt: skip
        return placed.full_tensor().cpu()

    def part(self, whole: Tensor) -> Tensor:
        """This process's slice of a `whole` tensor."""
        held = whole.to(self.master.device)
        return distribute_tensor(held, self.mesh, [Shard(0)], src_data_rank=None).to_local()


class Sharding:
    """Divides models over `processes`."""

    def __init__(self, processes: Processes) -> None:
        self.mesh = init_device_mesh(processes.device.type, (processes.count,))
        self.device = processes.device

    def shard(self, model: PreTrainedModel, dtype: torch.dtype | None = None) -> None:
        """Leave each process its slices of `model`. Blocks compute in `dtype` (None: their own)."""
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
        blocks = blocks_of(model)
        for block in blocks:
            fully_shard(block, mesh=self.mesh, mp_policy=policy)
        inside = {id(p) for block in blocks for p in block.parameters()}
        outside = {p for p in model.parameters() if id(p) not in inside}
        # The root has no tensors of its own; it lets each block fetch the next one's early
        fully_shard(model.base_model, mesh=self.mesh, mp_policy=policy, ignored_params=outside)
        _move(model, self.device)


def _move(model: nn.Module, device: torch.device) -> None:
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            if not isinstance(parameter, DTensor) and parameter.device != device:
                parameter.data = parameter.data.to(device)
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))


def wants_sharding(options: HealOptions, processes: Processes) -> bool | None:
    """Whether sharding is asked for; None: memory decides. Raises UsageError for one process."""
    if options.fsdp and processes.count == 1:
        raise UsageError("--fsdp shares a model out over processes; start several with --gpus N")
    if processes.count == 1:
        return False
    asked = os.environ.get(ACCELERATE, "").lower() in ("1", "true", "yes")
    return True if options.fsdp is None and asked else options.fsdp


def check_shardable(student: Checkpoint, processes: Processes) -> None:
    """Raise CapabilityError for a student or for processes that cannot be sharded."""
    if packed := sum(spec.quantized for spec in student.specs.values()):
        raise CapabilityError(
            f"{student.source.folder}: {packed} layers are stored in few bits, which --fsdp does not "
            "share out; heal with --no-fsdp, where every process holds the whole model"
        )
    if processes.device.type == "cuda" and processes.wire.type == "cpu":
        raise CapabilityError("--fsdp needs a GPU a process; start as many processes as there are GPUs")
