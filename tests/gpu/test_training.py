"""A pass of healing by fused rotations, gates and distances, on the GPU and in a CUDA graph."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from heal_models import QUIET, compress_pico, save_dense
from tolerances import TOLERANCES
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from blr.compressor.healing.objective import Objective
from blr.compressor.healing.student_and_teacher import TrainedPair, load_pair, load_teacher
from blr.compressor.healing.trainer import Passes
from blr.compressor.recipe.settings import HealOptions

pytestmark = pytest.mark.gpu
WINDOWS, WINDOW = 8, 32
KERNELS = ("rotary_kernel", "gated_kernel", "gated_back_kernel", "distance_kernel")


@pytest.mark.parametrize(
    ("dtype", "bound"), [("bfloat16", TOLERANCES[torch.bfloat16]), ("float32", 1e-4)]
)
def test_passes_are_those_of_torch(
    dtype: str, bound: float, on_cuda: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loss and gradients of the student, eager and replayed. In bfloat16 the gradients of either way are
    1e-2 from those in float32."""
    dense = save_dense(tmp_path / "dense")
    compressed = compress_pico(dense, tmp_path / "compressed", "svd")
    teacher = load_teacher(dense, torch.device(on_cuda), dtype=dtype)
    pair = load_pair(compressed, teacher, ("factors", "norms"))
    torch.manual_seed(0)
    rows = torch.randint(128, (WINDOWS, WINDOW))
    objective = Objective(pair, HealOptions("student"), rows[:1].to(on_cuda))
    passes = Passes(pair, objective, WINDOWS * (WINDOW - 1), WINDOWS, None, QUIET)
    assert passes.captures and pair.student.dtype == getattr(torch, dtype)
    monkeypatch.setenv("BLR_KERNELS", "torch")
    expected = taken(passes, pair, rows, captures=False)
    monkeypatch.delenv("BLR_KERNELS")
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        results = [taken(passes, pair, rows, captures=False)]
    assert set(KERNELS) <= {event.key for event in seen.key_averages()}
    results += [taken(passes, pair, rows, captures=True) for _ in range(2)]
    assert passes.captures and passes.graphs
    for found in results:
        assert float((found[0] - expected[0]).abs() / expected[0]) < min(bound, 1e-2)
        assert float((found[1] - expected[1]).norm() / expected[1].norm()) < bound


def taken(passes: Passes, pair: TrainedPair, rows: Tensor, captures: bool) -> tuple[Tensor, Tensor]:
    """The loss of a pass and the gradients of all masters, one behind the other."""
    passes.captures = captures
    loss = passes(rows)
    gradients = [master.grad for master in pair.masters.values() if master.grad is not None]
    found = loss.clone(), torch.cat([gradient.flatten().float() for gradient in gradients])
    assert len(gradients) == len(pair.masters)
    for master in pair.masters.values():
        master.grad = None
    return found
