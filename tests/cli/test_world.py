"""No "bug in blr" where the world is at fault: names, locales, folders, limits, odd models."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from limited import Ended, Limited
from spoiling import spoil

from blr.compressor.checkpoint.hints import inert
from blr.compressor.machine.exhaustion import exhausted

Run = Callable[..., subprocess.CompletedProcess[str]]
TEXT = "the protocol is " * 200


def refused(ended: Ended, code: int, fragment: str) -> None:
    assert ended.code == code, ended.err
    assert ended.err.count("blr: error: ") == 1 and "bug" not in ended.err
    assert fragment in ended.err


# --- Names and paths -------------------------------------------------------------------------------

NAMES = {
    "newline": b"model\n---\nlicense: evil",
    "escape": b"model\x1b[31m",
    "direction": "model\u202egnp.exe".encode(),
    "quotes": b"model'\"`$(x)",
    "japanese": "模型".encode(),
    "dashes": b"---",
}


@pytest.mark.parametrize("locale", [{}, {"PYTHONIOENCODING": "ascii"}], ids=["utf-8", "ascii"])
@pytest.mark.parametrize("name", NAMES)
def test_names_of_folders(
    name: str, locale: dict[str, str], limited: Limited, dense: Path, tmp_path: Path
) -> None:
    """Every command takes them and prints them escaped; nothing of them reaches a header."""
    given = f"./{os.fsdecode(NAMES[name])}"
    shutil.copytree(dense, tmp_path / given)
    patch = "import sys\nsys.stdout.reconfigure(encoding='ascii', errors='strict')" if locale else ""
    for command in (
        ("compress", given, "-o", f"{given}.out"),
        ("inspect", f"{given}.out"),
        ("verify", f"{given}.out"),
        ("export", f"{given}.out", "-o", "exported"),
        ("plan", given),
        ("generate", given, "the", "--max-new-tokens", "2"),
    ):
        ended = limited.run(*command, cwd=tmp_path, patch=patch)
        assert ended.code == 0, ended.err
        assert all(line.isprintable() for line in (ended.out + ended.err).splitlines())
        assert "license: evil" not in ended.out.splitlines()
    for folder in (f"{given}.out", "exported"):
        card = (tmp_path / folder / "README.md").read_text("utf-8")
        header, rest = card.removeprefix("---\n").split("\n---\n", 1)
        assert {line.partition(":")[0] for line in header.splitlines()} == {"library_name", "tags"}
        assert rest.startswith("# ") and "\nlicense" not in rest


def test_names_that_are_no_text(limited: Limited, model: Path) -> None:
    """Libraries take names as text: such a folder is refused before anything is done."""
    given = os.fsdecode(b"./mod\xe9le")
    os.rename(model, model.parent / given)
    for command in (("compress", given), ("export", given, "-o", "out"), ("generate", given, "the")):
        refused(limited.run(*command, cwd=model.parent), 4, "no text in utf-8; rename")
    os.rename(model.parent / given, model)
    for name in ("compress", "export"):
        ended = limited.run(name, "model", "-o", given, cwd=model.parent)
        refused(ended, 5, "no text in this locale; choose another")


LONG = "a" * 5000
PATHS = {"long": LONG, "long-parts": "/".join(["a" * 200] * 30), "no-user": "~nosuchuser/x"}
TAKES_PATHS: dict[str, tuple[tuple[str, ...], int]] = {
    "compress": (("compress", "{}", "-o", "out"), 4),
    "output": (("compress", "model", "-o", "{}/out"), 5),
    "calibration": (("compress", "model", "-o", "out", "--calibration", "{}.txt"), 4),
    "recipe": (("compress", "model", "-o", "out", "-r", "{}.yaml"), 3),
    "recipe-name": (("recipes", "validate", "{}"), 3),
    "plan": (("plan", "{}"), 4),
    "export": (("export", "{}", "-o", "out"), 4),
    "generate": (("generate", "{}", "the"), 4),
    "text": (("eval", "model", "--text", "{}"), 4),
    "sts": (("eval", "model", "--sts", "{}"), 4),
    "inspect": (("inspect", "{}"), 4),
    "verify": (("verify", "{}"), 5),
}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("command", TAKES_PATHS)
def test_paths(command: str, path: str, limited: Limited, model: Path) -> None:
    arguments, code = TAKES_PATHS[command]
    filled = (argument.replace("{}", PATHS[path]) for argument in arguments)
    ended = limited.run(*filled, cwd=model.parent)
    refused(ended, code, PATHS[path][:8])
    assert len(ended.err) < 2100


# --- Prompts and encodings -------------------------------------------------------------------------


@pytest.mark.parametrize("prompt", [b"the \xff protocol", b"\xed\xa0\x80", b"\xc3"], ids=repr)
def test_prompts_that_are_no_text(prompt: bytes, limited: Limited, dense: Path) -> None:
    ended = limited.run("generate", dense, os.fsdecode(prompt), cwd=dense.parent)
    refused(ended, 2, "prompt")


def test_prompt_of_a_locale_without_its_characters(limited: Limited, dense: Path) -> None:
    """LC_ALL=C without UTF-8 mode gives a prompt as bytes in disguise; they are UTF-8 all the same."""
    disguised = "the é protocol".encode().decode("ascii", "surrogateescape")
    command = ("generate", dense, disguised, "--max-new-tokens", "2", "--format", "json")
    assert limited.run(*command, cwd=dense.parent).code == 0


def test_calibration_with_half_a_character(limited: Limited, model: Path) -> None:
    (model.parent / "t.jsonl").write_text('{"text": "the \\ud800 protocol"}\n')
    command = ("compress", "model", "-o", "out", "--calibration", "t.jsonl")
    refused(limited.run(*command, cwd=model.parent), 4, "t.jsonl:1")


ASCII: dict[str, dict[str, str]] = {
    "C": {"LC_ALL": "C"},
    "C-without-utf-8": {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
    "ascii": {"PYTHONIOENCODING": "ascii"},
    "strict-ascii": {"LC_ALL": "POSIX", "PYTHONIOENCODING": "ascii:strict"},
}


@pytest.mark.parametrize("locale", ASCII)
def test_locales(locale: str, blr: Run, dense: Path, tmp_path: Path) -> None:
    """What the encoding of a stream has no bytes for is escaped; results are the same."""
    (tmp_path / "模型").symlink_to(dense)
    environment = {**os.environ, **ASCII[locale]}
    for command in (("--help",), ("recipes", "list"), ("plan", "--help"), ("plan", dense)):
        assert blr(*command, env=environment).returncode == 0
    result = blr("plan", "./模型", env=environment)
    if locale == "C-without-utf-8":
        assert result.returncode == 4 and "LC_ALL" in result.stderr
    else:
        assert result.returncode == 0
    assert result.stderr.isascii() and "bug" not in result.stderr


# --- Folders of caches and tables ------------------------------------------------------------------

UNUSABLE = ["/dev/null/x", "~nosuchuser/x", "/proc/1/nothing", "a" * 5000, "relative\n", "."]


@pytest.mark.parametrize("folder", UNUSABLE)
@pytest.mark.parametrize("name", ["XDG_CACHE_HOME", "BLR_TUNED_DIR"])
def test_folders_that_cannot_be_used(
    name: str, folder: str, limited: Limited, small: Path, tmp_path: Path
) -> None:
    """They are about speed alone: what reads them goes on without."""
    for command in (("generate", small, "the", "--max-new-tokens", "2"), ("plan", small)):
        ended = limited.run(*command, cwd=tmp_path, env={name: folder})
        assert ended.code == (0 if command[0] == "generate" else ended.code), ended.err
        assert "bug" not in ended.err


@pytest.mark.parametrize("content", ["", "[]", "gpu: 3", "\xff", "rules: [" * 100])
def test_tables_that_are_none(content: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A table of the user's that cannot be read is a warning: the shipped one is followed."""
    from blr.kernels.common.tuned import tuned_rules

    monkeypatch.setenv("BLR_TUNED_DIR", str(tmp_path))
    (tmp_path / "h200.yaml").write_bytes(content.encode("latin-1"))
    tuned_rules.cache_clear()
    with pytest.warns(UserWarning, match="h200.yaml"):
        rules = tuned_rules("h200")
    tuned_rules.cache_clear()
    assert rules


