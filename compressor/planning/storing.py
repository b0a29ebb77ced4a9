"""In how many bits planned layers are stored: from a structure and its settings to what a file holds."""

from __future__ import annotations

from blr.compressor.recipe.schema import DENSE, Recipe, StoredAs
from blr.compressor.structures.specs import BlastSpec, CorrectedSpec, DenseSpec, QuantizedSpec, Spec
from blr.kernels.quantized.formats import GROUPS


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


def what_becomes(recipe: Recipe) -> str:
    """What a recipe makes of most layers, in words that follow "layers"."""
    settings = recipe.own()
    packed = f" in {settings.stored.kind}" if settings.stored.bits else ""
    if settings.method == DENSE:
        return f"stored{packed}" if packed else "replaced as the rules say"
    if settings.stored.base:
        return f"stored in int{settings.stored.base}, corrected by {settings.method}{packed}"
    return f"replaced by {settings.method}{packed}"
