"""Models whose linear layers are structured: all the code that a checkpoint made by ``blr`` carries.

A structured layer stores a weight W [o, i] as a product of smaller tensors, or in few bits a number, or
both. This file builds the native model of transformers that ``config.json`` names, puts a
`FormulaLinear` in the place of every layer in the table ``config.json["blr"]["layers"]``, and lets
transformers load the weights::

    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)

``blr compress``, ``blr heal`` and ``blr export`` copy the file unchanged into every folder: compare it
with ``blr/compressor/modeling/modeling_blr.py`` in the version of the package blr-compress that the
model card names. There ``blr.compressor.register()`` has classes with kernels taken instead.

Before you trust a copy, check that it

* imports torch, transformers and the standard library only;
* opens no connection, reads no file but itself, and writes itself where a model is saved, no more;
* changes nothing of others but tables by which transformers finds classes, and
  ``PreTrainedModel.from_pretrained``, which then refuses to fill dense layers with random numbers.

Notation: `i` inputs, `o` outputs, `r` rank, `b` blocks, p = i/b, q = o/b.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial, wraps
from importlib import import_module
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

try:
    import transformers
    from transformers import conversion_mapping
    from transformers.core_model_loading import WeightRenaming, rename_source_key
    from transformers.modeling_utils import PreTrainedModel
except ImportError:  # a model of diffusers, whose code is beside this file, does without
    transformers = None  # type: ignore[assignment]

Shape = tuple[int, ...]
Axes = tuple[Shape, ...]
Entry = dict[str, Any]  # what the table of layers says of one layer
Mixin: Any = object  # the base of classes that are put before classes of transformers or diffusers
PREFIX = "Blr"  # of the names of our classes
FORMAT, LAYOUT = 1, 2  # versions of config.json["blr"], and of how an export stores tensors
HOME = "modeling_blr"  # the name of this file, which `auto_map` in config.json gives
PACKAGE = "pip install blr-compress"


# 1. Numbers in few bits -------------------------------------------------------------------------------
# A row of K numbers is padded to whole groups; each group has one scale. A level, an integer from
# −2^(bits−1) on, stands for ``scale · x (1 + CURVE x²)`` with x = level + SHIFT, or ``scale · level`` of
# 3 bits not curved. A group is W = group · bits / 32 little-endian words of 32 bits: field f of word j
# holds element f·W + j, as level + 2^(bits−1) below 8 bits. Three bits are two planes: the low two bits
# of every level, then the high one. Numbers in float8 have a scale a group, or a row where that is 0.

GROUP, KEPT_GROUP = 128, 32  # numbers that share a scale; the same of BLAST's couplings
PLANES = {8: (8,), 4: (4,), 3: (2, 1), 2: (2,)}  # bits of a level by plane, the lowest first
SHIFT = {8: 0.0, 4: 0.0, 3: 0.5, 2: 0.5}
CURVE = {3: 0.02}
E4M3 = torch.float8_e4m3fn


def dequantize(factor: Any, packed: Tensor, scale: Tensor) -> Tensor:
    """Numbers [..., R, K] of packed rows and scales [..., R, groups], in the dtype of the scales."""
    bits, group, K = factor.bits, factor.group, factor.stored_shape[-1]
    work = torch.float64 if scale.dtype == torch.float64 else torch.float32
    grid = 4 if bits == 3 and not factor.curved else bits  # uniform levels are those of 4 bits
    x = unpack(packed, bits, group).unflatten(-1, (-1, group)).to(work) + SHIFT[grid]
    points = x * (1 + CURVE[grid] * x.square()) if grid in CURVE else x
    return (points * scale.to(work).unsqueeze(-1)).flatten(-2)[..., :K].to(scale.dtype)


def unpack(packed: Tensor, bits: int, group: int) -> Tensor:
    """Levels int8 [..., R, K'] of packed rows, padding included."""
    grouped = packed.unflatten(-1, (-1, group * bits // 8))
    if bits == 8:
        return _fields(grouped, 8).flatten(-2)
    low, *high = grouped.split([group * width // 8 for width in PLANES[bits]], -1)
    codes = _fields(low, PLANES[bits][0])
    for plane, width in zip(high, PLANES[bits][1:], strict=True):
        codes = codes | _fields(plane, width) << PLANES[bits][0]
    return (codes.to(torch.int8) - 2 ** (bits - 1)).flatten(-2)


def _fields(plane: Tensor, width: int) -> Tensor:
    """The fields of `width` bits [..., G] that bytes [..., G·width/8] hold."""
    byte = plane.unflatten(-1, (-1, 4)).transpose(-1, -2)  # [..., byte, word]
    if width == 8:
        return byte.flatten(-2)
    fields = [byte >> place * width & 2**width - 1 for place in range(8 // width)]
    return torch.stack(fields, -2).flatten(-3)


def dequantize_float8(factor: Any, numbers: Tensor, scale: Tensor) -> Tensor:
    """Numbers [..., K] of float8 and scales [..., groups], in the dtype of the scales."""
    work = torch.float64 if scale.dtype == torch.float64 else torch.float32
    wide, group = scale.to(work), factor.group
    wide = wide.repeat_interleave(group, -1)[..., : numbers.shape[-1]] if group else wide
    return (numbers.to(work) * wide).to(scale.dtype)


# 2. Factors -------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Storage:
    """One way to store a matrix of numbers. suffixes: what the name of each of its tensors ends with.
    trained: whether they are parameters, else buffers. empty: the tensors of a factor, to be loaded.
    read: the matrix that they stand for."""

    suffixes: tuple[str, ...] = ("",)
    trained: bool = False
    empty: Callable[[Factor], tuple[Tensor, ...]] = lambda factor: (torch.zeros(factor.stored_shape),)
    read: Callable[..., Tensor] = lambda factor, stored: stored


def _empty_packed(factor: Factor) -> tuple[Tensor, ...]:
    *rows, K = factor.stored_shape
    groups = -(-K // factor.group) if factor.group else 1
    width = groups * factor.group * factor.bits // 8
    kind = torch.int8 if factor.bits == 8 else torch.uint8
    if factor.storage == "float8":
        width, kind = K, E4M3
    return torch.zeros(*rows, width, dtype=kind), torch.zeros(*rows, groups)


STORAGES = {
    "float": Storage(trained=True),
    "kernel": Storage(("_kernel",), trained=True),
    "integer": Storage(("_q", "_scale"), False, _empty_packed, dequantize),
    "float8": Storage(("_q", "_scale"), False, _empty_packed, dequantize_float8),
}


@dataclass(frozen=True)
class Factor:
    """One factor of a structure: how it is stored, and the dense tensor that this stands for. name:
    ``U`` or ``factors.0``. shape: of the dense tensor. storage: one of `STORAGES`. axes: the axes of
    `shape` that each axis of what is stored runs over; () if they are the same. bits, group, curved: of
    packed numbers. tile: rows that share a group, and the width that each is padded to, or None."""

    name: str
    shape: Shape
    storage: str = "float"
    axes: Axes = ()
    bits: int = 0
    group: int = GROUP
    tile: tuple[int, int] | None = None
    curved: bool = True

    @property
    def names(self) -> tuple[str, ...]:
        """What files call its tensors: ``U_q`` and ``U_scale``, ``factors_kernel.0``."""
        stem, dot, number = self.name.partition(".")
        return tuple(f"{stem}{end}{dot}{number}" for end in STORAGES[self.storage].suffixes)

    @property
    def matrix_shape(self) -> Shape:
        """The shape of the matrix that is stored: `shape` with its axes in stored order."""
        joined = self.axes or tuple((axis,) for axis in range(len(self.shape)))
        return tuple(prod([self.shape[axis] for axis in each]) for each in joined)

    @property
    def stored_shape(self) -> Shape:
        """The shape of what is stored: `matrix_shape`, or its tiles where rows share a group."""
        if self.tile is None:
            return self.matrix_shape
        *outer, R, _ = self.matrix_shape
        return (*outer, -(-R // self.tile[0]), self.tile[0] * self.tile[1])

    @property
    def unit(self) -> float:
        """The standard deviation that keeps the size of activations: 1 / √(numbers that are summed)."""
        summed = (1, *self.shape)[{"U": -1, "weight": -1, "S": -3}.get(self.name, -2)]
        return max(summed, 1) ** -0.5

    def dense(self, *stored: Tensor) -> Tensor:
        """The dense tensor that the stored tensors stand for; for float factors a view."""
        return self.arranged(STORAGES[self.storage].read(self, *stored))

    def arranged(self, matrix: Tensor) -> Tensor:
        """The dense tensor whose stored matrix is `matrix`: axes back in order, tiles taken apart."""
        if not self.axes:
            return matrix
        if self.tile:
            R, K = self.matrix_shape[-2:]
            matrix = matrix.unflatten(-1, self.tile).flatten(-3, -2)[..., :R, :K]
        order = sum(self.axes, ())
        matrix = matrix.reshape([self.shape[axis] for axis in order])
        return matrix.permute([order.index(axis) for axis in range(len(order))])


def stored_axes(name: str, dims: int, packed: bool, side: str) -> Axes:
    """The order of a factor's axes for kernels: those that are summed over last, as one if packed."""
    stem, axes = name.partition(".")[0], tuple((axis,) for axis in range(dims))
    if packed and (name, side) == ("U", "in"):
        return (1,), (0, 2)
    if stem == "factors":
        return ((0,), (3,), (1, 2)) if packed else ((0,), (3,), (1,), (2,))
    if stem == "S":
        return axes if packed else ((2,), (0,), (1,))
    return (*axes[:-2], axes[-1], axes[-2]) if stem == "V" else axes


def factors_of(entry: Entry, exported: bool = False) -> list[Factor]:
    """The factors that a layer stores. Raises ValueError for an entry of another version."""
    structure, bits = STRUCTURES.get(entry.get("structure", "")), entry.get("bits", 0)
    if structure is None or bits not in (0, *PLANES):
        found = f"structure {entry.get('structure')!r} in {bits!r} bits"
        expected = f"{', '.join(STRUCTURES)}, in {', '.join(map(str, PLANES))} bits"
        raise ValueError(f"config.blr.layers has {found}; expected {expected}; {PACKAGE} --upgrade")
    shapes = structure.shapes(sizes(entry))
    return [_factor(entry, name, shape, exported) for name, shape in shapes.items()]


def _factor(entry: Entry, name: str, shape: Shape, exported: bool) -> Factor:
    bits, group = entry.get("bits"), entry.get("group", GROUP)
    exported, side = exported and not bits, entry.get("side", "out")
    if name == "S":
        bits, group = bits and entry.get("kept_bits"), KEPT_GROUP
    if not (bits or exported):
        return Factor(name, shape, entry.get("storage", "float"))
    axes = stored_axes(name, len(shape), bool(bits), side)
    if not bits:
        return Factor(name, shape, "kernel", axes)
    made = Factor(name, shape, "float8" if entry.get("fp8") else "integer", axes, bits, group)
    width = 1 << (made.matrix_shape[-1] - 1).bit_length()
    tiled = entry.get("tiled") and name == "U" and group >= 2 * made.matrix_shape[-1]
    tile = (group // width, width) if tiled else None
    return replace(made, tile=tile, curved=entry.get("curved", True))


# 3. Structures ----------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Formula:
    """One way to write a weight as a product. shapes: the factors by name, of the `sizes` of an entry.
    product: ``x Wᵀ + bias`` of an entry, x [..., i], the bias [o] or None, and the factors in order."""

    shapes: Callable[[SimpleNamespace], dict[str, Shape]]
    product: Callable[..., Tensor]


def sizes(entry: Entry) -> SimpleNamespace:
    """The sizes that shapes depend on: `i`, `o`, `r`, `b`, `g` groups of a `side`, and `patterns`."""
    b, g, side = entry.get("blocks", 1), entry.get("groups", 1), entry.get("side", "out")
    r, patterns = entry.get("rank", b * entry.get("block_rank", 0)), entry.get("patterns", ())
    i, o = entry["in_features"], entry["out_features"]
    return SimpleNamespace(i=i, o=o, r=r, b=b, g=g, side=side, patterns=patterns)


def low_rank(entry: Entry, x: Tensor, bias: Tensor | None, U: Tensor, V: Tensor) -> Tensor:
    """``W = U Vᵀ``: U [o, r], V [i, r]; or in g groups of outputs or of inputs, each with its own."""
    if U.dim() == 2:
        return linear(x @ V, U, bias)
    groups, _, rank = U.shape
    if entry.get("side", "out") == "out":
        inner = linear(x, V.transpose(1, 2).flatten(0, 1)).unflatten(-1, (groups, rank))
        y = torch.einsum("...gr,gqr->...gq", inner, U).flatten(-2)
        return y if bias is None else y + bias
    inner = torch.einsum("...gp,gpr->...gr", x.unflatten(-1, (groups, -1)), V).flatten(-2)
    return linear(inner, U.movedim(0, 1).flatten(1), bias)


def _low_rank_shapes(n: SimpleNamespace) -> dict[str, Shape]:
    if n.g == 1:
        return {"U": (n.o, n.r), "V": (n.i, n.r)}
    rows, columns = (n.o // n.g, n.i) if n.side == "out" else (n.o, n.i // n.g)
    return {"U": (n.g, rows, n.r), "V": (n.g, columns, n.r)}


def monarch(entry: Entry, x: Tensor, bias: Tensor | None, U: Tensor, V: Tensor) -> Tensor:
    """``W_kl = U_kl V_klᵀ``: U [b, q, r] runs over (l, s) in its last axis, V [b, p, r] over (k, s).
    Source: "Memory-Efficient Acceleration of Block Low-Rank Foundation Models", section 2."""
    (inputs, p, r), (outputs, q, _), batch = V.shape, U.shape, x.shape[:-1]
    x = x.reshape(-1, inputs, p).transpose(0, 1)  # [l, n, p]
    z = (x @ V).unflatten(-1, (outputs, r // outputs))  # [l, n, k, s]
    z = z.permute(2, 1, 0, 3).flatten(2)  # [k, n, l·s]
    y = (z @ U.transpose(1, 2)).transpose(0, 1).reshape(*batch, outputs * q)
    return y if bias is None else y + bias


def blast(entry: Entry, x: Tensor, bias: Tensor | None, U: Tensor, S: Tensor, V: Tensor) -> Tensor:
    """``W_kl = U_k diag(S_kl) V_lᵀ``: U [b, q, r], S [b, b, r], V [b, p, r]. Source: as of `monarch`."""
    (inputs, p, _), (outputs, q, _), batch = V.shape, U.shape, x.shape[:-1]
    x = x.reshape(-1, inputs, p).transpose(0, 1)  # [l, n, p]
    z = (x @ V).permute(2, 1, 0)  # [r, n, l]
    z = torch.bmm(z, S.permute(2, 1, 0))  # [r, n, k]
    y = z.permute(2, 1, 0) @ U.transpose(1, 2)  # [k, n, q]
    y = y.transpose(0, 1).reshape(*batch, outputs * q)
    return y if bias is None else y + bias


def kronecker(entry: Entry, x: Tensor, bias: Tensor | None, *factors: Tensor) -> Tensor:
    """``W = K_0 K_1 …`` of w [a, b, c, d] with ``K[i·bd + j·d + l, i·cd + k·d + l] = w[i, j, k, l]``.
    Source: "Fast Inference with Kronecker-Sparse Matrices", algorithm 1."""
    for w in reversed(factors):
        a, b, c, d = w.shape
        y = x.reshape(-1, a, c, d).permute(1, 3, 0, 2) @ w.permute(0, 3, 2, 1)  # [a, d, n, b]
        x = y.permute(2, 0, 3, 1).reshape(*x.shape[:-1], a * b * d)
    return x if bias is None else x + bias


STRUCTURES = {
    "dense": Formula(lambda n: {"weight": (n.o, n.i)}, lambda _, x, bias, w: linear(x, w, bias)),
    "svd": Formula(_low_rank_shapes, low_rank),
    "monarch": Formula(lambda n: {"U": (n.b, n.o // n.b, n.r), "V": (n.b, n.i // n.b, n.r)}, monarch),
    "blast": Formula(
        lambda n: {"U": (n.b, n.o // n.b, n.r), "S": (n.b, n.b, n.r), "V": (n.b, n.i // n.b, n.r)}, blast
    ),
    "ks": Formula(lambda n: {f"factors.{k}": tuple(p) for k, p in enumerate(n.patterns)}, kronecker),
}


# 4. Layers --------------------------------------------------------------------------------------------
class ComposedLinear(nn.Module):
    """Base of the layers that stand for an `nn.Linear`, or a GPT-2 ``Conv1D``: they map
    [..., in_features] to [..., out_features]. entry: what the table of layers says of it."""

    def __init__(self, entry: Entry, in_features: int, out_features: int, bias: bool) -> None:
        super().__init__()
        self.entry, self.in_features, self.out_features = entry, in_features, out_features
        self.bias = nn.Parameter(torch.zeros(out_features)) if bias else None

    def composed(self) -> Tensor:
        """W [o, i], with gradients to the factors."""
        raise NotImplementedError

    @property
    def weight(self) -> Tensor:
        """W [o, i] for code that reads it of an `nn.Linear`. Nothing is computed for its dtype."""
        return self.composed() if torch.compiler.is_compiling() else DenseWeight(self, self.like())

    def like(self) -> Tensor:
        """A tensor that has the dtype and the device of the layer's computation."""
        return next(t for t in (*self.parameters(), *self.buffers()) if is_number(t))

    def extra_repr(self) -> str:
        return ", ".join(f"{k}={v}" for k, v in {**self.entry, "bias": self.bias is not None}.items())


class FormulaLinear(ComposedLinear):
    """A product of factors. exported: whether they lie as kernels read them."""

    def __init__(self, entry: Entry, bias: bool, exported: bool = False) -> None:
        super().__init__(entry, entry["in_features"], entry["out_features"], bias)
        self.held = {factor.name: factor for factor in factors_of(entry, exported)}
        for factor in self.held.values():
            storage = STORAGES[factor.storage]
            for name, tensor in zip(factor.names, storage.empty(factor), strict=True):
                self._hold(name, nn.Parameter(tensor) if storage.trained else tensor)
        first_values(self)

    def _hold(self, name: str, tensor: Tensor) -> None:
        stem, dot, number = name.partition(".")
        if dot and stem not in self._modules:
            self.add_module(stem, Numbered())
        home: nn.Module = self.get_submodule(stem if dot else "")
        if isinstance(tensor, nn.Parameter):
            home.register_parameter(number or stem, tensor)
        else:
            home.register_buffer(number or stem, tensor)

    def stored(self, factor: Factor) -> list[Tensor]:
        """The tensors that hold a factor."""
        ends = (name.partition(".") for name in factor.names)
        return [getattr(self, stem)()[n] if dot else getattr(self, stem) for stem, dot, n in ends]

    def factor(self, name: str) -> Tensor:
        """The factor ``U``, ``factors.0``, …, dense."""
        return self.held[name].dense(*self.stored(self.held[name]))

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """``x Wᵀ + bias``, from [..., i] to [..., o]."""
        factors = map(self.factor, self.held)
        return STRUCTURES[self.entry["structure"]].product(self.entry, x, bias, *factors)

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x, self.bias)

    def composed(self) -> Tensor:
        like = self.like()
        return self.product(torch.eye(self.in_features, dtype=like.dtype, device=like.device), None).mT

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Moves and casts of torch go through this: float8 numbers are moved as bytes, never cast."""

        def apply(tensor: Tensor) -> Tensor:
            return fn(tensor.view(torch.uint8)).view(E4M3) if tensor.dtype == E4M3 else fn(tensor)

        return super()._apply(apply, recurse)


class SummedLinear(ComposedLinear):
    """The sum of two layers, ``W = Q + S``: a dense weight in few bits and a structure."""

    def __init__(self, entry: Entry, bias: bool, exported: bool = False) -> None:
        super().__init__(entry, entry["base"]["in_features"], entry["base"]["out_features"], bias)
        self.base, self.correction = (self.make(part, exported) for part in ("base", "correction"))

    def make(self, part: str, exported: bool) -> FormulaLinear:
        return FormulaLinear(self.entry[part], False, exported)

    def forward(self, x: Tensor) -> Tensor:
        y = self.base(x) + self.correction(x)
        return y if self.bias is None else y + self.bias

    def composed(self) -> Tensor:
        return self.base.composed() + self.correction.composed()


class Experts(nn.Module):
    """Experts in place of transformers' own. parts: the lists of layers in place of stacks [E, o, i]."""

    def __init__(self, native: Any, parts: dict[str, list[str]]) -> None:
        super().__init__()
        vars(self).update({k: v.copy() if isinstance(v, dict) else v for k, v in vars(native).items()})
        self.native, self.parts, self.count = type(native), parts, native.num_experts
        for stack, names in parts.items():
            taken: Any = self._parameters.pop(stack)
            weights = (taken.mT if self.is_transposed else taken).detach()
            for name, each in zip(names, weights.chunk(len(names), 1), strict=True):
                layers = [nn.Linear(w.shape[1], w.shape[0], False, "meta") for w in each]
                for layer, weight in zip(layers, each, strict=True):
                    layer.weight = nn.Parameter(weight, requires_grad=False)
                setattr(self, name, nn.ModuleList(layers))

    def one(self, expert: int, x: Tensor) -> Tensor:
        """What an expert makes of x [n, i], by its weight in each stack or by its layers."""
        for stack, gate in (("gate_up_proj", self.native._apply_gate), ("down_proj", lambda _, y: y)):
            if names := self.parts.get(stack):
                y = torch.cat([getattr(self, name)[expert](x) for name in names], -1)
            else:
                weight = getattr(self, stack)[expert]
                y = x @ weight if self.is_transposed else linear(x, weight)
            x = gate(self, y + getattr(self, f"{stack}_bias")[expert] if self.has_bias else y)
        return x

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        x, (chosen, at) = hidden_states.flatten(0, -2), top_k_index.sort(-1)
        w, flat = top_k_weights.gather(-1, at), chosen.flatten()
        if (x.is_cuda and torch.cuda.is_current_stream_capturing()) or torch.compiler.is_compiling():
            y: Any = sum(self.one(n, x) * (w * (chosen == n)).sum(-1, True) for n in range(self.count))
        else:
            order = flat.argsort(stable=True)
            rows = x[order // chosen.shape[-1]].split(flat.bincount(minlength=self.count).tolist())
            found = torch.cat([self.one(n, own) for n, own in enumerate(rows) if len(own)] or [x])
            found = torch.empty_like(found).index_copy(0, order, found).view(*chosen.shape, -1)
            y = (found * w[..., None]).sum(1)
        return y.to(x.dtype).view_as(hidden_states)


class Numbered(nn.Module):
    """Tensors by number. A call returns them, for offloading brings in what a called module holds."""

    def forward(self) -> dict[str, Tensor | None]:
        return {**self._parameters, **self._buffers}


class Pair(nn.Sequential):
    """``y = U (V x) + bias``: two `nn.Linear`, V [r, i] and U [o, r], for tools that look for those."""

    def __init__(self, entry: Entry, bias: bool) -> None:
        super().__init__()
        self.V = nn.Linear(entry["in_features"], entry["rank"], bias=False)
        self.U = nn.Linear(entry["rank"], entry["out_features"], bias=bias)

    weight = property(lambda self: self.U.weight @ self.V.weight)  # computed at each reading
    bias = property(lambda self: self.U.bias)


def linear_of(entry: Entry, bias: bool, exported: bool = False) -> ComposedLinear:
    """The layer of an entry of the table, with first values."""
    kind = SummedLinear if entry.get("structure") == "corrected" else FormulaLinear
    return kind(entry, bias, exported)


def is_number(tensor: Tensor) -> bool:
    """Whether a tensor holds floating-point numbers that mean something without scales."""
    return tensor.is_floating_point() and tensor.element_size() > 1


@torch.no_grad()
def first_values(layer: ComposedLinear) -> None:
    """Fill a layer that is made, not loaded: random factors. Packed ones stay, for nothing trains
    them, and so does what has values already, which transformers marks."""
    for factor in getattr(layer, "held", {}).values():
        first, *others = layer.stored(factor)  # type: ignore[operator]
        if not (others or first.is_meta or getattr(first, "_is_hf_initialized", False)):
            first.copy_(torch.randn_like(first) * factor.unit)


FACTS = {getattr(Tensor, n) for n in ("size", "dim", "numel", "element_size", "is_floating_point")} | {
    getattr(Tensor, name).__get__  # known of a weight without its values
    for name in ("dtype", "device", "shape", "ndim", "layout", "requires_grad", "is_cuda", "is_meta")
}
READERS = ("__invert__", "__index__", "__int__", "__iter__", "requires_grad_")  # have writers' names


def writes(func: object, kwargs: Mapping[str, object]) -> bool:
    """Whether a function of torch writes to one of its arguments."""
    name = getattr(func, "__name__", "")
    named = name.startswith("__i") or name == "__setitem__" or name[-1:] == "_" != name[-2:-1]
    return name not in READERS and (named or "out" in kwargs or bool(kwargs.get("inplace")))


class DenseWeight(Tensor):
    """The weight W [o, i] of a layer without its values. Dtype, device and shape cost nothing; all other
    functions of torch compute the product of its factors. Writing raises: these would not change."""

    _is_hf_initialized = True  # `init_weights` of transformers leaves it: the factors have values
    layer: ComposedLinear

    @staticmethod
    def __new__(cls, layer: ComposedLinear, like: Tensor) -> DenseWeight:
        shape = layer.out_features, layer.in_features
        made = Tensor._make_wrapper_subclass(cls, shape, dtype=like.dtype, device=like.device)
        made.layer = layer
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: object, args: Any = (), kwargs: Any = None) -> object:
        kwargs = kwargs or {}
        if func in FACTS or func is Tensor.__len__:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        sets = func == vars(torch._C.TensorBase)["data"].__set__ or writes(func, kwargs)
        if sets and isinstance(written := kwargs.get("out", args[0]), DenseWeight):
            found = f"the weight of a {type(written.layer).__name__} is made of what it stores"
            raise RuntimeError(f"{found} and cannot be written: change its factors")
        args, kwargs = torch.utils._pytree.tree_map_only(
            DenseWeight, lambda weight: weight.layer.composed(), (args, kwargs)
        )
        return func(*args, **kwargs)

    @classmethod  # torch's own is none
    def __torch_dispatch__(cls, func: object, *arguments: object) -> None:  # type: ignore[override]
        raise RuntimeError(f"{func} reached a weight that has no values: pass it to functions of torch")


# 5. The table of layers -------------------------------------------------------------------------------
def entries_of(config: object) -> dict[str, Entry]:
    """The entries of all structured layers by name on disk, with those that an export packs. Raises
    ValueError for an export of another version."""
    blr = getattr(config, "blr", None) or {}
    table, export = blr.get("layers") or {}, blr.get("export")
    if export is None:
        return dict(table)
    if export.get("layout") != LAYOUT:
        found = f"config.blr.export.layout is {export.get('layout')!r}: this code reads layout {LAYOUT}"
        raise ValueError(f"{found}; export the checkpoint again, or take the version that wrote it")
    bits, plain = int((export.get("quantize") or "int0").removeprefix("int")), export.get("plain", ())
    packed = {
        name: {**entry, "bits": bits}
        for name, entry in table.items()
        if bits and name not in plain and {"bits", "base"}.isdisjoint(entry)
    }
    for name, (o, i) in export.get("dense", {}).items():
        packed[name] = {"structure": "dense", "in_features": i, "out_features": o, "bits": bits}
    return {**table, **packed, **export.get("head", {})}


def replace_layers(model: nn.Module, entries: dict[str, Entry], make: Callable[..., nn.Module]) -> None:
    """Replace each module that `entries` names by ``make(entry, has_bias)``, on its device and in its
    dtype. Raises KeyError for a name that no module has."""
    modules = dict(model.named_modules())
    for name, entry in entries.items():
        if name not in modules:
            raise KeyError(f"the configuration replaces {name!r}, which this model does not have")
        old = next(t for t in (*modules[name].parameters(), *modules[name].buffers()) if is_number(t))
        with torch.device(old.device):
            new = make(entry, getattr(modules[name], "bias", None) is not None)
        parent, _, child = name.rpartition(".")
        setattr(modules[parent], child, new.to(old.dtype))


# Stacks of transformers' experts, and what checkpoints call the layers that each joins
STACKS = [("gate_up_proj", names.split()) for names in ("gate_up_proj", "gate_proj up_proj", "w1 w3")]
STACKS += [("down_proj", [name]) for name in ("down_proj", "w2")]


def stacks_apart(model: PreTrainedModel, names: Iterable[str]) -> dict[str, dict[str, list[str]]]:
    """By each module of experts whose layers are among `names`, on disk as ``….experts.w1.7``: the
    stacks of weights that these stand for, with what the layers are called."""
    parts = {n.rpartition(".")[0] for n in names if ".experts." in n and n.rpartition(".")[2].isdigit()}
    homes = module_names(model, {part.rpartition(".")[0] for part in parts})
    return {homes[h]: {s: each for s, each in STACKS if f"{h}.{each[0]}" in parts} for h in homes}


def module_names(model: PreTrainedModel, stored_names: Iterable[str]) -> dict[str, str]:
    """For each name of a layer on disk that of its module in `model`: renamed as transformers renames
    tensors of this architecture, with or without the base model's prefix."""
    known = conversion_mapping.get_model_conversion_mapping(model)
    renamings = [renaming for renaming in known if isinstance(renaming, WeightRenaming)]
    modules = {name for name, _ in model.named_modules()}
    prefix, found = f"{model.base_model_prefix}.", {}
    for stored in stored_names:
        name = rename_source_key(f"{stored}.weight", renamings, [])[0].removesuffix(".weight")
        candidates = (name, name.removeprefix(prefix), prefix + name)
        found[stored] = next((each for each in candidates if each in modules), name)
    return found


def by_module(model: PreTrainedModel, entries: dict[str, Entry]) -> dict[str, Entry]:
    """`entries` by the names of modules in `model`. Left out are a head that only the class named in the
    configuration has, and all layers of a model inside a classifier, which places them itself."""
    modules, names = dict(model.named_modules()), module_names(model, entries)
    held = {name: entries[stored] for stored, name in names.items() if name in modules}
    whole = held and named_class(model) == type(model).__name__
    return {name: entries[stored] for stored, name in names.items()} if whole else held


def named_class(model: PreTrainedModel) -> str:
    """The class that the configuration of a model names, by default the model's own."""
    return next(iter(getattr(model.config, "architectures", None) or ()), type(model).__name__)


# 6. Loading and saving --------------------------------------------------------------------------------
class LoudModel(Mixin):
    """Mixin of models, which have a `finish_loading`: missing tensors are an error."""

    @classmethod
    def from_pretrained(cls, *arguments: object, **options: object) -> Any:
        """Load a model as the library does. Raises ValueError when tensors are missing, left over or of
        another shape (unless that is to be ignored), which the library would replace by random numbers;
        callers that ask for the loading info judge it themselves."""
        asked = options.pop("output_loading_info", False)
        model, info = super().from_pretrained(*arguments, output_loading_info=True, **options)
        model.finish_loading()
        if asked:
            return model, info
        if options.get("ignore_mismatched_sizes"):
            info = {**info, "mismatched_keys": ()}
        if found := misloaded(model, info):
            raise ValueError(f"{found}; expected those that config.json describes, copy them again")
        return model


def misloaded(model: PreTrainedModel, info: Mapping[str, Iterable[str | tuple[str, ...]]]) -> str:
    """Names the tensors that a loaded model lacks or has no place for; empty if there are none. A model
    of another class than its configuration names may lack a head or leave one over."""
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        found = {key if isinstance(key, str) else key[0] for key in info.get(kind) or ()}
        if found and kind != "mismatched_keys":
            found = _accountable(model, found, kind == "missing_keys")
        if found:
            names = ", ".join(repr(name) for name in sorted(found)[:3])
            return f"{kind.replace('_', ' ')} {names} ({len(found)} in all)"
    return ""


def _accountable(model: Any, keys: set[str], missing: bool) -> set[str]:
    """Those `keys` that count as `missing`, or left over, for the class that the configuration names."""
    name = named_class(model)
    native = getattr(transformers, name.removeprefix(PREFIX), None)
    if name == type(model).__name__ or native is None:
        return keys
    named = type(model).make_model(name) if name.startswith(PREFIX) else native
    prefix = f"{named.base_model_prefix}."
    with torch.device("meta"):
        own = {key.removeprefix(prefix) for key in named(model.config).state_dict()}
    return {key for key in keys if (key.removeprefix(prefix) in own) == missing}


def write_code(folder: Path, *others: Path) -> None:
    """Copy this file, and `others`, into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in (Path(__file__), *others):
        (folder / path.name).write_bytes(path.read_bytes())


# 7. Configurations ------------------------------------------------------------------------------------
GUARD = "for_native_classes"  # an entry of config.json, see section 9


class ModelType:
    """The `model_type` of our configuration classes. Of a class it is `ours`, as files and Auto classes
    have it; of an instance it is `native`, by which other code decides."""

    def __init__(self, ours: str, native: str) -> None:
        self.ours, self.native = ours, native

    def __get__(self, config: object, owner: type) -> str:
        return self.ours if config is None else self.native

    def __set__(self, config: object, value: str) -> None:
        """Ignore the value in a file, which is known already."""


class StructuredConfig(Mixin):
    """Mixin of configurations: ``BlrLlamaConfig`` is ``LlamaConfig`` with the entry ``blr``. make_model:
    returns the class of a model by its name. before_saving: called by the package with the configuration
    and the folder that it is about to be written to."""

    make_model: Callable[[str], type]
    before_saving: Callable[[Any, Path], None] = staticmethod(lambda config, folder: None)

    def save_pretrained(self, save_directory: str | Path, *arguments: object, **options: object) -> Any:
        """Save as transformers does, with who saved it in ``blr["saved"]``, and with this file."""
        origin, folder = str(getattr(self, "_name_or_path", None) or ""), Path(save_directory)
        saved = {"by": f"transformers {transformers.__version__}", "from": Path(origin).name or None}
        self.blr = {**(getattr(self, "blr", None) or {}), "saved": saved}
        setattr(self, GUARD, guard(self.model_type))
        write_code(folder)
        self.before_saving(self, folder)
        return super().save_pretrained(save_directory, *arguments, **options)

    def structured_class(self, native: type) -> type:
        """Our variant of the model class `native`. Raises ValueError if there is none."""
        try:
            return type(self).make_model(PREFIX + native.__name__)
        except AttributeError as error:
            found = f"{native.__name__} has no structured variant, which this configuration needs; take "
            raise ValueError(f"{found}a class that transformers names, or an Auto class") from error


def native_name(name: str) -> str:
    """``LlamaConfig`` for ``BlrLlamaConfig``. Raises AttributeError for any other kind of name."""
    if not name.startswith(PREFIX) or not hasattr(transformers, name.removeprefix(PREFIX)):
        raise AttributeError(f"no structured variant of {name!r} in transformers")
    return name.removeprefix(PREFIX)


@cache
def config_class(name: str) -> type[Any]:
    """Make the configuration class ``Blr<Native>Config``. It has no plan of tensor parallelism, for the
    native one cuts ``weight`` matrices that a structured layer has not."""
    native: Any = getattr(transformers, native_name(name))
    members: dict[str, object] = {"__module__": __name__, "blr": None, "base_model_tp_plan": None}
    members |= {"__annotations__": {"blr": "dict | None"}, "__doc__": f"{native.__name__} with `blr`."}
    members |= {"model_type": ModelType(f"{PREFIX.lower()}_{native.model_type}", native.model_type)}
    for mapping in auto_tables("_MAPPING"):  # of tokenizers and processors, by class
        types = getattr(mapping, "_reverse_config_mapping", {})
        if native.__name__ in types:
            types[name] = types[native.__name__]
    return type(name, (StructuredConfig, native), members)


def auto_tables(ending: str) -> list[Any]:
    """The tables of transformers' Auto classes whose names end so."""
    kinds = ("modeling", "feature_extraction", "image_processing", "processing", "tokenization")
    modules = [import_module(f"transformers.models.auto.{k}_auto") for k in (*kinds, "video_processing")]
    return [table for m in modules for name, table in vars(m).items() if name.endswith(ending)]


# 8. Models --------------------------------------------------------------------------------------------
class StructuredModel(LoudModel):
    """Mixin of models: ``BlrLlamaForCausalLM`` is ``LlamaForCausalLM`` whose layers are replaced before
    its weights are loaded. make_layer: from an entry of the table. make_experts: those of a block."""

    make_layer: Callable[..., nn.Module] = staticmethod(linear_of)
    make_experts: Callable[..., nn.Module] = Experts
    make_model: Callable[[str], type]
    made_of: type[PreTrainedModel]

    def __init__(self, config: object, *arguments: object, **options: object) -> None:
        # Give AutoModel the class of what is inside this one, unless it has one for the configuration:
        # whoever loads a folder has trusted its code, and transformers would ask again.
        mapping: Any = transformers.AutoModel._model_mapping
        inner = getattr(mapping.get(self.made_of.config_class, None), "__name__", "")
        known = type(config) in mapping or inner == self.made_of.__name__
        if not known and hasattr(transformers, inner):
            mapping.register(type(config), self.make_model(PREFIX + inner))
        super().__init__(config, *arguments, **options)

    def post_init(self) -> None:
        """Replace the layers. Every model of transformers calls this last when it is made, on the meta
        device while loading, before it collects tied weights. Models inside have replaced their own."""
        self.place_layers()
        super().post_init()
        self._tp_plan = dict[str, str]()  # nobody can split it by the native one

    def place_layers(self) -> None:
        """Put the layers of the table, and pairs of linear layers, in their places."""
        blr = self.config.blr or {}
        make = partial(self.make_layer, exported="export" in blr)
        pairs, modules = blr.get("pairs") or {}, dict(self.named_modules())
        stacks = stacks_apart(self, [*(blr.get("layers") or ()), *pairs])
        for name in stacks.keys() & modules.keys():
            self.set_submodule(name, self.make_experts(modules[name], stacks[name]))
        replace_layers(self, by_module(self, entries_of(self.config)), make)
        replace_layers(self, by_module(self, pairs), Pair)

    def initialize_weights(self) -> None:
        """Give all layers first values, structured ones and those of transformers."""
        for layer in self.modules():  # first: then transformers marks all layers
            if isinstance(layer, ComposedLinear) and not getattr(layer, "_is_hf_initialized", False):
                first_values(layer)
        super().initialize_weights()

    def finish_loading(self) -> None:
        """Warn of a feature of the folder that needs the package."""
        if kind := (self.config.blr or {}).get("kv_cache"):
            told = "blr: keys and values are cached whole: a cache of %s needs %s"
            logging.getLogger("blr").warning(told, kind, PACKAGE)

    def save_pretrained(self, *arguments: object, **options: object) -> Any:
        """Save with the layers as they are now: a merged adapter has raised ranks, and a model of
        another class than was written may have no head."""
        table, modules = (self.config.blr or {}).get("layers", {}), dict(self.named_modules())
        for name, module in module_names(self, table).items():
            if module not in modules:
                del table[name]
            elif hasattr(modules[module], "entry"):
                table[name] = modules[module].entry
        return super().save_pretrained(*arguments, **options)

    def _get_dtype_plan(self, dtype: torch.dtype) -> dict[str, torch.dtype]:
        """Let packed tensors and indices keep their types in modules that transformers keeps in float32
        (T5's `wo` beside float16)."""
        plan = super()._get_dtype_plan(dtype)
        held = {n: t.dtype for n, t in self.named_buffers() if not is_number(t)} if plan else {}
        return {**held, **plan}


@cache
def model_class(name: str, mixins: tuple[type, ...] = (StructuredModel,)) -> type:
    """Make the model class ``Blr<Native>``. Raises AttributeError for another kind of name."""
    native: Any = getattr(transformers, native_name(name))
    # give it the native renamings of tensors, which transformers skips for custom code
    if (renamings := conversion_mapping.get_checkpoint_conversion_mapping(native.__name__)) is not None:
        conversion_mapping.register_checkpoint_conversion_mapping(name, renamings, overwrite=True)
    conversion_mapping.USER_REGISTERED_MAPPINGS.add(name)
    _name_beside(native.__name__)
    # named again: transformers would wrap the class in another one, which no pickle finds
    last = (transformers.GenerationMixin,) * issubclass(native, transformers.GenerationMixin)
    members = {"__module__": mixins[-1].__module__, "made_of": native}
    members |= {"__doc__": f"{native.__name__} with structured layers."}
    members |= {"config_class": config_class(PREFIX + native.config_class.__name__)}
    return type(name, (*mixins, native, *last), members)


def _name_beside(native: str) -> None:
    """Put our class beside `native` in the tables of names: Trainer shifts labels for classes that it
    finds among the causal language models, pipelines and model cards look for the name of a class."""
    for names in auto_tables("_NAMES"):
        for kind, classes in list(names.items()):
            listed = classes if isinstance(classes, tuple | list) else (classes,)
            if native in listed and not kind.startswith(f"{PREFIX.lower()}_"):
                ours = tuple(f"{PREFIX}{name}" for name in listed)
                names[f"{PREFIX.lower()}_{kind}"] = ours if classes is listed else ours[0]


# 9. Native classes ------------------------------------------------------------------------------------
REMEDY = "load it by AutoModelForCausalLM or the Auto class of its task, after "
REMEDY += "blr.compressor.register() or with trust_remote_code=True"


def guard(native_type: str) -> dict[str, str]:
    """Make the entry `GUARD` of config.json, which stops ``LlamaForCausalLM.from_pretrained(folder)``
    where no code of ours runs: a native configuration class takes the part of a file that has its own
    type; the `dtype` of this is none, which raises AttributeError with the words below."""
    found = "the layers of this folder are structured, native classes have no place for them"
    return {"model_type": native_type, "dtype": f"{found}; {REMEDY}"}


def watch_native_classes() -> None:
    """Let a native model class that is given a configuration of ours become our class, and refuse a
    model whose dense layers were filled with random numbers in the place of structured ones."""
    native: Any = PreTrainedModel.from_pretrained.__func__  # type: ignore[attr-defined]
    if hasattr(native, "is_watched"):  # by another copy of this code
        return

    @wraps(native)
    def from_pretrained(cls: Any, *arguments: object, **options: Any) -> Any:
        if hasattr(cls, "made_of"):
            return native(cls, *arguments, **options)
        if hasattr(options.get("config"), "structured_class"):
            ours = options["config"].structured_class(cls)
            return ours.from_pretrained(*arguments, **options)
        found = native(cls, *arguments, **options)
        model = found[0] if isinstance(found, tuple) else found
        if getattr(model.config, "blr", None):
            found = f"the structured layers of {model.name_or_path}"
            raise ValueError(f"{cls.__name__} has no place for {found}; {REMEDY}")
        return found

    from_pretrained.is_watched = True  # type: ignore[attr-defined]
    PreTrainedModel.from_pretrained = classmethod(from_pretrained)  # type: ignore[assignment]


if transformers is not None:
    StructuredModel.make_model = StructuredConfig.make_model = staticmethod(model_class)
    watch_native_classes()


def __getattr__(name: str) -> type:
    """The classes that `auto_map` names, made when they are asked for."""
    if not name.startswith(PREFIX):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return config_class(name) if name.endswith("Config") else model_class(name)
