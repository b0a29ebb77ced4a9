"""`blr push`: what reaches the hub verifies, loads and says how it was made.

The hub is replaced at the boundary of huggingface_hub: `HfApi.create_repo` and `HfApi.create_commit`
keep what they are given. Refusals come from its own client against a dead address.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from exporting import compress_to
from huggingface_hub import ModelCard
from pico import save_pico
from running import Run
from state_files import NO_OBJECTS

from blr.compressor.base.errors import HubError, InputError, UsageError, VerifyError
from blr.compressor.commands.push import prepare_push, send
from blr.compressor.workspace.manifest import (
    build_manifest,
    computing_digest,
    read_manifest,
    verify_manifest,
)

CARD = "---\nlicense: mit\nbase_model: owner/base\nlanguage: en\n---\n# A dense model\n"


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_pico("llama", tmp_path_factory.mktemp("push") / "dense")
    (folder / "README.md").write_text(CARD)
    return folder


@pytest.fixture(scope="module")
def output(dense: Path) -> Path:
    settings = {"method": "blast", "cf": 1.5, "blocks": 4, "rounds": 2}
    return compress_to(dense, dense.parent / "out", check=True, **settings)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the client was asked: arguments of the repository and of the commit; `files`, `private` and
    `manifest` of the repository that it finds."""
    asked: dict[str, Any] = {}

    def create_repo(self: Any, repository: str, **options: Any) -> None:
        asked["repository"] = (repository, options)

    def create_commit(self: Any, repository: str, operations: Any, **options: Any) -> Any:
        asked["commit"] = (repository, operations, options)
        return SimpleNamespace(commit_url=f"hub:{repository}/commit/1")

    def repo_info(self: Any, repository: str, revision: str | None = None) -> Any:
        files = [SimpleNamespace(rfilename=name) for name in asked.get("files", [".gitattributes"])]
        return SimpleNamespace(private=asked.get("private", True), sha="1" * 40, siblings=files)

    def download(self: Any, repository: str, name: str, revision: str | None = None) -> str:
        return str(asked["manifest"])

    monkeypatch.setattr(huggingface_hub.HfApi, "create_repo", create_repo)
    monkeypatch.setattr(huggingface_hub.HfApi, "repo_info", repo_info)
    monkeypatch.setattr(huggingface_hub.HfApi, "hf_hub_download", download)
    monkeypatch.setattr(huggingface_hub.HfApi, "create_commit", create_commit)
    monkeypatch.delenv("HF_HUB_OFFLINE")
    return asked


def test_what_arrives_verifies_and_its_card_is_valid(
    output: Path, hub: dict[str, Any], tmp_path: Path
) -> None:
    metrics = tmp_path / "metrics.json"
    far = {"kl": {"mean": 0.12, "error": 0.01}, "agreement": 0.8}
    judged = {"perplexity": 14.65, "tasks": {"arc_easy": {"acc": 0.5}}, "against": far}
    metrics.write_text(json.dumps(judged))
    before = {path.name: path.read_bytes() for path in output.iterdir()}
    prepared = prepare_push(output, "me/small", metrics)
    url = send(prepared, private=True, revision=None, message="m")
    assert (url, hub["repository"]) == (
        "hub:me/small/commit/1",
        ("me/small", {"private": True, "exist_ok": True}),
    )
    arrived = tmp_path / "arrived"
    arrived.mkdir()
    for operation in hub["commit"][1]:
        with operation.as_file() as file:
            (arrived / operation.path_in_repo).write_bytes(file.read())
    (arrived / ".gitattributes").write_text("*.safetensors filter=lfs\n")  # as the hub adds
    assert verify_manifest(arrived) == len(before) - 1
    assert {path.name: path.read_bytes() for path in output.iterdir()} == before
    data = ModelCard((arrived / "README.md").read_text()).data
    assert (data.license, data.base_model, data.language) == ("mit", ["owner/base"], "en")
    assert {"blr", "structured-compression", "blast"} <= set(data.tags)
    assert data.model_name == "small"
    found = {(r.metric_type, r.dataset_name, r.metric_value) for r in data.eval_results}
    near = {("kl_to_dense", "text", 0.12), ("same_top1_as_dense", "text", 0.8)}
    assert found == {("perplexity", "text", 14.65), ("acc", "arc_easy", 0.5), *near}


