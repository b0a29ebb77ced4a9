"""Kernels that fitting and healing use."""
