"""The Python files inside a folder load where `blr` is not installed."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bare
import pytest
import torch
from patience import PATIENCE
from pico import MODELS, save_model, save_pico
from transformers import AutoModelForCausalLM

from blr.compressor import register
from blr.compressor.base.progress import Progress
from blr.compressor.bundling.bundle import BundleError, bound_names
from blr.compressor.commands.compress import Settings, compress
from blr.compressor.loading.vendor import (
    ROOTS,
    code_files,
    diffusion_files,
    left_out,
    read_modules,
    runtime_files,
)
from blr.compressor.modeling import modeling_blr
from blr.compressor.recipe.schema import make_recipe
from blr.compressor.structures.specs import SPECS

register()

# Loads checkpoints one after the other without blr; prints the logits and a generation of each. A trace
# of each holds plain torch alone.
WITHOUT_BLR = """
import json, sys, torch
from transformers import AutoModelForCausalLM
class Logits(torch.nn.Module):
    def forward(self, ids):
        return self.model(ids, use_cache=False).logits
folders, ids, function = sys.argv[2:], torch.tensor(json.loads(sys.argv[1])), Logits()
found = {}
for folder in folders:
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, dtype=torch.float32)
    with torch.inference_mode():
        logits = model.eval()(ids).logits
    function.model = model
    traced = torch.jit.trace(function, ids[:, :5], check_trace=False)
    assert "blr::" not in str(traced.inlined_graph)
    torch.testing.assert_close(traced(ids), logits)
    tokens = model.generate(ids[:1], max_new_tokens=2, do_sample=False, eos_token_id=None)
    found[folder] = {"logits": logits.tolist(), "tokens": tokens.tolist()}
assert not any(name == "blr" or name.startswith("blr.") for name in sys.modules)
print(json.dumps(found))
"""
# Imports every module of a folder of copied files.
IMPORT_ALL = """
import importlib, sys
sys.path.insert(0, sys.argv[1])
for name in sys.argv[2:]:
    importlib.import_module("flat." + name)
"""
SUPPORT = Path(bare.__file__).parent
IDS = torch.arange(2, 26).view(2, 12)
EVERYTHING = left_out(SPECS, quantized=True, rows=16, drafted=True, experts=True)
Made = Callable[[], dict[str, bytes]]
FILES: dict[str, Made] = {
    "checkpoint": code_files,
    "diffusion": diffusion_files,
    "export": lambda: runtime_files(EVERYTHING),
}
each_kind = pytest.mark.parametrize("made", FILES.values(), ids=FILES)
METHODS = ["svd", "monarch", "blast", "ks"]


def run_python(code: str, *arguments: str, **settings: str) -> subprocess.CompletedProcess[str]:
    settings |= {"PATH": "", "PYTHONPATH": str(SUPPORT), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=PATIENCE,
        env=settings,
    )


def ruff(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ruff", arguments[0], "--isolated", *arguments[1:]]
    return subprocess.run(list(map(str, command)), capture_output=True, text=True)


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A compressed pico model of one layer by every method."""
    folder = tmp_path_factory.mktemp("outputs")
    config, settings, model = MODELS["qwen2"]
    source = folder / "dense"
    save_model(config, {**settings, "num_hidden_layers": 1}, model, source)
    for method in METHODS:
        recipe = make_recipe(method=method, cf=1.5, rounds=1, blocks=None if method == "ks" else 4)
        compress(source, recipe, folder / method, Settings("pico", check=False), Progress(quiet=True))
    return {method: folder / method for method in METHODS}