def test_figures_of_another_model_are_refused(output: Path, blr: Run, tmp_path: Path) -> None:
    for digest, code in ((computing_digest(output), 0), ("0" * 64, 4), (None, 4)):
        judged = {"checkpoint": {"name": "dense", "digest": digest}, "perplexity": 2.0}
        (tmp_path / "m.json").write_text(json.dumps(judged))
        done = blr("push", output, "me/small", "--dry-run", "--metrics", "m.json")
        assert done.returncode == code, done.stderr
    assert "figures of 'dense', expected those of " in done.stderr


def test_the_command_on_the_card_makes_the_same_bytes(
    dense: Path, output: Path, blr: Run, tmp_path: Path
) -> None:
    card = prepare_push(output, "me/small").files["README.md"]
    assert isinstance(card, bytes)
    lines = card.decode().partition("## Made by")[2].splitlines()
    command = next(line for line in lines if line.startswith("blr compress"))
    assert {line.partition(" ")[0] for line in lines} >= {"torch", "transformers", "python", "blr"}
    shutil.copytree(dense, tmp_path / "dense")
    shutil.copy(output / "recipe.yaml", tmp_path)
    done = blr(*shlex.split(command)[1:], "-o", "again", "-q")
    assert done.returncode == 0, done.stderr
    names = {path.name for path in output.iterdir()}
    assert names == {path.name for path in (tmp_path / "again").iterdir()}
    for name in names - {"blr_manifest.json"}:
        assert (tmp_path / "again" / name).read_bytes() == (output / name).read_bytes(), name


def test_a_dry_run_sends_nothing_and_a_changed_folder_is_refused(
    output: Path, blr: Run, tmp_path: Path
) -> None:
    done = blr("push", output, "me/small", "--dry-run", "--format", "json")
    found = json.loads(done.stdout)
    assert done.returncode == 0 and "commit" not in found and found["card"]["license"] == "mit"
    changed = shutil.copytree(output, tmp_path / "changed")
    (changed / "config.json").write_text("{}")
    with pytest.raises(VerifyError, match=r"config\.json"):
        prepare_push(changed, "me/small")


@pytest.mark.parametrize(
    "metrics",
    [
        {"texts": 5},
        {"texts": [{"perplexity": 2.0}]},
        {"texts": [{"text": 3, "perplexity": 2.0}]},
        {"tasks": [1]},
        {"tasks": {"arc": {"acc": "high"}}},
        {"perplexity": None},
        {"perplexity": 2.0, "against": {"kl": 0.1}},
        {"spearman": True},
        {"spearman": 10**400},
        {"perplexity": "2.0"},
        {"perplexity": [2.0]},
        {"texts": [[1]]},
        {"texts": {"a": 1}},
        {"tasks": {"arc": 3}},
        {"tasks": {"arc": {"acc": None}}},
        {"checkpoint": "dense", "perplexity": 2.0},
        {"checkpoint": {"name": 3, "digest": None}, "perplexity": 2.0},
        {"checkpoint": {"digest": ["x"]}, "perplexity": 2.0},
        {},
    ],
)
def test_metrics_that_are_none_are_named(metrics: dict[str, Any], output: Path, tmp_path: Path) -> None:
    (tmp_path / "m.json").write_text(json.dumps(metrics))
    with pytest.raises(InputError, match=r"m\.json: found .*; expected what `blr eval"):
        prepare_push(output, "me/small", tmp_path / "m.json")


@pytest.mark.parametrize("kind", NO_OBJECTS)
def test_metrics_that_are_no_file_of_ours(kind: str, output: Path, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "m.json").write_text(json.dumps({"perplexity": 2.0}))
    NO_OBJECTS[kind](tmp_path / "in" / "m.json")
    if kind == "linked":  # one that a user names may be
        assert prepare_push(output, "me/small", tmp_path / "in" / "m.json").front["model-index"]
        return
    with pytest.raises(InputError, match=r"m\.json: found"):
        prepare_push(output, "me/small", tmp_path / "in" / "m.json")