@pytest.mark.parametrize("kind", ["fifo", "folder", "device", "link-loop"])
def test_tables_that_are_no_files(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from blr.kernels.common.tuned import tuned_rules

    path = tmp_path / "h200.yaml"
    {
        "fifo": lambda: os.mkfifo(path),
        "folder": path.mkdir,
        "device": lambda: path.symlink_to("/dev/zero"),
        "link-loop": lambda: path.symlink_to(path.name),
    }[kind]()
    monkeypatch.setenv("BLR_TUNED_DIR", str(tmp_path))
    tuned_rules.cache_clear()
    if kind == "link-loop":
        assert tuned_rules("h200")
    else:
        with pytest.warns(UserWarning, match="h200.yaml"):
            tuned_rules("h200")
    tuned_rules.cache_clear()


# --- What a machine lacks --------------------------------------------------------------------------

LACKING: dict[str, str] = {
    "threads": 'import threading\ndef f(s): raise RuntimeError("can\'t start new thread")\n'
    "threading.Thread.start = f",
    "memory": "import blr.compressor.checkpoint.source as s\n"
    "def f(*a, **k): raise MemoryError\ns.read_header = f",
    "model-memory": "import transformers as t\ndef f(*a, **k):\n raise RuntimeError('[enforce fail at "
    "alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can\\'t allocate memory: you tried')\n"
    "t.AutoModelForCausalLM.from_pretrained = f",
    "model-threads": "import transformers as t\ndef f(*a, **k):\n"
    ' raise RuntimeError("can\'t start new thread")\n'
    "t.AutoModelForCausalLM.from_pretrained = f\nt.PreTrainedModel.from_pretrained = f",
    "tokenizer-memory": "import transformers as t\ndef f(*a, **k): raise OSError(12, 'no room')\n"
    "t.AutoTokenizer.from_pretrained = f",
    "processes": "import subprocess\ndef f(*a, **k): raise BlockingIOError(11, 'again')\n"
    "subprocess.run = f",
    "library": "import blr.compressor.loading.load as l\ndef f(*a, **k):\n"
    " raise ImportError('libtorch.so: failed to map segment from shared object')\n"
    "l.load_tokenizer = f\nimport blr.compressor.planning.plan as p\np.make_plan = f\n"
    "import blr.compressor.export.export as e\ne.check_options = f",
}


@pytest.mark.parametrize(
    ("lack", "command"),
    [
        *((lack, "generate") for lack in LACKING if lack != "threads"),
        *((lack, "compress") for lack in ("threads", "memory", "processes", "model-threads")),
        *((lack, "export") for lack in ("threads", "memory", "processes", "library")),
    ],
)
def test_what_a_machine_lacks(lack: str, command: str, limited: Limited, model: Path) -> None:
    rest = {"generate": ("the",)}.get(command, ("-o", "out"))
    refused(limited.run(command, "model", *rest, cwd=model.parent, patch=LACKING[lack]), 9, "")


def test_little_address_space(limited: Limited, model: Path) -> None:
    """A real limit: whatever fails first, it is the machine that is said to be at fault."""
    patch = (
        "import resource\n"
        "used = int(open('/proc/self/statm').read().split()[0]) * 4096\n"
        "resource.setrlimit(resource.RLIMIT_AS, (used + (2 << 20), -1))"
    )
    for command in (("generate", "model", "the"), ("compress", "model", "-o", "out")):
        ended = limited.run(*command, cwd=model.parent, patch=patch)
        assert ended.code in (0, 9), ended.err


@pytest.mark.parametrize(
    ("error", "lacks"),
    [
        (RuntimeError("can't start new thread"), True),
        (RuntimeError("CUDA out of memory. Tried to allocate 2 GiB"), True),
        (MemoryError(), True),
        (OSError(12, "Cannot allocate memory"), True),
        (ImportError("libx.so: failed to map segment from shared object"), True),
        (RuntimeError("shapes cannot be multiplied"), False),
        (ValueError("out of memory of what was"), False),
        (OSError(2, "No such file"), False),
        (KeyError("memory"), False),
    ],
)
def test_what_counts_as_lacking(error: Exception, lacks: bool) -> None:
    assert (exhausted(error) is not None) == lacks
    wrapped = ValueError("cannot be built")
    wrapped.__cause__ = error
    assert (exhausted(wrapped) is not None) == lacks


# --- Defaults of models for generation -------------------------------------------------------------

FOLLOWED: list[dict[str, Any]] = [
    {"num_beams": 3},
    {"num_beams": 2, "num_return_sequences": 2},
    {"num_beams": 3, "length_penalty": 2.0, "early_stopping": True},
    {"num_return_sequences": 1, "return_dict_in_generate": True},
    {"return_dict_in_generate": True, "output_scores": True},
    {"repetition_penalty": 1.3},
    {"no_repeat_ngram_size": 2},
    {"suppress_tokens": [1, 2]},
    {"bad_words_ids": [[1]]},
    {"prompt_lookup_num_tokens": 2},
    {"do_sample": True, "temperature": 0.7, "top_k": 5},
    {"do_sample": True, "temperature": 0.0},
    {"eos_token_id": [0, 1, 2]},
    {"max_length": 5},
    {"min_new_tokens": 4},
    {"use_cache": False},
    {"pad_token_id": 10**6},
]
ODD: list[dict[str, Any]] = [
    {"stop_strings": ["protocol"]},  # transformers misreads tokenizers of whole words
    {"num_beams": "many"},
    {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5},
    {"constraints": ["x"], "num_beams": 2},
    {"force_words_ids": [[1]], "num_beams": 2},
    {"penalty_alpha": 0.6, "top_k": 4},
    {"assistant_early_exit": 1},
    {"dola_layers": "low"},
    {"cache_implementation": "quantized"},
    {"watermarking_config": {"ngram_len": 0}},
    {"num_return_sequences": 4},
    {"guidance_scale": 2.0},
    {"sequence_bias": [[[1], 2.0]]},
    {"forced_eos_token_id": 10**6},
    {"decoder_start_token_id": -5},
    {"max_time": 1e-9},
]


@pytest.mark.parametrize("values", [*FOLLOWED, *ODD], ids=str)
def test_generation_defaults(values: dict[str, Any], limited: Limited, model: Path) -> None:
    """What streaming cannot do is done without; what cannot be done at all is refused."""
    spoil(model, "generation_config.json", **values)
    results = [
        limited.run("generate", model, "the", "--max-new-tokens", "4", *more, cwd=model.parent)
        for more in ((), ("--format", "json"))
    ]
    assert {ended.code for ended in results} <= ({0} if values in FOLLOWED else {0, 4})
    if results[0].code == 0:
        assert results[0].out.endswith(json.loads(results[1].out)["text"] + "\n")
        assert results[0].out.startswith("the")
    else:
        refused(results[0], 4, "generation_config.json")


def test_stop_strings_end_a_text(limited: Limited, tiny: Path, tmp_path: Path) -> None:
    model = Path(shutil.copytree(tiny, tmp_path / "model"))
    spoil(model, "generation_config.json", stop_strings=["e"])
    command = ("generate", model, "The protocol is", "--format", "json")
    ended = limited.run(*command, cwd=tmp_path)
    assert ended.code == 0, ended.err
    text = json.loads(ended.out)["text"]
    assert text.count("e") == 1 and text.index("e") > len(text) - 8  # in the last token


@pytest.mark.parametrize("command", ["generate", "eval", "compress", "calibrated", "export"])
def test_results_as_tuples(command: str, limited: Limited, model: Path) -> None:
    """`return_dict` false is a preference of whoever calls the model, not a fault of it."""
    spoil(model, "config.json", return_dict=False)
    (model.parent / "t.txt").write_text(TEXT)
    commands = {
        "generate": ("generate", "model", "the", "--max-new-tokens", "2"),
        "eval": ("eval", "model", "--text", "t.txt", "--window", "16"),
        "compress": ("compress", "model", "-o", "out"),
        "calibrated": (
            *("compress", "model", "-o", "out", "--calibration", "t.txt"),
            *("--samples", "2", "--seq-len", "16"),
        ),
        "export": ("export", "model", "-o", "out"),
    }
    ended = limited.run(*commands[command], cwd=model.parent)
    assert ended.code == 0, ended.err


# --- Layers that are asked for by name --------------------------------------------------------------


def test_reasons_for_layers_that_cannot_be(limited: Limited, model: Path) -> None:
    """A tied head, an embedding, a norm, and what is no tensor at all."""
    for glob, reason in (
        ("lm_head", "tied to the embedding"),
        ("lm_*", "tied to the embedding"),
        ("*embed_tokens", "no compressible linear layer"),
        ("*.input_layernorm", "no compressible linear layer"),
        ("nothing.*", "globs match module names, for example"),
    ):
        refused(limited.run("plan", "model", "--include", glob, cwd=model.parent), 2, reason)
    refused(limited.run("plan", "model", "--exclude", "lm_head", cwd=model.parent), 2, "tied to the")


def test_reason_for_a_tied_head_that_is_stored(limited: Limited, model: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(model / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    refused(limited.run("plan", "model", "--include", "lm_head", cwd=model.parent), 2, "tied to the")


def test_reason_for_an_integer_layer(limited: Limited, model: Path) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    name = "model.layers.0.mlp.up_proj"
    tensors = load_file(model / "model.safetensors")
    tensors[f"{name}.weight"] = tensors[f"{name}.weight"].to(torch.int8)
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    refused(limited.run("plan", "model", "--include", name, cwd=model.parent), 2, "stored as I8")


# --- Hints of code ----------------------------------------------------------------------------------

HINTS: dict[str, Any] = {
    "model_file": "modeling_evil.py",
    "trust_remote_code": True,
    "auto_map": {"AutoConfig": "evil.C"},
    "custom_pipelines": {"x": {"impl": "evil.P"}},
    "code_revision": "main",
    "_attn_implementation_internal": "sdpa",
    "_experts_implementation": "eager",
    "_custom": "evil",
    "init_script": "evil.sh",
    "plugin": ["evil"],
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "auto_map": {"a": "evil.C"}},
}
INERT: dict[str, Any] = {
    "_sliding_window_pattern": 6,
    "some_future_size": 3,
    "some_future_list": [1, 2],
    "flavour": "plain",
    "id2label": {"0": "auto_map", "1": "plugin"},
}


def test_hints_of_code_do_not_travel(limited: Limited, model: Path) -> None:
    spoil(model, "config.json", **HINTS, **INERT)
    spoil(model, "tokenizer_config.json", auto_map={"AutoTokenizer": ["evil.T", None]}, x=1)
    assert limited.run("compress", "model", "-o", "out", cwd=model.parent).code == 0
    assert limited.run("export", "out", "-o", "fast", cwd=model.parent).code == 0
    for folder in ("out", "fast"):
        config = json.loads((model.parent / folder / "config.json").read_bytes())
        assert "evil" not in json.dumps({**config, "auto_map": None})
        assert not (HINTS.keys() - {"auto_map", "rope_parameters"}) & config.keys()
        assert config["auto_map"]["AutoConfig"].startswith("configuration_blr.")
        assert config.items() >= INERT.items()
        assert b"evil" not in (model.parent / folder / "tokenizer_config.json").read_bytes()


@pytest.mark.parametrize("key", HINTS)
def test_hints_by_key(key: str) -> None:
    kept = inert({key: HINTS[key], "a": [{key: HINTS[key]}]}, {"rope_parameters"})
    assert "evil" not in json.dumps(kept)


# --- Records of an output ---------------------------------------------------------------------------


def record(**changes: Any) -> dict[str, Any]:
    spec = {"structure": "svd", "in_features": 8, "out_features": 8, "rank": 2}
    return {"spec": spec, "type": "q_proj", "error": 0.5, "notes": [], **changes}


RECORDS: dict[str, Any] = {
    "list": [],
    "number": {"a": 3},
    "empty-record": {"a": {}},
    "error-text": {"a": record(error="0.5")},
    "error-nan": {"a": record(error=float("nan"))},
    "error-huge": {"a": record(error=10**400)},
    "error-list": {"a": record(error=[0.5])},
    "type-number": {"a": record(type=3)},
    "type-list": {"a": record(type=["q"])},
    "notes-text": {"a": record(notes="n")},
    "notes-numbers": {"a": record(notes=[1])},
    "spec-list": {"a": record(spec=[1])},
    "spec-null": {"a": record(spec=None)},
    "spec-unknown": {"a": record(spec={"structure": "x"})},
    "spec-structure-list": {"a": record(spec={"structure": ["svd"]})},
    "spec-text-sizes": {"a": record(spec={**record()["spec"], "rank": "2"})},
    "spec-negative": {"a": record(spec={**record()["spec"], "rank": -2})},
    "spec-zero": {"a": record(spec={**record()["spec"], "in_features": 0})},
    "spec-float": {"a": record(spec={**record()["spec"], "out_features": 8.5})},
    "spec-huge": {"a": record(spec={**record()["spec"], "rank": 10**300})},
    "spec-boolean": {"a": record(spec={**record()["spec"], "rank": True})},
    "patterns-number": {
        "a": record(spec={"structure": "ks", "in_features": 8, "out_features": 8, "patterns": 3})
    },
    "patterns-flat": {
        "a": record(spec={"structure": "ks", "in_features": 8, "out_features": 8, "patterns": [[1, 2]]})
    },
    "name-control": {"a\u001b[31m": record()},
    "name-newline": {"a\nb": record()},
    "name-long": {"a" * 5000: record()},
}


@pytest.mark.parametrize("case", RECORDS)
def test_records_of_wrong_types(case: str, limited: Limited, tmp_path: Path) -> None:
    (tmp_path / "blr_layers.json").write_text(json.dumps(RECORDS[case]))
    (tmp_path / "config.json").write_text('{"model_type": "blr_llama", "blr": {}}')
    refused(limited.run("inspect", ".", cwd=tmp_path), 4, "not an output of blr compress")


@pytest.mark.parametrize("text", ["\u001b[2J", "a\nb", "\u202e", "\ud800"], ids=ascii)
def test_records_with_control_characters(text: str, limited: Limited, tmp_path: Path) -> None:
    (tmp_path / "blr_layers.json").write_text(json.dumps({"a": record(type=text, notes=[text])}))
    (tmp_path / "config.json").write_text('{"model_type": "blr_llama", "blr": {}}')
    ended = limited.run("inspect", ".", cwd=tmp_path)
    assert ended.code == 0 and all(line.isprintable() for line in ended.out.splitlines())
