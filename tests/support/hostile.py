"""Table of hostile checkpoints: HOSTILE maps an id to what writes it and what the error must say.

`build(folder)` turns `folder`, an empty one, into a checkpoint that must be refused. Code that
runs would create `folder.parent / "canary"`.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

Build = Callable[[Path], Any]

CONFIG = {
    **{"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 8},
    **{"intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2},
    **{"num_key_value_heads": 1, "vocab_size": 32, "max_position_embeddings": 64},
    **{"rms_norm_eps": 1e-5, "tie_word_embeddings": True, "torch_dtype": "float32"},
}
_Q, _KV = "num_attention_heads*head_dim", "num_key_value_heads*head_dim"
LLAMA_SHAPES: dict[str, list[str | int]] = {
    "model.embed_tokens.weight": ["vocab_size", "hidden_size"],
    "model.layers.*.self_attn.q_proj.weight": [_Q, "hidden_size"],
    "model.layers.*.self_attn.[kv]_proj.weight": [_KV, "hidden_size"],
    "model.layers.*.self_attn.o_proj.weight": ["hidden_size", _Q],
    "model.layers.*.mlp.[gu]*_proj.weight": ["intermediate_size", "hidden_size"],
    "model.layers.*.mlp.down_proj.weight": ["hidden_size", "intermediate_size"],
    **{"model.layers.*norm.weight": ["hidden_size"], "model.norm.weight": ["hidden_size"]},
    "model.layers.#": ["num_hidden_layers"],
}
_LAYER = {
    **{"self_attn.q_proj": (8, 8), "self_attn.k_proj": (4, 8), "self_attn.v_proj": (4, 8)},
    **{"self_attn.o_proj": (8, 8), "mlp.gate_proj": (16, 8), "mlp.up_proj": (16, 8)},
    **{"mlp.down_proj": (8, 16), "input_layernorm": (8,), "post_attention_layernorm": (8,)},
}
PICO: dict[str, tuple[int, ...]] = {
    "model.embed_tokens.weight": (32, 8),
    "model.norm.weight": (8,),
    **{f"model.layers.0.{name}.weight": shape for name, shape in _LAYER.items()},
}
SHARD, INDEX = "model.safetensors", "model.safetensors.index.json"


class Hostile(NamedTuple):
    """`fragment` must occur in the message; `allow_pickle` is what the command would be given."""

    build: Build
    fragment: str
    allow_pickle: bool = False


def packed(header: bytes | dict[str, Any], data: bytes = b"", length: int | None = None) -> bytes:
    """A safetensors file from a header, as it is or as JSON, with its true or another length."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw) if length is None else length) + raw + data


