"""Messages start from GPUs only where every process has one of its own, whoever shows it which."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from blr.compressor.base import processes
from blr.compressor.base.processes import Processes

pytestmark = pytest.mark.fast
GPU = torch.device("cuda", 0)


def wire(gpus: list[str], monkeypatch: pytest.MonkeyPatch) -> tuple[str, list[str]]:
    """Where messages of processes start that see `gpus`, and what is said."""
    found = Processes("cpu", alone=True)
    found.device, found.count = GPU, len(gpus)
    monkeypatch.setattr(found, "gather", lambda _: gpus)
    monkeypatch.setattr(processes, "_card", lambda _: gpus[0])
    found._find_wire()
    return found.wire.type, found.notes


@pytest.mark.parametrize(
    ("gpus", "expected", "said"),
    [
        (["a", "b"], "cuda", []),  # also where each is the only one that its process sees
        (["a", "a"], "cpu", ["2 processes share 1 GPUs"]),
        (["a", "b", "a", "b"], "cpu", ["4 processes share 2 GPUs"]),
    ],
)
def test_by_the_cards_themselves(
    gpus: list[str], expected: str, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert wire(gpus, monkeypatch) == (expected, said)


@pytest.mark.parametrize(
    ("name", "same"), [("NVIDIA H200", False), ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", True)]
)
def test_parts_of_a_card_are_one(name: str, same: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for uuid in ("one", "other"):
        properties = SimpleNamespace(name=name, uuid=uuid)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _, p=properties: p)
        found.append(processes._card(GPU))
    assert (found[0] == found[1]) is same
