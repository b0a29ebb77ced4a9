"""The two models of a healing run: the dense teacher, and the student with what is trained of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from blr.compressor.checkpoint.source import TORCH_NAMES, open_source
from blr.compressor.errors import CapabilityError, InputError, UsageError
from blr.compressor.export.origin import Checkpoint
from blr.compressor.fitting.twins import Twin, make_twin
from blr.compressor.heal.additions import add_products, attach, is_addition
from blr.compressor.heal.compose import compose_layers
from blr.compressor.heal.gauge import balanced
from blr.compressor.heal.norms import fuse_norms
from blr.compressor.loading.carry import token_ids
from blr.compressor.loading.load import load_model
from blr.compressor.loading.sentences import Sentences
from blr.compressor.modeling.layers import StructuredLinear
from blr.compressor.modeling.modeling_blr import module_name
from blr.compressor.quoting import quote
from blr.compressor.rounding.latent import SCALE_RATE, Latent
from blr.compressor.text.own import working_dtype

SCALES = ":scales"  # behind the name of a parameter: the scales of what is rounded
GENERATES, EMBEDS = "AutoModelForCausalLM", "AutoModel"


@dataclass
class Pair:
    """Both models in evaluation mode on one device and in one dtype to compute in.

    `masters` are what the optimizer moves, by parameter name: the student's own parameters where
    the computation is in float32, else float32 copies of them. `sentences` says how an encoder's hidden
    states become an embedding; None for decoders.
    """

    teacher: Any
    student: Any
    masters: dict[str, Tensor]
    sentences: Sentences | None = None
    twins: dict[str, Twin] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.parameters = dict(self.student.named_parameters())
        self.latents = {n: found for n, found in latents_of(self.twins).items() if n in self.masters}

    @property
    def device(self) -> torch.device:
        return self.student.device

    def trained(self) -> list[tuple[Tensor, nn.Parameter]]:
        """Every master with the parameter it stands for; scales, which stand for none, left out."""
        known = self.parameters
        return [(master, known[name]) for name, master in self.masters.items() if name in known]

    def shares(self) -> list[float]:
        """Of the rate, for each of the masters."""
        return [SCALE_RATE if name.endswith(SCALES) else 1.0 for name in self.masters]

    @torch.no_grad()
    def publish(self) -> None:
        """Round the masters to the student's parameters."""
        pairs = [(p, m) for m, p in self._plain() if p is not m]
        if pairs:
            torch._foreach_copy_([p for p, _ in pairs], [m for _, m in pairs])
        for latent in self.latents.values():
            latent.publish()

    def _plain(self) -> list[tuple[Tensor, nn.Parameter]]:
        """As `trained`, without what is rounded."""
        rounded = {id(latent.parameter) for latent in self.latents.values()}
        return [
            (master, parameter) for master, parameter in self.trained() if id(parameter) not in rounded
        ]

    @torch.no_grad()
    def collect(self) -> None:
        """Add the gradients of a micro-batch to those of the masters, in float32."""
        for latent in self.latents.values():
            latent.collect()
        for master, parameter in self._plain():
            if parameter is master or parameter.grad is None:
                continue
            fresh = parameter.grad.to(master.dtype)
            master.grad = fresh if master.grad is None else master.grad.add_(fresh)
            parameter.grad = None

    def forget_fresh(self) -> None:
        """Drop the gradients that were not collected."""
        for _, parameter in self.trained():
            parameter.grad = None

    def forget(self) -> None:
        """Drop all gradients."""
        self.forget_fresh()
        for master in self.masters.values():
            master.grad = None

    def values(self) -> dict[str, Tensor]:
        """Copies of the masters on the CPU, contiguous, by parameter name."""
        return {n: m.detach().cpu().clone().contiguous() for n, m in self.masters.items()}

    @torch.no_grad()
    def restore(self, values: dict[str, Tensor]) -> None:
        """The inverse of `values`."""
        for name, master in self.masters.items():
            master.copy_(values[name])
        self.publish()


def check_same_vocabulary(student: Checkpoint, teacher: Checkpoint) -> None:
    """Raise InputError unless the two models speak of the same tokens."""
    if not student.compressed:
        raise InputError(
            f"{student.source.folder}: a dense checkpoint, there is nothing to heal; "
            "give an output of blr compress"
        )
    if teacher.compressed:
        raise InputError(
            f"{teacher.source.folder}: compressed by blr; expected the dense checkpoint as the teacher"
        )
    sizes = [checkpoint.source.config.get("vocab_size") for checkpoint in (student, teacher)]
    if sizes[0] != sizes[1]:
        found = f"a vocabulary of {quote(sizes[1])} tokens, not {quote(sizes[0])}"
        _refuse_vocabulary(teacher, f"{found} as the compressed model")
    ids = [token_ids(checkpoint.source.folder) for checkpoint in (student, teacher)]
    if ids[0] is not None and ids[1] is not None and ids[0][1] != ids[1][1]:
        _refuse_vocabulary(teacher, "a tokenizer that gives other ids than the compressed model's")


def _refuse_vocabulary(teacher: Checkpoint, found: str) -> None:
    raise InputError(
        f"{teacher.source.folder}: {found}; expected the dense model it "
        "came from, or one with the same tokenizer"
    )


def task_of(checkpoint: Checkpoint) -> str:
    """The Auto class of a causal language model or of an encoder of text.

    Raises CapabilityError for any other model.
    """
    config = checkpoint.source.config
    name = (config.get("architectures") or [""])[0]
    if name.endswith(("ForCausalLM", "LMHeadModel")):
        return GENERATES
    reads = "vocab_size" in config and not config.get("is_encoder_decoder")
    if name.endswith("Model") and "Encoder" not in name and reads:
        return EMBEDS
    raise CapabilityError(
        f"{checkpoint.source.folder}: {name or 'no architecture'} is neither a causal language model "
        "nor a plain encoder of text (BertModel, …); only those can be healed"
    )


