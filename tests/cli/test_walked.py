"""What a walk through the commands has found: refused before any work, in one line that says why."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from heal_models import save_characters, write_text
from limited import Limited, refused
from pico import save_pico

CASES: dict[str, tuple[str, dict[str, str], int, str]] = {
    "all dense": ("compress DENSE -r dense.yaml -o out", {}, 2, "every layer is kept as it is"),
    "all dense, planned": ("plan DENSE -r dense.yaml", {}, 2, "every layer is kept as it is"),
    "quantized, planned": ("plan quantized", {}, 4, "quantization_config of method 'fp8'"),
    "trained kinds that it has not": (
        "heal SMALL --teacher DENSE -o out --train biases,dense --steps 1",
        *({}, 2, "the model has none of these; expected some of factors, norms, "),
    ),
    "a base of dense": (
        "plan DENSE --base int2 --method dense --rank 4",
        *({}, 2, "base int2 is what a structure corrects, expected method svd, monarch, blast"),
    ),
    "a text folder beside": (
        "plan DENSE",
        *({"BLR_TEXT_DIR": "texts"}, 2, "BLR_TEXT_DIR is 'texts': expected the whole path"),
    ),
    "in an output": ("compress DENSE -o SMALL/inner", {}, 5, "an output of blr, which would no longer"),
    "in one, deep": ("bench layers -o SMALL/a/b", {}, 5, "an output of blr, which would no longer be"),
    "transient": ("compress DENSE -o out", {"BLR_TRANSIENT": "64MB"}, 2, "BLR_TRANSIENT is '64MB'"),
    "compiled": ("eval SMALL --text t.txt", {"BLR_COMPILED": "fast"}, 2, "BLR_COMPILED is 'fast'"),
    "decode": ("generate SMALL a", {"BLR_DECODE": "fast"}, 2, "BLR_DECODE is 'fast'"),
    "nobody to meet": ("compress DENSE -o out", {"WORLD_SIZE": "2"}, 2, "WORLD_SIZE is 2 and nobody"),
    "heal of a sweep": (
        "sweep DENSE -o out --eval t.txt --methods svd --cf 2 --heal 0,-1",
        *({}, 2, "--heal is -1, expected a number over 0"),
    ),
    "sts of a decoder": ("eval DENSE --sts pairs.csv", {}, 9, "LlamaForCausalLM continues text"),
    "binary": ("export SMALL -o out --quantize int4 --text b.txt", {}, 4, "bytes that are no UTF-8"),
    "rank of additions": (
        "heal SMALL --teacher DENSE -o out --lora 65 --steps 1",
        *({}, 2, "--lora 65: expected at most 32, the largest rank of a layer"),
    ),
}


@pytest.fixture
def place(dense: Path, tmp_path: Path) -> Path:
    (tmp_path / "dense.yaml").write_text('rules:\n  - {match: "*", method: dense}\n')
    (tmp_path / "t.txt").write_text(" ".join(f"w{k % 40}" for k in range(80)))
    (tmp_path / "pairs.csv").write_text("one,other,score\nw1 w2,w3,3\nw4,w5,1\nw6,w7,5\n")
    (tmp_path / "b.txt").write_bytes(b"caf\xe9 " * 100)
    config = json.loads((dense / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8"}
    (tmp_path / "quantized").mkdir()
    (tmp_path / "quantized/config.json").write_text(json.dumps(config))
    return tmp_path


@pytest.mark.parametrize("case", CASES)
def test_refused(case: str, limited: Limited, dense: Path, small: Path, place: Path) -> None:
    command, environment, code, said = CASES[case]
    words = command.replace("DENSE", str(dense)).replace("SMALL", str(small)).split()
    before = {path.name for path in place.iterdir()}
    refused(limited.run(*words, cwd=place, env=environment), code, said)
    assert {path.name for path in place.iterdir()} == before


def test_a_rank_that_a_launcher_left_behind_is_nobodys(
    limited: Limited, dense: Path, place: Path
) -> None:
    done = limited.run("compress", dense, "-o", "out", "-q", cwd=place, env={"RANK": "1"})
    assert done.code == 0 and (place / "out/blr_manifest.json").exists(), done.err


def test_a_sweep_without_a_point_prints_one_object(limited: Limited, dense: Path, place: Path) -> None:
    grid = ("--methods", "svd", "--cf", "500", "--plain", "none", "--window", "16")
    output = ("--eval", "t.txt", "-o", "out", "--format", "json", "--device", "cpu")
    done = limited.run("sweep", dense, *grid, *output, cwd=place)
    assert done.code and json.loads(done.out)["exit_code"] == done.code


def test_homes_in_options_are_those_of_the_shell(limited: Limited, dense: Path, place: Path) -> None:
    """Shells leave ``--output=~/x`` as it is, and batch jobs have no shell."""
    home = {"HOME": str(place)}
    calibrated = ("--calibration=~/t.txt", "--samples", "2", "--seq-len", "16")
    done = limited.run("compress", dense, "--output=~/out", *calibrated, "-q", cwd=dense, env=home)
    assert done.code == 0 and (place / "out/blr_manifest.json").exists(), done.err
    done = limited.run("eval", "~/out", "--text", "~/t.txt", "--window", "16", cwd=dense, env=home)
    assert done.code == 0 and "perplexity" in done.out, done.err
    done = limited.run("inspect", "~/out", cwd=dense, env=home)
    assert done.code == 0, done.err


UNPRIVILEGED = """
import ctypes
libc, head, held = ctypes.CDLL(None), (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
libc.capget(head, held)
held[0] &= ~0b110  # root's leave to look into any folder
libc.capset(head, held)
"""


@pytest.mark.parametrize(
    "command",
    ["plan shut/model", "inspect shut/model", "compress DENSE --calibration shut/t.txt -o out"],
)
def test_folders_that_may_not_be_seen_are_told_from_none(
    command: str, limited: Limited, dense: Path, place: Path
) -> None:
    (place / "shut/model").mkdir(parents=True)
    (place / "shut").chmod(0)
    words = [str(dense) if word == "DENSE" else word for word in command.split()]
    done = limited.run(*words, cwd=place, patch=UNPRIVILEGED)
    (place / "shut").chmod(0o700)
    refused(done, 4, "no permission to reach a ")


CALIBRATED = ("--calibration", "t.txt", "--samples", "2", "--seq-len", "16", "--refit", "1", "-q")


@pytest.mark.parametrize(
    "options",
    [
        ("--method", "svd", "--cf", "1.3", "--quantize", "fp8", "--finish", "0"),
        ("--method", "blast", "--blocks", "32", "--cf", "1.1", "--rounds", "2", "--finish", "0"),
    ],
    ids=["float8", "more blocks than tensors"],
)
def test_what_was_fitted_is_written(
    options: tuple[str, ...], limited: Limited, dense: Path, place: Path
) -> None:
    done = limited.run("compress", dense, "-o", "out", *options, *CALIBRATED, cwd=place)
    assert done.code == 0, done.err
    assert limited.run("verify", "out", cwd=place).code == 0


def test_a_last_pass_without_a_layer_of_a_block(limited: Limited, tmp_path: Path) -> None:
    save_pico("qwen2", tmp_path / "model")
    save_characters(tmp_path / "model")
    write_text(tmp_path / "t.txt")
    options = ("--method", "svd", "--include", "lm_head", "--finish", "1")
    done = limited.run("compress", "model", "-o", "out", *options, *CALIBRATED, cwd=tmp_path)
    assert done.code == 0, done.err


def test_too_short_a_text_is_told(limited: Limited, dense: Path, place: Path) -> None:
    words = ("compress", dense, "-o", "out", "--calibration", "t.txt", "--seq-len", "16")
    done = limited.run(*words, "--samples", "1", cwd=place)
    assert done.code == 0 and "calibrated on 16 tokens, fewer than the " in done.err
    assert "of outputs, on the calibration text, by layer type" in done.out


def test_layers_that_grow_are_told(limited: Limited, dense: Path, place: Path) -> None:
    done = limited.run("plan", dense, "--method", "svd", "--rank", "500", cwd=place)
    assert done.code == 0 and "times larger than they are: give a smaller rank" in done.out
