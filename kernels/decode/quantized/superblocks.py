"""What scales K-quants of llama.cpp hold. No torch."""

# Scales that K-quants of llama.cpp hold: in groups of 32, the scales of 8 groups are whole multiples of
# one unit. By bits: the largest multiple, and the significant bits of a unit, so that bfloat16 holds the
# products.
SUPERBLOCK, K_GROUP, K_QUANTS = 8, 32, {"q2_k": 2, "q3_k": 3}
MULTIPLES = {2: (15, 4), 3: (31, 3)}
