"""Loads the two models of a healing run: the dense teacher, and the student that is trained."""

import os
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.utils import get_total_norm
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from blr.compressor.base.errors import CapabilityError, UsageError
from blr.compressor.base.processes import Processes
from blr.compressor.checkpoint.header import TORCH_NAMES
from blr.compressor.checkpoint.source import open_source
from blr.compressor.exporting.origin import Checkpoint
from blr.compressor.fitting.blocks import move_buffers
from blr.compressor.fitting.composed import compose_layers
from blr.compressor.fitting.student import Twin, make_twin
from blr.compressor.fitting.trainer import TrainedSet
from blr.compressor.healing.trained_parameters import (
    StoredNames,
    add_products,
    attach,
    choose,
    is_addition,
    kind_of,
)
from blr.compressor.loading.load import load_computing, load_model
from blr.compressor.loading.native import continues_text
from blr.compressor.loading.sentences import Sentences
from blr.compressor.modeling.fused import fuse_trained
from blr.compressor.modeling.layers import StructuredLinear
from blr.compressor.modeling.modeling_blr import module_names
from blr.compressor.recipe.settings import KINDS, HealOptions
from blr.compressor.structures.balance import balanced
from blr.compressor.structures.latent import Latent, Plain, Trained, add_gradients

GENERATES, EMBEDS = "AutoModelForCausalLM", "AutoModel"
ACCELERATE = "ACCELERATE_USE_FSDP"  # set by `accelerate launch --use_fsdp`


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
    """Divides models over `processes` (FSDP2, arXiv 2304.11277). Each keeps a slice of every tensor in
    the blocks, in float32 with its moments, and a block is put together while it computes. What is
    outside of the blocks is whole in every process."""

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
        for parameter in outside:
            parameter.data = parameter.data.to(self.device)
        move_buffers(model, self.device)


class TrainedPair(TrainedSet):
    """Student and teacher in evaluation mode, on one device and in one dtype. `trained` are the
    student's trained parameters, `places` where they lie on disk, `sentences` how an encoder embeds,
    and `twins` its layers in few bits."""

    def __init__(
        self, teacher: PreTrainedModel, student: PreTrainedModel, trained: dict[str, Trained],
        places: StoredNames, sentences: Sentences | None, twins: dict[str, Twin],
    ) -> None:  # fmt: skip
        super().__init__(trained)
        self.teacher, self.student, self.places = teacher, student, places
        self.sentences, self.twins = sentences, twins
        first = {id(part.parameter): name for name, part in trained.items()}
        every = student.named_parameters(remove_duplicate=False)
        self.first_names = {name: first[id(p)] for name, p in every if id(p) in first}
        self.slices = {name: part for name, part in trained.items() if isinstance(part, Slice)}

    @property
    def device(self) -> torch.device:
        return self.student.device

    @property
    def size(self) -> int:
        """How many numbers are trained, over all processes where they are sharded."""
        return sum(tensor.numel() for tensor in self._whole().values())

    def _whole(self) -> dict[str, Tensor]:
        """The masters; in place of slices the parameters that they are slices of."""
        return {**self.masters, **{name: part.parameter for name, part in self.slices.items()}}

    def kinds(self) -> list[str]:
        """The kinds (`settings.KINDS`) of what is trained; additions have none."""
        parts, names = parts_of(self.twins), [n for n in self.masters if not is_addition(n)]
        found = {"factors" if n in parts else kind_of(self.student, n) for n in names}
        return [kind for kind in KINDS if kind in found]

    def left_out(self, kinds: tuple[str, ...]) -> list[str]:
        """A note on parameters of these `kinds` that are not trained; empty if there are none."""
        held = self.places.held | parts_of(self.twins).keys()
        plain = (n for n, _ in self.student.named_parameters() if not is_addition(n) and n not in held)
        found = [name for name in plain if kind_of(self.student, name) in kinds]
        said = "not trained, which the checkpoint stores otherwise than the model computes with them:"
        return [f"{said} {found[0]}, {len(found)} in all"] if found else []

    def kept_whole(self) -> list[Tensor]:
        """The masters that every process has whole."""
        return [master for name, master in self.masters.items() if name not in self.slices]

    def sizes(self, processes: Processes) -> list[float]:
        """The root mean square of every master, over all processes where it is sharded."""
        squares = torch.stack([m.detach().double().square().sum() for m in self.masters.values()])
        split = [name in self.slices for name in self.masters]
        if any(split):
            mask = torch.tensor(split, device=squares.device)
            squares = torch.where(mask, processes.sum(squares), squares)
        counts = [tensor.numel() for tensor in self._whole().values()]
        return [(s / max(n, 1)) ** 0.5 for s, n in zip(squares.tolist(), counts, strict=True)]

    def norm(self, processes: Processes) -> Tensor:
        """The norm of the gradients of all masters."""
        found = {n: m.grad for n, m in self.masters.items() if m.grad is not None}
        whole = [grad for name, grad in found.items() if name not in self.slices]
        total = get_total_norm(whole).to(self.device).square()
        if self.slices:
            own = [grad for name, grad in found.items() if name in self.slices]
            total = total + processes.sum(get_total_norm(own).to(self.device).square())
        return total.sqrt()

    def joined(self, values: dict[str, Tensor]) -> dict[str, Tensor]:
        """`values`, which are tensors like some masters, with all processes' slices put together."""
        return {n: self.slices[n].whole(v) if n in self.slices else v for n, v in values.items()}

    def parted(self, values: dict[str, Tensor]) -> dict[str, Tensor]:
        """This process's part of what `joined` gives."""
        return {n: self.slices[n].part(v).cpu() if n in self.slices else v for n, v in values.items()}


