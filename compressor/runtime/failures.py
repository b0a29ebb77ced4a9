"""What the decoder refuses, each in one line: found, expected, what to do."""

from __future__ import annotations


class DecoderError(ValueError):
    """Base of what the decoder refuses."""


class UnsupportedError(DecoderError):
    """The model, the device or the mode is not one that the decoder runs."""


class ContextError(DecoderError):
    """More tokens than the cache has slots for."""


class BatchError(DecoderError):
    """More rows than the decoder was made for, or rows of a shape it does not take."""


class BusyError(DecoderError):
    """A call from inside another one, whose caches it would overwrite."""
