"""In how many bits planned layers are stored: from a structure and its settings to what a file holds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from blr.compressor.recipe.schema import DENSE, StoredAs
from blr.compressor.structures.specs import BlastSpec, CorrectedSpec, DenseSpec, QuantizedSpec, Spec
from blr.kernels.decode.quantized.formats import GROUPS


def stored_spec(spec: Spec, stored: StoredAs, width: int) -> Spec:
    """`spec` as it is stored; itself where packed it would be no smaller: rows far shorter than a group.

    Args:
        width: bits of a number that is not packed.
    """
    if stored.base is not None:
        base = QuantizedSpec(DenseSpec(spec.in_features, spec.out_features), stored.base, stored.group)
        return CorrectedSpec(base, _correction(spec, stored, width))
    if stored.bits is None:
        return spec
    kept = _couplings(spec, stored)
    packed = QuantizedSpec(spec, stored.bits, stored.group, kept, fp8=stored.fp8)
    return packed if packed.stored_bits(width) < spec.stored_bits(width) else spec


def _correction(spec: Spec, stored: StoredAs, width: int) -> Spec:
    """The correction, packed in the groups, no larger than asked for, that take the fewest bits."""
    if stored.bits is None:
        return spec
    kept = _couplings(spec, stored)
    tried = [QuantizedSpec(spec, stored.bits, g, kept, tiled=True) for g in GROUPS if g <= stored.group]
    return min(tried, key=lambda packed: packed.stored_bits(width))


def _couplings(spec: Spec, stored: StoredAs) -> int | None:
    return stored.couplings if isinstance(spec, BlastSpec) else None


def what_became(specs: Iterable[Spec], layers: str = "") -> str:
    """How many layers became what, most of them first; `layers` is what the first are called."""
    (first, count), *others = Counter(_became(spec) for spec in specs).most_common()
    rest = "".join(f", {number} {became}" for became, number in others)
    return f"{count} {layers}{first}{rest}"


def _became(spec: Spec) -> str:
    if isinstance(spec, CorrectedSpec):
        corrected = f"corrected by {spec.correction.structure}{_packed(spec.correction)}"
        return f"stored{_packed(spec.base)}, {corrected}"
    if spec.structure == DENSE:
        return f"stored{_packed(spec)}"
    return f"replaced by {spec.structure}{_packed(spec)}"


def _packed(spec: Spec) -> str:
    return f" in {spec.kind}" if isinstance(spec, QuantizedSpec) else ""
