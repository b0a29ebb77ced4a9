"""Which parameters of a compressed model a healing trains."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch import nn

from blr.compressor.base.errors import UsageError
from blr.compressor.checkpoint.source import open_source
from blr.compressor.exporting.origin import Checkpoint
from blr.compressor.healing.additions import is_addition
from blr.compressor.healing.settings import KINDS
from blr.compressor.loading.native import native_errors
from blr.compressor.loading.quiet_libraries import quiet_transformers
from blr.compressor.loading.streamed import empty_model
from blr.compressor.modeling.layers import StructuredLinear


def check_has_kinds(checkpoint: Checkpoint, kinds: tuple[str, ...]) -> None:
    """Raise UsageError, from headers, when nothing of `checkpoint` is of the `kinds` to be trained."""
    if "factors" in kinds and checkpoint.specs:
        return
    source = open_source(checkpoint.source.folder)
    with native_errors(source), quiet_transformers():
        model = empty_model(source)
    _check_any(model, kinds, checkpoint.specs)


def choose(
    student: Any,
    kinds: tuple[str, ...],
    packed: Collection[str],
    added: set[str],
    held: Collection[str],
) -> list[str]:
    """Names of the parameters that are trained, which want gradients from here on.

    Args:
        kinds: of `settings.KINDS`. packed: names of the factors of layers in few bits.
        added: names of layers with additions. held: names of what the checkpoint can store.

    Raises UsageError when there is nothing of these kinds.
    """
    named = dict(student.named_parameters())
    plain = [n for n in named if n not in packed and _is_trained(student, n, kinds, added)]
    placed = [name for name in plain if name in held or is_addition(name)]
    found = [*placed, *(packed if "factors" in kinds else ())]
    if not found and not plain:
        _check_any(student, kinds, packed)
    if not found:
        raise UsageError(
            f"--train {','.join(kinds)}: the checkpoint stores {plain[0]} otherwise than the model "
            f"computes with it; leave that kind out"
        )
    for name in found:
        named[name].requires_grad_()
    return found


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


def _check_any(model: Any, kinds: tuple[str, ...], factored: Collection[str]) -> None:
    """Raise UsageError when nothing of `model` is of the `kinds`; `factored` names what has factors."""
    present = {kind_of(model, name) for name, _ in model.named_parameters()}
    present |= {"factors"} if factored else set()
    if not present & {*kinds}:
        raise UsageError(
            f"--train {','.join(kinds)}: the model has none of these; expected some of "
            f"{', '.join(kind for kind in KINDS if kind in present)}"
        )


def _is_trained(student: Any, name: str, kinds: tuple[str, ...], added: set[str]) -> bool:
    """Whether the parameter `name` is: of the kinds asked for; of layers with additions, only these."""
    if is_addition(name):
        return True
    kind = kind_of(student, name)
    return kind in kinds and not (kind in ("factors", "dense") and name.rpartition(".")[0] in added)
