"""What tests on a GPU share. They run with ``pytest -m gpu -n 8 tests/gpu``.

A test makes many comparisons, since most of its time goes into compiling kernels and starting
processes; `judge` counts them, and the run ends with a line a group. Nothing here may import kernels:
pytest loads this file before `tests/conftest.py` decides whether they are interpreted.
"""

from __future__ import annotations

import fcntl
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest
from rows import Row, is_fatal, packed

HANG = 300  # seconds of a test, after which a worker is taken to hang and replaced
WORKER = "PYTEST_XDIST_WORKER"
METHODS = ("dense", "svd", "monarch", "blast", "ks")
Judge = Callable[[Iterable[Row]], None]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """`checkpoint`: the bundled one as it is and compressed by each method, and --checkpoint's."""
    if "checkpoint" in metafunc.fixturenames:
        more = metafunc.config.option.checkpoint
        metafunc.parametrize("checkpoint", [*METHODS, *more], ids=[*METHODS, *(m.name for m in more)])


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What wants the GPU for itself comes last."""
    items.sort(key=lambda item: "alone" in getattr(item, "fixturenames", ()))


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> str:
    """Where models and kernels run: cuda, or cpu to check the checks."""
    return request.config.option.device


@pytest.fixture
def on_cuda(device: str) -> str:
    """For tests that the interpreter cannot run."""
    if device != "cuda":
        pytest.skip("needs a GPU")
    return device


@pytest.fixture(scope="session")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that all processes of a run share."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if WORKER in os.environ else base) / "gpu-work"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="session", autouse=True)
def prepared(device: str) -> None:
    """Processes share the cores: one thread each, and no compile workers of their own."""
    os.environ |= {"TOKENIZERS_PARALLELISM": "false", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    if device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    else:
        assert "TRITON_INTERPRET" not in os.environ, "kernels would not run on the GPU"
    import torch
    import transformers

    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


@pytest.fixture(autouse=True)
def sharing(work: Path, request: pytest.FixtureRequest) -> Iterator[None]:
    """Tests share the GPU, but for those that ask for `alone`."""
    kind = fcntl.LOCK_EX if "alone" in request.fixturenames else fcntl.LOCK_SH
    with (work / "gpu.lock").open("a") as file:
        fcntl.flock(file, kind)
        yield


@pytest.fixture(autouse=True)
def not_hanging(sharing: None) -> Iterator[None]:
    """A kernel that never ends takes its worker with it, and xdist starts another."""
    if WORKER in os.environ:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(HANG)
    yield
    signal.alarm(0)


@pytest.fixture
def alone() -> None:
    """For tests that compare times: no other test runs meanwhile."""


@pytest.fixture
def judge(record_property: Callable[[str, object], None], request: pytest.FixtureRequest) -> Judge:
    """Takes rows as they are made: all are counted, and the test fails with those that do."""

    def judged(rows: Iterable[Row]) -> None:
        found: list[Row] = []
        try:
            for row in rows:
                found.append(row)
                record_property("row", packed(row))
        except Exception as error:
            if is_fatal(error) and WORKER in os.environ:
                _give_up(request, f"after {found[-1] if found else 'its start'}: {error}")
            raise
        failed = [str(row) for row in found if not row.passed]
        if failed or not found:
            pytest.fail("\n".join(failed) or "nothing was compared", pytrace=False)

    return judged


def _give_up(request: pytest.FixtureRequest, why: str) -> None:
    """End this worker, which no test can use any more; xdist blames the test and starts another."""
    request.config.pluginmanager.getplugin("capturemanager").suspend_global_capture()
    print(f"{request.node.nodeid}: {why}", file=sys.stderr, flush=True)
    os._exit(1)
