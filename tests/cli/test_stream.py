"""`blr compress --stream`: weights stay on the hub, fetched as they are read."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import bare
import pytest
from hubs import COMMIT, Environment, Hub, online, recorded
from limited import Limited, refused
from pico import save_pico
from safetensors.torch import load_file, save_file

from blr.compressor.loading.resolve import MODULES


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pico Llama."""
    return save_pico("llama", tmp_path_factory.mktemp("dense") / "llama")


@pytest.fixture(scope="module")
def sharded(dense: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model in several files."""
    folder = Path(shutil.copytree(dense, tmp_path_factory.mktemp("sharded") / "pico"))
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    half, index = len(tensors) // 2, {}
    for number, names in enumerate((list(tensors)[:half], list(tensors)[half:]), 1):
        file = f"model-{number:05}-of-00002.safetensors"
        save_file({name: tensors[name] for name in names}, folder / file)
        index |= dict.fromkeys(names, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return folder


def weights_in(home: Path) -> list[Path]:
    return [path for path in home.rglob("*.safetensors") if path.stat().st_size > 20_000]


def test_streamed_it_keeps_no_weights(
    hub: Callable[..., None],
    environment: Environment,
    sharded: Path,
    limited: Limited,
    tmp_path: Path,
) -> None:
    """The bytes are those of a download, past connections that break, each weight fetched thrice."""
    hub(folder=sharded, commit=COMMIT, every=7)
    done = online(environment, tmp_path, "compress", "who/pico", "-o", "out", "--stream")
    assert done.returncode == 0, done.stderr
    assert "weights stay there" in done.stderr
    assert recorded(tmp_path / "out") == {"name": "who/pico", "revision": COMMIT}
    assert not weights_in(tmp_path / "hf")
    size = sum(path.stat().st_size for path in sharded.glob("*.safetensors"))
    assert sum(count for _, count in Hub.sent) < 4 * size
    assert limited.run("compress", sharded, "-o", "local", "-q", cwd=tmp_path).code == 0
    found, expected = (load_file(tmp_path / n / "model.safetensors") for n in ("out", "local"))
    assert found.keys() == expected.keys()
    assert all(tensor.equal(expected[name]) for name, tensor in found.items())


def test_streamed_bytes_are_those_that_the_hub_lists(
    hub: Callable[..., None], environment: Environment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    about = Hub.about

    def other(self: Hub, name: str) -> dict[str, object]:
        found = about(self, name)
        return {**found, "lfs": {**found["lfs"], "oid": "0" * 64}}

    monkeypatch.setattr(Hub, "about", other)
    hub(commit=COMMIT)
    done = online(environment, tmp_path, "compress", "who/pico", "-o", "out", "--stream")
    assert done.returncode == 4 and "by the hub" in done.stderr
    assert not (tmp_path / "out").exists()


def test_what_takes_the_whole_model_is_not_streamed(
    dense: Path, limited: Limited, tmp_path: Path
) -> None:
    for given, said in ((("who/pico", "--heal"), "whole model"), ((dense,), "is a local folder")):
        refused(limited.run("compress", *given, "--stream", cwd=tmp_path), 2, said)


SMALL = """
from blr.compressor.checkpoint import remote
from blr.compressor.cli import main
remote.AHEAD = 1024  # bytes, so that layers are requests of their own
main()
"""


def streamed(environment: Environment, folder: Path, *options: str) -> tuple[int, str]:
    """Exit code and the last line that is said."""
    asked = ("compress", "who/pico", "-o", "out", "--stream", "-q", "--no-check", *options)
    done = bare.run(SMALL, *asked, cwd=folder, env=environment)
    assert done.returncode == 0 or done.stderr.splitlines()[-1].startswith("blr: error: "), done.stderr
    return done.returncode, (done.stderr.splitlines() or [""])[-1]


def test_repositories_that_cannot_be_streamed_are_named(
    hub: Callable[..., None], environment: Environment, sharded: Path, tmp_path: Path
) -> None:
    """A gated one, one that lacks a shard, and one without safetensors."""
    hub(commit=COMMIT, status=403)
    code, said = streamed(environment, tmp_path)
    assert code == 8 and "GatedRepoError" in said and "hf auth login" in said
    folder = Path(shutil.copytree(sharded, tmp_path / "model"))
    (folder / "model-00002-of-00002.safetensors").unlink()
    hub(folder=folder, commit=COMMIT)
    code, said = streamed(environment, tmp_path)
    assert code == 8 and "found no model-00002-of-00002.safetensors" in said
    (folder / "model.safetensors.index.json").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"pickled")
    hub(folder=folder, commit=COMMIT[::-1])
    code, said = streamed(environment, tmp_path)
    assert code == 8 and "found no model.safetensors" in said and "leave out --stream" in said
    assert not list((tmp_path / "hf").rglob("*.bin")) and not (tmp_path / "out").exists()


@pytest.mark.slow
def test_refused_in_the_middle_it_goes_on_later(
    hub: Callable[..., None], environment: Environment, sharded: Path, tmp_path: Path
) -> None:
    """At once where asking again is of no use; layers that are finished are not fetched again."""
    tensors = sum(len(load_file(path)) for path in sharded.glob("*.safetensors"))
    answered = tensors + 10  # all were read once, and some layers again
    hub(folder=sharded, commit=COMMIT, status=401, parts=answered)
    code, said = streamed(environment, tmp_path)
    assert code == 8 and "a token that may read it" in said and "same command again" in said
    finished = len(list((tmp_path / "out.blr-partial/journal").glob("*.safetensors")))
    assert len(Hub.sent) == answered and finished > 0
    hub(folder=sharded, commit=COMMIT)
    assert streamed(environment, tmp_path, "--revision", COMMIT)[0] == 0
    headers = 2 * 2
    assert len(Hub.sent) == headers + tensors + tensors - finished
    assert recorded(tmp_path / "out")["revision"] == COMMIT


@pytest.mark.slow
def test_nothing_of_other_folders_is_downloaded(
    hub: Callable[..., None], environment: Environment, dense: Path, tmp_path: Path
) -> None:
    """Weights in other formats or precisions, which many repositories have beside the model, stay."""
    folder = Path(shutil.copytree(dense, tmp_path / "model"))
    (folder / "fp32").mkdir()
    shutil.copy(folder / "model.safetensors", folder / "fp32")
    hub(folder=folder, commit=COMMIT)
    assert streamed(environment, tmp_path)[0] == 0
    assert not weights_in(tmp_path / "hf")


@pytest.mark.slow
def test_modules_are_downloaded(
    hub: Callable[..., None], environment: Environment, dense: Path, tmp_path: Path
) -> None:
    """Of sentence-transformers, whose small weights the output has, too."""
    folder = Path(shutil.copytree(dense, tmp_path / "model"))
    (folder / "2_Dense").mkdir()
    shutil.copy(folder / "model.safetensors", folder / "2_Dense")
    (folder / MODULES).write_text('[{"path": "2_Dense"}]')
    hub(folder=folder, commit=COMMIT)
    assert streamed(environment, tmp_path)[0] == 0
    assert (tmp_path / "out/2_Dense/model.safetensors").stat().st_size > 20_000
