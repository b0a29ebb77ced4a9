"""The command line on the bundled checkpoint: what a person types and what comes back."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from limited import Limited
from pico import save_pico
from running import Run
from safetensors.torch import load_file, save_file


def result(done: subprocess.CompletedProcess[str]) -> dict[str, object]:
    """The one JSON object on standard output of a command that succeeded."""
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def refused(done: subprocess.CompletedProcess[str], code: int, *fragments: str) -> None:
    """One line on standard error with every fragment, the exit code, nothing on standard output."""
    assert done.returncode == code, done.stderr
    assert done.stdout == ""
    lines = [line for line in done.stderr.splitlines() if not line.startswith("blr: note: ")]
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("blr: error: ")
    assert all(fragment in lines[0] for fragment in fragments), lines[0]


@pytest.fixture(scope="module")
def compressed(limited: Limited, tmp_path_factory: pytest.TempPathFactory, tiny: Path) -> Path:
    """tiny-llama compressed by BLAST at CF 1.25."""
    folder = tmp_path_factory.mktemp("compressed")
    options = ["--method", "blast", "--cf", "1.25", "--rounds", "5", "--force"]
    done = limited.run("compress", tiny, "-o", "out", *options, cwd=folder)
    assert done.code == 0, done.err
    return folder / "out"


def test_help_and_version_load_no_torch() -> None:
    code = (
        "import sys; from blr.compressor.cli import main; sys.argv = ['blr', sys.argv[1]]\n"
        "try: main()\nfinally: print('torch' in sys.modules, file=sys.stderr)"
    )
    for option in ("--help", "--version"):
        command = [sys.executable, "-c", code, option]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        assert done.stderr.strip() == "False"


def test_compress_reports_what_it_did(compressed: Path, blr: Run) -> None:
    inspected = result(blr("inspect", compressed, "--format", "json"))
    assert inspected["cf"] == pytest.approx(1.25, rel=0.02)
    assert len(inspected["layers"]) == 28
    assert all(0 < layer["error"] < 1 for layer in inspected["layers"])
    table = blr("inspect", compressed).stdout.splitlines()
    assert table[0].split()[:3] == ["module", "structure", "shape"]
    assert len(table) == 30
    assert "28 files" not in blr("verify", compressed).stdout


def test_default_output_and_json_summary(tiny: Path, blr: Run, tmp_path: Path) -> None:
    done = result(blr("compress", tiny, "--cf", "1.5", "--format", "json", "--force"))
    assert Path(done["output"]) == tmp_path / "tiny-llama-svd-cf1.5"
    assert done["cf"] == pytest.approx(1.5, rel=0.02)
    stored = load_file(Path(done["output"]) / "model.safetensors")
    assert sum(tensor.numel() for tensor in stored.values()) == done["parameters_after"]
    assert done["parameters_after"] < done["parameters_before"]


def test_eval_gives_perplexity_near_the_dense_one(
    compressed: Path, tiny: Path, sample: Path, blr: Run
) -> None:
    options = ["--text", sample, "--max-tokens", "4096", "--window", "256", "--format", "json"]
    dense, structured = (result(blr("eval", folder, *options)) for folder in (tiny, compressed))
    assert dense["tokens"] == structured["tokens"] == 16 * 255
    assert dense["window"] == 256
    assert 5 < dense["perplexity"] < structured["perplexity"] < 1000


@pytest.mark.slow
def test_several_texts_are_a_row_each(tiny: Path, sample: Path, blr: Run, tmp_path: Path) -> None:
    (tmp_path / "harder.txt").write_text((tiny / "tokenizer_config.json").read_text())
    options = ["--text", sample, "--max-tokens", "512", "--window", "256"]
    alone = result(blr("eval", tiny, *options, "--format", "json"))
    both = [*options, "--text", "harder.txt"]
    first, second = result(blr("eval", tiny, *both, "--format", "json"))["texts"]
    assert alone.pop("checkpoint") == {"name": "tiny-llama", "digest": None}
    assert first == alone and second["perplexity"] > alone["perplexity"]
    rows = blr("eval", tiny, *both).stdout.splitlines()
    assert rows[0].split() == ["text", "perplexity", "tokens"] and len(rows) == 4
    assert rows[3] == f"counted: {first['counted']}"


def test_json_lines_are_judged_by_their_text(tiny: Path, sample: Path, blr: Run, tmp_path: Path) -> None:
    """As a calibration reads them: not the syntax around it."""
    text = sample.read_text()[:4000]
    lines = [json.dumps({"id": n, "text": part}) for n, part in enumerate(text.split("\n"))]
    (tmp_path / "text.JSONL").write_text("\n".join(lines))
    (tmp_path / "text.txt").write_text(f"{text}\n")
    done = blr("eval", tiny, "--text", "text.JSONL", "--text", "text.txt", "--format", "json")
    found, expected = json.loads(done.stdout)["texts"]
    assert found["perplexity"] == expected["perplexity"] and found["tokens"] == expected["tokens"]
    (tmp_path / "text.JSONL").write_text('{"content": "x"}\n')
    done = blr("eval", tiny, "--text", "text.JSONL")
    assert done.returncode == 4 and "text.JSONL:1: expected a JSON object" in done.stderr


def test_tasks_without_their_package_name_the_extra(tiny: Path, blr: Run) -> None:
    if find_spec("lm_eval") is not None:
        pytest.skip("lm_eval is installed")
    done = blr("eval", tiny, "--tasks", "hellaswag")
    assert (done.returncode, done.stdout) == (9, "")
    assert done.stderr.splitlines()[-1].endswith("pip install 'blr-compress[eval]'")


def test_stride_scores_every_token_with_more_context(tiny: Path, sample: Path, blr: Run) -> None:
    options = ["--text", sample, "--max-tokens", "1024", "--window", "256", "--format", "json"]
    plain = result(blr("eval", tiny, *options))
    strided = result(blr("eval", tiny, *options, "--stride", "64"))
    assert strided["tokens"] == 1023
    assert strided["perplexity"] < plain["perplexity"]


def test_generate_streams_text_or_prints_json(compressed: Path, blr: Run) -> None:
    text = blr("generate", compressed, "The protocol", "--max-new-tokens", "8")
    assert text.returncode == 0, text.stderr
    found = result(blr("generate", compressed, "The protocol", "--max-new-tokens", "8", "--format=json"))
    assert 1 <= found["tokens"] <= 8
    assert found["text"].strip() in text.stdout


def test_shards_hold_the_same_tensors_as_one_file(
    tiny: Path, sample: Path, blr: Run, tmp_path: Path
) -> None:
    result(blr("compress", tiny, "-o", "one", "--format", "json", "--force"))
    result(blr("compress", tiny, "-o", "many", "--max-shard-size", "1MB", "--format", "json", "--force"))
    shards = sorted((tmp_path / "many").glob("*.safetensors"))
    assert len(shards) > 2
    many = {name: t for shard in shards for name, t in load_file(shard).items()}
    one = load_file(tmp_path / "one" / "model.safetensors")
    assert many.keys() == one.keys()
    assert all(many[name].equal(tensor) for name, tensor in one.items())
    assert blr("eval", "many", "--text", sample, "--quiet").returncode == 0


def test_source_files_are_carried_byte_for_byte(compressed: Path, tiny: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (compressed / name).read_bytes() == (tiny / name).read_bytes()


def test_pattern_and_dtype_options(tmp_path: Path, blr: Run) -> None:
    source = save_pico("gpt2", tmp_path / "dense")
    arguments = ["compress", source, "-m", "ks", "--include", "*attn.c_proj", "--format", "json"]
    chain = ["--pattern", "(1,16,8,2)(4,4,8,1)"]
    done = result(blr(*arguments, *chain, "-o", "chain", "--dtype", "float16"))
    assert done["layers"] == 2
    stored = load_file(tmp_path / "chain" / "model.safetensors")
    factor = stored["transformer.h.0.attn.c_proj.factors.0"]
    assert (tuple(factor.shape), str(factor.dtype)) == ((1, 16, 8, 2), "torch.float16")
    assert result(blr(*arguments, "--pattern", "butterfly", "-o", "butterfly"))["layers"] == 2


@pytest.mark.parametrize(
    ("arguments", "code", "fragments"),
    [
        (["no/such/folder"], 4, ["no/such/folder", "no such folder"]),
        (["."], 5, ["inside .", "choose another --output"]),  # where the default would be written
        (["full", "-o", "out"], 4, ["config.json"]),
        (["TINY", "--method", "magic"], 2, ["method", "magic", "svd"]),
        (["TINY", "--cf", "1"], 2, ["cf", "greater than 1"]),
        (["TINY", "--cf", "1e6"], 2, ["at most cf"]),
        (["TINY", "--cf", "two"], 2, ["--cf"]),
        (["TINY", "--solver", "magic"], 2, ["magic", "closed-form"]),
        (["TINY", "-o", "full"], 5, ["full", "exists"]),
        (["TINY", "--device", "cuda:7"], 9, ["cuda:7"]),
        (["TINY", "--max-shard-size", "big"], 2, ["big", "5GB"]),
        (["TINY", "--nonsense"], 2, ["--nonsense"]),
        ([], 2, ["argument"]),
    ],
    ids=lambda value: "-".join(map(str, value)) if isinstance(value, list) else None,
)
def test_bad_input_gets_one_line_and_writes_nothing(
    arguments: list[str], code: int, fragments: list[str], tiny: Path, blr: Run, tmp_path: Path
) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "precious").write_text("keep")
    named = [str(tiny) if a == "TINY" else a for a in arguments]
    refused(blr("compress", *named), code, *fragments)
    left = {str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if ".blr-partial" not in str(p)}
    assert left == {"full", "full/precious"}


def test_a_weight_with_nan_is_named_and_counted(tiny: Path, blr: Run, tmp_path: Path) -> None:
    source = tmp_path / "bad"
    source.mkdir()
    tensors = load_file(tiny / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    tensors[name][3, :2] = float("nan")
    save_file(tensors, source / "model.safetensors")
    (source / "config.json").write_bytes((tiny / "config.json").read_bytes())
    refused(blr("compress", source, "-o", "out"), 7, name, "2 NaN or Inf")
    assert not (tmp_path / "out").exists()


def test_eval_wants_text_or_sts(tiny: Path, blr: Run) -> None:
    refused(blr("eval", tiny), 2, "--text", "--sts")
    refused(blr("eval", tiny, "--text", "missing.txt"), 4, "missing.txt")


def test_verify_notices_a_changed_file(compressed: Path, blr: Run, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    subprocess.run(["cp", "-r", compressed, copy], check=True)
    (copy / "config.json").write_text("{}")
    refused(blr("verify", copy), 10, "config.json")
    assert blr("verify", compressed).returncode == 0


def test_a_kernel_setting_that_cannot_be_followed_is_refused_before_any_work(
    tiny: Path, installed: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BLR_KERNELS", "fast")
    refused(installed("inspect", tiny), 2, "BLR_KERNELS is 'fast'", "auto, torch, triton")
    assert installed("--version").returncode == 0
