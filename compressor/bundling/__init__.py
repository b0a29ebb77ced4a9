"""Joins modules of this package into a few readable files that run where it is not installed."""
