"""What trained blocks read is what their float8 is rounded for, after a refit and the last pass."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from calibrating import run
from pico import save_pico

from blr.compressor.fitting.rounding import Metric
from blr.compressor.fitting.student import Student, read_by


@pytest.mark.parametrize("kind", ["fp8", "int8"])
def test_both_passes_round_every_layer_in_the_metric_of_its_inputs(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Integers are trained as they are rounded: nothing is read again for them."""
    keep, given = Student.keep, list[tuple[int, set[str]]]()

    def spy(self: Student, key: str, facts: Mapping[str, Any], metrics: dict[str, Metric]) -> None:
        given.append((self.index, set(metrics)))  # which are given up as they are used
        keep(self, key, facts, metrics)

    monkeypatch.setattr(Student, "keep", spy)
    folder = save_pico("llama", tmp_path / "model")
    found = run(folder, tmp_path / "j", epochs=1, finish=1, method="svd", cf=2.0, quantize=kind)
    assert [index for index, _ in given] == [0, 1, 0, 1]
    names = [set(student.twins) for student in found.students] * 2
    assert [metrics for _, metrics in given] == (names if kind == "fp8" else [set()] * 4)


def test_what_a_block_reads(tmp_path: Path) -> None:
    settings = {"method": "svd", "cf": 2.0, "quantize": "fp8"}
    found = run(save_pico("llama", tmp_path / "model"), tmp_path / "j", finish=1, **settings)
    student, states = found.students[0], {n: batch.hidden for n, batch in found.mine.items()}
    seen: list[torch.Tensor] = []
    down = student.block.get_submodule("mlp.down_proj")
    down.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0].flatten(0, 1)))
    metrics, behind = read_by(student, states)
    x = torch.cat(seen).double()
    gram = x.mT @ x
    expected = gram / gram.diagonal().mean()
    torch.testing.assert_close(metrics["mlp.down_proj"].gram, expected, rtol=1e-4, atol=1e-4)
    assert metrics["self_attn.q_proj"] is metrics["self_attn.k_proj"]
    assert all(
        behind[n].shape == state.shape and not behind[n].equal(state) for n, state in states.items()
    )
