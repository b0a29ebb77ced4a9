"""What is silenced for a while speaks again as before."""

from __future__ import annotations

import pytest
from transformers.utils import logging

from blr.compressor.loading.quiet import quiet_transformers


@pytest.mark.parametrize("bars", [True, False])
def test_bars_are_as_before(bars: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging, "_tqdm_active", bars)
    with quiet_transformers():
        assert not logging.is_progress_bar_enabled()
    assert logging.is_progress_bar_enabled() == bars
