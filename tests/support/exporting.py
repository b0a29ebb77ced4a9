"""Compresses and exports in this process."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import bare

from blr.compressor.base.progress import Progress
from blr.compressor.commands.compress import Settings, compress
from blr.compressor.exporting.job import export
from blr.compressor.exporting.options import ExportOptions
from blr.compressor.recipe.schema import make_recipe
from blr.compressor.structures.specs import Spec
from blr.kernels.common.orders import Order, order_of

# Loads exports where blr cannot be imported and prints the tokens that each generates;
# arguments: the prompt's tokens as JSON, then folders.
WITHOUT_BLR = (
    bare.without("blr")
    + """
import json
import torch
from transformers import AutoModelForCausalLM
found, ids = {}, torch.tensor([json.loads(sys.argv[1])])
for folder in sys.argv[2:]:
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, dtype=torch.float32)
    new = model.generate(ids, max_new_tokens=24, do_sample=False, eos_token_id=None)
    found[folder] = new[0].tolist()
assert not any(name == "blr" or name.startswith("blr.") for name in sys.modules)
print(json.dumps(found))
"""
)


def orders(spec: Spec) -> dict[str, Order]:
    """The order of every factor's axes in kernel layout, as ``{"U": (0, 1), "V": (1, 0)}``."""
    return {name: order_of(name, len(shape)) for name, shape in spec.shapes().items()}


def stored_name(factor: str) -> str:
    """What an export calls a factor in kernel layout: ``V_kernel``, ``factors_kernel.0``."""
    stem, dot, index = factor.partition(".")
    return f"{stem}_kernel{dot}{index}"


def compress_to(source: Path, output: Path, *, check: bool = False, **settings: object) -> Path:
    """`source` compressed, whatever it loses, which `check` measures; returns `output`."""
    given = Settings(source.name, force=True, check=check)
    compress(source, make_recipe(**settings), output, given, Progress(quiet=True))
    return output


def tokens_without_blr(
    folders: dict[str, Path], tokens: list[int], scratch: Path
) -> dict[str, list[int]]:
    """What copies of exports generate after `tokens` in a process that cannot import `blr`, by name."""
    scratch.mkdir()
    copies = {n: shutil.copytree(folder, scratch / n / "here") for n, folder in folders.items()}
    environment = {"PATH": "", "HF_HOME": str(scratch / "hf"), "HF_HUB_OFFLINE": "1"}
    environment["OMP_NUM_THREADS"] = os.environ["OMP_NUM_THREADS"]
    done = bare.run(WITHOUT_BLR, json.dumps(tokens), *copies.values(), cwd=scratch, env=environment)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    return {name: found[str(copy)] for name, copy in copies.items()}


def export_to(source: Path, output: Path, *, check: bool = False, **options: object) -> Path:
    """`source` exported, and compared with it by `check`; returns `output`."""
    export(source, output, ExportOptions(source.name, check=check, **options), Progress(quiet=True))
    return output


def plain_layers(folder: Path) -> list[str]:
    """The structured modules that an export leaves as they are: packed they would not be smaller."""
    return json.loads((folder / "config.json").read_bytes())["blr"]["export"].get("plain", [])
