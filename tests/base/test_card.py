"""The GPU of this machine by its driver, and what is planned and exported for where none is named."""

from __future__ import annotations

import ctypes
import json
from pathlib import Path
from typing import Any

import pytest
from running import Invoke

from blr.compressor.base import device as card
from blr.compressor.base.device import Card, installed_card
from blr.compressor.planning import roofline
from blr.compressor.planning.roofline import chosen_gpu, gpu_of
from blr.compressor.planning.sizing import decided
from blr.compressor.recipe.schema import Recipe

pytestmark = pytest.mark.fast
H100, L4 = Card("NVIDIA H100 80GB HBM3", 85_520_809_984), Card("NVIDIA L4", 24_152_899_584)


class Driver:
    """Two GPUs as NVML tells them."""

    cards = (H100, L4)

    def nvmlInit_v2(self) -> int:
        return 0

    nvmlShutdown = nvmlInit_v2

    def nvmlDeviceGetHandleByIndex_v2(self, number: int, handle: Any) -> int:
        handle._obj.value = number + 1
        return 0 if number < len(self.cards) else 2

    def nvmlDeviceGetHandleByUUID(self, name: bytes, handle: Any) -> int:
        handle._obj.value = 2
        return 0 if name == b"GPU-two" else 2

    def nvmlDeviceGetName(self, handle: Any, name: Any, length: int) -> int:
        name.value = self.cards[handle.value - 1].name.encode()
        return 0

    def nvmlDeviceGetMemoryInfo(self, handle: Any, memory: Any) -> int:
        memory._obj.total = self.cards[handle.value - 1].memory
        return 0


@pytest.mark.parametrize(
    ("visible", "found"),
    [(None, H100), ("1,0", L4), ("GPU-two", L4), ("", None), ("-1", None), ("7", None), ("x", None)],
)
def test_the_first_gpu_that_is_visible(
    visible: str | None, found: Card | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(card.ctypes, "CDLL", lambda name: Driver())
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert installed_card() == found


def test_no_driver_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(card, "LIBRARY", "libno-such-thing.so.1")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert installed_card() is None
    assert ctypes.sizeof(card._Memory) == 24


@pytest.mark.parametrize(
    ("name", "gigabytes", "known"),
    [
        ("NVIDIA H200", 150, "h200"),
        ("NVIDIA A100-SXM4-80GB", 85, "a100"),
        ("NVIDIA A100-SXM4-40GB", 42, None),  # half of what is known of it
        ("NVIDIA GeForce RTX 4090", 25, "rtx-4090"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", 16, None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", 10, None),
        ("NVIDIA L40S", 48, None),
        ("NVIDIA GH200 480GB", 150, None),
    ],
)
def test_names_of_the_driver_are_those_of_the_table(
    name: str, gigabytes: int, known: str | None
) -> None:
    found = gpu_of(Card(name, gigabytes * 10**9))
    assert (found.name if found else None) == known


def test_what_is_asked_for_wins_and_what_is_here_comes_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roofline, "installed_card", lambda: L4)
    assert [chosen_gpu(name)[0].name for name in ("a40", None)] == ["a40", "l4"]
    monkeypatch.setattr(roofline, "installed_card", lambda: None)
    gpu, why = chosen_gpu(None)
    assert gpu.name == "h200" and "none of" in why


def test_plans_and_exports_are_for_the_gpu_that_is_here_and_say_so(
    tiny: Path, tmp_path: Path, invoke: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(roofline, "installed_card", lambda: L4)
    assert (
        "times on l4 (datasheet ceilings, bf16 rooflines; the one of this machine)"
        in (invoke("plan", tiny)[1])
    )
    command = ("export", tiny, "-o", tmp_path / "out", "--no-check", "--context", "64")
    code, out, err = invoke(*command)
    assert code == 0 and "for:     l4 (the one of this machine), batch 1" in out, err
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["blr"]["export"]["gpu"] == "l4"


def test_a_recipe_names_the_gpu_where_it_decides_what_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Elsewhere nothing that is written hangs on the machine, so that a run can go on on another."""
    monkeypatch.setattr(roofline, "installed_card", lambda: L4)
    assert decided(Recipe(method="svd", cf=2)).gpu is None
    assert decided(Recipe(method="svd", tokens_per_second=10.0)).gpu == "l4"
    assert decided(Recipe(method="svd", tokens_per_second=10.0, gpu="a40")).gpu == "a40"
