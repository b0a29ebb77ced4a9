"""What solvers may take of a memory: known without torch, for forecasts."""

SPREAD_BYTES = 1 << 33  # for the products V_lᵀ H_l of which all block rows of BLAST are made
