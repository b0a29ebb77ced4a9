"""Finds experts in a checkpoint: transformers stacks their weights, and each of them is a layer.

The expert n of a block is called ``model.layers.0.mlp.experts.gate_proj.n``, whether a checkpoint keeps
experts one by one (``experts.n.gate_proj.weight``) or in a stack.
"""

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace

from blr.compressor.base.errors import UsageError
from blr.compressor.checkpoint.header import TensorEntry
from blr.compressor.checkpoint.source import Source

# The stack of transformers that a layer is a part of, by what checkpoints call the layer
STACKS = {"gate_proj": "gate_up_proj", "up_proj": "gate_up_proj", "down_proj": "down_proj"}
STACKS |= {"w1": "gate_up_proj", "w3": "gate_up_proj", "w2": "down_proj"}
PAIRED = {"expert_up_proj", "expert_w3"}  # types that read what another layer of the expert reads
AT_ONCE = 16  # experts that a GPU fits by the same launches
TRANSPOSED = {"gpt_oss"}  # model types whose stacks are [E, i, o]
_ONE = re.compile(r"(.+\.experts)\.(\d+)\.(\w+)\.weight")
EXPERT = re.compile(r"(.+\.experts)\.(\w+)\.(\d+)")  # what its layers are called here
_STACKED = re.compile(r"(.+\.experts)\.(gate_up_proj|down_proj)")
_LINEAR = re.compile(r"(.+)\.(input_linear|output_linear)\.weight")  # of Granite
_FIRSTS = ("w1.0", "gate_proj.0", "0.w1.weight", "0.gate_proj.weight")  # not of stacks
_OF_LINEAR = {"input_linear": "gate_up_proj", "output_linear": "down_proj"}


@dataclass(frozen=True)
class Expert:
    """A layer of one expert: the `entry` of its weight is a part of a stored stack, or a tensor."""

    module: str
    type: str
    entry: TensorEntry
    stack: str


def experts_in(entry: TensorEntry) -> list[Expert]:
    """The layers of experts whose weights a stored tensor holds; none if it holds something else."""
    if match := _ONE.fullmatch(entry.name):
        home, number, part = match.groups()
        known = part in STACKS and len(entry.shape) == 2
        return [_expert(home, part, int(number), entry, STACKS[part])] if known else []
    if len(entry.shape) != 3:
        return []
    if match := _STACKED.fullmatch(entry.name):
        return _parts(match[1], match[2], entry)
    match = _LINEAR.fullmatch(entry.name)
    return _parts(f"{match[1]}.experts", _OF_LINEAR[match[2]], entry) if match else []


def _parts(home: str, stack: str, entry: TensorEntry) -> list[Expert]:
    count, *shape = entry.shape
    size = entry.nbytes // max(count, 1)
    starts = [entry.start + n * size for n in range(count)]
    parts = (replace(entry, shape=tuple(shape), start=start, end=start + size) for start in starts)
    return [_expert(home, stack, number, part, stack) for number, part in enumerate(parts)]


def _expert(home: str, part: str, number: int, entry: TensorEntry, stack: str) -> Expert:
    return Expert(f"{home}.{part}.{number}", f"expert_{part}", entry, stack)


def native_weights(source: Source, modules: Collection[str]) -> dict[str, list[str]]:
    """By the name that transformers' checkpoints give a weight the layers whose weights it holds: one,
    or all experts of a stack."""
    found: dict[str, list[str]] = {}
    known = {*modules, *source.entries}
    for module in modules:
        name = f"{module}.weight"
        if match := EXPERT.fullmatch(module):
            home, part, number = match.groups()
            firsts = {f"{home}.{first}" for first in _FIRSTS}
            name = f"{home}.{number}.{part}.weight" if known & firsts else f"{home}.{part}"
        found.setdefault(name, []).append(module)
    return found


def check_whole(experts: Iterable[tuple[str, str]], chosen: Collection[str]) -> None:
    """Raise UsageError if of the layers in one stack some are `chosen` and some are not."""
    stacks: dict[str, list[str]] = {}
    for module, stack in experts:
        stacks.setdefault(f"{module.rsplit('.', 2)[0]}.{stack}", []).append(module)
    for stack, modules in stacks.items():
        left = [module for module in modules if module not in chosen]
        if 0 < len(left) < len(modules):
            raise UsageError(
                f"{stack}: {len(left)} of {len(modules)} layers stay dense, from {left[0]} on, and the "
                "others do not; expected all experts of a stack or none: --exclude '*.experts.*', or "
                "give them another method"
            )
