"""The modeling files inside a checkpoint load where `blr` is not installed."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from pico import inputs_for, save_pico
from transformers import AutoModelForCausalLM

import blr.compressor.modeling  # noqa: F401
from blr.compressor.compress import Settings, compress
from blr.compressor.modeling.vendor import vendored_files
from blr.compressor.progress import Progress
from blr.compressor.recipe import make_recipe

# Loads without blr (an import hook refuses it) and prints the logits and a generation.
WITHOUT_BLR = """
import json, sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name == "blr" or name.startswith("blr."):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Refuse())
import torch
from transformers import AutoModelForCausalLM
folder, ids = sys.argv[1], torch.tensor(json.loads(sys.argv[2]))
model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, dtype=torch.float32)
with torch.inference_mode():
    logits = model.eval()(ids).logits
tokens = model.generate(ids[:1], max_new_tokens=8, do_sample=False, eos_token_id=None)
assert not any(name == "blr" or name.startswith("blr.") for name in sys.modules)
print(json.dumps({"logits": logits.tolist(), "tokens": tokens.tolist()}))
"""


@pytest.mark.parametrize("method", ["svd", "monarch", "blast", "ks"])
def test_loads_without_blr_and_agrees(method: str, tmp_path: Path) -> None:
    source, output = save_pico("qwen2", tmp_path / "dense"), tmp_path / "out"
    recipe = make_recipe(method=method, cf=1.5, rounds=1, blocks=None if method == "ks" else 4)
    compress(source, recipe, output, Settings("pico"), Progress(quiet=True))
    model = AutoModelForCausalLM.from_pretrained(output, dtype=torch.float32).eval()
    ids = inputs_for(model)["input_ids"]
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_BLR, str(output), json.dumps(ids.tolist())],
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        timeout=120,
        env={"PATH": "", "HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "1"},
    )
    found = json.loads(done.stdout.splitlines()[-1])
    with torch.inference_mode():
        torch.testing.assert_close(torch.tensor(found["logits"]), model(ids).logits)
    tokens = model.generate(ids[:1], max_new_tokens=8, do_sample=False, eos_token_id=None)
    assert found["tokens"] == tokens.tolist()


def test_files_are_python_that_imports_only_siblings_and_dependencies() -> None:
    files = vendored_files()
    for name, data in files.items():
        for node in ast.walk(ast.parse(data, name)):
            if isinstance(node, ast.ImportFrom) and node.level:
                assert node.level == 1
                assert f"{node.module}.py" in files
            elif isinstance(node, ast.ImportFrom | ast.Import):
                module = getattr(node, "module", None) or node.names[0].name
                top = module.partition(".")[0]
                assert top in {"torch", "transformers"} | sys.stdlib_module_names, (name, module)


def test_files_are_the_same_bytes_for_every_model(tmp_path: Path) -> None:
    for name in ("gpt2", "vit"):
        source, output = save_pico(name, tmp_path / f"{name}-dense"), tmp_path / name
        recipe = make_recipe(method="svd", cf=1.5)
        compress(source, recipe, output, Settings(name), Progress(quiet=True))
        assert {path.name: path.read_bytes() for path in output.glob("*.py")} == vendored_files()
