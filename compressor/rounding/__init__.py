"""Weights on a grid: which levels (`grid`), which of them (`gptq`), beside what correction
(`correction`), and how they are trained (`latent`)."""
