"""Measures how much each layer's output matters: Fisher information by a backward pass through blocks.

For a layer with weight W, input moments H and output gradients G = Σ g gᵀ, the eigenvalues of G^½ W H
Wᵀ G^½ predict the loss that each further rank saves. FWSVD (arXiv 2207.00112) weights by the diagonal
of G; the Kronecker-factored form is that of K-FAC (arXiv 1503.05671).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from blr.compressor.base.device import tensor_cores
from blr.compressor.base.errors import NumericsError
from blr.compressor.base.process_environment import share_out
from blr.compressor.base.processes import sum_in_order
from blr.compressor.base.progress import MEASURING
from blr.compressor.fitting.block_passes import Batch, captured_inputs, home, run_block, watched
from blr.compressor.fitting.blocks import BlockModel
from blr.compressor.fitting.experts import AT_ONCE, watched_experts
from blr.compressor.fitting.factorize import Work, layer_seed
from blr.compressor.recipe.architectures import Group
from blr.compressor.structures.linalg import cholesky, eigenvalues
from blr.compressor.workspace.journal import layer_key

BACKWARD = 4.4  # time of a block's backward pass with its sums, relative to its forward pass
Sums = dict[tuple[str, str], Tensor]  # by layer or list of experts' layers, "in" or "out"
FLOOR = 0.05  # share of the layer's mean that an expert's sensitivities get
HIDDEN = "hidden"  # stands for a block's own output among the names of its layers


@dataclass
class Sensitivity:
    """Sensitivities measured over `tokens`. `curves` are falling eigenvalues by module. `read` takes a
    block's number and reads from disk, in the first process, the Fisher information of its outputs by
    module name or `HIDDEN`: G [o, o] with a mean diagonal of 1, or its diagonal."""

    read: Callable[[int], dict[str, Tensor]]
    curves: dict[str, Tensor]
    tokens: int


def measure(
    work: Work, model: BlockModel, batches: list[Batch], key: str,
    whole: Callable[[str], bool] = lambda module: True,
) -> Sensitivity:  # fmt: skip
    """Measure every compressible layer, or take it from the journal under `key`, which covers whatever
    it depends on. `whole` tells whether all of a module's G is kept; of others the diagonal is."""
    keys = [layer_key(key=key, block=index) for index in range(len(model))]
    if work.missing([key, *keys]):
        curves = SensitivitySweep(work, model, batches, keys, whole).run()
        if work.processes.first:
            work.journal.store(key, {name: t.contiguous() for name, t in curves.items()}, {})
    known = work.processes.told(work.processes.first and work.journal.tensors(key))
    tokens = sum(batch.tokens for batch in batches)
    return Sensitivity(lambda index: work.journal.tensors(keys[index]), known, tokens)


class Task(NamedTuple):
    """Layers whose curves are computed together: one, or some experts' with a first axis for them in
    `input` and `output`, their sums of inputs and output gradients. read: which inputs these are."""

    names: tuple[str, ...]
    read: object
    input: Tensor
    output: Tensor


