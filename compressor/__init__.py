"""`blr.compressor`: turns Hugging Face checkpoints into structured ones. Importing it loads no torch."""

__version__ = "0.1.0"
