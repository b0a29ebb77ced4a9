"""Models loaded, changed and saved by transformers give folders that load, verify and export."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import bare
import pytest
import torch
import transformers
from exporting import compress_to, export_to
from pico import save_pico
from running import Invoke
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from blr.compressor import register
from blr.compressor.workspace.manifest import MANIFEST

register()

IDS = torch.arange(2, 14).view(1, 12)
KINDS = ["checkpoint", "export", "int8", "int4"]  # the last of layers without a bias, too
# Loads folders without blr, saves them again elsewhere, copies and pickles the models, and prints
# their logits; then the same process imports blr, and both doors lead to it.
WITHOUT_AND_WITH_BLR = (
    bare.without("blr")
    + """
import copy, json, pickle, sys, warnings
from pathlib import Path
warnings.simplefilter("error", UserWarning)
import torch
from transformers import AutoModel, AutoModelForCausalLM
again, *folders = map(Path, sys.argv[1:])
ids, found = torch.arange(2, 14).view(1, 12), {}
for folder in folders:
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()
    with torch.no_grad():
        logits = model(ids).logits
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert other(ids).logits.equal(logits)
        bare = AutoModel.from_pretrained(folder, trust_remote_code=True).eval()
        states = [m(ids).last_hidden_state for m in (bare, model.base_model)]
        assert torch.allclose(*states, rtol=1e-4, atol=1e-5), folder
    found[folder.name] = logits.tolist()
    model.save_pretrained(again / folder.name)
sys.meta_path.remove(refuse)
from blr.compressor import register
register()
for folder in folders:
    for trust in (True, None):
        model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=trust)
        assert type(model).__module__.startswith("blr."), type(model)
        with torch.no_grad():
            assert torch.allclose(model(ids).logits, torch.tensor(found[folder.name]))
print(json.dumps(found))
"""
)


def logits(folder: Path) -> torch.Tensor:
    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(folder).eval()(IDS).logits


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A compressed pico model and its exports, by kind."""
    folder = tmp_path_factory.mktemp("made")
    source = save_pico("qwen2", folder / "dense")
    compress_to(source, folder / "checkpoint", method="blast", cf=1.5, rounds=1, blocks=4)
    export_to(folder / "checkpoint", folder / "export")
    export_to(folder / "checkpoint", folder / "int8", quantize_head="int8")
    compress_to(source, folder / "low-rank", method="svd", cf=1.5)
    export_to(folder / "low-rank", folder / "int4", quantize="int4", force=True)
    return folder


