"""`blr export`: what is written, what reads it, and what is refused."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
import transformers
from exporting import compress_to, export_to, orders, stored_name, tokens_without_blr
from killer import Killer
from pico import inputs_for, save_pico
from running import Invoke
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.dynamic_module_utils import get_imports, get_relative_imports

from blr.compressor import __version__, register
from blr.compressor.base.errors import NumericsError
from blr.compressor.exporting import origin as checkpoint
from blr.compressor.loading.vendor import code_files, left_out, runtime_files
from blr.compressor.modeling import modeling_blr
from blr.compressor.modeling.modeling_blr import LAYOUT
from blr.compressor.structures.specs import SPECS, spec_from_dict
from blr.compressor.workspace.manifest import MANIFEST, read_manifest, verify_files
from blr.compressor.workspace.workspace import Workspace

register()

WEIGHTS = "model.safetensors"
STRUCTURES = ["svd", "monarch", "blast", "ks"]
PROMPT = list(range(40, 60))
NEW_TOKENS = 24


def greedy(folder: Path) -> list[int]:
    """What the checkpoint in `folder` generates after `PROMPT`, by transformers."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    arguments = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "eos_token_id": None}
    return model.generate(torch.tensor([PROMPT]), **arguments)[0].tolist()


def refused(outcome: tuple[int, str, str], code: int, *fragments: str) -> None:
    """The exit code, one line on standard error with every fragment, nothing on standard output."""
    assert outcome[0] == code, outcome
    assert outcome[1] == "" and outcome[2].count("\n") == 1, outcome
    assert all(fragment in outcome[2] for fragment in fragments), outcome[2]


def test_copied_elsewhere_and_without_blr_the_tokens_are_those_of_the_source(
    sources: dict[str, Path], exports: dict[str, Path], tmp_path: Path
) -> None:
    packed = export_to(sources["blast"], tmp_path / "packed", quantize="int4")
    own = export_to(sources["svd"], tmp_path / "own", self_contained=True)
    assert {path.name for path in own.glob("*.py")} > {"modeling_blr.py", "runtime_blr.py"}
    expected = {name: greedy(source) for name, source in sources.items()}
    expected |= {"packed": greedy(packed), "own": expected["svd"]}
    folders = {**exports, "packed": packed, "own": own}
    assert tokens_without_blr(folders, PROMPT, tmp_path / "elsewhere") == expected


@pytest.mark.parametrize("name", ["dense", *STRUCTURES])
def test_tensors_are_those_of_the_source_in_another_order(
    name: str, sources: dict[str, Path], exports: dict[str, Path]
) -> None:
    stored, expected = (load_file(folder[name] / WEIGHTS) for folder in (exports, sources))
    config = json.loads((exports[name] / "config.json").read_bytes())
    assert len(config["blr"]["layers"]) == (0 if name == "dense" else 28)
    for module, fields in config["blr"]["layers"].items():
        for factor, order in orders(spec_from_dict(fields)).items():
            physical = expected.pop(f"{module}.{factor}").permute(order)
            assert stored.pop(f"{module}.{stored_name(factor)}").equal(physical)
    assert stored.keys() == expected.keys()
    assert all(tensor.equal(expected[key]) for key, tensor in stored.items())


def test_settings_and_files_of_an_export(exports: dict[str, Path], sources: dict[str, Path]) -> None:
    folder = exports["svd"]
    config = json.loads((folder / "config.json").read_bytes())
    assert config["blr"]["export"] == {
        **{"layout": LAYOUT, "gpu": "h200", "batch": 2, "context": 128, "cache": "whole"},
        "blr_version": __version__,
    }
    assert config["auto_map"]["AutoModelForCausalLM"] == "modeling_blr.BlrLlamaForCausalLM"
    files = {path.name: path.read_bytes() for path in folder.glob("*.py")}
    assert files == code_files()
    for name in ("tokenizer.json", "generation_config.json", "recipe.yaml", "blr_layers.json"):
        assert (folder / name).read_bytes() == (sources["svd"] / name).read_bytes()
    card = (folder / "README.md").read_text()
    front, _, compressed = (sources["svd"] / "README.md").read_text().partition("\n# ")
    assert card.startswith(f"{front}\n# ") and card.count("from_pretrained") == 3
    assert f"\n## {compressed.splitlines()[0]}" in card
    assert "contexts up to 128 tokens" in card


@pytest.mark.parametrize("name", ["dense", "blast"])
def test_the_other_commands_take_an_export(
    name: str, sources: dict[str, Path], exports: dict[str, Path], sample: Path, invoke: Invoke
) -> None:
    assert invoke("verify", exports[name])[0] == 0
    options = ("--text", sample, "--max-tokens", "512", "--window", "128", "--format", "json")
    found, expected = (json.loads(invoke("eval", f[name], *options)[1]) for f in (exports, sources))
    assert found["tokens"] == expected["tokens"]
    assert found["perplexity"] == pytest.approx(expected["perplexity"], rel=1e-4)
    options = ("The protocol", "--max-new-tokens", "8", "--format", "json")
    found, expected = (json.loads(invoke("generate", f[name], *options)[1]) for f in (exports, sources))
    assert found["text"] == expected["text"]
    if name != "dense":
        found, expected = (json.loads(invoke("inspect", f[name], "--format=json")[1])["layers"]
                           for f in (exports, sources))  # fmt: skip
        assert found == expected and len(found) == 28


