"""What fits cost, as far as it takes to share them out evenly."""

from __future__ import annotations

from blr.compressor.structures.specs import BlastSpec, Spec

DECOMPOSED = 20.0  # operations of a decomposition for each one of a product of the same matrix
FACTORED = 18.0  # the same of batched factorizations and the solves behind them
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
    return ROUNDS * (weighted + 3.0 * o * i * spec.rank + FACTORED * spec.blocks * spec.rank**3)
