"""Outputs of the version that carried bundles of its own modules give the same logits: by the files that
they carry, by the package, and by the one file that is carried since.

`tests/data/outputs-0.1.1.tar.xz` holds a pico Llama model in every structure and number format, and
exports of it, with the logits of that version.
"""

from __future__ import annotations

import json
import shutil
import tarfile
from pathlib import Path
from typing import Any

import bare
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from blr.compressor import register
from blr.compressor.base.errors import InputError
from blr.compressor.loading.vendor import code_files

register()

ARCHIVE = Path(__file__).parents[1] / "data" / "outputs-0.1.1.tar.xz"
STRUCTURES = ("svd", "monarch", "blast", "kronecker")
NUMBERS = ("int8", "int4", "int3", "int2", "int2+2", "blast-int4", "fp8")
EXPORTED = ("svd", "blast", "int2+2", "int4", "monarch", "kronecker")
NAMES = (*STRUCTURES, *NUMBERS, *(f"{name}-export" for name in EXPORTED))
GONE = ("pivoted", "pivoted-export")  # read by their own files alone
# Loads folders by their own files where blr cannot be imported; prints how far logits are from theirs.
REMOTE = (
    bare.without("blr")
    + """
import json
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
found = {}
for folder in sys.argv[1:]:
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, dtype=torch.float32)
    told = load_file(f"{folder}/logits.safetensors")
    with torch.no_grad():
        logits = model.eval()(told["input_ids"]).logits
    found[folder] = float((logits - told["logits"]).norm() / told["logits"].norm())
print(json.dumps(found))
"""
)
CLOSE = 1e-5  # relative: kernels for the CPU sum in another order than plain torch


@pytest.fixture(scope="module")
def earlier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("earlier")
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(folder, filter="data")
    return folder


def remote(folders: list[Path], cwd: Path, home: Path) -> dict[str, float]:
    """Relative distances by folder, in a process where blr is missing."""
    environment = {"HF_HOME": str(home), "PATH": "", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = bare.run(REMOTE, *folders, cwd=cwd, env=environment)
    assert done.returncode == 0, done.stderr
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("name", NAMES)
def test_the_package_loads_it(name: str, earlier: Path) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(earlier / name, dtype=torch.float32).eval()
    told = load_file(earlier / name / "logits.safetensors")
    with torch.no_grad():
        found = model(told["input_ids"]).logits
    assert (found - told["logits"]).norm() < CLOSE * told["logits"].norm()


@pytest.mark.parametrize("name", GONE)
def test_pivot_rows_are_refused_with_a_way_on(name: str, earlier: Path) -> None:
    with pytest.raises(InputError, match=r"pivot rows.*trust_remote_code=True.*--method svd"):
        AutoModelForCausalLM.from_pretrained(earlier / name)


def test_its_own_files_load_it_where_blr_is_missing(earlier: Path, tmp_path: Path) -> None:
    found = remote([earlier / name for name in (*NAMES, *GONE)], earlier, tmp_path)
    assert {name: far for name, far in found.items() if far > CLOSE} == {}


def test_the_file_that_is_carried_since_reads_the_same_tensors(earlier: Path, tmp_path: Path) -> None:
    for name in NAMES:
        folder = shutil.copytree(earlier / name, tmp_path / name)
        for path in folder.glob("*.py"):
            path.unlink()
        for file, data in code_files().items():
            (folder / file).write_bytes(data)
        config = json.loads((folder / "config.json").read_bytes())
        classes = {auto: cls.rpartition(".")[2] for auto, cls in config["auto_map"].items()}
        config["auto_map"] = {auto: f"modeling_blr.{cls}" for auto, cls in classes.items()}
        (folder / "config.json").write_text(json.dumps(config))
    found = remote([tmp_path / name for name in NAMES], tmp_path, tmp_path / "home")
    assert {name: far for name, far in found.items() if far > CLOSE} == {}
