"""Keeps the bars and the advice of libraries off the streams while `blr` tries something with them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, redirect_stdout
from io import StringIO
from typing import Any

from transformers.utils import logging


def quiet_transformers() -> AbstractContextManager[None]:
    """No output of transformers but errors."""
    return _quiet(logging)


def quiet_diffusers() -> AbstractContextManager[None]:
    """No output of diffusers but errors."""
    from diffusers.utils import logging as its

    return _quiet(its)


@contextmanager
def _quiet(logging: Any) -> Iterator[None]:
    """`logging`: of the library."""
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
