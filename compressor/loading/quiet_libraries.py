"""Keeps the bars and the advice of libraries off the streams while `blr` tries something with them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, redirect_stdout
from io import StringIO
from typing import Any

from transformers.utils import logging


def quiet_transformers() -> AbstractContextManager[None]:
    """Silence transformers but for errors."""
    return _quiet(logging)


def quiet_diffusers() -> AbstractContextManager[None]:
    """Silence diffusers but for errors."""
    from diffusers.utils import logging as its

    return _quiet(its)


@contextmanager
def _quiet(logging: Any) -> Iterator[None]:
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
