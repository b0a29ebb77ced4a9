"""Plans the tensors of an export. Each is made from stored ones when its turn to be written comes."""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from math import prod

import torch
from torch import Tensor

from blr.compressor.base.disk import Bytes
from blr.compressor.base.errors import NumericsError
from blr.compressor.base.quoting import quote
from blr.compressor.checkpoint.header import BITS, TORCH_NAMES, TensorEntry
from blr.compressor.checkpoint.regular import refuse
from blr.compressor.checkpoint.source import Source
from blr.compressor.exporting.quantizer import Quantizer
from blr.compressor.modeling import modeling_blr
from blr.compressor.planning.layers import native_weights
from blr.compressor.structures.packing import factors_of, restored
from blr.compressor.structures.specs import SCALE, Spec, Stored, stored_names
from blr.compressor.workspace.scan import check_product
from blr.compressor.workspace.shards import Slot
from blr.kernels.common.layout import to_physical
from blr.kernels.common.orders import Order
from blr.kernels.fp8.reference import LARGEST

STORED = {name: dtype for dtype, name in TORCH_NAMES.items()}  # torch's name -> safetensors'
Make = Callable[[], Tensor]
CHUNK = 1 << 24  # bytes handed on at once
LINEAR: dict[str, Order] = {"U": (0, 1), "V": (1, 0)}  # axes of factors as weights of linear layers


@dataclass(frozen=True)
class Tensors:
    """The planned tensors. slots: in the order of the source. make: functions that compute those tensors
    which are no plain copies; their entries have a name, dtype and shape, but no place in a file."""

    source: Source
    slots: list[Slot] = field(default_factory=list)
    make: dict[TensorEntry, Make] = field(default_factory=dict)

    def add(self, name: str, entry: TensorEntry, dtype: str, order: Order | None = None) -> None:
        """Add a stored tensor, as it is or cast to `dtype`, safetensors' name, with axes in `order`."""
        if order in (None, tuple(range(len(entry.shape)))) and dtype == entry.dtype:
            self.slots.append(Slot(name, entry))
            return
        shape = tuple(entry.shape[axis] for axis in order) if order else entry.shape
        self.add_made(name, dtype, shape, partial(_convert, self.source, entry, order, dtype))

    def add_packed(self, quantizer: Quantizer, module: str, factor: str, dtype: str) -> None:
        """Add a factor or dense weight, packed, with scales of `dtype`."""
        for part, (stored, shape) in quantizer.parts(module, factor, dtype).items():
            self.add_made(f"{module}.{part}", stored, shape, partial(quantizer.tensor, module, part))

    def add_dense(
        self, name: str, specs: Mapping[str, Spec], dtype: str, transposed: bool = False
    ) -> None:
        """Add the dense weight [o, i] of a structured layer in `dtype`, as [i, o] if `transposed`; or
        the stack of those of experts [E, o, i]. specs: of the layers, by module."""
        first = next(iter(specs.values()))
        shape: tuple[int, ...] = (first.out_features, first.in_features)
        shape = shape[::-1] if transposed else shape
        shape = shape if name.endswith(".weight") else (len(specs), *shape)

        def make() -> Tensor:
            weights = [dense_weight(self.source, m, s, TORCH_NAMES[dtype]) for m, s in specs.items()]
            return torch.stack([w.mT if transposed else w for w in weights]).reshape(shape)

        self.add_made(name, dtype, shape, make)

    def add_paired(self, module: str, spec: Spec, entry: TensorEntry, dtype: str) -> None:
        """Add a factor of a low-rank layer as the weight of a linear one, U [o, r] or V [r, i]."""
        part = entry.name.removeprefix(f"{module}.")
        factor, whole = part.removesuffix(SCALE), spec.plain
        if factor not in LINEAR:
            return  # comes with its scale, or with U
        shape = tuple(whole.shapes()[factor][axis] for axis in LINEAR[factor])
        if not spec.quantized:
            self.add(f"{module}.{factor}.weight", entry, dtype, LINEAR[factor])
            return
        make = partial(unpacked_factor, self.source, module, spec, factor, TORCH_NAMES[dtype])
        self.add_made(f"{module}.{factor}.weight", dtype, shape, make)

    def add_made(self, name: str, dtype: str, shape: tuple[int, ...], make: Make) -> None:
        """Add a tensor that `make` computes; its entry names some file of the source."""
        nbytes = prod(shape) * BITS[dtype] // 8
        entry = TensorEntry(name, dtype, shape, self.source.shards[0], 0, nbytes)
        self.slots.append(Slot(name, entry))
        self.make[entry] = make

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {slot.name: slot.origin.shape for slot in self.slots}

    @property
    def nbytes(self) -> int:
        return sum(slot.origin.nbytes for slot in self.slots)