def task_of(checkpoint: Checkpoint) -> str:
    """The Auto class of a causal model or an encoder. Raises CapabilityError for others."""
    config = checkpoint.source.config
    name = (config.get("architectures") or [""])[0]
    if name.endswith(("ForCausalLM", "LMHeadModel")) or continues_text(checkpoint.source):
        return GENERATES
    reads = "vocab_size" in config and not config.get("is_encoder_decoder")
    if name.endswith("Model") and "Encoder" not in name and reads:
        return EMBEDS
    raise CapabilityError(
        f"{checkpoint.source.folder}: {name or 'no architecture'} is neither a causal language model "
        "nor a plain encoder of text (BertModel, …), which can be healed; give one of those"
    )


def load_teacher(
    folder: Path, device: torch.device, task: str = GENERATES, dtype: str | None = None
) -> PreTrainedModel:
    """The dense model, frozen, in `dtype` (None: the one to compute in)."""
    model = load_computing(folder, task, device, dtype)
    fuse_trained(model)
    return model.requires_grad_(False)


def load_pair(
    folder: Path,
    teacher: PreTrainedModel,
    kinds: tuple[str, ...],
    sentences: Sentences | None = None,
    additions: tuple[int, int] | None = None,
    sharding: Sharding | None = None,
) -> TrainedPair:
    """Load the student in `folder` with balanced factors, ready to be trained beside `teacher`.
    `additions` are rank and seed of low-rank additions, which are trained in place of factors;
    `sharding` divides both models."""
    task = GENERATES if sentences is None else EMBEDS
    place = teacher.device if sharding is None else "cpu"
    student = load_model(folder, task, dtype="float32", device=str(place))
    twins = take_twins(student, folder)
    _balance(student, twins)
    added = attach(student, *additions) if additions else set()
    student.requires_grad_(False)
    places = StoredNames(student, open_source(folder).entries)
    chosen = choose(student, kinds, parts_of(twins), added, places.held)
    compose_layers(student)
    add_products(student, added)
    fuse_trained(student)
    if sharding is not None:
        sharding.shard(teacher)  # the student is computed in its dtype
        sharding.shard(student, None if teacher.dtype == torch.float32 else teacher.dtype)
    trained = _trained(student, teacher, chosen, twins)
    pair = TrainedPair(teacher, student, trained, places, sentences, twins)
    pair.publish()
    return pair


