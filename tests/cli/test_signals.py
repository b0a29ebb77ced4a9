"""SIGINT, SIGTERM and SIGHUP stop a run in any state; the command it prints finishes the work."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from killer import Killer, Outcome
from patience import PATIENCE
from pico import save_pico
from producing import files

SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
LAYERS = 14
# One layer, fitted for a second or more in calls that each last long
LONG = (
    "--no-check",
    "--include",
    "*layers.0.mlp.down_proj",
    "--method",
    "blast",
    "--blocks",
    "4",
    "--rounds",
    "120",
)
BLR = Path(sys.executable).with_name("blr")


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pico Llama."""
    return save_pico("llama", tmp_path_factory.mktemp("dense") / "llama")


def resume(stderr: str, how: str = "resume") -> list[str]:
    """The arguments of the command that a stopped run printed."""
    match = re.fullmatch(rf"blr: stopped by SIG\w+; .*; {how} with: (blr .*)\n", stderr)
    assert match, stderr
    return shlex.split(match[1])[1:]


@pytest.fixture(scope="module")
def whole(killer: Killer, dense: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple:
    """An uninterrupted run and its files."""
    folder = tmp_path_factory.mktemp("whole")
    done = killer.run("compress", dense, "-o", "an output", "-q", cwd=folder)
    assert done.code == 0
    return done, files(folder / "an output")


def middle(events: list[str], state: str) -> int:
    """The number of a boundary inside a stage of a run."""
    stores = [number for number, event in enumerate(events) if event == "store"]
    return {"layers": stores[6], "writing": stores[-1] + 10, "purging": events.index("rmdir")}[state]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize("state", ["layers", "writing", "purging"])
def test_stopped_while_busy_with_the_disk(
    number: int, state: str, killer: Killer, dense: Path, whole: tuple, tmp_path: Path
) -> None:
    """The main thread hangs in a call that does not return, as over a network disk that is gone."""
    at = middle(whole[0].events, state)
    command = ("compress", dense, "--restart", "-o", "an output", "-q")
    stopped = killer.run(*command, cwd=tmp_path, stop_at=at, stop=number)
    assert stopped.code == 128 + number
    assert os.listdir(tmp_path) == ["an output.blr-partial"]
    assert f"kept in {tmp_path / 'an output.blr-partial'}" in stopped.stderr
    arguments = resume(stopped.stderr)
    assert "--restart" not in arguments
    resumed = killer.run(*arguments, cwd=tmp_path)
    assert resumed.code == 0 and stopped.fits + resumed.fits <= LAYERS + 1
    assert files(tmp_path / "an output") == whole[1]
    assert os.listdir(tmp_path) == ["an output"]


def test_stopped_in_a_long_factorization(killer: Killer, tiny: Path, tmp_path: Path) -> None:
    command = ("compress", tiny, *LONG, "-q", "-o")
    whole = killer.run(*command, "whole", cwd=tmp_path)
    assert whole.code == 0 and whole.fits == 1
    fit = whole.events.index("fit")
    for number in SIGNALS:
        stopped = killer.run(*command, "out", cwd=tmp_path, stop_at=fit, stop=number)
        assert stopped.code == 128 + number and "store" not in stopped.events
        assert sorted(os.listdir(tmp_path)) == ["out.blr-partial", "whole"]
    assert killer.run(*resume(stopped.stderr), cwd=tmp_path).code == 0
    assert files(tmp_path / "out") == files(tmp_path / "whole")


def test_suspended_and_continued(killer: Killer, tiny: Path, tmp_path: Path) -> None:
    """As by Ctrl-Z and fg, or by a batch system; longer than any wait for a signal might last."""
    command = ("compress", tiny, *LONG, "-q", "-o", "out")
    done = killer.run(*command, cwd=tmp_path, stop_at=0, suspended=1.5)
    assert (done.code, done.stderr) == (0, "")
    assert files(tmp_path / "out") and os.listdir(tmp_path) == ["out"]


def test_json_tells_the_stop(killer: Killer, dense: Path, tmp_path: Path) -> None:
    command = ("compress", dense, "-o", "out", "--format", "json")
    stopped = killer.run(*command, cwd=tmp_path, stop_at=20, stop=signal.SIGTERM)
    assert stopped.code == 143
    assert re.fullmatch(r'\{"error": "stopped by SIGTERM; .*", "exit_code": 143\}\n', stopped.stdout)


def start(dense: Path, folder: Path, *before: str, **options: object) -> subprocess.Popen[str]:
    """The real command, caught as it has taken its lock and begins to import torch."""
    command = [*before, str(BLR), "compress", str(dense), "-o", "out", "-q"]
    run = subprocess.Popen(command, cwd=folder, text=True, stderr=subprocess.PIPE, **options)
    wait_for(folder / "out.blr-lock", run)
    return run


def wait_for(path: Path, run: subprocess.Popen[str]) -> None:
    while not path.exists() and run.poll() is None:
        time.sleep(0.005)


@pytest.mark.parametrize("number", SIGNALS)
def test_stopped_while_importing_torch(number: int, dense: Path, tmp_path: Path) -> None:
    run = start(dense, tmp_path)
    time.sleep(0.3)
    run.send_signal(number)
    stderr = run.communicate(timeout=PATIENCE)[1]
    assert run.returncode == 128 + number
    assert resume(stderr, "start again")[:2] == ["compress", str(dense)]
    assert not (tmp_path / "out.blr-lock").exists()


@pytest.mark.parametrize("number", SIGNALS)
def test_background_job_of_a_shell(number: int, dense: Path, tmp_path: Path) -> None:
    """A non-interactive shell starts its background jobs with SIGINT ignored."""
    script = f"{shlex.quote(str(BLR))} compress {shlex.quote(str(dense))} -o out -q & echo $!; wait $!"
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    shell = subprocess.Popen(["sh", "-c", script], cwd=tmp_path, **streams)
    job = int(shell.stdout.readline())
    wait_for(tmp_path / "out.blr-lock", shell)
    os.kill(job, number)
    _, stderr = shell.communicate(timeout=PATIENCE)
    assert shell.returncode == 128 + number
    assert resume(stderr, "(?:resume|start again)")  # as it had begun to write
    assert not (tmp_path / "out.blr-lock").exists()


def test_terminal_that_is_gone(dense: Path, tmp_path: Path) -> None:
    """SIGHUP when nobody reads any more, as after a lost connection: the run still ends."""
    run = start(dense, tmp_path)
    run.stderr.close()
    run.send_signal(signal.SIGHUP)
    assert run.wait(PATIENCE) == 129
    assert not (tmp_path / "out.blr-lock").exists()


def test_reader_that_is_stuck(dense: Path, tmp_path: Path) -> None:
    """Standard error is a full pipe: saying how to resume must not keep the run from ending."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    try:
        while True:
            os.write(writer, bytes(65536))
    except BlockingIOError:
        os.set_blocking(writer, True)
    command = [str(BLR), "compress", str(dense), "-o", "out", "-q"]
    run = subprocess.Popen(command, cwd=tmp_path, stderr=writer)
    wait_for(tmp_path / "out.blr-lock", run)
    run.send_signal(signal.SIGTERM)
    assert run.wait(PATIENCE) == 143
    os.close(reader)
    os.close(writer)


def test_a_stopped_export_says_that_it_starts_over(killer: Killer, dense: Path, tmp_path: Path) -> None:
    whole = killer.run("export", dense, "-o", "whole", "-q", cwd=tmp_path)
    at = len(whole.events) // 2
    command = ("export", dense, "-o", "out", "-q")
    stopped = killer.run(*command, cwd=tmp_path, stop_at=at, stop=signal.SIGTERM)
    assert stopped.code == 143 and not (tmp_path / "out").exists()
    assert "kept" not in stopped.stderr
    assert killer.run(*resume(stopped.stderr, "start again"), cwd=tmp_path).code == 0
    assert files(tmp_path / "out") == files(tmp_path / "whole")
    assert not list(tmp_path.glob("*.blr-*"))


# Stops in the middle of the imports, told from a hook that tells which import it is.
EARLY = """
import os, sys, time
module, number = sys.argv[1], int(sys.argv[2])
del sys.argv[1:3]
class Hook:
    def find_spec(self, name, path=None, target=None):
        if name == module:
            os.kill(os.getpid(), number)
            time.sleep(600)
sys.meta_path.insert(0, Hook())
from blr.compressor.__main__ import main
main()
"""


@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize("module", ["typer", "blr.compressor.cli.signals"])
def test_stopped_before_the_command_has_begun(number: int, module: str) -> None:
    """While the command line itself is imported: the code of later, one line, no traceback."""
    command = [sys.executable, "-c", EARLY, module, str(int(number)), "compress", "/x", "--format=json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    message = f"stopped by {signal.Signals(number).name}"
    assert (done.returncode, done.stderr) == (128 + number, f"blr: {message}\n")
    assert json.loads(done.stdout) == {"error": message, "exit_code": 128 + number}


def test_next_to_nothing_is_imported_before_signals_have_handlers() -> None:
    """Until then Ctrl-C is a traceback of Python's."""
    code = "import sys; known = {*sys.modules}; import blr.compressor.__main__"
    code += "; print(*sorted({*sys.modules} - known))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    found = done.stdout.split()
    others = {name for name in found if not name.startswith("blr")}
    assert others <= {"__future__"} and len(found) < 8


def test_transformers_is_told_to_be_silent_before_it_is_imported() -> None:
    """Unless the user says otherwise: what it has to say of a model is in our one line."""
    code = "import os, sys, types; told = lambda: print(os.environ['TRANSFORMERS_VERBOSITY']); "
    code += "sys.modules['blr.compressor.cli'] = types.SimpleNamespace(main=told); "
    code += "from blr.compressor.__main__ import main; main()"
    for more, level in (({}, "error"), ({"TRANSFORMERS_VERBOSITY": "info"}, "info")):
        environment = {k: v for k, v in os.environ.items() if k != "TRANSFORMERS_VERBOSITY"} | more
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
        assert done.stdout == f"{level}\n"


def test_handlers_are_restored() -> None:
    from blr.compressor.cli.signals import stop_on_signals

    before = [signal.getsignal(number) for number in SIGNALS]
    with stop_on_signals():
        assert all(callable(signal.getsignal(number)) for number in SIGNALS)
        assert signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    assert [signal.getsignal(number) for number in SIGNALS] == before
    assert signal.set_wakeup_fd(-1) == -1
    assert not [each for each in threading.enumerate() if "_watch" in each.name]


# A stop while the lock is being taken: its file is there, but not yet known as ours.
REGISTERING = """
import os, sys, time
from blr.compressor.workspace import lock, workspace
from blr.compressor.cli import signals
class Slow(set):
    def add(self, path):
        os.kill(os.getpid(), int(sys.argv[1]))
        time.sleep(0.3)
        super().add(path)
lock.HELD_LOCKS = signals.HELD_LOCKS = Slow()
with signals.stop_on_signals(), workspace.Workspace("out"):
    time.sleep(600)
"""


@pytest.mark.parametrize("number", SIGNALS)
def test_stopped_while_taking_the_lock(number: int, tmp_path: Path) -> None:
    command = [sys.executable, "-c", REGISTERING, str(int(number))]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, timeout=PATIENCE)
    assert done.returncode == 128 + number, done.stderr
    assert os.listdir(tmp_path) == []