def described(dtype: Any = "F32", shape: Any = (1,), offsets: Any = (0, 4)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def tensors(shapes: dict[str, tuple[int, ...]]) -> bytes:
    """A good safetensors file of F32 tensors with small distinct values."""
    header, data = {}, bytearray()
    for name, shape in shapes.items():
        count, start = 1, len(data)
        for extent in shape:
            count *= extent
        data += struct.pack(f"<{count}f", *((i * 7919 % 101 - 50) / 500 for i in range(count)))
        header[name] = described("F32", shape, (start, len(data)))
    return packed({"__metadata__": {"format": "pt"}, **header}, bytes(data))


def write(folder: Path, shard: bytes | None = None, **config: Any) -> Path:
    """A good checkpoint in `folder`, with another shard or config values where given."""
    (folder / "config.json").write_text(json.dumps({**CONFIG, **config}))
    (folder / SHARD).write_bytes(tensors(PICO) if shard is None else shard)
    return folder


def shard(content: bytes) -> Build:
    return lambda folder: write(folder, content)


def one(entry: Any = None, data: bytes = bytes(4), name: str = "a") -> Build:
    """A shard with a single tensor, `name`, described by `entry`."""
    return shard(packed({name: described() if entry is None else entry}, data))


def text(header: str, data: bytes = bytes(4)) -> Build:
    return shard(packed(header.encode(), data))


def config(content: str | None = None, **values: Any) -> Build:
    def build(folder: Path) -> None:
        write(folder, **values)
        if content is not None:
            (folder / "config.json").write_text(content)

    return build


def replaced(name: str, make: Callable[[Path], Any]) -> Build:
    """A good checkpoint with one file replaced by what `make(path)` puts there."""

    def build(folder: Path) -> None:
        write(folder)
        (folder / name).unlink(missing_ok=True)
        make(folder / name)

    return build


def linked(name: str, target: str) -> Build:
    """A good checkpoint with one file a link to `target`; `secret` is a shard outside it."""

    def make(path: Path) -> None:
        (path.parent.parent / "secret").write_bytes(tensors(PICO))
        path.symlink_to(target)

    return replaced(name, make)


def indexed(weight_map: Any, files: dict[str, dict[str, tuple[int, ...]]] | None = None) -> Build:
    """An index over shards x and y that hold the tensors a and b, or what `files` says."""
    raw = weight_map if isinstance(weight_map, str) else json.dumps({"weight_map": weight_map})

    def build(folder: Path) -> None:
        write(folder)
        (folder / SHARD).unlink()
        shards = {"x.safetensors": {"a": (1,)}, "y.safetensors": {"b": (1,)}}
        for name, shapes in {**shards, **(files or {})}.items():
            (folder / name).write_bytes(tensors(shapes))
        (folder / INDEX).write_text(raw)

    return build


def sparse(size: int, start: bytes = b"") -> Callable[[Path], None]:
    def make(path: Path) -> None:
        path.write_bytes(start)
        os.truncate(path, size)

    return make


class Canary:
    """Pickles as a call that creates a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (str(self.path), "w")


class Bomb:
    """Pickles as `bytearray(10**12)`, which `weights_only` lets through."""

    def __reduce__(self) -> tuple[Any, ...]:
        return bytearray, (10**12,)


def archived(state: Any, compression: int = zipfile.ZIP_STORED, protocol: int = 2) -> bytes:
    """What torch.save would write for `state`, without torch."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression) as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(state, protocol))
        archive.writestr("archive/version", "3\n")
    return buffer.getvalue()


def pickled(content: Callable[[Path], bytes]) -> Build:
    """A checkpoint of pickled weights; `content(canary)` gives the bytes of pytorch_model.bin."""

    def build(folder: Path) -> None:
        write(folder)
        (folder / SHARD).unlink()
        (folder / "pytorch_model.bin").write_bytes(content(folder.parent / "canary"))

    return build


def saved(state: Callable[[], Any], claim: bytes = b"?", instead: bytes = b"?") -> Build:
    """Weights from the real torch.save, with bytes of the pickle exchanged if given."""

    def content(_: Path) -> bytes:
        import torch

        buffer, forged = io.BytesIO(), io.BytesIO()
        torch.save(state(), buffer)
        with zipfile.ZipFile(buffer) as old, zipfile.ZipFile(forged, "w") as new:
            for item in old.infolist():
                new.writestr(item, old.read(item).replace(claim, instead))
        return forged.getvalue()

    return pickled(content)


def _zeros(*shape: int) -> Any:
    import torch

    return torch.zeros(shape)


def _pickle_index(folder: Path) -> None:
    write(folder)
    (folder / SHARD).unlink()
    outside = {"weight_map": {"a": "../pytorch_model.bin"}}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(outside))