def load_teacher(folder: Path, device: torch.device, task: str = GENERATES) -> Any:
    """The dense model, frozen, in the dtype to compute in."""
    model = load_model(folder, task, dtype=working_dtype(device), device=str(device))
    fuse_norms(model)
    return model.requires_grad_(False)


def load_pair(
    folder: Path,
    teacher: Any,
    kinds: tuple[str, ...],
    sentences: Sentences | None = None,
    additions: tuple[int, int] | None = None,
) -> Pair:
    """The student in `folder`, its factors balanced, ready to be trained beside `teacher`.

    Args:
        kinds: what is trained, of `settings.KINDS`. sentences: of an encoder.
        additions: rank and seed of what is trained in place of factors (`additions.py`).

    Raises UsageError when there is nothing of these kinds.
    """
    task = GENERATES if sentences is None else EMBEDS
    student = load_model(folder, task, dtype="float32", device=str(teacher.device))
    twins = take_twins(student, folder)
    _balance(student, twins)
    added = attach(student, *additions) if additions else set()
    student.requires_grad_(False)
    rounded = latents_of(twins)
    latents = rounded if "factors" in kinds else {}
    named = {n: p for n, p in student.named_parameters() if n not in rounded}
    chosen = {n: p for n, p in named.items() if _is_trained(student, n, kinds, added)}
    if not chosen and not latents:
        raise UsageError(f"--train {','.join(kinds)}: the model has none of these")
    if teacher.dtype == torch.float32:
        masters: dict[str, Tensor] = dict(chosen)
    else:
        masters = {name: p.detach().clone().requires_grad_() for name, p in chosen.items()}
        student.to(teacher.dtype)
    for parameter in [*chosen.values(), *(latent.parameter for latent in latents.values())]:
        parameter.requires_grad_()
    for name, latent in latents.items():
        masters |= {name: latent.latent, name + SCALES: latent.scale}
    _share(student, teacher)
    compose_layers(student)
    add_products(student, added)
    fuse_norms(student)
    pair = Pair(teacher, student, masters, sentences, twins)
    pair.publish()
    return pair


def take_twins(student: Any, folder: Path) -> dict[str, Twin]:
    """Put twins (`fitting/twins.py`) in the place of the layers of `student` that `folder` stores in few
    bits; by their names in the model."""
    entries, found = open_source(folder).entries, dict[str, Twin]()
    for stored in student.config.blr["layers"]:
        name = module_name(student, stored)
        layer = student.get_submodule(name)
        if not layer.described.quantized:
            continue
        tensors = {n: t for n, t in layer.state_dict().items() if n != "bias"}
        for suffix, tensor in tensors.items():  # loaded in float32, stored in their own dtype
            stored_dtype = getattr(torch, TORCH_NAMES[entries[f"{stored}.{suffix}"].dtype])
            tensors[suffix] = tensor.to(stored_dtype)
        found[name] = make_twin(layer.described, tensors, layer.bias)
        parent, _, leaf = name.rpartition(".")
        setattr(student.get_submodule(parent), leaf, found[name].module)
    return found


def latents_of(twins: dict[str, Twin]) -> dict[str, Latent]:
    """What is rounded of `twins`, by the names of the parameters in the model."""
    return {
        f"{name}.{part}": found
        for name, twin in twins.items()
        for part, found in twin.parts.items()
        if isinstance(found, Latent)
    }


def _is_trained(student: Any, name: str, kinds: tuple[str, ...], added: set[str]) -> bool:
    """Whether the parameter `name` is: of the kinds asked for; of layers with additions, only these."""
    if is_addition(name):
        return True
    kind = kind_of(student, name)
    return kind in kinds and not (kind in ("factors", "dense") and name.rpartition(".")[0] in added)


def kind_of(model: Any, name: str) -> str:
    """Which of `settings.KINDS` the parameter called `name` is."""
    owner, _, leaf = name.rpartition(".")
    module = model.get_submodule(owner)
    if isinstance(module, nn.ParameterList):
        return "factors"
    if isinstance(module, StructuredLinear) and leaf != "bias":
        return "factors"
    if "Norm" in type(module).__name__:
        return "norms"
    if leaf == "bias":
        return "biases"
    if isinstance(module, nn.Embedding):
        return "embeddings"
    return "head" if module is model.get_output_embeddings() else "dense"


def structured_layers(model: Any) -> dict[str, StructuredLinear]:
    """By name in the model."""
    return {n: m for n, m in model.named_modules() if isinstance(m, StructuredLinear)}


def factors_of(layer: StructuredLinear) -> dict[str, nn.Parameter]:
    """By the names of its spec."""
    return {name: layer.get_parameter(name) for name in layer.spec.shapes()}


@torch.no_grad()
def _balance(student: Any, twins: dict[str, Twin]) -> None:
    inside = {id(part) for twin in twins.values() for part in twin.module.modules()}
    for layer in structured_layers(student).values():
        if id(layer) in inside:
            continue
        factors = factors_of(layer)
        found = balanced({name: p.double() for name, p in factors.items()}, layer.spec)
        for name, parameter in factors.items():
            parameter.copy_(found[name])


def _share(student: Any, teacher: Any) -> None:
    """Frozen tensors that the teacher has as well are kept once."""
    theirs = dict(teacher.named_parameters())
    for name, parameter in student.named_parameters():
        other = theirs.get(name)
        if other is None or parameter.requires_grad or other.shape != parameter.shape:
            continue
        if torch.equal(parameter, other):
            parameter.data = other.data