# A stop while a temporary folder is in use.
SCRATCH = """
import os, signal, time
from blr.compressor.cli import signals
from blr.compressor.base.disk import scratch_folder
with signals.stop_on_signals(), scratch_folder() as folder:
    (folder / "held").write_text("text")
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(600)
"""


def test_temporary_folders_go_with_a_stop(tmp_path: Path) -> None:
    command, environment = [sys.executable, "-c", SCRATCH], {**os.environ, "TMPDIR": str(tmp_path)}
    done = subprocess.run(command, env=environment, capture_output=True, timeout=PATIENCE)
    assert done.returncode == 143 and os.listdir(tmp_path) == []


def test_nohup_is_respected(killer: Killer, dense: Path, whole: tuple, tmp_path: Path) -> None:
    """By a run that goes on to its end, and by the real command, which something else ends then."""
    fate = {"stop_at": whole[0].events.index("fit"), "stop": signal.SIGHUP, "ignored": signal.SIGHUP}
    done = killer.run("compress", dense, "-o", "whole", "-q", cwd=tmp_path, **fate)
    assert (done.code, done.stderr) == (0, "")
    run = start(dense, tmp_path, "sh", "-c", "trap '' HUP; exec \"$@\"", "sh")
    run.send_signal(signal.SIGHUP)
    time.sleep(0.3)
    run.send_signal(signal.SIGTERM)
    assert run.communicate(timeout=PATIENCE)[1].startswith("blr: stopped by SIGTERM")
    assert run.returncode == 143


def test_a_forked_helper_is_ended_as_usual() -> None:
    """Ending a child that a library has forked must not end the run."""
    from blr.compressor.cli.signals import stop_on_signals

    with stop_on_signals():
        child = os.fork()
        if child == 0:
            time.sleep(PATIENCE)
            os._exit(1)
        os.kill(child, signal.SIGTERM)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM


def test_outcome_counts_fits() -> None:
    assert Outcome(0, ["fit", "store", "fit"], "", "", 0.0).fits == 2
