"""Compiled forward passes: where none can be, one line says why (one is compiled in tests/packages)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from pico import save_pico
from running import Invoke

from blr.compressor.base.errors import CapabilityError
from blr.compressor.exporting import forward


@pytest.mark.parametrize(
    ("program", "fragment"),
    [("import os; os.abort()", "signal 6"), ("raise RuntimeError('no such kernel')", "no such kernel")],
    ids=["crash", "error"],
)
def test_a_pass_that_does_not_run_is_refused(
    program: str, fragment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forward, "RUN", program)
    with pytest.raises(CapabilityError, match=f"does not run here .*{fragment}") as raised:
        forward._results(tmp_path / "model.pt2", {"x": torch.zeros(1)})
    assert "\n" not in str(raised.value)


def test_decoders_and_machines_without_a_compiler(
    tiny: Path, tmp_path: Path, invoke: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder = save_pico("bert", tmp_path / "dense")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    for source, message in ((tiny, "generates text"), (encoder, "no C++ compiler")):
        code, out, err = invoke("export", source, "-o", tmp_path / "out", "--as", "pt2", "--quiet")
        assert (code, out, err.count("\n")) == (9, "", 1) and message in err
        assert not (tmp_path / "out").exists()