def plan_tensors(
    source: Source,
    specs: Mapping[str, Spec],
    dtype: str | None,
    quantizer: Quantizer | None = None,
    densified: Mapping[str, Spec] | None = None,
    transposed: Collection[str] = (),
    paired: Mapping[str, Spec] | None = None,
) -> Tensors:
    """Plan the tensors of an export of `source`, from headers alone. specs: structured module to its
    spec, as on disk. dtype: torch's name of what floating-point tensors are cast to; None leaves them.
    quantizer: packs the structured and dense layers that it lists. densified: structured modules of
    which the dense weight is written. transposed: those of them that store it [i, o]. paired: low-rank
    ones that are written as two linear layers. Raises InputError: a factor that is missing or of another
    shape than its spec says."""
    densified, paired = densified or {}, paired or {}
    factors = _factors(source, {**specs, **densified, **paired})
    if quantizer is not None:
        factors |= {f"{module}.weight": (module, "weight") for module in quantizer.dense}
    biases = {f"{module}.bias": f"{module}.U.bias" for module in paired}
    joined = native_weights(source, densified)
    firsts = {modules[0]: name for name, modules in joined.items()}
    found = Tensors(source)
    for entry in source.entries.values():
        target = STORED[dtype] if dtype and entry.is_float else entry.dtype
        module, factor = factors.get(entry.name, ("", ""))
        if quantizer is not None and module in quantizer.packings:
            found.add_packed(quantizer, module, factor, target)
        elif module in specs:
            name, order = relaid_name(specs[module], factor)
            found.add(f"{module}.{name}", entry, target, order)
        elif module in paired:
            found.add_paired(module, paired[module], entry, target)
        elif module not in densified:
            found.add(biases.get(entry.name, entry.name), entry, target)
        elif module in firsts and factor == next(iter(densified[module].stored())):  # once a weight
            parts = {each: densified[each] for each in joined[firsts[module]]}
            found.add_dense(firsts[module], parts, target, module in transposed)
        head = None if quantizer is None else quantizer.head
        if quantizer and head and head.tied and head.weight is entry:  # the embedding, which stays
            found.add_packed(quantizer, head.module, "weight", target)
    return found


def check_products(
    source: Source, specs: Mapping[str, Spec], dtype: str | None, norms: Mapping[str, float]
) -> None:
    """Raise NumericsError for a structured layer whose weight the stored dtype cannot hold. dtype:
    torch's name of what is stored, None for the factors' own. norms: of factors, by name."""
    for module, whole in specs.items():
        for part, spec in whole.parts():
            home = f"{module}.{part}" if part else module
            entries = (source.entries[f"{home}.{name}"] for name in spec.stored())
            floats = [entry for entry in entries if entry.is_float]
            held = getattr(torch, dtype or TORCH_NAMES[floats[0].dtype])
            found = [norms[entry.name] * _largest(spec, entry, f"{home}.") for entry in floats]
            tensors = partial(_stored_tensors, source, home, spec)
            check_product(f"{source.folder}: layer {module!r}", spec, found, tensors, held)


def _largest(spec: Spec, entry: TensorEntry, prefix: str) -> float:
    """The number by which the norm of a stored tensor is multiplied to bound that of its factor. It is
    above 1 for scales, which stand for groups of numbers."""
    packing = spec.packing
    if packing is None or entry.name.removeprefix(prefix) in spec.shapes():
        return 1.0
    if packing.fp8:
        factor = next(n for n in spec.shapes() if entry.name == prefix + stored_names(n)[1])
        return LARGEST * (packing.group or packing.packed_shape(factor)[-1]) ** 0.5
    return 128.0 * packing.group**0.5