class SensitivitySweep:
    """A forward and a backward sweep through the blocks, of which only one at a time is in memory.
    States and gradients are by number of batch; what is found of block n is stored under `keys[n]`."""

    def __init__(
        self, work: Work, model: BlockModel, batches: list[Batch], keys: list[str],
        whole: Callable[[str], bool],
    ) -> None:  # fmt: skip
        self.work, self.model, self.batches = work, model, batches
        self.keys, self.whole = keys, whole
        self.processes = work.processes
        self.mine = {n: batch for n, batch in enumerate(batches) if self.processes.owns(n)}
        size = sum(batch.hidden.nbytes for batch in self.mine.values())
        self.home = home((len(model) + 1) * size, model.device)  # of states and gradients
        self.curves: dict[str, Tensor] = {}

    def run(self) -> dict[str, Tensor]:
        """Run both sweeps; the curves of all layers, in every process."""
        model = self.model
        levels = [{n: batch.hidden.to(self.home) for n, batch in self.mine.items()}]
        costs = {f"block {n} forward": 1.0 for n in range(len(model))}
        costs |= {f"block {n} backward": BACKWARD for n in range(len(model))}
        told = self.work.progress.layers(len(costs), MEASURING, costs)
        with told as advance, tensor_cores(model.device):
            for index in range(len(model)):
                advance(f"block {index} forward")
                levels.append(self._forward(index, levels[-1]))
            gradients = self._final_gradients(levels.pop())
            for index in reversed(range(len(model))):
                advance(f"block {index} backward")
                gradients = self._backward(index, levels.pop(), gradients)
        return self.curves

    @torch.no_grad()
    def _forward(self, index: int, hidden: dict[int, Tensor]) -> dict[int, Tensor]:
        block = self.model.load_block(index)
        return {
            n: run_block(block, state.to(self.model.device), self.mine[n]).to(self.home)
            for n, state in hidden.items()
        }

    def _final_gradients(self, hidden: dict[int, Tensor]) -> dict[int, Tensor]:
        gradients = {}
        for n, state in hidden.items():
            generator = torch.Generator().manual_seed(layer_seed(self.work.recipe.seed, f"loss:{n}"))
            state = state.to(self.model.device).detach().requires_grad_(True)
            _loss(self.model, state, self.mine[n], generator).backward()
            assert state.grad is not None
            gradients[n] = state.grad.to(self.home)
        return gradients

    def _backward(
        self, index: int, hidden: dict[int, Tensor], gradients: dict[int, Tensor]
    ) -> dict[int, Tensor]:
        """Gradients with respect to the input of block `index`; what it measures is recorded."""
        block = self.model.load_block(index)
        groups = self.model.groups(block)
        shared = [group for group in groups if not group.experts]
        layers = [name for group in shared for name in group.modules]
        heads = [group.modules[0] for group in shared]
        lists = [group.lists for group in groups if group.experts]
        kinds = [(HIDDEN, "out"), *((n, "out") for n in layers), *((n, "in") for n in heads)]
        apart = [*((n, "out") for names in lists for n in names), *((names[0], "in") for names in lists)]
        entering = {}

        def parts(n: int) -> Sums:
            state = hidden[n].to(self.model.device).detach()
            given = gradients[n].to(state.device)
            found, gradient = _products(block, layers, heads, state, self.mine[n], given)
            entering[n] = gradient.to(self.home)
            return found

        sums = sum_in_order(self.processes, len(self.batches), parts, kinds + apart, torch.float64)
        sums |= {key: sums[key] + FLOOR / len(sums[key]) * sums[key].sum(0) for key in apart}
        self._record(index, block, sums)
        return entering

    def _record(self, index: int, block: nn.Module, sums: Sums) -> None:
        model, path = self.model, f"{self.model.path}.{index}"
        tasks = [task for group in model.groups(block) for task in _tasks(group, sums)]
        sizes = [sum(block.get_parameter(f"{n}.weight").numel() for n in task.names) for task in tasks]
        owners = share_out(sizes, self.processes.count)
        mine: dict[str, Tensor] = {}
        kept = {HIDDEN: _unit(sums[HIDDEN, "out"])} if self.processes.first else {}
        roots: dict[object, Tensor] = {}  # of the last input alone, which layers beside each other share
        for task, owner in zip(tasks, owners, strict=True):
            stored = [model.stored_module(f"{path}.{name}") for name in task.names]
            if self.processes.first:
                for name, output in zip(stored, _each(task.output), strict=True):
                    kept[name] = _unit(output if self.whole(name) else output.diagonal())
            if owner == self.processes.rank:
                try:
                    roots = roots if task.read in roots else {task.read: cholesky(task.input)}
                    found = curve(self._weight(block, task), roots[task.read], task.output)
                except NumericsError as error:
                    raise NumericsError(f"{stored[0]}: {error}") from error
                mine |= zip(stored, _each(found, 1), strict=True)
        if kept:
            self.work.journal.store(self.keys[index], kept, {})
        self.curves |= self.processes.merged(mine)

    def _weight(self, block: nn.Module, task: Task) -> Tensor:
        found = [block.get_parameter(f"{name}.weight").double() for name in task.names]
        weight = torch.stack(found) if task.output.dim() > 2 else found[0]
        return weight.mT if self.model.family.transposed else weight


