"""What `torch.compile` makes of our operators: a call of one, or the plain products inside it.

Inductor fuses what surrounds a product of the library, and plans its memory; an operator of ours is a
call between, of the one without gradients: those are Python, some 6 µs a call on a fast host. Where
tables choose the plain form for a number of tokens known when compiling, the graph gets that form. The
environment variable BLR_COMPILED says otherwise: `plain` always, `operator` never (default `auto`).
Torch keeps compiled graphs on the disk by what was traced, which is the same for all forms: another
than the default marks those of the process, as it is when inductor is imported.
"""

import os
from collections.abc import Callable

import torch
from torch import Tensor

from blr.kernels.common.available import kernel_device
from blr.kernels.common.mode import setting
from blr.kernels.common.registration import Operator
from blr.kernels.common.tables import PLAIN, REFERENCE, Shape, choose

VARIABLE = "BLR_COMPILED"
FORMS = ("auto", "plain", "operator")
# Numbers read and written, tokens x (inputs + outputs), up to which calls of an operator from a compiled
# graph take longer than the plain form, whose calls of the library cost a third (8B shapes on an H200;
# BLAST's plain form is the slower on the GPU). CUDA graphs call nothing.
HOST_BOUND = {"monarch": 20_000_000, "blast": 10_000_000}
FEW = 64  # tokens up to which an operator is one or two launches, as decoding asks for it
_LOWERED: list[tuple[Operator[Tensor], Callable[..., object]]] = []


def inlined(operator: Operator[Tensor], structure: str, shape: Callable[..., Shape]) -> Operator[Tensor]:
    """`operator`, which compilations may look into; `shape` gives its sizes by its factors."""

    def decompose(x: Tensor, *rest: object) -> object:
        factors = [t for t in rest[:-1] if isinstance(t, Tensor)]
        plain = is_plain(structure, shape(*factors), x)
        return (operator.plain if plain else operator.bare)(x, *rest)

    _LOWERED.append((operator, decompose))
    return operator


def called(operator: Operator[Tensor]) -> Operator[Tensor]:
    """`operator`, which compilations call."""
    _LOWERED.append((operator, operator.bare))
    return operator


def add_decompositions() -> None:
    """Tell inductor, which has just been imported, what to make of every operator given to the above."""
    from torch._inductor import decomposition, lowering

    layout = lowering.tag_to_layout_constraint(torch.Tag.needs_fixed_stride_order)
    for operator, made in _LOWERED:
        lowering.make_fallback(operator.bare, layout, warn=False)
        decomposition.decompositions[operator.op] = made
    decomposition.fast_random_decomps.cache_clear()
    _mark_caches(os.environ.get(VARIABLE, ""))


def _mark_caches(form: str) -> None:
    """Once, however many copies of this package there are."""
    mark, config = f"{VARIABLE}={form}", torch.compiler.config
    if form and mark not in config.cache_key_tag:
        config.cache_key_tag += mark


def compiled_form() -> str:
    """The value of BLR_COMPILED. Raises RuntimeError for one that is not in `FORMS`."""
    return setting(VARIABLE, FORMS)


def is_plain(structure: str, shape: Shape, x: Tensor) -> bool:
    """Whether a graph for x [n, i] gets the plain form."""
    form = compiled_form()
    if form != "auto":
        return form == "plain"
    if not isinstance(x.shape[0], int) or not kernel_device(x):
        return False  # any number of tokens; or no kernels, and a form of its own on a CPU
    from torch._inductor import config

    n = x.shape[0]
    few = n * (shape.inputs + shape.outputs) <= HOST_BOUND.get(structure, 0)
    if n > FEW and few and not config.triton.cudagraphs:
        return True  # the host's calls, and not the GPU, are what n tokens take
    chosen, _ = choose(structure, shape, n, x.dtype, x.device)
    return chosen in (*PLAIN[structure][-1:], REFERENCE)
