"""Calibration: what a layer's inputs look like and what its outputs matter, from sample text."""
