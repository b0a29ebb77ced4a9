"""A model is computed with in half precision where it runs in that."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from pico import save_pico

from blr.compressor.base.errors import CapabilityError
from blr.compressor.loading.load import GENERATES, load_computing

CPU = torch.device("cpu")


def failing(words: str) -> Any:
    """A forward pass of Llama that does not run in half precision, and says so."""
    run = transformers.LlamaModel.forward

    def forward(self: Any, *given: Any, **named: Any) -> Any:
        if self.dtype == torch.bfloat16:
            raise RuntimeError(words)
        return run(self, *given, **named)

    return forward


def test_in_float32_where_it_does_not_run_in_half(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_pico("llama", tmp_path)
    assert load_computing(tmp_path, GENERATES, CPU, "bfloat16").dtype == torch.bfloat16
    assert load_computing(tmp_path, GENERATES, CPU).dtype == torch.float32
    monkeypatch.setattr(
        transformers.LlamaModel, "forward", failing("expected scalar type Float but found BFloat16")
    )
    assert load_computing(tmp_path, GENERATES, CPU, "bfloat16").dtype == torch.float32


def test_want_of_memory_is_no_dtype(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_pico("llama", tmp_path)
    monkeypatch.setattr(transformers.LlamaModel, "forward", failing("not enough memory"))
    with pytest.raises(CapabilityError, match="too little memory"):
        load_computing(tmp_path, GENERATES, CPU, "bfloat16")
