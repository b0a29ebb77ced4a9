"""Weights in few bits: chosen by what the layer's output loses (`gptq`), and trained (`latent`). The
grids are those of `blr.kernels.quantized.reference`."""
