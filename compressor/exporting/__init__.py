"""Folders in kernel layout, quantized where asked for, with the runtime that decodes them."""
