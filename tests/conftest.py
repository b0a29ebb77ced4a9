"""Fixtures shared by all tests: the bundled checkpoint and the `blr` command; how kernels run."""

from __future__ import annotations

import gc
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from interpreting import replace_once
from killer import Killer
from limited import Limited
from patience import PATIENCE
from running import Invoke, Run
from syncing import never_wait
from warm import Warm

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["BLR_TEXT_DIR"] = "off"  # what a run writes must not depend on those before it
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

ROOT = Path(__file__).parents[1]
DATA = ROOT / "tests/data"
TREE, LEFT = pytest.StashKey[set[str]](), pytest.StashKey[list[str]]()
DEFAULTS: dict[int, Any] = {signal.SIGHUP: signal.SIG_DFL, signal.SIGINT: signal.default_int_handler}


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


def pytest_sessionstart(session: pytest.Session) -> None:
    """What lies in the repository before the tests, in the process that starts all others."""
    if not hasattr(session.config, "workerinput"):
        session.config.stash[TREE] = repository()


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """The tests leave the repository as they found it: what they write goes to a temporary folder."""
    if TREE in session.config.stash:
        session.config.stash[LEFT] = left = sorted(repository() ^ session.config.stash[TREE])
        if left and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED


def repository() -> set[str]:
    """Every file of the repository but those that Python, pytest and the linters keep."""
    found = set[str]()
    for folder, folders, files in os.walk(ROOT):
        folders[:] = [name for name in folders if not name.startswith(".") and name != "__pycache__"]
        found |= {os.path.relpath(os.path.join(folder, name), ROOT) for name in files}
    return found


def pytest_collection_finish(session: pytest.Session) -> None:
    """What is imported by now stays: collecting garbage need not look through it again."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure(config: pytest.Config) -> None:
    gc.unfreeze()  # what libraries have in compiled code says otherwise that it is still held


def pytest_configure(config: pytest.Config) -> None:
    """Kernels are compiled for the GPU where tests on it are asked for: set before any of them, or
    of the tests, is imported."""
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):
        heed_signals()
    if asks_for_gpu(config) and config.option.device == "cuda":
        os.environ.pop("TRITON_INTERPRET", None)


def heed_signals() -> None:
    """Those that tests send to the commands they start; nohup and & have children ignore them."""
    for number, handler in DEFAULTS.items():
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)


def asks_for_gpu(config: pytest.Config) -> bool:
    """Whether `-m` selects tests marked gpu."""
    return re.search(r"(?<!not )\bgpu\b", config.option.markexpr) is not None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests marked gpu are left out unless `-m gpu` asks for them, and skipped where there is none; of
    those marked sampled(n), about every nth case is for everyday runs."""
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
    """Of a function marked sampled(n), all cases but those that `chosen` names are slow."""
    tables: dict[str, list[Any]] = {}
    for item in items:
        if item.get_closest_marker("sampled"):
            tables.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for cases in tables.values():
        step = cases[0].get_closest_marker("sampled").args[0]
        params = [{name: repr(value) for name, value in case.callspec.params.items()} for case in cases]
        everyday = chosen(params, step)
        for number, case in enumerate(cases):
            if number not in everyday:
                case.add_marker(pytest.mark.slow)


def chosen(cases: list[dict[str, str]], step: int) -> set[int]:
    """The numbers of every `step`th case, and of more until each value of each axis that has no more
    values than these are comes up."""
    taken = set(range(0, len(cases), step))
    for axis in cases[0]:
        values = [case[axis] for case in cases]
        if len(set(values)) <= len(range(0, len(cases), step)):
            missing = set(values) - {values[number] for number in taken}
            taken |= {values.index(value) for value in missing}
    return taken


def has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def pytest_terminal_summary(
    terminalreporter: Any, exitstatus: pytest.ExitCode, config: pytest.Config
) -> None:
    """What tests left behind; a line a group of the comparisons that tests on a GPU made."""
    if left := config.stash.get(LEFT, []):
        names = ", ".join(left[:5])
        terminalreporter.write_line(f"FAILED: the tests changed the repository: {names}", red=True)
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


@pytest.fixture(scope="session", autouse=True)
def interpreter() -> None:
    """Where kernels are interpreted, faster than Triton does it."""
    replace_once()


@pytest.fixture(scope="session", autouse=True)
def disk_that_is_not_waited_for() -> None:
    """Where this process writes."""
    never_wait()


@pytest.fixture(scope="session")
def tiny() -> Path:
    """The bundled trained checkpoint."""
    return DATA / "tiny-llama"


@pytest.fixture(scope="session")
def sample() -> Path:
    """Text that the bundled checkpoint never saw."""
    return DATA / "sample.txt"


@pytest.fixture(scope="session")
def warm() -> Iterator[Warm]:
    """The process that forks for every command."""
    with Warm() as started:
        yield started


@pytest.fixture(scope="session")
def limited(warm: Warm) -> Limited:
    return Limited(warm)


@pytest.fixture(scope="session")
def killer(warm: Warm) -> Killer:
    return Killer(warm)


@pytest.fixture
def blr(tmp_path: Path, limited: Limited) -> Run:
    """Runs ``blr`` in a temporary folder, its output captured."""

    def run(*arguments: object, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        done = limited.run(*map(str, arguments), cwd=tmp_path, env=env)
        return subprocess.CompletedProcess(arguments, done.code, done.out, done.err)

    return run


@pytest.fixture
def invoke(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Invoke:
    """Runs ``blr`` in this process: exit code, standard output and error."""
    from blr.compressor.cli import main  # once the environment above is set

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["blr", *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            main()
        assert isinstance(end.value.code, int)
        return end.value.code, *capsys.readouterr()

    return run


@pytest.fixture
def installed(tmp_path: Path) -> Run:
    """The same by the command that is installed, in a process of its own."""
    command = Path(sys.executable).with_name("blr")

    def run(*arguments: object, **options: object) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(command), *map(str, arguments)],
            **{"cwd": tmp_path, "capture_output": True, "text": True, "timeout": PATIENCE, **options},
        )

    return run
