"""The published kernels that ours are compared with: they are in scripts/bench, and not installed."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "scripts" / "bench"))  # behind names of the tests' own

from published.ffn import FORMS, Factors, reference
from published.fused_mix import fused_mix
from published.parts import product
from published.staged import staged
from published.transposed import transposed

__all__ = ["FORMS", "Factors", "fused_mix", "product", "reference", "staged", "transposed"]
