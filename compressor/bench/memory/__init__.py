"""`blr bench memory`: what a forward pass takes beside the weights, dense, low-rank and bounded."""
