"""`blr verify` notices every change; outputs are the same bytes wherever and whenever made."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pico import save_pico

from blr.compressor.base.progress import Progress
from blr.compressor.commands.compress import Settings, compress
from blr.compressor.recipe.schema import make_recipe
from blr.compressor.workspace.manifest import MANIFEST, read_manifest

Invoke = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pico Llama with a file in a subfolder."""
    folder = save_pico("llama", tmp_path_factory.mktemp("dense") / "llama")
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text("{}")
    return folder


def make(dense: Path, output: Path) -> Path:
    settings = Settings("pico", max_shard_size=30_000)
    compress(dense, make_recipe(method="blast", blocks=4, rounds=2), output, settings, Progress(True))
    return output


@pytest.fixture(scope="module")
def whole(dense: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An output that must not be changed."""
    return make(dense, tmp_path_factory.mktemp("whole") / "out")


@pytest.fixture
def output(whole: Path, tmp_path: Path) -> Path:
    """A copy of an output."""
    return shutil.copytree(whole, tmp_path / "out")


def shard(output: Path) -> Path:
    return sorted(output.glob("*.safetensors"))[1]


def change_byte(output: Path) -> None:
    content = bytearray(shard(output).read_bytes())
    content[-1] ^= 1
    shard(output).write_bytes(content)


def replace(make: Callable[[Path], object]) -> Callable[[Path], None]:
    def damage(output: Path) -> None:
        shard(output).unlink()
        make(shard_name(output))

    return damage


def shard_name(output: Path) -> Path:
    names = [name for name in read_manifest(output)["files"] if name.endswith(".safetensors")]
    return output / next(name for name in names if not (output / name).exists())


def link_to_a_copy(path: Path) -> None:
    twin = path.parent.parent / "twin"
    shutil.copy(path.parent / "config.json", twin)
    path.symlink_to(twin)


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "changed byte": (change_byte, "SHA-256 "),
    "truncated": (lambda out: os.truncate(shard(out), 100), ": 100 bytes, expected "),
    "extended": (lambda out: os.truncate(shard(out), 10**6), ": 1000000 bytes, expected "),
    "missing": (lambda out: shard(out).unlink(), "missing"),
    "missing in a folder": (
        lambda out: shutil.rmtree(out / "1_Pooling"),
        "1_Pooling/config.json: missing",
    ),
    "extra": (lambda out: (out / "extra.py").write_text(""), "extra.py: not listed"),
    "extra in a folder": (
        lambda out: (out / "1_Pooling" / "x").write_text(""),
        "1_Pooling/x: not listed",
    ),
    "extra after a hub's name": (
        lambda out: (out / ".gitattributes.evil.py").write_text(""),
        ".gitattributes.evil.py: not listed",
    ),
    "folder of a hub's name": (
        lambda out: ((out / ".gitattributes").mkdir(), (out / ".gitattributes" / "x.py").touch()),
        ".gitattributes/x.py: not listed",
    ),
    "link of a hub's name": (
        lambda out: (out / ".gitattributes").symlink_to("/etc/hostname"),
        ".gitattributes: not listed",
    ),
    "code in the hub's folder": (
        lambda out: (
            (out / ".cache/huggingface/download").mkdir(parents=True),
            (out / ".cache/huggingface/download/evil.py").touch(),
        ),
        ".cache/huggingface/download/evil.py: not listed",
    ),
    "beside the hub's folder": (
        lambda out: ((out / ".cache").mkdir(), (out / ".cache" / "huggingface.py").touch()),
        ".cache/huggingface.py: not listed",
    ),
    "extra link": (lambda out: (out / "link").symlink_to("/etc"), "link: not listed"),
    "extra FIFO": (lambda out: os.mkfifo(out / "fifo"), "fifo: not listed"),
    "extra odd name": (lambda out: (out / "a\nb\x1b[31m").write_text(""), "a\\nb\\x1b[31m: not listed"),
    "a link": (replace(link_to_a_copy), "not a regular file"),
    "a FIFO": (replace(os.mkfifo), "not a regular file"),
    "a folder": (replace(os.mkdir), "not a regular file"),
    "a device": (replace(lambda path: path.symlink_to("/dev/zero")), "not a regular file"),
}


def test_whole_output(output: Path, invoke: Invoke) -> None:
    code, out, err = invoke("verify", output)
    assert (code, err) == (0, "") and "files match" in out
    code, out, _ = invoke("verify", output, "--format", "json")
    assert code == 0 and json.loads(out)["ok"] is True


def test_what_the_hub_puts_beside_files_is_no_damage(output: Path, invoke: Invoke) -> None:
    names = (".gitignore", "CACHEDIR.TAG", "download/config.json.metadata", "download/config.json.lock")
    git = (".gitattributes", ".git/HEAD", ".git/objects/ab/cd")
    for name in (*git, *(f".cache/huggingface/{name}" for name in names)):
        (output / name).parent.mkdir(parents=True, exist_ok=True)
        (output / name).touch()
    code, _, err = invoke("verify", output)
    assert (code, err) == (0, "")


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_noticed(damage: str, output: Path, invoke: Invoke) -> None:
    harm, fragment = DAMAGES[damage]
    harm(output)
    code, out, err = invoke("verify", output)
    assert code == 10 and out == ""
    assert err.startswith(f"blr: error: {output}: ") and err.count("\n") == 1
    assert fragment in err and err.removesuffix("\n").isprintable()
    assert json.loads(invoke("verify", output, "--format=json")[1])["exit_code"] == 10


_GOOD = {"size": 1, "sha256": "0" * 64}
MANIFESTS: dict[str, Any] = {
    "outside": {"format": 1, "files": {"../secret": _GOOD}},
    "inside and out": {"format": 1, "files": {"1_Pooling/../../secret": _GOOD}},
    "absolute": {"format": 1, "files": {"/etc/passwd": _GOOD}},
    "backslash": {"format": 1, "files": {"..\\secret": _GOOD}},
    "NUL": {"format": 1, "files": {"a\0b": _GOOD}},
    "newline": {"format": 1, "files": {"a\nblr: ok": _GOOD}},
    "empty name": {"format": 1, "files": {"": _GOOD}},
    "folder itself": {"format": 1, "files": {".": _GOOD}},
    "size as text": {"format": 1, "files": {"a": {**_GOOD, "size": "1"}}},
    "digest as number": {"format": 1, "files": {"a": {**_GOOD, "sha256": 3}}},
    "digest too short": {"format": 1, "files": {"a": {**_GOOD, "sha256": "0"}}},
    "listing as text": {"format": 1, "files": {"a": "x"}},
    "files as list": {"format": 1, "files": ["a"]},
    "other format": {"format": 3, "files": {"a": _GOOD}},
    "no files": {"format": 1, "files": {}},
    "header digest as number": {"format": 1, "files": {"a": {**_GOOD, "header_sha256": 3}}},
    "no format": {"files": {"a": _GOOD}},
    "run as list": {"format": 1, "files": {"a": _GOOD}, "run": [1]},
    "run as text": {"format": 1, "files": {"a": _GOOD}, "run": "x"},
    "source as list": {"format": 1, "files": {"a": _GOOD}, "source": ["x"]},
    "source's name as number": {"format": 1, "files": {"a": _GOOD}, "source": {"name": 3}},
    "revision as list": {"format": 1, "files": {"a": _GOOD}, "source": {"name": "x", "revision": []}},
    "input as number": {"format": 1, "files": {"a": _GOOD}, "input_sha256": 3},
    "nested": {"format": 1, "files": {"a": _GOOD}, "run": {"a": json.loads("[" * 50 + "]" * 50)}},
    "list": [],
    "text": "x",
}


@pytest.mark.parametrize("case", MANIFESTS)
@pytest.mark.parametrize("command", ["verify", "overwrite"])
def test_hostile_manifest(case: str, command: str, dense: Path, tmp_path: Path, invoke: Invoke) -> None:
    output = tmp_path / "out"
    output.mkdir()
    (output / MANIFEST).write_text(json.dumps(MANIFESTS[case]))
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    if command == "verify":
        code, _, err = invoke("verify", output)
    else:
        code, _, err = invoke("compress", dense, "-o", output, "--overwrite")
    assert code == 5 and err.count("\n") == 1 and "not written by blr" in err
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda p: p.symlink_to("/dev/zero"), None])
def test_manifest_that_is_no_file(make: Any, tmp_path: Path, invoke: Invoke) -> None:
    if make:
        make(tmp_path / MANIFEST)
    code, _, err = invoke("verify", tmp_path)
    assert code == 5 and "not written by blr" in err


@pytest.mark.parametrize("command", ["verify", "inspect"])
def test_no_folder_is_told_apart_from_one_that_is_not_ours(
    command: str, tmp_path: Path, invoke: Invoke
) -> None:
    (tmp_path / "file").touch()
    for name, said in (("nowhere", "found no such folder; expected one that blr"), ("file", "a file;")):
        code, _, err = invoke(command, tmp_path / name)
        assert code == 4 and said in err and err.count("\n") == 1


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, '{"format":1,"format":1,"files":{}}', "\xff"])
def test_manifest_that_is_no_json(text: str, tmp_path: Path, invoke: Invoke) -> None:
    (tmp_path / MANIFEST).write_text(text, "latin-1")
    assert invoke("verify", tmp_path)[0] == 5


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"a": 3}', '{"a": {"spec": {}}}', None])
def test_inspect_of_no_output(text: str | None, tmp_path: Path, invoke: Invoke) -> None:
    if text is None:
        os.mkfifo(tmp_path / "blr_layers.json")
    else:
        (tmp_path / "blr_layers.json").write_text(text)
    code, out, err = invoke("inspect", tmp_path)
    assert code == 4 and out == "" and err.count("\n") == 1
    assert "not an output of blr compress" in err


def digests(output: Path) -> dict[str, Any]:
    return {**read_manifest(output)["files"], MANIFEST: (output / MANIFEST).read_bytes()}


def test_same_bytes_in_another_folder(
    dense: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Absolute, relative, through a link, and with a source that was copied elsewhere."""
    monkeypatch.chdir(tmp_path)
    copied = shutil.copytree(dense, tmp_path / "copied" / "llama")
    (tmp_path / "link").symlink_to(copied)
    made = make(Path("link"), Path("out"))
    assert digests(made) == digests(whole)
    assert digests(make(Path("copied/llama"), tmp_path / "elsewhere")) == digests(whole)
    text = "".join(
        path.read_text() for path in made.iterdir() if path.suffix in {".json", ".md", ".yaml"}
    )
    assert str(tmp_path) not in text and str(dense) not in text


def test_manifest_tells_where_it_came_from(whole: Path) -> None:
    manifest = read_manifest(whole)
    assert manifest["source"] == {"name": "pico", "revision": None}
    assert manifest["run"]["recipe"]["method"] == "blast" and manifest["fallbacks"] == []
    assert len(manifest["input_sha256"]) == len(manifest["recipe_sha256"]) == 64


def test_traceback_only_when_asked_for(
    tmp_path: Path, invoke: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = invoke("verify", tmp_path)
    assert "Traceback" not in plain[2] and plain[2].count("\n") == 1
    monkeypatch.setenv("BLR_DEBUG", "1")
    loud = invoke("verify", tmp_path)
    assert loud[0] == plain[0] and "Traceback (most recent call last)" in loud[2]
    assert loud[2].endswith(plain[2])


def test_a_bug_is_one_line_too(tmp_path: Path, invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(folder: Path) -> None:
        raise RuntimeError("first line\nsecond \x1b[31m line")

    monkeypatch.setattr("blr.compressor.commands.verify.verify_manifest", fail)
    code, _, err = invoke("verify", tmp_path)
    assert code == 1
    assert err.startswith("blr: error: RuntimeError: first line second \\x1b[31m line; this is a bug")
    assert err.count("\n") == 1


def test_out_of_memory(tmp_path: Path, invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(folder: Path) -> None:
        raise MemoryError

    monkeypatch.setattr("blr.compressor.commands.verify.verify_manifest", fail)
    code, _, err = invoke("verify", tmp_path)
    assert code == 9 and err.startswith("blr: error: this machine has too little memory")
