"""What a walk through the commands has found: refused before any work, in one line that says why."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from limited import Limited, refused

CASES: dict[str, tuple[str, dict[str, str], int, str]] = {
    "all dense": ("compress DENSE -r dense.yaml -o out", {}, 2, "every layer is kept as it is"),
    "transient": ("compress DENSE -o out", {"BLR_TRANSIENT": "64MB"}, 2, "BLR_TRANSIENT is '64MB'"),
    "compiled": ("eval SMALL --text t.txt", {"BLR_COMPILED": "fast"}, 2, "BLR_COMPILED is 'fast'"),
    "nobody to meet": ("compress DENSE -o out", {"WORLD_SIZE": "2"}, 2, "WORLD_SIZE is 2 and nobody"),
    "heal of a sweep": (
        "sweep DENSE -o out --eval t.txt --methods svd --cf 2 --heal 0,-1",
        *({}, 2, "--heal -1: expected minutes over 0"),
    ),
    "sts of a decoder": ("eval DENSE --sts pairs.csv", {}, 9, "LlamaForCausalLM continues text"),
    "binary": ("export SMALL -o out --quantize int4 --text b.txt", {}, 4, "bytes that are no UTF-8"),
    "rank of additions": (
        "heal SMALL --teacher DENSE -o out --lora 65 --steps 1",
        *({}, 2, "--lora 65: expected at most 32, the largest rank of a layer"),
    ),
}


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "dense.yaml").write_text('rules:\n  - {match: "*", method: dense}\n')
    (tmp_path / "t.txt").write_text(" ".join(f"w{k % 40}" for k in range(80)))
    (tmp_path / "pairs.csv").write_text("one,other,score\nw1 w2,w3,3\nw4,w5,1\nw6,w7,5\n")
    (tmp_path / "b.txt").write_bytes(b"caf\xe9 " * 100)
    return tmp_path


@pytest.mark.parametrize("case", CASES)
def test_refused(case: str, limited: Limited, dense: Path, small: Path, place: Path) -> None:
    command, environment, code, said = CASES[case]
    words = [{"DENSE": str(dense), "SMALL": str(small)}.get(w, w) for w in command.split()]
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