def read_tensor(source: Source, tensors: Tensors, entry: TensorEntry) -> Iterator[Bytes]:
    """Yield the bytes of a planned tensor in pieces. Raises NumericsError for values out of range."""
    if entry not in tensors.make:
        yield from source.read_bytes(entry)
        return
    flat = tensors.make[entry]().contiguous().reshape(-1).view(torch.uint8)
    data = memoryview(flat.numpy())  # type: ignore[arg-type] # stubs of numpy for Python 3.11
    for start in range(0, len(data), CHUNK):
        yield data[start : start + CHUNK]


def _factors(source: Source, specs: Mapping[str, Spec]) -> dict[str, tuple[str, str]]:
    """Module and name there of every stored factor, by name on disk. Raises InputError without it."""
    found = {}
    for module, spec in specs.items():
        for name, stored in spec.stored().items():
            _check_stored(source, f"{module}.{name}", stored)
            found[f"{module}.{name}"] = module, name
    return found


def relaid_name(spec: Spec, name: str) -> tuple[str, Order | None]:
    """What an export calls a stored tensor of a layer, and the order of its axes; packed ones stay."""
    if len(spec.parts()) > 1:
        part, _, own = name.partition(".")
        relaid, order = relaid_name(dict(spec.parts())[part], own)
        return f"{part}.{relaid}", order
    if spec.packing is not None:
        return name, None
    factor = next(f for f in modeling_blr.factors_of(spec.to_dict(), exported=True) if f.name == name)
    return factor.names[0], sum(factor.axes, ())


def _check_stored(source: Source, name: str, stored: Stored) -> None:
    entry, (shape, dtype) = source.entries.get(name), stored
    fits = entry is not None and (entry.dtype == dtype if dtype else entry.is_float)
    if entry is None or entry.shape != shape or not fits:
        found = "no tensor" if entry is None else f"{entry.dtype} of shape {list(entry.shape)}"
        wanted = f"{dtype or 'floating-point numbers'} of shape {list(shape)}"
        expected = f"{wanted}, as config.blr.layers says"
        refuse(source.folder, f"{found} under {quote(name)}", expected, "compress the model again")


def unpacked_factor(source: Source, module: str, spec: Spec, factor: str, dtype: str) -> Tensor:
    """A factor of a low-rank layer as the weight of a linear one, U [o, r] or V [r, i], in `dtype`."""
    tensors = _stored_tensors(source, module, spec)
    return factors_of(spec, tensors, getattr(torch, dtype))[factor].permute(LINEAR[factor])


def _convert(source: Source, entry: TensorEntry, order: Order | None, dtype: str) -> Tensor:
    tensor = source.load_tensor(entry)
    cast = tensor.to(getattr(torch, TORCH_NAMES[dtype]))
    lost = int((torch.isfinite(tensor) & ~torch.isfinite(cast)).sum()) if dtype != entry.dtype else 0
    if lost:
        found = f"{lost} values of {quote(entry.name)} are out of range of {cast.dtype}"
        expected = "expected finite numbers; choose --dtype bfloat16 or float32"
        raise NumericsError(f"{entry.file}: {found}, {expected}")
    return to_physical(cast, order) if order else cast


def in_order(group: list[Slot], slots: list[Slot]) -> list[Slot]:
    """Order the tensors of a shard as in `slots`, so that those of a layer, which are computed together,
    are written together; but not where that would leave one unaligned to its elements."""
    if any(slot.origin.nbytes % 8 for slot in group):
        return group
    position = {slot.name: n for n, slot in enumerate(slots)}
    return sorted(group, key=lambda slot: position[slot.name])


def dense_weight(source: Source, module: str, spec: Spec, dtype: str) -> Tensor:
    """The dense weight [o, i] of a structured layer, computed in float32 or better and rounded once."""
    tensors = _stored_tensors(source, module, spec)
    exact = any(tensor.dtype == torch.float64 for tensor in tensors.values())
    wide = torch.float64 if exact else torch.float32
    return restored(spec, tensors, wide).to(getattr(torch, dtype))


def _stored_tensors(source: Source, module: str, spec: Spec) -> dict[str, Tensor]:
    return {name: source.load_tensor(source.entries[f"{module}.{name}"]) for name in spec.stored()}
