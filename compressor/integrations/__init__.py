"""Structured layers inside servers: how factors are split over processes, and vLLM's plugin."""
