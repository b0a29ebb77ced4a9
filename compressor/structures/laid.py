"""The sizes of a layer on a GPU, by which kernels and their tables know it."""

from __future__ import annotations

from blr.compressor.structures.spec import Spec
from blr.kernels.common.layout import wide_rank
from blr.kernels.common.tables import Shape


def laid_rank(spec: Spec) -> int:
    """The rank with the zeros behind it, as kernels see it; 0 where there is no rank."""
    rank = int(getattr(spec, "rank", 0))
    whole = spec.structure in ("svd", "blast") and getattr(spec, "groups", 1) == 1
    return wide_rank(rank) if whole else rank


def laid_shape(spec: Spec) -> Shape:
    """The sizes by which a table is asked. The blocks of a Kronecker-sparse layer are its factors."""
    blocks = len(getattr(spec, "patterns", ())) or getattr(spec, "blocks", 1)
    return Shape(spec.in_features, spec.out_features, blocks, laid_rank(spec))
