"""Good checkpoints are read as the safetensors library reads them, in every layout."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from patience import PATIENCE
from safetensors import safe_open
from safetensors.torch import save_file

from blr.compressor.base.errors import InputError
from blr.compressor.checkpoint.extras import Extras
from blr.compressor.checkpoint.header import TORCH_NAMES
from blr.compressor.checkpoint.pickled import convert_pickle
from blr.compressor.checkpoint.source import Source, open_source

TINY = Path(__file__).parents[1] / "data" / "tiny-llama"
FAST = settings(
    max_examples=100,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def example() -> dict[str, torch.Tensor]:
    """One tensor of every dtype that torch and safetensors share, and the odd shapes."""
    torch.manual_seed(0)
    values = torch.randint(0, 2, (3, 5))
    made = {name.lower(): values.to(getattr(torch, name)) for name in TORCH_NAMES.values()}
    made["scalar"] = torch.tensor(2.5)
    made["empty"] = torch.empty(0, 7)
    made["row"] = torch.randn(1, 9, dtype=torch.float64)
    return made


def write(folder: Path, *shards: dict[str, torch.Tensor]) -> Path:
    """A checkpoint in `folder`: single for one shard, otherwise indexed."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text('{"model_type": "llama", "x": Infinity}')
    weight_map = {}
    for number, shard in enumerate(shards):
        name = f"model-{number}.safetensors" if len(shards) > 1 else "model.safetensors"
        save_file(shard, folder / name, {"format": "pt"})
        weight_map.update(dict.fromkeys(shard, name))
    if len(shards) > 1:
        index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Equal dtype, shape and bytes."""
    flat = [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other)]
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(*flat)


def check_equals_library(source: Source) -> None:
    names = []
    for shard in source.shards:
        with safe_open(shard, "pt") as library:
            for name in library.keys():  # noqa: SIM118 (not a dict)
                assert same(source.load_tensor(source.entries[name]), library.get_tensor(name))
                names.append(name)
    assert sorted(names) == sorted(source.entries)


def test_tiny_llama() -> None:
    source = open_source(TINY)
    assert source.model_type == "llama" and len(source.entries) == 38
    carried = ["generation_config.json", "tokenizer.json", "tokenizer_config.json"]
    assert list(source.extras.carried) == carried
    check_equals_library(source)


def test_every_dtype(tmp_path: Path) -> None:
    tensors = example()
    source = open_source(write(tmp_path, tensors))
    for name, tensor in tensors.items():
        loaded = source.load_tensor(source.entries[name])
        assert same(loaded, tensor)
        loaded.fill_(1)  # memory of its own, writable
    floats = {"float16", "bfloat16", "float32", "float64", "scalar", "empty", "row"}
    assert {name for name, entry in source.entries.items() if entry.is_float} == floats


def test_sharded_in_deterministic_order(tmp_path: Path) -> None:
    tensors = example()
    names = sorted(tensors)
    halves = [{name: tensors[name] for name in names[start::2]} for start in (0, 1)]
    source = open_source(write(tmp_path, *halves))
    check_equals_library(source)
    order = [(entry.file, entry.start, entry.end) for entry in source.entries.values()]
    assert order == sorted(order) and len(source.shards) == 2


@FAST
@given(
    st.dictionaries(
        st.text("abc.xyz_0129", min_size=1, max_size=9).filter(lambda name: ".." not in name),
        st.tuples(st.sampled_from(["F32", "BF16", "I64", "U8"]), st.lists(st.integers(0, 5))),
        min_size=1,
        max_size=5,
    )
)
def test_random_checkpoints(tmp_path: Path, described: dict[str, tuple[str, list[int]]]) -> None:
    tensors = {
        name: torch.rand(shape[:4]).mul(99).to(getattr(torch, TORCH_NAMES[dtype]))
        for name, (dtype, shape) in described.items()
    }
    check_equals_library(open_source(write(tmp_path, tensors)))


INDEX_TEXT = st.text('abxy./\\\0{}[]":,', max_size=9)
NAME = st.sampled_from(["a", "b", "x.safetensors", "y.safetensors", ""]) | INDEX_TEXT


@FAST
@given(
    st.binary(max_size=40).map(lambda data: b'{"weight_map":' + data)
    | st.dictionaries(NAME, NAME | st.none() | st.integers(), max_size=4).map(
        lambda weight_map: json.dumps({"weight_map": weight_map}).encode()
    )
)
def test_random_index(tmp_path: Path, index: bytes) -> None:
    one = torch.ones(1)
    folder = tmp_path / "checkpoint"
    if not folder.exists():
        write(folder, {"a": one}, {"b": one})
        for number, name in enumerate("xy"):
            (folder / f"model-{number}.safetensors").rename(folder / f"{name}.safetensors")
    (folder / "model.safetensors.index.json").write_bytes(index)
    try:
        assert set(open_source(folder).entries) <= {"a", "b"}
    except InputError as error:
        assert str(error).isprintable() and len(str(error)) < 500


def test_bytes_and_digest(tmp_path: Path) -> None:
    source = open_source(write(tmp_path, {"a": torch.arange(1000.0)}))
    entry = source.entries["a"]
    pieces = list(source.read_bytes(entry, 999))
    whole = b"".join(pieces)
    assert len(pieces) == 5 and whole == torch.arange(1000.0).numpy().tobytes()
    assert source.sha256(entry) == hashlib.sha256(whole).hexdigest()


def test_change_after_the_check_is_noticed(tmp_path: Path) -> None:
    source = open_source(write(tmp_path, {"a": torch.ones(4)}))
    save_file({"a": torch.zeros(5)}, tmp_path / "model.safetensors")
    with pytest.raises(InputError, match="changed since"):
        source.load_tensor(source.entries["a"])


def test_sub_byte_types_are_copied_not_loaded(tmp_path: Path) -> None:
    write(tmp_path, {"z": torch.ones(1)})
    raw = b'{"a":{"dtype":"F4","shape":[6],"data_offsets":[0,3]}}'
    content = len(raw).to_bytes(8, "little") + raw + b"\x12\x34\x56"
    (tmp_path / "model.safetensors").write_bytes(content)
    source = open_source(tmp_path)
    assert b"".join(source.read_bytes(source.entries["a"])) == b"\x12\x34\x56"
    with pytest.raises(InputError, match="F4 of tensor 'a'"):
        source.load_tensor(source.entries["a"])


def test_extra_files_are_data_only(tmp_path: Path) -> None:
    write(tmp_path, {"a": torch.ones(1)})
    carried = [
        *("1_Pooling/config.json", "additional_chat_templates/tool.jinja", "chat_template.jinja"),
        *("merges.txt", "modules.json", "sentencepiece.bpe.model", "special_tokens_map.json"),
        *("tokenizer.json", "tokenizer.model.v3", "vocab.txt"),
        # what a licence or a card needs, and what nobody knows
        *("LICENSE", "NOTICE.txt", "README.md", "USE_POLICY.md", "images/a/plot.png", "x.json"),
    ]
    left = ["tokenizer.py", "tokenizer.bin", "vocab.pkl", "model.py", "run.SH", "tf_model.h5"]
    left += ["1_Pooling/pytorch_model.bin", "tokenizer.json.pt", "tokenizer\n.json", "bad.json"]
    left += ["script", "program", "pickled", "onnx/"]
    contents = {"script": b"#!/bin/sh", "program": b"\x7fELF...", "pickled": b"\x80\x04..."}
    contents |= {"bad.json": b"{", "modules.json": b'[{"path": "1_Pooling"}]'}
    for name in [*carried, *left, "onnx/model.onnx", "onnx/config.json", ".git/config", ".gitignore"]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        if not name.endswith("/"):
            (tmp_path / name).write_bytes(contents.get(name, b"{}"))
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "link").symlink_to("/etc/hostname")
    source = open_source(tmp_path)
    assert list(source.extras.carried) == sorted(carried)
    assert source.extras.left == tuple(sorted([*left, "fifo", "link"]))
    assert source.extras.notes()[0].endswith(" more") and Extras().notes() == []


def test_modules_of_sentence_transformers_bring_their_weights(tmp_path: Path) -> None:
    """Pickled ones are named; --allow-pickle converts them. Weights of other folders stay behind."""
    write(tmp_path, {"a": torch.ones(1)})
    modules = [{"path": path} for path in ("", "1_Pooling", "2_Dense", "3_Dense")]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    for name in ("2_Dense", "3_Dense", "checkpoint-5"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    for name in ("2_Dense", "checkpoint-5"):
        save_file({"linear.weight": torch.ones(2, 2)}, tmp_path / name / "model.safetensors")
    torch.save({"linear.weight": torch.ones(3, 3)}, tmp_path / "3_Dense" / "pytorch_model.bin")
    dense = ["2_Dense/config.json", "2_Dense/model.safetensors", "3_Dense/config.json"]
    source = open_source(tmp_path)
    assert list(source.extras.carried) == [*dense, "modules.json"]
    assert source.extras.pickled == ("3_Dense/pytorch_model.bin",)
    assert source.extras.left == ("3_Dense/pytorch_model.bin", "checkpoint-5/")
    source = open_source(tmp_path, allow_pickle=True, scratch=tmp_path / ".scratch")
    assert list(source.extras.carried) == [*dense, "3_Dense/model.safetensors", "modules.json"]
    assert source.extras.left == ("checkpoint-5/",) and not source.extras.pickled
    with safe_open(source.extras.carried["3_Dense/model.safetensors"], "pt") as stored:
        assert stored.get_tensor("linear.weight").equal(torch.ones(3, 3))


def test_links_of_the_hub_cache(tmp_path: Path) -> None:
    """snapshots/REVISION/file -> ../../blobs/HASH is how huggingface_hub stores downloads."""
    model = tmp_path / "models--who--what"
    snapshot, blobs = model / "snapshots" / "0123", model / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, file in enumerate(sorted(TINY.iterdir())):
        shutil.copy(file, blobs / f"hash{number}")
        (snapshot / file.name).symlink_to(f"../../blobs/hash{number}")
    source = open_source(snapshot)
    assert len(source.entries) == 38 and len(source.extras.carried) == 3
    check_equals_library(source)
    elsewhere = tmp_path / "models--who--else" / "blobs"
    elsewhere.parent.mkdir()
    blobs.rename(elsewhere)
    blobs.symlink_to(elsewhere)
    with pytest.raises(InputError, match="leaves the folder"):
        open_source(snapshot)


def test_folder_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(TINY)
    assert len(open_source(tmp_path / "link").entries) == 38


@pytest.mark.parametrize("sharded", [False, True])
def test_pickled(tmp_path: Path, sharded: bool) -> None:
    folder = write(tmp_path / "in", {"a": torch.ones(1)})
    (folder / "model.safetensors").unlink()
    (folder / "tokenizer.json").write_text("{}")
    base = torch.randn(6, 4)
    odd = {"whole": base, "tied": base, "part": base[2:], "turned": base.t(), **example()}
    odd["parameter"] = torch.nn.Parameter(base)
    if sharded:
        torch.save({"more": base}, folder / "y.bin")
        torch.save(odd, folder / "x.bin")
        weight_map = {**dict.fromkeys(odd, "x.bin"), "more": "y.bin"}
        text = json.dumps({"weight_map": weight_map})
        (folder / "pytorch_model.bin.index.json").write_text(text)
    else:
        torch.save(odd, folder / "pytorch_model.bin")
    source = open_source(folder, allow_pickle=True, scratch=tmp_path / "scratch")
    assert source.entries.keys() == odd.keys() | ({"more"} if sharded else set())
    assert source.folder == folder and list(source.extras.carried) == ["tokenizer.json"]
    for name, tensor in odd.items():
        assert same(source.load_tensor(source.entries[name]), tensor)


def test_pickled_conversion_is_reproducible(tmp_path: Path) -> None:
    torch.save(example(), tmp_path / "pytorch_model.bin")
    contents = []
    for name in ("one", "two"):
        converted = convert_pickle(tmp_path, tmp_path / name)
        contents.append({file.name: file.read_bytes() for file in converted.iterdir()})
    assert contents[0] == contents[1]


def test_memory_stays_one_tensor(tmp_path: Path) -> None:
    """Loading 12 tensors of 16 MB one after another holds about one of them (torch apart)."""
    write(tmp_path, {f"a{i}": torch.full((4 * 2**20,), float(i)) for i in range(12)})
    script = """
import sys, torch
from pathlib import Path
from blr.compressor.checkpoint.source import open_source
def peak():
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])
source = open_source(Path(sys.argv[1]))
torch.ones(9).sum()
before = peak()
for entry in source.entries.values():
    source.load_tensor(entry)
print(peak() - before)
"""
    if not os.path.exists("/proc/self/status"):
        pytest.skip("reads the peak from /proc")
    command = [sys.executable, "-I", "-c", script, str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=True)
    assert int(result.stdout) < 3 * 16 * 1024  # KiB; one being read while one is let go, and slack
