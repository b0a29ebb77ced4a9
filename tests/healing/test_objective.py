"""What decoders are compared by: the distributions of the next token, and what their blocks give."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from heal_models import compress_pico, save_dense
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from blr.compressor.base.errors import CapabilityError
from blr.compressor.healing.objective import Objective
from blr.compressor.healing.student_and_teacher import load_pair, load_teacher
from blr.compressor.recipe.settings import HIDDEN, HealOptions

PROBE = torch.arange(2, 10)[None]


class Silent(nn.Module):
    """Gives logits, and has no blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(16, 16)

    @property
    def base_model(self) -> nn.Module:
        return self

    def get_output_embeddings(self) -> None:
        return None

    def forward(self, ids: Tensor, use_cache: bool = False) -> Any:
        return SimpleNamespace(logits=self.table(ids))


def objective(student: Any, teacher: Any, **options: Any) -> Objective:
    pair: Any = SimpleNamespace(student=student, teacher=teacher, device=torch.device("cpu"))
    return Objective(pair, HealOptions("student", **options), PROBE)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = save_dense(tmp_path_factory.mktemp("dense") / "llama")
    return AutoModelForCausalLM.from_pretrained(folder).eval()


@pytest.mark.parametrize(
    ("options", "weight"),
    [
        ({}, HIDDEN),
        ({"top_k": 3}, HIDDEN),
        ({"hidden": 0.5}, 0.5),
        ({"hidden": 0.0}, 0),
        ({"loss": "lm"}, 0),
    ],
)
def test_blocks_count_beside_divergence(options: dict[str, Any], weight: float, llama: Any) -> None:
    assert objective(llama, llama, **options).weight == weight


def test_a_model_without_blocks_is_healed_by_its_logits(llama: Any) -> None:
    silent = Silent()
    found = objective(silent, silent)
    assert found.weight == 0 and float(found(PROBE).detach()) == pytest.approx(0, abs=1e-5)
    with pytest.raises(CapabilityError, match="leave it out"):
        objective(silent, silent, hidden=1.0)
    assert objective(llama, silent).weight == 0


def test_blocks_that_see_some_of_the_tokens_do_not_count() -> None:
    """An expert gives as many rows as are sent to it, another number in every pass."""

    class Routed(Silent):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

        def forward(self, ids: Tensor, use_cache: bool = False) -> Any:
            logits = self.table(ids)
            return SimpleNamespace(logits=logits + sum(e(logits[0, :2]).sum() for e in self.experts))

    model = Routed()
    assert objective(model, model).weight == 0


@pytest.mark.parametrize(
    "settings",
    [{"method": "svd"}, {"method": "svd", "quantize": "fp8"}, {"method": "monarch", "blocks": 4}],
    ids=str,
)
def test_a_structured_head_is_trained(settings: dict[str, Any], tmp_path: Path) -> None:
    """As it would be through whole logits."""
    dense = save_dense(tmp_path / "dense", "llama")
    packed = compress_pico(dense, tmp_path / "packed", **settings, include=["*"])
    pair = load_pair(packed, load_teacher(dense, torch.device("cpu")), ("factors",))
    windows, found = torch.randint(128, (2, 12)), []
    for plain in (True, False):
        asked = objective(pair.student, pair.teacher)
        assert asked.student.plain and asked.teacher.plain
        asked.student.plain = asked.teacher.plain = plain
        pair.forget()
        asked(windows).backward()
        gradients = [pair.student.get_parameter(f"lm_head.{name}").grad for name in "UV"]
        found.append([gradient.clone() for gradient in gradients])
    for mine, whole in zip(*found, strict=True):
        torch.testing.assert_close(mine, whole, rtol=1e-3, atol=1e-4)
