"""A compiled forward pass, `model.pt2`, in a process that imports torch alone."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import bare
import pytest
import torch
from exporting import compress_to
from flipping import every_flip_is_found
from pico import MODELS, inputs_for, save_pico
from running import Invoke
from safetensors.torch import load_file, save_file
from transformers import AutoModel

from blr.compressor import register
from blr.compressor.exporting.forward import COMPILERS

register()

# Runs a compiled forward pass with torch alone.
WITH_TORCH = """
import sys, torch
from safetensors.torch import load_file, save_file
run = torch._inductor.aoti_load_package(sys.argv[1])
save_file(run(**load_file(sys.argv[2])), sys.argv[3])
assert not any(name.partition(".")[0] in ("blr", "transformers") for name in sys.modules)
"""


@pytest.mark.skipif(not any(map(shutil.which, COMPILERS)), reason="AOTInductor needs a C++ compiler")
def test_a_compiled_encoder_runs_with_torch_alone(
    tmp_path: Path, invoke: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"method": "blast", "cf": 1.5, "blocks": 4, "rounds": 1}
    monkeypatch.setitem(MODELS["bert"][1], "num_hidden_layers", 1)  # a compilation takes its time
    source = compress_to(save_pico("bert", tmp_path / "dense"), tmp_path / "c", **options)
    code, out, err = invoke("export", source, "-o", tmp_path / "out", "--as=pt2", "--format=json")
    assert code == 0 and json.loads(out)["kind"] == "pt2", err
    every_flip_is_found(tmp_path / "out")
    assert "aoti_load_package" in (tmp_path / "out" / "README.md").read_text()
    model = AutoModel.from_pretrained(source).eval()
    ids = inputs_for(model)["input_ids"][:1, :7]  # other sizes than those that were traced
    inputs = {"input_ids": ids.contiguous(), "attention_mask": torch.ones_like(ids)}
    save_file(inputs, tmp_path / "inputs")
    files = [str(tmp_path / name) for name in ("out/model.pt2", "inputs", "results")]
    done = bare.run(WITH_TORCH, *files)
    assert done.returncode == 0, done.stderr
    found = load_file(tmp_path / "results")
    with torch.inference_mode():
        expected = model(**inputs)
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, expected[name])