@pytest.fixture(scope="module")
def loaded(outputs: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What all outputs give in one process: each brings its own copy of the code, which must not disturb
    the others."""
    ids, home = json.dumps(IDS.tolist()), str(tmp_path_factory.mktemp("home"))
    code = bare.without("blr", "triton") + WITHOUT_BLR
    done = run_python(code, ids, *map(str, outputs.values()), HF_HOME=home)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("method", METHODS)
def test_loads_without_blr_and_agrees(
    method: str, outputs: dict[str, Path], loaded: dict[str, Any]
) -> None:
    found = loaded[str(outputs[method])]
    model = AutoModelForCausalLM.from_pretrained(outputs[method], dtype=torch.float32).eval()
    with torch.inference_mode():
        torch.testing.assert_close(torch.tensor(found["logits"]), model(IDS).logits)
    tokens = model.generate(IDS[:1], max_new_tokens=2, do_sample=False, eos_token_id=None)
    assert found["tokens"] == tokens.tolist()


@each_kind
def test_files_are_python_that_imports_only_siblings_and_dependencies(
    made: Made,
) -> None:
    """Triton is optional: imported in `try` alone, where transformers does not insist on it."""
    files = made()
    for name, data in files.items():
        tree = ast.parse(data, name)
        tried = {id(n) for t in ast.walk(tree) if isinstance(t, ast.Try) for n in ast.walk(t)}
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.level:
                assert node.level == 1
                assert f"{node.module}.py" in files
            elif isinstance(node, ast.ImportFrom | ast.Import):
                module = getattr(node, "module", None) or node.names[0].name
                top = module.partition(".")[0]
                known = {"torch", "transformers", "diffusers"} | (
                    {"triton"} if id(node) in tried else set()
                )
                assert top in known | sys.stdlib_module_names, (name, module)


@each_kind
def test_every_file_can_be_imported_from_its_folder(made: Made, tmp_path: Path) -> None:
    """Names that files import from each other at their top exist."""
    pytest.importorskip("triton")
    (tmp_path / "flat").mkdir()
    for name, data in made().items():
        (tmp_path / "flat" / name).write_bytes(data)
    modules = [name.removesuffix(".py") for name in made()]
    done = bare.run(bare.without("blr") + IMPORT_ALL, tmp_path, *modules)
    assert done.returncode == 0, done.stderr


@each_kind
def test_every_name_is_defined(made: Made, tmp_path: Path) -> None:
    """In functions too, which no import runs; and what they import from other files is there."""
    trees = {name: ast.parse(data) for name, data in made().items()}
    defined = {
        name: {n for node in tree.body for n in bound_names(node)} for name, tree in trees.items()
    }
    for name, tree in trees.items():
        (tmp_path / name).write_text(ast.unparse(tree))
        siblings = [n for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and n.level]
        for node in siblings:
            asked = {alias.name for alias in node.names}
            assert asked <= defined[f"{node.module}.py"], (name, node.module)
    found = ruff("check", "--select", "F811,F82,E9", "--output-format", "json", tmp_path)
    assert [row["message"] for row in json.loads(found.stdout)] == []


def test_a_linter_leaves_the_files_of_an_export_alone(tmp_path: Path) -> None:
    """With every rule there is but that against leaving files alone, and as a formatter."""
    for name, data in runtime_files(EVERYTHING).items():
        if name not in code_files():
            (tmp_path / name).write_bytes(data)
    for command in (["check", "--select", "ALL", "--ignore", "PGH004"], ["format", "--check"]):
        done = ruff(*command, "--quiet", tmp_path)
        assert (done.returncode, done.stdout) == (0, ""), done.stderr


# What an export leaves out -> its files, kernels that are and are not in them.
EXPORTS: dict[str, tuple[frozenset[str], int, set[str], set[str]]] = {
    "everything": (
        EVERYTHING,
        4,
        {"decode.skinny.triton", "decode.integer.rows"},
        {"training.cholesky_triton"},
    ),
    "blast": (
        *(left_out({"blast"}), 4, {"decode.gemv.triton", "decode.attention.triton"}),
        {"decode.quantized.triton", "decode.skinny.triton"},
    ),
    "int4": (
        *(left_out({"dense"}, True), 4, {"decode.quantized.triton", "decode.integer.rows"}),
        {"decode.skinny.triton"},
    ),
    "int4-batch": (
        *(left_out({"dense"}, True, rows=4), 4, {"decode.skinny.triton"}),
        {"decode.skinny.mix", "layers.packed.prepare", "layers.routing.triton"},
    ),
    "mixture": (
        *(left_out({"dense"}, experts=True), 4, {"layers.routing.triton"}),
        {"decode.quantized.launch"},
    ),
    "encoder": (left_out({"svd"}, rows=0), 2, set(), {"decode.gemv.triton"}),
}
USUAL = {"svd": left_out({"svd"}), "blast": EXPORTS["blast"][0], "int4": EXPORTS["int4"][0]}
USUAL["int4-batch"] = EXPORTS["int4-batch"][0]


@pytest.mark.parametrize(("needless", "count", "there", "absent"), EXPORTS.values(), ids=EXPORTS)
def test_a_self_contained_export_carries_only_the_kernels_it_runs(
    needless: frozenset[str], count: int, there: set[str], absent: set[str]
) -> None:
    files = runtime_files(needless)
    assert len(files) == count
    text = files.get("kernels_blr.py", b"").decode()
    held = set(re.findall(r"^# =+ blr\.kernels\.(\S+)$", text, re.MULTILINE))
    assert there <= held and not absent & held


@pytest.mark.parametrize("name", USUAL)
def test_a_usual_self_contained_export_has_at_most_8000_lines(name: str) -> None:
    assert sum(data.count(b"\n") for data in runtime_files(USUAL[name]).values()) <= 8000


def test_a_checkpoint_has_one_file_that_a_person_can_read() -> None:
    (data,) = code_files().values()
    assert data == Path(modeling_blr.__file__).read_bytes()
    assert data.count(b"\n") <= 900
    assert sorted(diffusion_files()) == ["diffusion_blr.py", "modeling_blr.py"]
    assert runtime_files(EVERYTHING)["modeling_blr.py"] == data


@pytest.mark.parametrize("absent", ["blr.compressor.modeling.settings", "blr.compressor.modeling"])
def test_what_is_needed_at_the_top_cannot_be_left_out(absent: str) -> None:
    with pytest.raises(BundleError, match="at its top, which is to be left out"):
        read_modules(ROOTS.values(), frozenset({absent}))


def test_files_are_the_same_bytes_for_every_model(tmp_path: Path) -> None:
    for name in ("gpt2", "vit"):
        source, output = save_pico(name, tmp_path / f"{name}-dense"), tmp_path / name
        recipe = make_recipe(method="svd", cf=1.5)
        compress(source, recipe, output, Settings(name, check=False), Progress(quiet=True))
        assert {path.name: path.read_bytes() for path in output.glob("*.py")} == code_files()
