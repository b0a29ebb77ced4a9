"""Kernels for few tokens: plain, packed and tensor-core products, attention over a cache."""
