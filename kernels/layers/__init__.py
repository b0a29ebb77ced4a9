"""Kernels of the structured layers, one folder for each structure."""
