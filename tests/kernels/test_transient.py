"""Products of blocks over the bound of memory are computed in chunks of tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tolerances import TOLERANCES
from torch import Tensor

from blr.kernels.common import dispatch as dispatching
from blr.kernels.common import transient, tuned
from blr.kernels.common.dispatch import dispatch, forget
from blr.kernels.common.tables import Shape
from blr.kernels.layers.blast.reference import blast_linear
from blr.kernels.layers.monarch.reference import monarch_linear


@pytest.mark.parametrize(
    ("structure", "reference", "shapes"),
    [
        ("monarch", monarch_linear, [(4, 6, 8), (4, 5, 8)]),
        ("blast", blast_linear, [(4, 6, 3), (4, 4, 3), (4, 5, 3)]),
    ],
)
def test_chunks_of_products(
    structure: str, reference: Any, shapes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    x, factors, bias = torch.randn(23, 20), [torch.randn(shape) for shape in shapes], torch.randn(24)
    seen: list[int] = []

    def counted(x: Tensor, *factors: Tensor, bias: Tensor | None) -> Tensor:
        seen.append(len(x))
        return reference(x, *factors, bias)

    shape = Shape(20, 24, 4, factors[-1].shape[2])
    monkeypatch.setattr(dispatching, "FEWEST", 5)
    forget()
    found = {}
    for text in ("off", "0.0001"):
        monkeypatch.setenv(transient.VARIABLE, text)
        found[text] = dispatch(structure, shape, dict, counted, x, factors, bias)
    assert seen[0] == 23 and max(seen[1:]) == 5 and sum(seen[1:]) == 23
    error = (found["0.0001"] - found["off"]).norm() / found["off"].norm()
    assert error <= TOLERANCES[torch.float32]


def test_a_gpu_has_no_bound_but_by_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here a CPU that counts as one; whatever rules its table has of earlier versions."""
    rule = {"structure": "forward", "variant": "bounded", "config": {"mib": 12}}
    monkeypatch.setattr(tuned, "_READERS", [lambda gpu: [rule]])
    monkeypatch.setattr(transient, "UNBOUNDED", ("cpu",))
    monkeypatch.delenv(transient.VARIABLE, raising=False)
    forget()
    x = torch.empty(1, 1).expand(30000, 64)
    assert transient.transient_bytes(x.device.type) is None
    monkeypatch.setenv(transient.VARIABLE, "5")
    assert transient.transient_bytes(x.device.type) == 5 << 20
    monkeypatch.setenv(transient.VARIABLE, "off")
    assert transient.transient_bytes(x.device.type) is None
    monkeypatch.undo()
    forget()


def test_chunks_are_even_and_whole() -> None:
    assert list(transient.chunks(10, 4)) == [(0, 3), (3, 6), (6, 10)]
    assert list(transient.chunks(3, 100)) == [(0, 3)]
    assert list(transient.chunks(2, 0)) == [(0, 1), (1, 2)]