def _tasks(group: Group, sums: Sums) -> Iterator[Task]:
    """The tasks of a group."""
    if not group.experts:
        head = group.modules[0]
        for name in group.modules:
            yield Task((name,), head, sums[head, "in"], sums[name, "out"])
    names = group.lists
    for start in range(0, len(group.experts), AT_ONCE):
        some = slice(start, start + AT_ONCE)
        for name, members in zip(names, zip(*group.experts[some], strict=True), strict=True):
            read = names[0], start
            yield Task(members, read, sums[names[0], "in"][some], sums[name, "out"][some])


def _each(found: Tensor, dimensions: int = 2) -> Sequence[Tensor]:
    """What layers have each, of `dimensions`."""
    return found.unbind() if found.dim() > dimensions else [found]


def _products(
    block: nn.Module, names: list[str], heads: list[str], state: Tensor, batch: Batch, gradient: Tensor
) -> tuple[Sums, Tensor]:
    """What a batch adds to each of a block's sums, and the gradient of the block's input."""
    results, modules = dict[str, Tensor](), {name: block.get_submodule(name) for name in names}

    def tap(name: str, output: Tensor) -> None:
        output.retain_grad()
        results[name] = output

    state.requires_grad_(True)
    taps = watched(modules, leave=tap), captured_inputs(block, heads), watched_experts(block)
    with taps[0], taps[1] as inputs, taps[2] as passed:
        out = run_block(block, state, batch)
    for (_, side), (_, passing) in passed.items():
        if side == "out":
            passing.retain_grad()
    out.backward(gradient)
    rows = {(name, "in"): given.detach() for name, given in inputs.items()}
    rows[HIDDEN, "out"] = gradient
    rows |= {(name, "out"): _gradient(result) for name, result in results.items()}
    kept = {key: batch.rows(values) for key, values in rows.items()}
    found = {key: values.mT @ values for key, values in kept.items()}
    for key, (seats, values) in passed.items():
        values = _gradient(values) if key[1] == "out" else values.detach()
        found[key] = seats.gram(values, values)
    return found, _gradient(state)


def _gradient(tensor: Tensor) -> Tensor:
    assert tensor.grad is not None
    return tensor.grad


def _loss(model: BlockModel, hidden: Tensor, batch: Batch, generator: torch.Generator) -> Tensor:
    """Of a decoder the cross entropy of tokens drawn from its own predictions: the true Fisher
    information needs no labels. Of an encoder a random projection of the mean-pooled embedding, which
    gives the embedding's Gauss-Newton metric."""
    if not model.model.can_generate():
        mask = batch.mask.to(hidden.device)
        pooled = (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        drawn = torch.randn(pooled.shape, generator=generator).to(pooled)
        return (torch.nn.functional.normalize(pooled, dim=-1) * drawn).sum()
    logits = model.logits(hidden[:, batch.idle :]).flatten(0, 1)
    drawn = draw_tokens(logits.detach(), generator)
    return torch.nn.functional.cross_entropy(logits, drawn, reduction="sum")


def draw_tokens(logits: Tensor, generator: torch.Generator) -> Tensor:
    """Draw a token [n] for each row of `logits` [n, v]. Uniform numbers come from a generator of the
    CPU, so that the draws are the same on any machine."""
    below = logits.softmax(-1).cumsum(-1)
    chance = torch.rand(len(logits), 1, generator=generator).to(below) * below[:, -1:]
    return torch.searchsorted(below, chance, right=True)[:, 0].clamp_max(logits.shape[-1] - 1)


def curve(weight: Tensor, root: Tensor, output: Tensor) -> Tensor:
    """Falling eigenvalues of G^½ W H Wᵀ G^½ for W [..., o, i], a Cholesky factor of H [..., i, i] and G
    [..., o, o] in float64; on the CPU."""
    mixed = cholesky(output).mT @ weight @ root  # same singular values as G^½ W H^½
    small = mixed @ mixed.mT if mixed.shape[-2] <= mixed.shape[-1] else mixed.mT @ mixed
    return eigenvalues(small).float().cpu()


def _unit(information: Tensor) -> Tensor:
    """G or its diagonal, scaled to a mean diagonal of 1, on the CPU in float32."""
    own = information.diagonal() if information.dim() == 2 else information
    scale = own.mean().clamp_min(torch.finfo(torch.float64).tiny)
    return (information / scale).float().cpu().contiguous()