ACCOUNTS: dict[str, dict[str, Any]] = {
    "device as number": {"device": 3},
    "device of two lines": {"device": "cpu\n```\n# Mine"},
    "threads as text": {"threads": "4"},
    "heal as list": {"heal": [1]},
    "calibration that is no digest": {"calibration": "/home/me/secret.txt"},
    "versions as list": {"versions": ["torch"]},
    "versions of two lines": {"versions": {"torch": "2.0\n```\n# Mine"}},
    "versions as numbers": {"versions": {"torch": 2}},
    "recipe as text": {"recipe": "svd"},
}


@pytest.mark.parametrize("case", ACCOUNTS)
def test_an_account_that_no_blr_has_written_is_a_line(case: str, output: Path, tmp_path: Path) -> None:
    """The manifest's own digest is no secret: whoever wrote the folder can make it fit."""
    forged, manifest = shutil.copytree(output, tmp_path / "forged"), read_manifest(output)
    files = {n: (found["size"], found["sha256"]) for n, found in manifest["files"].items()}
    facts = {n: manifest[n] for n in manifest if n not in ("format", "files", "manifest_sha256")}
    facts["run"] = {**facts["run"], **ACCOUNTS[case]}
    (forged / "blr_manifest.json").write_bytes(build_manifest(forged, files, **facts))
    verify_manifest(forged)
    with pytest.raises(InputError, match=r"blr_manifest\.json: found") as error:
        prepare_push(forged, "me/small")
    assert "\n" not in str(error.value)


def test_names_that_no_repository_has_are_refused(output: Path) -> None:
    for name in ("small", "../small", "me/..", "me/a--b", "me/small.git", "me/a/b", "-me/small"):
        with pytest.raises(UsageError, match="expected owner/name"):
            prepare_push(output, name)
    with pytest.raises(InputError, match="no such folder"):
        prepare_push(output / "gone", "me/small")


@pytest.mark.parametrize(
    ("environment", "said"),
    [({"HF_HUB_OFFLINE": "1"}, "offline"), ({"HF_HUB_OFFLINE": "0"}, "hf auth login")],
)
def test_refusals_are_a_line(environment: dict[str, str], said: str, output: Path, blr: Run) -> None:
    dead = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": "/nonexistent", "HF_TOKEN": ""}
    done: subprocess.CompletedProcess[str] = blr(
        "push", output, "me/small", env={**os.environ, **dead, **environment}
    )
    assert (done.returncode, done.stdout) == (8, "")
    assert said in done.stderr.splitlines()[-1] and "me/small" in done.stderr.splitlines()[-1]


def test_what_an_earlier_output_left_is_removed(
    output: Path, hub: dict[str, Any], tmp_path: Path
) -> None:
    """Transformers would load its weights before these; what others put there stays."""
    there = ("model-00001-of-00002.safetensors", "model.safetensors.index.json", "recipe.yaml")
    files = {name: {"sha256": "0" * 64, "bytes": 1} for name in (*there, "gone.json")}
    (tmp_path / "blr_manifest.json").write_text(json.dumps({"files": files}))
    hub["files"] = [*there, "blr_manifest.json", "notes.txt", ".gitattributes"]
    hub["manifest"] = tmp_path / "blr_manifest.json"
    send(prepare_push(output, "me/small"), private=False, revision="dev", message="m")
    assert hub["repository"][1]["private"] is None, "as its owner has it"
    kinds = {type(operation).__name__ for operation in hub["commit"][1]}
    assert kinds == {"CommitOperationAdd", "CommitOperationDelete"}
    removed = [o.path_in_repo for o in hub["commit"][1] if type(o).__name__ == "CommitOperationDelete"]
    assert removed == list(there[:2])
    assert hub["commit"][2]["parent_commit"] == "1" * 40 and hub["commit"][2]["revision"] == "dev"


def test_a_repository_that_is_not_as_asked_for_gets_nothing(output: Path, hub: dict[str, Any]) -> None:
    hub["private"] = False
    with pytest.raises(HubError, match="me/small: a public repository, expected a private one"):
        send(prepare_push(output, "me/small"), private=True, revision=None, message="m")
    hub["files"] = ["pytorch_model.bin", "config.json"]
    with pytest.raises(HubError, match=r"holds 'pytorch_model\.bin', weights that are not of this"):
        send(prepare_push(output, "me/small"), private=False, revision=None, message="m")
    assert "commit" not in hub
