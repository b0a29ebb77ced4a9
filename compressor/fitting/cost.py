"""What fits cost, as far as it takes to share them out evenly."""

from __future__ import annotations

from blr.compressor.structures.specs import BlastSpec, Spec

DECOMPOSED = 20.0  # operations of a decomposition for each one of a product of the same matrix
# Of BLAST's descent, for each operation of a product with the inputs' moments: its other products, and
# batched factorizations with the solves behind them; without moments, and with them, where a GPU solves
# tile by tile (LOG, 2026-11-26: 33.5 ms an evaluation of an 8B's gate, down 73, q 13.9, k 2.5)
PRODUCTS, FACTORED = {False: 3.0, True: 0.7}, {False: 18.0, True: 3.9}
ROUNDS = 100.0  # of BLAST's descent


def predicted_cost(spec: Spec, calibrated: bool = False) -> float:
    """Floating-point operations of one layer's fit, up to a factor that all layers share.

    Args:
        calibrated: in the norm of activations, which BLAST multiplies V with.
    """
    spec = spec.plain
    o, i = spec.out_features, spec.in_features
    if not isinstance(spec, BlastSpec):
        return DECOMPOSED * o * i * min(o, i)
    weighted = i * (i + o + spec.blocks * spec.rank) * spec.rank if calibrated else 0
    products = PRODUCTS[calibrated] * o * i * spec.rank
    return ROUNDS * (weighted + products + FACTORED[calibrated] * spec.blocks * spec.rank**3)
