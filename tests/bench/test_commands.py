"""`blr bench` as typed, on the CPU with small layers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from patience import PATIENCE
from running import Invoke, Run
from torch import Tensor

from blr.bench import layers
from blr.bench.harness import SIGNALS, Stopped, stoppable

SMALL = ("--models", "vit-b", "--structures", "svd,blast", "--blocks", "4", "--dtype", "float32")


def served(monkeypatch: pytest.MonkeyPatch, product: Callable[..., Tensor]) -> None:
    """Our layers compute low rank by `product`."""
    usual = layers.product_of
    monkeypatch.setattr(layers, "product_of", lambda name: product if name == "svd" else usual(name))


def test_layers_as_text_and_files_with_a_wrong_arm(
    invoke: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served(monkeypatch, lambda x, U, V, bias=None: x @ V @ U.mT * 1.1)
    out = tmp_path / "out"
    code, said, err = invoke("bench", "layers", *SMALL, "--n", "1,3", "--repeats", "3", "-o", str(out))
    assert code == 0, err
    lines = said.splitlines()
    assert lines[0] == "cpu: milliseconds a call, by the host's clock"
    assert "vit-b qkv 768→2304 n=3" in lines
    last = json.loads(lines[-1])
    assert last["summary"]["statuses"] == {"ok": 3 * 2 * 4, "wrong": 3 * 2}
    assert set(last["summary"]["speedup_over_dense"]) == {"svd", "blast"}
    saved = json.loads((out / "results.json").read_text())
    assert saved["summary"] == last["summary"]
    assert saved["versions"]["torch"] and saved["machine"]["device"] == "cpu"
    wrong = [row for row in saved["rows"] if (row["arm"], row["structure"]) == ("ours", "svd")]
    assert {(row["status"], row["ms"], row["speedup"]) for row in wrong} == {("wrong", None, None)}
    assert all(row["rel_error"] == pytest.approx(0.1, rel=0.01) for row in wrong)
    assert {row["variant"] for row in saved["rows"] if row["arm"] == "ours"} == {"reference"}


def test_a_stopped_run_keeps_what_was_timed(
    invoke: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(x: Tensor, U: Tensor, V: Tensor, bias: Tensor | None = None) -> Tensor:
        if len(x) == 2:
            os.kill(os.getpid(), signal.SIGINT)
        return x @ V @ U.mT

    served(monkeypatch, stop)
    out = tmp_path / "out"
    code, said, err = invoke(
        "bench", "layers", *SMALL, "--n", "1,2", "--repeats", "1", "--output", str(out)
    )
    assert code == 130, err
    assert err.splitlines()[-1] == "blr: stopped: SIGINT; results are of what was timed before"
    saved = json.loads((out / "results.json").read_text())
    assert saved["stopped"] == json.loads(said.splitlines()[-1])["stopped"] == "SIGINT"
    of_two = [row for row in saved["rows"] if row["n"] == 2]
    assert [(row["arm"], row["rounds"]) for row in of_two] == [("dense", 1), ("plain", 1)]
    assert {row["n"] for row in saved["rows"]} == {1, 2} and all(row["speedup"] for row in of_two)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["layers", "--models", "llama-8"], "known: llama-7b, llama-3.1-8b"),
        (["layers", "--n", "1,x"], "--n is '1,x': expected positive integers"),
        (["layers", "--n", "0"], "--n is '0': expected positive integers"),
        (["layers", "--structures", "svd,fft"], "structure 'fft' is unknown"),
        (["layers", "--dtype", "int4"], "dtype 'int4' is unknown"),
        (["layers", "--cf", "1"], "cf is 1: expected"),
        (["layers", "--device", "cuda:9"], "device 'cuda:9' cannot be used"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_be_run_is_one_line(blr: Run, options: list[str], message: str) -> None:
    done = blr("bench", *options)
    assert done.returncode == (9 if "--device" in options else 2)
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("blr: error: ") and message in line


@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
def test_every_stopping_signal_is_told_apart(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with pytest.raises(Stopped) as found, stoppable():
        os.kill(os.getpid(), number)
    assert (found.value.number, found.value.name) == (number, number.name)
    assert signal.getsignal(number) is before


def test_a_lost_terminal_stops_nothing_that_is_told_so() -> None:
    """As nohup does."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stoppable():
            os.kill(os.getpid(), signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)


def test_outputs_that_cannot_be_used(blr: Run, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "results.json").write_text("{}")
    for folder, message in (("file", "cannot be written to"), ("used", "already holds results.json")):
        done = blr("bench", "layers", *SMALL, "--output", folder)
        assert done.returncode == 5
        assert message in done.stderr and len(done.stderr.splitlines()) == 1
    assert (tmp_path / "used" / "results.json").read_text() == "{}"


def test_refusals_come_before_torch_is_loaded() -> None:
    code = (
        "import sys; from blr.compressor.cli import main\n"
        "try: main()\nfinally: print('torch' in sys.modules, file=sys.stderr)"
    )
    command = [sys.executable, "-c", code, "bench", "layers", "--dtype", "int4"]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ, timeout=PATIENCE)
    assert done.stderr.splitlines()[-1] == "False"