def _trained(
    student: PreTrainedModel, teacher: PreTrainedModel, chosen: list[str], twins: dict[str, Twin]
) -> dict[str, Trained]:
    """The trained parameters by name, with masters in float32; the student is brought to the teacher's
    dtype."""
    parameters, parts = dict(student.named_parameters()), parts_of(twins)
    narrow = teacher.dtype != torch.float32
    found: dict[str, Trained] = {}
    for name in chosen:
        parameter = parameters[name]
        if isinstance(parameter, DTensor):
            found[name] = Slice(parameter)
        elif isinstance(parts.get(name), Latent):
            found[name] = parts[name]
        else:
            # The replay of a CUDA graph overwrites gradients, so they are summed elsewhere
            apart = narrow or parameter.is_cuda
            master = parameter.detach().clone().requires_grad_() if apart else None
            found[name] = Plain(parameter, master)
    if narrow:
        narrowed(student, teacher)
    _share(student, teacher)
    return found


def narrowed(student: PreTrainedModel, teacher: PreTrainedModel) -> None:
    """Give the student's parameters the teacher's dtype, except slices, and its buffers the dtypes of
    the teacher's: rotations in few bits would turn keys by other angles."""
    for parameter in student.parameters():
        if not isinstance(parameter, DTensor):
            parameter.data = parameter.data.to(teacher.dtype)
    theirs = dict(teacher.named_buffers())
    for name, buffer in student.named_buffers():
        if name in theirs:
            buffer.data = buffer.data.to(theirs[name].dtype)


def take_twins(student: Any, folder: Path) -> dict[str, Twin]:
    """Make the student's layers in few bits trainable; returns their new forms by name."""
    entries, found = open_source(folder).entries, dict[str, Twin]()
    for stored, name in module_names(student, student.config.blr["layers"]).items():
        layer = student.get_submodule(name)
        if not layer.described.quantized:
            continue
        tensors = {n: t for n, t in layer.state_dict().items() if n != "bias"}
        for suffix, tensor in tensors.items():  # loaded in float32, stored in their own dtype
            stored_dtype = getattr(torch, TORCH_NAMES[entries[f"{stored}.{suffix}"].dtype])
            tensors[suffix] = tensor.to(stored_dtype)
        found[name] = make_twin(layer.described, tensors, layer.bias)
        student.set_submodule(name, found[name].module)
    return found


def parts_of(twins: dict[str, Twin]) -> dict[str, Trained]:
    """The trained parameters of `twins` by their names in the model."""
    return {
        f"{name}.{part}": found for name, twin in twins.items() for part, found in twin.parts.items()
    }


def structured_layers(model: PreTrainedModel) -> dict[str, StructuredLinear]:
    """The structured layers of a model, by name."""
    return {n: m for n, m in model.named_modules() if isinstance(m, StructuredLinear)}


@torch.no_grad()
def _balance(student: PreTrainedModel, twins: dict[str, Twin]) -> None:
    inside = {id(part) for twin in twins.values() for part in twin.module.modules()}
    for layer in structured_layers(student).values():
        if id(layer) in inside:
            continue
        factors = {name: layer.get_parameter(name) for name in layer.spec.shapes()}
        found = balanced({name: p.double() for name, p in factors.items()}, layer.spec)
        for name, parameter in factors.items():
            parameter.copy_(found[name])


def _share(student: PreTrainedModel, teacher: PreTrainedModel) -> None:
    """Let frozen tensors of the student that equal the teacher's share their memory."""
    theirs = dict(teacher.named_parameters())
    for name, parameter in student.named_parameters():
        other = theirs.get(name)
        split = isinstance(parameter, DTensor)
        if other is None or split or parameter.requires_grad or other.shape != parameter.shape:
            continue
        if torch.equal(parameter, other):
            parameter.data = other.data


def blocks_of(model: PreTrainedModel) -> list[nn.Module]:
    """The model's blocks: its longest list of modules."""
    lists = [list(m) for m in model.modules() if type(m) is nn.ModuleList and len(m) > 1]
    return max(lists, key=len, default=[])


def checkpoint_blocks(model: PreTrainedModel) -> None:
    """Let the backward pass keep only the blocks' inputs. transformers' own way needs training mode,
    with its dropout."""
    for block in blocks_of(model):
        block.forward = partial(checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False)


def compile_blocks(model: PreTrainedModel) -> None:
    """Compile each of the model's blocks."""
    torch._dynamo.config.cache_size_limit = 64  # ranks differ from block to block
    for block in blocks_of(model):
        block.compile(dynamic=False)


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
