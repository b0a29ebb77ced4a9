"""How much each layer's output matters: Fisher information by one backward pass, block by block.

For a decoder the loss is the cross entropy of tokens drawn from the model's own predictions (the
true Fisher information needs no labels); for an encoder it is a random projection of the
mean-pooled embedding, which gives the Gauss-Newton metric of the embedding. Hidden states are
kept between the forward and the backward sweep, so that one block at a time is resident.

For a layer with weight W, input moments H and output gradients G = Σ g gᵀ, the eigenvalues of
G^½ W H Wᵀ G^½ are the predicted loss saved by each further rank. Sources: FWSVD (arXiv 2207.00112)
weights by the diagonal of G; the Kronecker-factored form is that of K-FAC (arXiv 1503.05671).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from blr.compressor.errors import NumericsError
from blr.compressor.fitting.blocks import Batch, BlockModel, captured_inputs, run_block
from blr.compressor.fitting.work import Work
from blr.compressor.progress import Progress
from blr.compressor.structures.linalg import cholesky, eigenvalues


@dataclass
class Sensitivity:
    """By module name on disk: `curves` (falling eigenvalues) and `outputs` (G [o, o], mean diagonal
    1, float32); `blocks` holds G [d, d] of every block's hidden output, likewise."""

    curves: dict[str, Tensor] = field(default_factory=dict)
    outputs: dict[str, Tensor] = field(default_factory=dict)
    blocks: dict[str, Tensor] = field(default_factory=dict)


def measure(work: Work, model: BlockModel, batches: list[Batch], key: str) -> Sensitivity:
    """Sensitivities of every compressible layer, from the journal where it has them.

    Args:
        batches: hidden states entering the first block; left as they are.
        key: digest of everything the result depends on.
    """
    if work.journal.load(key) is not None:
        return _unflatten(work.journal.tensors(key))
    found = _sweep(model, batches, work.recipe.seed, work.progress)
    work.journal.store(key, _flatten(found), {})
    return found


def _sweep(model: BlockModel, batches: list[Batch], seed: int, progress: Progress) -> Sensitivity:
    levels = [[batch.hidden for batch in batches]]
    with progress.layers(2 * len(model), "measuring sensitivity") as advance:
        for index in range(len(model)):
            advance(f"block {index} forward")
            levels.append(_forward(model, index, batches, levels[-1]))
        gradients = _final_gradients(model, batches, levels.pop(), seed)
        found = Sensitivity()
        for index in reversed(range(len(model))):
            advance(f"block {index} backward")
            gradients = _backward(model, index, batches, levels.pop(), gradients, found)
    return found


@torch.no_grad()
def _forward(model: BlockModel, index: int, batches: list[Batch], hidden: list[Tensor]) -> list[Tensor]:
    block = model.load_block(index)
    return [
        run_block(block, state.to(model.device), batch).cpu()
        for state, batch in zip(hidden, batches, strict=True)
    ]


def _final_gradients(
    model: BlockModel, batches: list[Batch], hidden: list[Tensor], seed: int
) -> list[Tensor]:
    """Gradient of the loss with respect to the last block's output, batch by batch."""
    generator = torch.Generator().manual_seed(seed)
    gradients = []
    for state, batch in zip(hidden, batches, strict=True):
        state = state.to(model.device).requires_grad_(True)
        _loss(model.model, state, batch.mask.to(model.device), generator).backward()
        assert state.grad is not None
        gradients.append(state.grad.cpu())
    return gradients


