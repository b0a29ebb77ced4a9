"""The command that a result offers next is one that can be run here, on this output."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from heal_models import compress_pico, save_dense
from pico import save_pico
from running import Invoke

from blr.compressor.base.device import Card
from blr.compressor.cli import making as summary
from blr.compressor.cli.making import use_lines

pytestmark = pytest.mark.fast
DECODER: Any = {"loss": 0.1, "perplexity": {"before": 2.0, "after": 2.2}}


def test_an_export_is_offered_where_there_is_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(summary, "installed_card", lambda: Card("NVIDIA H200", 1))
    assert use_lines("a model", DECODER)[0] == ("next", "blr export 'a model' -o 'a model-fast'")
    assert use_lines("out", {"distance": 0.1}) == [("next", "blr export out -o out-fast")]


@pytest.mark.parametrize("check", [DECODER, {"unmeasured": "why"}, None])
def test_without_a_gpu_a_decoder_may_write_and_servers_get_the_folder(
    check: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(summary, "installed_card", lambda: None)
    (_, tried), (label, served) = use_lines("out", check)
    assert tried == 'blr generate out "A prompt"'
    assert label == "server" and served.startswith("vllm serve out,") and "not an export" in served
    assert use_lines("out", {"distance": 0.1}) == [("next", "blr inspect out")]


def test_what_is_offered_after_a_healing_runs(tmp_path: Path, invoke: Invoke) -> None:
    dense = save_dense(tmp_path / "dense")
    small = compress_pico(dense, tmp_path / "small")
    given = ("--teacher", dense, "--steps", 1, "--window", 16, "--batch", 64, "--own-tokens", 400)
    code, out, err = invoke("heal", small, *given, "--device", "cpu", "-o", tmp_path / "healed", "-q")
    assert code == 0, err
    offered = next(line for line in out.splitlines() if line.startswith("next:")).split()
    assert offered[1:4] == ["blr", "generate", str(tmp_path / "healed")]
    assert invoke("generate", tmp_path / "healed", "abc", "--max-new-tokens", 1)[0] == 0


@pytest.mark.parametrize(("name", "kind", "offered"), [("bert", "dense", 0), ("llama", "dense", 1)])
def test_of_an_export_only_a_decoder_is_asked_to_write(
    name: str, kind: str, offered: int, tmp_path: Path, invoke: Invoke
) -> None:
    save_pico(name, tmp_path / "dense")
    given = ("--method", "svd", "--cf", 1.5, "--force", "-q")
    code, _, err = invoke("compress", tmp_path / "dense", *given, "-o", tmp_path / "small")
    assert code == 0, err
    code, out, err = invoke("export", tmp_path / "small", "--as", kind, "-o", tmp_path / "out", "-q")
    assert code == 0 and out.count("blr generate") == offered, err
