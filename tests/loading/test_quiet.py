"""What transformers has to say of a checkpoint is said in one line of ours."""

from __future__ import annotations

import logging
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import transformers
from pico import save_pico
from safetensors.torch import load_file, save_file

from blr.compressor.base.errors import InputError
from blr.compressor.loading.load import load_model


@pytest.mark.parametrize("spoil", ["missing", "unexpected", "mismatched"])
def test_no_report_of_its_own(spoil: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, name = save_pico("llama", tmp_path / "model"), "model.layers.1.mlp.up_proj.weight"
    tensors = load_file(folder / "model.safetensors")
    if spoil == "unexpected":
        tensors["model.layers.1.mlp.side_proj.weight"] = torch.ones(4, 4)
    elif spoil == "missing":
        del tensors[name]
    else:
        tensors[name] = tensors[name][:-1].clone()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    said: list[logging.LogRecord] = []
    handler = logging.Handler()
    monkeypatch.setattr(handler, "emit", said.append)
    logging.getLogger("transformers").addHandler(handler)
    transformers.logging.set_verbosity_warning()  # as in a process of its own
    try:
        left = spoil == "unexpected"  # out, as transformers does
        refused = nullcontext() if left else pytest.raises(InputError, match=r"layers\.1\.mlp")
        with refused:
            load_model(folder, "AutoModelForCausalLM", dtype="float32", device="cpu")
    finally:
        transformers.logging.set_verbosity_error()
        logging.getLogger("transformers").removeHandler(handler)
    assert not said
