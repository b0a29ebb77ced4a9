"""Fixtures shared by all tests: the bundled checkpoint and the `blr` command; how kernels run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from patience import PATIENCE
from running import Run

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRITON_INTERPRET"] = "1"  # kernels run on the CPU; read when they are imported
os.environ.setdefault("OMP_NUM_THREADS", "1")  # threads only slow pico-sized linear algebra down

# What a property-based test finds does not depend on the run, nor on how busy the machine is
hypothesis.settings.register_profile(
    "blr",
    deadline=None,
    derandomize=True,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("blr")

DATA = Path(__file__).parent / "data"


def pytest_addoption(parser: pytest.Parser) -> None:
    options = parser.getgroup("gpu", "tests marked gpu")
    options.addoption(
        "--device",
        choices=("cuda", "cpu"),
        default="cuda",
        help="Where they run; cpu checks the checks themselves, in Triton's interpreter.",
    )
    options.addoption(
        "--checkpoint",
        action="append",
        default=[],
        type=Path,
        help="A decoder's folder to check beside the bundled checkpoint and its compressed copies.",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Kernels are compiled for the GPU where tests on it are asked for: set before any of them, or
    of the tests, is imported."""
    if asks_for_gpu(config) and config.option.device == "cuda":
        os.environ.pop("TRITON_INTERPRET", None)


def asks_for_gpu(config: pytest.Config) -> bool:
    """Whether `-m` selects tests marked gpu."""
    return re.search(r"(?<!not )\bgpu\b", config.option.markexpr) is not None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests marked gpu are left out unless `-m gpu` asks for them, and skipped where there is none; of
    those marked sampled(n), every nth case is for everyday runs."""
    spread_samples(items)
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if not asks_for_gpu(config):
        config.hook.pytest_deselected(items=on_gpu)
        items[:] = [item for item in items if not item.get_closest_marker("gpu")]
    elif on_gpu and config.option.device == "cuda" and not has_gpu():
        why = "torch finds no CUDA device; --device cpu runs these tests in Triton's interpreter"
        for item in on_gpu:
            item.add_marker(pytest.mark.skip(reason=why))


def spread_samples(items: list[pytest.Item]) -> None:
    """Of a function marked sampled(n), all cases but every nth in their order are slow: with axes of
    other lengths than n, each value of each axis comes up."""
    seen: Counter[str] = Counter()
    for item in items:
        mark = item.get_closest_marker("sampled")
        if mark is None:
            continue
        function = item.nodeid.partition("[")[0]
        if seen[function] % mark.args[0]:
            item.add_marker(pytest.mark.slow)
        seen[function] += 1


def has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def pytest_terminal_summary(
    terminalreporter: Any, exitstatus: pytest.ExitCode, config: pytest.Config
) -> None:
    """A line a group of the comparisons that tests on a GPU made, wherever they ran."""
    if not asks_for_gpu(config):
        if any("gpu" in Path(argument.partition("::")[0]).parts for argument in config.args):
            terminalreporter.write_line("tests/gpu: deselected without -m gpu, which takes a CUDA GPU")
        return
    from rows import Row, counted

    reports = [report for found in terminalreporter.stats.values() for report in found]
    calls = [report for report in reports if getattr(report, "when", "") == "call"]
    rows = [Row(*value) for call in calls for name, value in call.user_properties if name == "row"]
    if rows:
        terminalreporter.section("comparisons")
        terminalreporter.write_line("\n".join(counted(rows, "FAIL" if exitstatus else "PASS")))


@pytest.fixture(scope="session")
def tiny() -> Path:
    """The bundled trained checkpoint."""
    return DATA / "tiny-llama"


@pytest.fixture(scope="session")
def sample() -> Path:
    """Text that the bundled checkpoint never saw."""
    return DATA / "sample.txt"


@pytest.fixture
def blr(tmp_path: Path) -> Run:
    """Runs the installed `blr` command in a temporary folder, its output captured."""
    command = Path(sys.executable).with_name("blr")

    def run(*arguments: object, **options: object) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(command), *map(str, arguments)],
            **{"cwd": tmp_path, "capture_output": True, "text": True, "timeout": PATIENCE, **options},
        )

    return run