def test_command_prints_json_or_text(sources: dict[str, Path], tmp_path: Path, invoke: Invoke) -> None:
    arguments = ("export", sources["svd"], "--quiet", "-o")
    code, out, err = invoke(*arguments, tmp_path / "a", "--as", "folder", "--format", "json")
    found = json.loads(out)
    assert (code, err, found["layers"], found["context"]) == (0, "", 28, 1024)
    assert found["bytes_after"] == found["bytes_before"]
    code, out, err = invoke(*arguments, tmp_path / "b", "--gpu", "A100", "--batch", 4)
    assert code == 0 and "for:        a100, batch 4, context 1024 tokens" in out
    listed = [read_manifest(tmp_path / name)["files"] for name in "ab"]
    assert listed[0][WEIGHTS] == listed[1][WEIGHTS]
    assert verify_files(tmp_path / "a", read_manifest(tmp_path / "a")) == []


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_dtype_casts_every_tensor(dtype: str, sources: dict[str, Path], tmp_path: Path) -> None:
    folder = export_to(sources["blast"], tmp_path / "out", dtype=dtype, max_shard_size=1_000_000)
    shards = [load_file(path) for path in folder.glob("*.safetensors")]
    assert len(shards) > 2
    assert {t.dtype for shard in shards for t in shard.values()} == {getattr(torch, dtype)}
    assert json.loads((folder / "config.json").read_bytes())["dtype"] == dtype
    assert AutoModelForCausalLM.from_pretrained(folder, dtype="auto").dtype == getattr(torch, dtype)


