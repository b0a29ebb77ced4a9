"""What a killed run has kept is not taken for other weights, of whichever tensors they are."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from heal_models import QUIET, save_dense, write_text
from safetensors.torch import load_file, save_file

from blr.compressor.commands.compress import Settings, compress
from blr.compressor.output import files as produce
from blr.compressor.recipe.schema import Recipe

RECIPE = Recipe(method="svd", cf=1.5, seq_len=16, samples=8)


def run(source: Path, output: Path) -> dict[str, torch.Tensor]:
    text = str(source / "text.txt")
    compress(source, RECIPE, output, Settings("dense", calibration=text, device="cpu"), QUIET)
    return load_file(output / "model.safetensors")


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("changed", ["embed_tokens", "norm", "gate_proj"])
def test_a_resumed_run_is_a_fresh_one(
    changed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = save_dense(tmp_path / "dense", "llama")
    write_text(source / "text.txt")
    with monkeypatch.context() as patched:
        patched.setattr(produce, "write_whole", interrupt)
        with pytest.raises(KeyboardInterrupt):
            run(source, tmp_path / "out")
    path = source / "model.safetensors"
    torch.manual_seed(0)
    tensors = load_file(path)
    for name in [name for name in tensors if changed in name]:
        tensors[name] *= 1 + 0.5 * torch.randn_like(tensors[name])
    save_file(tensors, path, {"format": "pt"})
    resumed, fresh = run(source, tmp_path / "out"), run(source, tmp_path / "fresh")
    assert resumed.keys() == fresh.keys()
    assert all(torch.equal(resumed[name], tensor) for name, tensor in fresh.items())