@pytest.fixture(scope="module")
def saved(made: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same loaded with blr, changed and saved."""
    folder = tmp_path_factory.mktemp("saved")
    for kind in KINDS:
        model = AutoModelForCausalLM.from_pretrained(made / kind)
        with torch.no_grad():
            model.get_input_embeddings().weight.mul_(1.5)
        model.save_pretrained(folder / kind)
    return folder


@pytest.fixture(scope="module")
def doors(saved: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """What saved folders give without blr, and where they were saved from there."""
    folder = tmp_path_factory.mktemp("again")
    environment = {
        "PATH": "",
        "HF_HOME": str(folder / "hf"),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    done = bare.run(WITHOUT_AND_WITH_BLR, folder, *(saved / k for k in KINDS), env=environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1]), folder


@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_folder_carries_the_files_that_travelled(kind: str, made: Path, saved: Path) -> None:
    """The same bytes and entry points; the manifest, which it has not, would be another's."""
    before, after = ({p.name: p.read_bytes() for p in (f / kind).glob("*.py")} for f in (made, saved))
    assert after == before
    configs = [json.loads((f / kind / "config.json").read_bytes()) for f in (made, saved)]
    assert configs[0]["auto_map"] == configs[1]["auto_map"]
    assert not (saved / kind / MANIFEST).exists()


@pytest.mark.parametrize("kind", KINDS)
def test_it_loads_without_blr_and_through_both_doors(
    kind: str, made: Path, saved: Path, doors: tuple[dict[str, Any], Path]
) -> None:
    """Also from what was saved without blr, deep copies and pickles; as changed, not as compressed."""
    expected = logits(saved / kind)
    assert not torch.allclose(expected, logits(made / kind))
    torch.testing.assert_close(torch.tensor(doors[0][kind]), expected)
    assert logits(doors[1] / kind).equal(expected)


@pytest.mark.parametrize("door", ["with blr", "without"])
@pytest.mark.parametrize("kind", KINDS)
def test_inspect_and_verify_take_it_with_its_provenance(
    kind: str, door: str, saved: Path, doors: tuple[dict[str, Any], Path], invoke: Invoke
) -> None:
    folder = (saved if door == "with blr" else doors[1]) / kind
    origin = f"saved by transformers {transformers.__version__} from {kind}"
    code, out, _ = invoke("inspect", folder, "--format", "json")
    assert (code, json.loads(out)["saved"]) == (0, origin)
    assert all(row["error"] is None for row in json.loads(out)["layers"])
    assert invoke("inspect", folder)[1].splitlines()[-1] == origin
    code, out, _ = invoke("verify", folder)
    assert code == 0 and origin in out


def test_export_takes_it_and_says_so(saved: Path, tmp_path: Path, invoke: Invoke) -> None:
    output = export_to(saved / "checkpoint", tmp_path / "out")
    manifest = json.loads((output / MANIFEST).read_bytes())
    assert manifest["saved"] == f"saved by transformers {transformers.__version__} from checkpoint"
    assert invoke("verify", output)[0] == 0 and "saved" not in json.loads(
        invoke("inspect", output, "--format", "json")[1]
    )
    torch.testing.assert_close(logits(output), logits(saved / "checkpoint"))


def with_head(layers: dict[str, Any]) -> dict[str, Any]:
    """With an entry for a layer that is dense."""
    return {**layers, "lm_head": next(iter(layers.values()))}


# What is done to a saved folder -> what verify says.
BROKEN = {
    "tensor gone": (
        lambda f: retable(f, "layers", with_head),
        "",
    ),
    "code gone": (lambda f: os.remove(f / "modeling_blr.py"), "modeling_blr.py missing"),
    "weights cut": (lambda f: os.truncate(f / "model.safetensors", 500), "model.safetensors"),
    "not ours": (lambda f: retable(f, "saved", lambda t: None), "not written by blr"),
    "saved by nobody": (lambda f: retable(f, "saved", lambda t: 3), "not written by blr"),
}


def retable(folder: Path, key: str, change: Any) -> None:
    config = json.loads((folder / "config.json").read_bytes())
    config["blr"][key] = change(config["blr"].get(key))
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("broken", BROKEN)
def test_verify_refuses_a_saved_folder_that_does_not_fit(
    broken: str, saved: Path, tmp_path: Path, invoke: Invoke
) -> None:
    copy, (change, reason) = shutil.copytree(saved / "checkpoint", tmp_path / "copy"), BROKEN[broken]
    change(copy)
    code, out, error = invoke("verify", copy)
    assert code in (4, 5, 10) and out == "" and reason in error and "a bug" not in error


def test_saving_over_an_output_leaves_no_manifest_of_it(
    made: Path, tmp_path: Path, invoke: Invoke
) -> None:
    """It would list other bytes; the folder is then one that transformers saved."""
    copy = shutil.copytree(made / "checkpoint", tmp_path / "copy")
    model = AutoModelForCausalLM.from_pretrained(copy)
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(2)
    model.save_pretrained(copy)
    code, out, _ = invoke("verify", copy)
    assert code == 0 and "saved by transformers" in out


def test_another_task_and_a_configuration_alone_save_what_they_need(made: Path, tmp_path: Path) -> None:
    model = AutoModelForSequenceClassification.from_pretrained(made / "checkpoint", num_labels=3)
    model.save_pretrained(tmp_path / "task")
    again = AutoModelForSequenceClassification.from_pretrained(tmp_path / "task")
    assert again.score.weight.equal(model.score.weight)
    model.config.save_pretrained(tmp_path / "config")
    assert (tmp_path / "config" / "modeling_blr.py").is_file()


def test_the_tokenizer_neither_asks_nor_warns(
    made: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], tiny: Path
) -> None:
    """Where blr is imported, which knows the model type."""
    copy = shutil.copytree(made / "checkpoint", tmp_path / "copy")
    for file in tiny.glob("tokenizer*"):
        shutil.copy(file, copy)
    assert AutoTokenizer.from_pretrained(copy)("a b")["input_ids"]
    assert capfd.readouterr() == ("", "")