def _loss(model: Any, hidden: Tensor, mask: Tensor, generator: torch.Generator) -> Tensor:
    if not model.can_generate():
        pooled = (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        drawn = torch.randn(pooled.shape, generator=generator).to(pooled)
        return (torch.nn.functional.normalize(pooled, dim=-1) * drawn).sum()
    base = model.base_model
    norm = next(getattr(base, name) for name in ("norm", "ln_f") if hasattr(base, name))
    logits = model.get_output_embeddings()(norm(hidden)).flatten(0, 1)
    chances = logits.detach().softmax(-1).cpu()
    drawn = torch.multinomial(chances, 1, generator=generator)[:, 0].to(logits.device)
    return torch.nn.functional.cross_entropy(logits, drawn, reduction="sum")


def _backward(
    model: BlockModel,
    index: int,
    batches: list[Batch],
    hidden: list[Tensor],
    gradients: list[Tensor],
    found: Sensitivity,
) -> list[Tensor]:
    """Gradients entering block `index`, having added what it says to `found`."""
    block = model.load_block(index)
    names = [name for group in model.family.groups for name in group.modules]
    heads = [group.modules[0] for group in model.family.groups]
    grams: dict[str, Tensor] = {}
    outputs: dict[str, Tensor] = {}
    entering = []
    for state, batch, gradient in zip(hidden, batches, gradients, strict=True):
        state = state.to(model.device).requires_grad_(True)
        _add(outputs, "", gradient[batch.mask].to(model.device))
        with _tapped(block, names) as results, captured_inputs(block, heads) as inputs:
            run_block(block, state, batch).backward(gradient.to(model.device))
        keep = batch.mask.to(model.device)
        for name, result in results.items():
            assert result.grad is not None
            _add(outputs, name, result.grad[keep])
        for name, given in inputs.items():
            _add(grams, name, given.detach()[keep])
        assert state.grad is not None
        entering.append(state.grad.cpu())
    _record(model, index, block, grams, outputs, found)
    return entering


class _tapped:
    """Context: the outputs of the named submodules, which keep their gradients."""

    def __init__(self, block: nn.Module, names: list[str]) -> None:
        self.kept: dict[str, Tensor] = {}
        self.handles = [
            block.get_submodule(name).register_forward_hook(self._keeper(name)) for name in names
        ]

    def _keeper(self, name: str) -> Any:
        def keep(module: nn.Module, inputs: Any, output: Tensor) -> None:
            output.retain_grad()
            self.kept[name] = output

        return keep

    def __enter__(self) -> dict[str, Tensor]:
        return self.kept

    def __exit__(self, *_: object) -> None:
        for handle in self.handles:
            handle.remove()


def _add(sums: dict[str, Tensor], name: str, rows: Tensor) -> None:
    part = (rows.mT @ rows).double()
    sums[name] = sums[name] + part if name in sums else part


def _record(
    model: BlockModel,
    index: int,
    block: nn.Module,
    grams: dict[str, Tensor],
    outputs: dict[str, Tensor],
    found: Sensitivity,
) -> None:
    found.blocks[str(index)] = _unit(outputs.pop(""))
    for group in model.family.groups:
        gram = grams[group.modules[0]]
        for name in group.modules:
            stored = model.stored_module(f"{model.path}.{index}.{name}")
            weight = block.get_parameter(f"{name}.weight").double()
            weight = weight.mT if model.family.transposed else weight
            try:
                found.curves[stored] = curve(weight, gram, outputs[name])
            except NumericsError as error:
                raise NumericsError(f"{stored}: {error}") from error
            found.outputs[stored] = _unit(outputs[name])


def curve(weight: Tensor, gram: Tensor, output: Tensor) -> Tensor:
    """Falling eigenvalues [min(o, i)] of G^½ W H Wᵀ G^½, on the CPU in float32.

    Args:
        weight: W [o, i]; gram: H [i, i]; output: G [o, o]; all float64.
    """
    left, right = cholesky(output), cholesky(gram)
    mixed = left.mT @ weight @ right  # same singular values as G^½ W H^½
    small = mixed @ mixed.mT if mixed.shape[0] <= mixed.shape[1] else mixed.mT @ mixed
    return eigenvalues(small).float().cpu()


def _unit(matrix: Tensor) -> Tensor:
    """Scaled to a mean diagonal of 1, on the CPU in float32."""
    scale = matrix.diagonal().mean().clamp_min(torch.finfo(torch.float64).tiny)
    return (matrix / scale).float().cpu()


def _flatten(found: Sensitivity) -> dict[str, Tensor]:
    kinds = {"curve": found.curves, "output": found.outputs, "block": found.blocks}
    return {
        f"{kind}:{name}": t.contiguous() for kind, table in kinds.items() for name, t in table.items()
    }


def _unflatten(stored: dict[str, Tensor]) -> Sensitivity:
    found = Sensitivity()
    tables = {"curve": found.curves, "output": found.outputs, "block": found.blocks}
    for key, tensor in stored.items():
        kind, _, name = key.partition(":")
        tables[kind][name] = tensor
    return found
