"""Which variant of a structure's kernels runs a shape: measured tables, else rules of thumb.

A table belongs to one GPU and is a list of rules, the most specific first; the first that matches
counts. A rule is a mapping of conditions, all optional, to a choice:

    structure   lowrank, monarch, blast or kronecker; those of float8, token and forward are read by
                earlier versions only
    dtype       a torch dtype's name or a list of them
    inputs, outputs, features (both sizes), blocks, rank, n     [least, most], inclusive
    variant     a key of the structure's VARIANTS, or, of earlier versions, "dense": skipped
    config      its keyword arguments, {} if left out

The number of tokens n counts as the next power of two, from 1 to 16384, so that a ragged n never
needs a rule, a compilation or a measurement of its own. Nothing is ever timed here: `blr tune`
writes tables.
"""

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch

from blr.kernels.common.available import HALF, gpu_key
from blr.kernels.common.names import FOLDERS
from blr.kernels.common.tuned import forget_rules, tuned_rules

BUCKETS = tuple(1 << power for power in range(15))
FEW = 8  # tokens up to which `narrow` is taken unmeasured
MOST = {"gemv": 1, "narrow": 64}  # tokens that a variant takes, where it does not take any number
# Forms of a structure that are products of the vendor's library alone: what ours must beat. The last is
# what a compiler makes of the reference.
PLAIN: dict[str, tuple[str, ...]] = {
    **{"lowrank": ("gemm",), "monarch": ("bmm",), "blast": ("bmm", "plain"), "kronecker": ()}
}
DENSE = "dense"
REFERENCE = "reference"

Rule = Mapping[str, Any]
Choice = tuple[str, dict[str, Any]]


class Shape(NamedTuple):
    """Sizes of a layer that decide between kernels; `rank` is r, the width of a block row."""

    inputs: int
    outputs: int
    blocks: int = 1
    rank: int = 0


def choose(
    structure: str, shape: Shape, n: int, dtype: torch.dtype, device: torch.device | str
) -> Choice:
    """Variant and keyword arguments for n tokens.

    Args:
        structure: a kernel folder or the name of a spec.
        device: where the tensors are, or the name of a GPU as `gpu_key` gives it.
    """
    gpu = device if isinstance(device, str) else gpu_key(device)
    return _choose(FOLDERS.get(structure, structure), shape, bucket(n), dtype, gpu)


def bucket(n: int) -> int:
    """The power of two, at most 16384, that n tokens are looked up under."""
    return min(1 << max(n - 1, 0).bit_length(), BUCKETS[-1])


def first_match(
    rules: Sequence[Rule], structure: str, shape: Shape, n: int, dtype: torch.dtype
) -> Rule | None:
    """The first rule that holds for the bucket `n`, or None."""
    return next((rule for rule in rules if _holds(rule, structure, shape, n, dtype)), None)


def heuristic(structure: str, n: int, dtype: torch.dtype) -> Choice:
    """The choice on a GPU that nobody measured, `n` a bucket.

    Few tokens read the weights once (gemv, narrow). BLAST's mix on the tensor cores and Monarch's
    permuted store pay in half precision; the rest is left to the vendor's matrix products, and each
    Kronecker-sparse factor to a predictor of its own.
    """
    if dtype == torch.float64:
        return REFERENCE, {}
    if structure == "kronecker":
        return "auto", {}
    if n <= MOST["gemv"]:
        return "gemv", {}
    if n <= FEW and dtype in HALF:
        return "narrow", {}
    prefill = {"lowrank": "gemm", "blast": "bmm_mix"}
    return prefill.get(structure, "permuted_store" if dtype in HALF else "bmm"), {}


def forget() -> None:
    """Read the tables again at the next choice."""
    _choose.cache_clear()
    forget_rules()


@cache
def _choose(structure: str, shape: Shape, n: int, dtype: torch.dtype, gpu: str) -> Choice:
    if dtype == torch.float64:
        return REFERENCE, {}
    rules = [rule for rule in tuned_rules(gpu) if rule["variant"] != DENSE]
    rule = first_match(rules, structure, shape, n, dtype)
    if rule is None:
        return heuristic(structure, n, dtype)
    return rule["variant"], dict(rule.get("config") or {})


def _holds(rule: Rule, structure: str, shape: Shape, n: int, dtype: torch.dtype) -> bool:
    dtypes = rule.get("dtype", name := str(dtype).removeprefix("torch."))
    sizes = {
        **{"inputs": (shape.inputs,), "outputs": (shape.outputs,)},
        **{"features": (shape.inputs, shape.outputs)},
        **{"blocks": (shape.blocks,), "rank": (shape.rank,), "n": (n,)},
    }
    return (
        rule.get("structure", structure) == structure
        and name in ([dtypes] if isinstance(dtypes, str) else dtypes)
        and all(_inside(rule.get(key), values) for key, values in sizes.items())
    )


def _inside(bounds: Sequence[int] | None, values: tuple[int, ...]) -> bool:
    return bounds is None or all(bounds[0] <= value <= bounds[1] for value in values)