def auto_map(folder: Path, **values: Any) -> None:
    """A good checkpoint that asks for code of its own, which would create the canary."""
    names = {"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M"}
    write(folder, auto_map=names, **values)
    tokenizer = {"auto_map": {"AutoTokenizer": ["evil.T", None]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    for name in ("evil.py", "tokenizer.py", "sitecustomize.py"):
        (folder / name).write_text(f"open({str(folder.parent / 'canary')!r}, 'w')")


_A = '"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}'
_DEEP = "[" * 100_000 + "]" * 100_000
_TWO = {"a": "x.safetensors", "b": "y.safetensors"}

HEADERS = {
    "file-of-5-bytes": Hostile(shard(b"\x01\0\0\0\0"), "at least 8 bytes"),
    "empty-file": Hostile(shard(b""), "at least 8 bytes"),
    "header-beyond-file": Hostile(shard(packed(b"{}", length=999)), "inside the file"),
    "truncated-data": Hostile(shard(tensors(PICO)[:-100]), "bytes of data"),
    "header-of-2**64-1": Hostile(shard(packed(b"{}", length=2**64 - 1)), "at most 25000000"),
    "header-of-26-MB": Hostile(
        replaced(SHARD, sparse(30_000_000, struct.pack("<Q", 26_000_000) + b"{")),
        "at most 25000000",
    ),
    "header-no-json": Hostile(text("{nonsense}"), "invalid JSON"),
    "header-cut-json": Hostile(text("{" + _A), "invalid JSON"),
    "header-no-utf8": Hostile(shard(packed(b'{"\xff":1}')), "invalid JSON"),
    "header-list": Hostile(text("[]", b""), "a JSON object"),
    "header-leading-space": Hostile(text(" {" + _A + "}"), "a JSON object"),
    "header-nan": Hostile(text('{"a":NaN}'), "NaN is not JSON"),
    "header-deep": Hostile(text('{"a":' + _DEEP + "}"), "nested"),
    "header-brackets": Hostile(text('{"a":[' + "[]," * 700_000 + "[]]}"), "brackets"),
    "header-duplicate-tensor": Hostile(text("{" + _A + "," + _A + "}"), "duplicate key 'a'"),
    "header-duplicate-field": Hostile(
        text('{"a":{"dtype":"F32","dtype":"F64","shape":[1],"data_offsets":[0,4]}}'), "'dtype'"
    ),
    "header-digits": Hostile(text('{"a":' + "9" * 5000 + "}"), "invalid JSON"),
    "entry-no-object": Hostile(one([1]), "exactly the fields"),
    "entry-unknown-field": Hostile(one({**described(), "stride": [1]}), "exactly the fields"),
    "entry-missing-field": Hostile(one({"dtype": "F32", "shape": [1]}), "exactly the fields"),
    "dtype-unknown": Hostile(one(described("F31")), "dtype 'F31'"),
    "dtype-list": Hostile(one(described(["F32"])), "one of"),
    "dim-bool": Hostile(one(described(shape=[True])), "integers"),
    "dim-float": Hostile(one(described(shape=[1.0])), "integers"),
    "dim-negative": Hostile(one(described(shape=[-1, -1])), "integers"),
    "dim-text": Hostile(one(described(shape="1")), "integers"),
    "dims-overflow": Hostile(one(described(shape=[2**32, 2**32])), "2**63"),
    "dims-overflow-to-size": Hostile(one(described(shape=[2**63 + 1, 2])), "2**63"),
    "dims-zero-overflow": Hostile(one(described(shape=[0, 2**62, 2**62], offsets=[0, 0])), "2**63"),
    "dims-1000": Hostile(one(described(shape=[1] * 1000)), "at most 64"),
    "size-too-small": Hostile(one(described(shape=[2])), "4 bytes for tensor 'a'"),
    "size-of-odd-f4": Hostile(one(described("F4", [7])), "3.5 for F4"),
    "offsets-reversed": Hostile(one(described(offsets=[4, 0])), "begin and end"),
    "offsets-beyond": Hostile(one(described(offsets=[0, 2**40])), "begin and end"),
    "offsets-three": Hostile(one(described(offsets=[0, 4, 4])), "begin and end"),
    "regions-overlap": Hostile(
        shard(packed({"a": described(), "b": described()}, bytes(4))), "overlaps"
    ),
    "regions-overlap-partly": Hostile(
        shard(packed({"a": described(), "b": described(offsets=[2, 6])}, bytes(6))), "overlaps"
    ),
    "regions-hole": Hostile(one(described(offsets=[4, 8]), bytes(8)), "a hole"),
    "trailing-bytes": Hostile(shard(tensors(PICO) + b"#!/bin/sh"), "9 trailing bytes"),
    "no-tensors": Hostile(text("{}", b""), "no tensors"),
    "metadata-numbers": Hostile(text('{"__metadata__":{"a":1}}', b""), "strings"),
    "metadata-null": Hostile(text('{"__metadata__":null}', b""), "strings"),
    "name-empty": Hostile(one(name=""), "is empty"),
    "name-nul": Hostile(one(name="a\0b"), "does not print"),
    "name-newline": Hostile(one(name="a\nblr: done"), "does not print"),
    "name-direction-mark": Hostile(one(name="a\u202eb"), "does not print"),
    "name-lone-surrogate": Hostile(one(name="a\ud800"), "does not print"),
    "name-slash": Hostile(one(name="/etc/passwd"), "unsafe tensor name"),
    "name-backslash": Hostile(one(name="..\\a"), "unsafe tensor name"),
    "name-dots": Hostile(one(name="a..b"), "unsafe tensor name"),
    "name-long": Hostile(one(name="a" * 1025), "1025 characters"),
}
INDICES = {
    "index-dots": Hostile(indexed({"a": "../x.safetensors"}), "plain name"),
    "index-absolute": Hostile(indexed({"a": "/tmp/x.safetensors"}), "plain name"),
    "index-backslash": Hostile(indexed({"a": "..\\x.safetensors"}), "plain name"),
    "index-nul": Hostile(indexed({"a": "x\0.safetensors"}), "plain name"),
    "index-drive": Hostile(indexed({"a": "c:x.safetensors"}), "plain name"),
    "index-pickle": Hostile(indexed({"a": "x.bin"}), "plain name"),
    "index-number": Hostile(indexed({"a": 3}), "plain name"),
    "index-unsafe-tensor": Hostile(indexed({"a/../b": "x.safetensors"}), "unsafe tensor name"),
    "index-missing-shard": Hostile(indexed({**_TWO, "c": "z.safetensors"}), "no file"),
    "index-missing-tensor": Hostile(indexed({**_TWO, "c": "x.safetensors"}), "tensor 'c'"),
    "index-wrong-shard": Hostile(
        indexed({"a": "y.safetensors", "b": "x.safetensors"}), "puts in 'y.safetensors'"
    ),
    "index-unlisted-tensor": Hostile(indexed(_TWO, {"x.safetensors": {"c": (1,)}}), "no file"),
    "index-tensor-twice": Hostile(indexed(_TWO, {"x.safetensors": {"b": (1,)}}), "tensor 'b'"),
    "index-list": Hostile(indexed([1]), "no weight_map"),
    "index-without-map": Hostile(indexed('{"metadata":{}}'), "no weight_map"),
    "index-duplicate": Hostile(
        indexed('{"weight_map":{"a":"x.safetensors","a":"y.safetensors"}}'), "duplicate key 'a'"
    ),
    "index-deep": Hostile(indexed('{"metadata":' + _DEEP + "}"), "nested"),
    "index-huge": Hostile(replaced(INDEX, sparse(25_000_001)), "at most 25000000"),
    "index-fifo": Hostile(replaced(INDEX, os.mkfifo), "FIFO"),
    "index-beside-single": Hostile(
        replaced(INDEX, lambda path: path.write_text('{"weight_map":{"a":"x.safetensors"}}')),
        "both",
    ),
}
FILES = {
    "shard-fifo": Hostile(replaced(SHARD, os.mkfifo), "FIFO"),
    "shard-folder": Hostile(replaced(SHARD, os.mkdir), "folder"),
    "shard-link-outside": Hostile(linked(SHARD, "../secret"), "leaves the folder"),
    "shard-link-absolute": Hostile(linked(SHARD, "/etc/passwd"), "leaves the folder"),
    "shard-link-device": Hostile(linked(SHARD, "/dev/zero"), "leaves the folder"),
    "shard-link-dangling": Hostile(linked(SHARD, "nowhere"), "no file"),
    "shard-link-loop": Hostile(linked(SHARD, SHARD), "no file"),
    "tokenizer-link-outside": Hostile(linked("tokenizer.json", "../secret"), "leaves the folder"),
    "tokenizer-fifo": Hostile(replaced("tokenizer.json", os.mkfifo), "FIFO"),
    "tokenizer-huge": Hostile(replaced("vocab.txt", sparse(64 * 2**20 + 1)), "at most 67108864"),
    "pooling-link-outside": Hostile(linked("1_Pooling", "/etc"), "leaves the folder"),
    "no-folder": Hostile(lambda folder: folder.rmdir(), "no such folder"),
    "no-checkpoint": Hostile(lambda folder: None, "no config.json"),
    "no-weights": Hostile(replaced(SHARD, lambda path: None), "no weights"),
}
CONFIGS = {
    "config-no-json": Hostile(config("{"), "invalid JSON"),
    "config-empty": Hostile(config(""), "invalid JSON"),
    "config-mark": Hostile(config("\ufeff{}"), "save it without that mark"),
    "config-list": Hostile(config("[]"), "an object"),
    "config-duplicate": Hostile(config('{"model_type":"llama","model_type":"x"}'), "duplicate key"),
    "config-deep": Hostile(config('{"a":' + _DEEP + "}"), "nested"),
    "config-40-levels": Hostile(config('{"a":' + "[" * 40 + "]" * 40 + "}"), "nested"),
    "config-huge": Hostile(replaced("config.json", sparse(1_000_001)), "at most 1000000"),
    "config-fifo": Hostile(replaced("config.json", os.mkfifo), "FIFO"),
    "config-link": Hostile(linked("config.json", "/etc/hostname"), "leaves the folder"),
    "config-no-type": Hostile(config("{}"), "no model_type"),
    "config-type-path": Hostile(config(model_type="../../evil"), "model_type '../../evil'"),
    "config-type-list": Hostile(config(model_type=["llama"]), "model_type"),
    "config-architectures-text": Hostile(config(architectures="Llama"), "architectures 'Llama'"),
    "config-architectures-path": Hostile(config(architectures=["../evil"]), "architectures"),
    "config-architectures-number": Hostile(config(architectures=[3]), "architectures '[3]'"),
    "config-auto-map-no-type": Hostile(lambda f: auto_map(f, model_type=None), "model_type"),
    "mismatch-width": Hostile(config(hidden_size=16), "by config.json"),
    "mismatch-vocabulary": Hostile(config(vocab_size=2**20), "tensor 'model.embed_tokens.weight'"),
    "mismatch-heads": Hostile(config(num_key_value_heads=2), "k_proj"),
    "mismatch-layers": Hostile(config(num_hidden_layers=10**6), "num_hidden_layers"),
    "mismatch-type": Hostile(config(hidden_size="8"), "hidden_size '8'"),
    "mismatch-bool": Hostile(config(intermediate_size=True), "intermediate_size 'True'"),
    "mismatch-huge": Hostile(config(hidden_size=2**62), "hidden_size"),
    "mismatch-rank": Hostile(
        shard(tensors({**PICO, "model.norm.weight": (8, 1)})), "'model.norm.weight'"
    ),
}
PICKLES = {
    "pickle-not-allowed": Hostile(pickled(lambda c: archived({"a": Canary(c)})), "--allow-pickle"),
    "pickle-reducer": Hostile(pickled(lambda c: archived({"a": Canary(c)})), "asks for", True),
    "pickle-reducer-legacy": Hostile(pickled(lambda c: pickle.dumps(Canary(c), 2)), "zip format", True),
    "pickle-reducer-by-stack": Hostile(
        pickled(lambda c: archived({"a": Canary(c)}, protocol=4)), "asks for 'STACK_GLOBAL'", True
    ),
    "pickle-bomb": Hostile(pickled(lambda c: archived({"a": Bomb()})), "bytearray", True),
    "pickle-zip-bomb": Hostile(
        pickled(lambda c: archived(bytes(2**24), zipfile.ZIP_DEFLATED)), "compressed", True
    ),
    "pickle-number": Hostile(pickled(lambda c: archived({"a": 3})), "int under the key", True),
    "pickle-list": Hostile(pickled(lambda c: archived([1])), "a list", True),
    "pickle-deep": Hostile(pickled(lambda c: archived({"a": {"b": {}}})), "dict under", True),
    "pickle-zero-stride-giant": Hostile(
        saved(lambda: {"a": _zeros(1).expand(2**40)}), "over a storage of 4", True
    ),
    "pickle-false-storage": Hostile(
        saved(lambda: {"a": _zeros(4, 6)}, b"K\x18", b"K\x19"), "over a storage of 100", True
    ),
    "pickle-storage-beyond-file": Hostile(
        saved(lambda: {"a": _zeros(4, 6)}, b"K\x18", b"J\0\0\0\x40"), "over a storage", True
    ),
    "pickle-unsafe-name": Hostile(saved(lambda: {"a/b": _zeros(1)}), "unsafe tensor name", True),
    "pickle-endless-views": Hostile(
        saved(lambda: {f"a{i}": w for w in [_zeros(1000)] for i in range(100)}), "8 times", True
    ),
    "pickle-index-outside": Hostile(_pickle_index, "plain name", True),
}
HOSTILE: dict[str, Hostile] = {**HEADERS, **INDICES, **FILES, **CONFIGS, **PICKLES}
