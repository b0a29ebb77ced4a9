"""Outputs of the version before its rooms were built load, verify and export, with the same logits.

`tests/data/outputs-0.1.0.tar.xz` holds a pico Llama model compressed in every structure and exported,
as that version wrote them: some 45 Python files each, manifests of format 1.
"""

from __future__ import annotations

import json
import os
import tarfile
from pathlib import Path
from typing import Any

import bare
import pytest
import torch
from running import Run
from transformers import AutoModelForCausalLM

from blr.compressor import register

register()

COMPRESSED = ("svd", "monarch", "blast", "ks")
EXPORTED = ("export", "export-int8")
REMOTE = """
import json, sys, torch
from transformers import AutoModelForCausalLM
found = {}
for folder in sys.argv[1:]:
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, dtype=torch.float32)
    with torch.no_grad():
        found[folder] = model.eval()(torch.arange(1, 13)[None]).logits[0, -1, :6].tolist()
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def earlier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("earlier")
    with tarfile.open(Path(__file__).parents[1] / "data" / "outputs-0.1.0.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    return folder


@pytest.fixture(scope="module")
def logits(earlier: Path) -> dict[str, list[float]]:
    return json.loads((earlier / "logits.json").read_text())


def answer(folder: Path, **options: Any) -> list[float]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options).eval()
    with torch.no_grad():
        return model(torch.arange(1, 13)[None]).logits[0, -1, :6].tolist()


@pytest.mark.parametrize("name", [*COMPRESSED, *EXPORTED])
def test_verifies(name: str, earlier: Path, blr: Run) -> None:
    done = blr("verify", earlier / name)
    assert done.returncode == 0, done.stderr
    assert "files match the manifest" in done.stdout


@pytest.mark.parametrize("name", COMPRESSED)
def test_loads_with_blr_and_is_inspected(
    name: str, earlier: Path, logits: dict[str, list[float]], blr: Run
) -> None:
    assert answer(earlier / name) == pytest.approx(logits[name], abs=1e-4)
    assert f" {name} " in blr("inspect", earlier / name).stdout


def test_loads_without_blr_by_the_files_it_carries(
    earlier: Path, logits: dict[str, list[float]], tmp_path: Path
) -> None:
    environment = {"HF_HOME": str(tmp_path), "PATH": "", "HF_HUB_OFFLINE": "1"}
    environment["OMP_NUM_THREADS"] = os.environ["OMP_NUM_THREADS"]
    code = bare.without("blr") + REMOTE
    done = bare.run(code, *COMPRESSED, *EXPORTED, cwd=earlier, env=environment)
    assert done.returncode == 0, done.stderr
    for name, found in json.loads(done.stdout.splitlines()[-1]).items():
        assert found == pytest.approx(logits[name], abs=1e-4), name


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", COMPRESSED)
def test_exports(
    name: str, earlier: Path, logits: dict[str, list[float]], tmp_path: Path, blr: Run
) -> None:
    done = blr("export", earlier / name, "-o", tmp_path / "out", "--context", 64)
    assert done.returncode == 0, done.stderr
    assert blr("verify", tmp_path / "out").returncode == 0
    assert answer(tmp_path / "out", trust_remote_code=True) == pytest.approx(logits[name], abs=1e-4)
