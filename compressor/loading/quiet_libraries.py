"""Keeps transformers' bars and advice off the streams while `blr` tries something with it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from io import StringIO

from transformers.utils import logging


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """No output of transformers but errors."""
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with redirect_stdout(StringIO()):
            yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
