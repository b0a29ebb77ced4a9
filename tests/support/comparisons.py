"""What ours is compared with, of scripts/bench, which is not installed: published kernels, patterns."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "scripts" / "bench"))  # behind names of the tests' own

from kronecker import BATCH, LIMIT, Algorithms, grid, largest, sample, stratum
from published.ffn import FORMS, Factors, reference
from published.fused_mix import fused_mix
from published.parts import product
from published.staged import staged
from published.transposed import transposed

PUBLISHED = (FORMS, Factors, fused_mix, product, reference, staged, transposed)
GRID = (BATCH, LIMIT, Algorithms, grid, largest, sample, stratum)
