"""Masks that transformers need not be asked about: in one thread, for a time."""

from __future__ import annotations

import threading

import pytest
import torch
from transformers import masking_utils

from blr.compressor.modeling.cuda_graphs import is_full, unmasked, unpacked

pytestmark = pytest.mark.fast
PACKED = torch.tensor([[0, 1, 2, 0, 1]])  # two sequences in a row


def finds_them() -> bool:
    return masking_utils.find_packed_sequence_indices(PACKED) is not None


def test_answers_are_this_threads_and_end() -> None:
    """However two threads leave: with each its own order, neither stays with the other's answer."""
    names = ("find_packed_sequence_indices", "is_tracing")
    native = [getattr(masking_utils, name) for name in names]
    inside, leave, seen = threading.Event(), threading.Event(), []

    def other() -> None:
        with unpacked():
            seen.append(finds_them())
            inside.set()
            leave.wait(10)
            seen.append(finds_them())

    thread = threading.Thread(target=other)
    with unmasked():
        thread.start()
        assert inside.wait(10) and not finds_them() and masking_utils.is_tracing(PACKED) is False
        with unmasked():
            assert not finds_them()
        assert not finds_them()
    assert finds_them(), "this thread asks again while the other does not"
    leave.set()
    thread.join()
    assert seen == [False, False]
    assert [getattr(masking_utils, name) for name in names] == native


def test_masks_that_hide_nothing() -> None:
    full = torch.ones(2, 3, dtype=torch.long)
    assert is_full(full) and is_full(full.bool())
    padded = torch.tensor([[1, 1, 0]])
    assert not any(is_full(mask) for mask in (padded, None, full.float(), full[:, None]))
