"""Decoding: a model as phases, bound to memory and kernels, replayed a token at a time."""
