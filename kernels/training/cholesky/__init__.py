"""Batches of symmetric positive definite systems, factored and solved tile by tile."""