def test_a_value_that_the_dtype_does_not_hold_is_an_error(tiny: Path, tmp_path: Path) -> None:
    source = shutil.copytree(tiny, tmp_path / "source")
    tensors = load_file(source / WEIGHTS)
    tensors["model.norm.weight"][:3] = 1e6
    save_file(tensors, source / WEIGHTS)
    with pytest.raises(NumericsError, match=r"3 values of 'model\.norm\.weight'"):
        export_to(source, tmp_path / "out", dtype="float16")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "code", "fragments"),
    [
        (["--context", "1025"], 9, ["--context 1025", "1024 positions"]),
        (["--context", "0"], 2, ["--context 0"]),
        (["--batch", "0"], 2, ["--batch 0", "1 to 16"]),
        (["--batch", "17"], 9, ["--batch 17", "1 to 16"]),
        (["--gpu", "abacus"], 2, ["abacus", "h200"]),
        (["--dtype", "int3"], 2, ["int3", "bfloat16"]),
        (["--quantize", "int3"], 2, ["int3", "int8, int4"]),
        (["--format", "folder"], 2, ["folder"]),
        (["--as", "gguf"], 2, ["gguf"]),
        (["--as", "dense", "--context", "8"], 2, ["--context 8", "--as dense has no use"]),
        (["--as", "dense", "--batch", "2"], 2, ["--batch 2", "--as dense has no use"]),
        (["--as", "dense", "--quantize", "int4"], 2, ["--quantize int4", "--as dense has no use"]),
        (["--as", "onnx", "--quantize-head", "int8"], 2, ["--as onnx has no use"]),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, list) else None,
)
def test_bad_options_get_one_line_and_write_nothing(
    arguments: list[str],
    code: int,
    fragments: list[str],
    tiny: Path,
    tmp_path: Path,
    invoke: Invoke,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    refused(invoke("export", tiny, "-o", "out", *arguments), code, *fragments)
    assert list(tmp_path.iterdir()) == []


def test_what_is_not_installed_is_named_with_its_remedy(
    tiny: Path, tmp_path: Path, invoke: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("blr.compressor.exporting.options.GRAPH_WRITERS", ("no_onnx", "no_onnxscript"))
    outcome = invoke("export", tiny, "-o", tmp_path / "out", "--as", "onnx")
    refused(
        outcome, 9, "no_onnx and no_onnxscript are not installed", "pip install 'blr-compress[onnx]'"
    )
    assert list(tmp_path.iterdir()) == []


def test_an_export_is_not_exported_again(
    exports: dict[str, Path], tmp_path: Path, invoke: Invoke
) -> None:
    for name in ("dense", "svd"):
        refused(invoke("export", exports[name], "-o", tmp_path / "out"), 4, "an export already")
    refused(invoke("compress", exports["dense"], "-o", tmp_path / "out"), 4, "already compressed")


def test_damaged_and_foreign_checkpoints(
    sources: dict[str, Path], tmp_path: Path, invoke: Invoke
) -> None:
    """Each change of a compressed checkpoint is named in one line."""
    config = json.loads((sources["svd"] / "config.json").read_bytes())
    module = next(iter(config["blr"]["layers"]))

    def changed(name: str, **entries: object) -> Path:
        copy = shutil.copytree(sources["svd"], tmp_path / name)
        (copy / "config.json").write_text(json.dumps({**config, **entries}))
        (copy / MANIFEST).unlink()  # which would tell that it changed, and no more
        return copy

    layers = dict(config["blr"]["layers"])
    wrong = {**layers[module], "rank": layers[module]["rank"] + 1}
    cases = {
        "format": ({"blr": {**config["blr"], "format": 2}}, "format 1"),
        "table": ({"blr": {"format": 1, "layers": []}}, "no blr.layers"),
        "rank": ({"blr": {"format": 1, "layers": {**layers, module: wrong}}}, f"{module}.U"),
        "none": ({"blr": {"format": 1, "layers": {**layers, module: 3}}}, module),
        "huge": ({"blr": {"format": 1, "layers": {**layers, "lm_head": layers[module]}}}, "lm_head"),
        "type": ({"model_type": "blr_abacus"}, "abacus"),
        "quantized": ({"quantization_config": {"quant_method": "gptq"}}, "gptq"),
        "class": ({"architectures": ["BlrAbacusModel"]}, "AbacusModel"),
    }
    for name, (entries, fragment) in cases.items():
        outcome = invoke("export", changed(name, **entries), "-o", tmp_path / "out", "--quiet")
        refused(outcome, 4, fragment)
    assert not (tmp_path / "out").exists()


def test_the_source_is_not_overwritten(sources: dict[str, Path], tmp_path: Path, invoke: Invoke) -> None:
    """It carries a manifest of ours, which --overwrite alone would take for leave to replace it."""
    copy = shutil.copytree(sources["svd"], tmp_path / "copy")
    refused(invoke("export", copy, "-o", copy, "--overwrite"), 5, "choose another --output")
    assert verify_files(copy, read_manifest(copy)) == []


def test_shipped_files_import_nothing_unguarded_but_torch_and_transformers(tmp_path: Path) -> None:
    """transformers refuses to load a file with any other import, triton's included."""
    files = runtime_files(left_out(SPECS, True, 16))
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
        imported = set(get_imports(tmp_path / name)) - sys.stdlib_module_names
        assert imported <= {"torch", "transformers"}, (name, imported)
        assert {f"{module}.py" for module in get_relative_imports(tmp_path / name)} <= files.keys()


def test_encoders_have_no_context(tmp_path: Path, invoke: Invoke) -> None:
    source = save_pico("bert", tmp_path / "dense")
    refused(invoke("export", source, "-o", tmp_path / "out", "--context", 16), 2, "generates no text")


def test_a_killed_export_leaves_nothing_that_looks_whole(
    tiny: Path, killer: Killer, tmp_path: Path
) -> None:
    command = ("export", tiny, "-o", "out", "--quiet")
    whole = killer.run("export", tiny, "-o", "whole", "--quiet", cwd=tmp_path)
    assert whole.code == 0, whole.stderr
    for die_at in (len(whole.events) // 2, len(whole.events) - 5):
        assert killer.run(*command, cwd=tmp_path, die_at=die_at).code == -9
        assert not (tmp_path / "out").exists()
    assert killer.run(*command, cwd=tmp_path).code == 0
    with Workspace(tmp_path / "other"):
        second = killer.run("export", tiny, "-o", "other", "--quiet", cwd=tmp_path)
        assert second.code == 5 and "another blr run is writing it" in second.stderr
    again = killer.run(*command, cwd=tmp_path)
    assert again.code == 5 and "not empty" in again.stderr
    assert killer.run(*command, "--overwrite", cwd=tmp_path).code == 0
    assert read_manifest(tmp_path / "out") == read_manifest(tmp_path / "whole")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "whole"]


AUTO = {"gpt2": "AutoModelForCausalLM", "bert": "AutoModel", "vit": "AutoModelForImageClassification"}


@pytest.mark.parametrize("method", ["dense", "blast"])
@pytest.mark.parametrize("name", AUTO)
def test_other_families_give_the_same_logits(name: str, method: str, tmp_path: Path) -> None:
    source = save_pico(name, tmp_path / "dense")
    if method != "dense":
        options = {"blocks": 4, "rounds": 1} if method == "blast" else {}
        source = compress_to(source, tmp_path / method, method=method, cf=1.5, **options)
    output = export_to(source, tmp_path / "out")
    auto = getattr(transformers, AUTO[name])
    found, expected = (auto.from_pretrained(f, dtype=torch.float32).eval() for f in (output, source))
    layers = [module for module in found.modules() if getattr(module, "exported", False)]
    assert len(layers) == (0 if method == "dense" else {"gpt2": 8, "bert": 12, "vit": 12}[name])
    with torch.inference_mode():
        torch.testing.assert_close(found(**inputs_for(found))[0], expected(**inputs_for(expected))[0])


def test_names_that_are_written_twice_agree() -> None:
    """`export.checkpoint` does not import transformers, hence has its own."""
    assert checkpoint.FORMAT == modeling_blr.FORMAT
    assert modeling_blr.PREFIX == checkpoint.OUR_CLASS
