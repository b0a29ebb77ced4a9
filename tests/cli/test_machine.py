"""What a machine lacks and folders that cannot be used: never "a bug in blr"."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from limited import Limited, refused
from running import Run

from blr.compressor.base.errors import CapabilityError
from blr.compressor.base.exhaustion import exhausted, raise_exhausted

# --- Folders of caches and tables -----------------------------------------------------------------

UNUSABLE = ["/dev/null/x", "~nosuchuser/x", "/proc/1/nothing", "a" * 5000, "relative\n", "."]


@pytest.mark.parametrize("folder", UNUSABLE)
@pytest.mark.parametrize("name", ["XDG_CACHE_HOME", "BLR_TUNED_DIR"])
def test_folders_that_cannot_be_used(
    name: str, folder: str, limited: Limited, small: Path, tmp_path: Path
) -> None:
    """They are about speed alone: what reads them goes on without."""
    for command in (("generate", small, "the", "--max-new-tokens", "2"), ("plan", small)):
        ended = limited.run(*command, cwd=tmp_path, env={name: folder})
        assert ended.code == (0 if command[0] == "generate" else ended.code), ended.err
        assert "bug" not in ended.err


@pytest.mark.parametrize("content", ["", "[]", "gpu: 3", "\xff", "rules: [" * 100])
def test_tables_that_are_none(content: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A table of the user's that cannot be read is a warning: the shipped one is followed."""
    from blr.kernels.common.tuned import forget_rules, tuned_rules

    monkeypatch.setenv("BLR_TUNED_DIR", str(tmp_path))
    (tmp_path / "h200.yaml").write_bytes(content.encode("latin-1"))
    forget_rules()
    with pytest.warns(UserWarning, match="h200.yaml"):
        rules = tuned_rules("h200")
    forget_rules()
    assert rules


@pytest.mark.parametrize("kind", ["fifo", "folder", "device", "link-loop"])
def test_tables_that_are_no_files(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from blr.kernels.common.tuned import forget_rules, tuned_rules

    path = tmp_path / "h200.yaml"
    {
        "fifo": lambda: os.mkfifo(path),
        "folder": path.mkdir,
        "device": lambda: path.symlink_to("/dev/zero"),
        "link-loop": lambda: path.symlink_to(path.name),
    }[kind]()
    monkeypatch.setenv("BLR_TUNED_DIR", str(tmp_path))
    forget_rules()
    if kind == "link-loop":
        assert tuned_rules("h200")
    else:
        with pytest.warns(UserWarning, match="h200.yaml"):
            tuned_rules("h200")
    forget_rules()


# --- What a machine lacks -------------------------------------------------------------------------

CUDA_FULL = (
    "CUDA out of memory. Tried to allocate 768.00 MiB. GPU 0 has a total capacity of 79.18 GiB of which "
    "291.62 MiB is free. Process 903 has 2.53 GiB memory in use."
)


def test_a_full_gpu_is_told_by_what_it_has() -> None:
    """Limits of the shell are no way out of it."""
    with pytest.raises(CapabilityError) as raised:
        raise_exhausted(torch.OutOfMemoryError(CUDA_FULL))
    said = str(raised.value)
    assert "768.00 MiB were needed, 291.62 MiB of 79.18 GiB are free on GPU 0" in said
    assert "--jobs" in said and "ulimit" not in said
    with pytest.raises(CapabilityError, match="the GPU has too little memory"):
        raise_exhausted(torch.OutOfMemoryError("CUDA out of memory, said otherwise"))


LACKING: dict[str, str] = {
    "threads": 'import threading\ndef f(s): raise RuntimeError("can\'t start new thread")\n'
    "threading.Thread.start = f",
    "memory": "import blr.compressor.checkpoint.source as s\n"
    "def f(*a, **k): raise MemoryError\ns.read_header = f",
    "model-memory": "import transformers as t\ndef f(*a, **k):\n raise RuntimeError('[enforce fail at "
    "alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can\\'t allocate memory: you tried')\n"
    "t.AutoModelForCausalLM.from_pretrained = f",
    "model-threads": "import transformers as t\ndef f(*a, **k):\n"
    ' raise RuntimeError("can\'t start new thread")\n'
    "t.AutoModelForCausalLM.from_pretrained = f\nt.PreTrainedModel.from_pretrained = f",
    "tokenizer-memory": "import transformers as t\ndef f(*a, **k): raise OSError(12, 'no room')\n"
    "t.AutoTokenizer.from_pretrained = f",
    "processes": "import subprocess\ndef f(*a, **k): raise BlockingIOError(11, 'again')\n"
    "subprocess.run = f",
    "library": "import blr.compressor.loading.load as l\ndef f(*a, **k):\n"
    " raise ImportError('libtorch.so: failed to map segment from shared object')\n"
    "l.load_tokenizer = f\nimport blr.compressor.planning.plan as p\np.make_plan = f\n"
    "import blr.compressor.exporting.options as e\ne.check_options = f",
}


@pytest.mark.parametrize(
    ("lack", "command"),
    [
        *((lack, "generate") for lack in LACKING if lack != "threads"),
        *((lack, "compress") for lack in ("threads", "memory", "processes", "model-threads")),
        *((lack, "export") for lack in ("threads", "memory", "processes", "library")),
    ],
)
def test_what_a_machine_lacks(lack: str, command: str, limited: Limited, model: Path) -> None:
    rest = {"generate": ("the",)}.get(command, ("-o", "out"))
    refused(limited.run(command, "model", *rest, cwd=model.parent, patch=LACKING[lack]), 9, "")


# What the C library says where it ends a process itself, before Python hears of it.
LOADER = "cannot allocate memory for thread-local data: ABORT\n"


def test_little_address_space(limited: Limited, model: Path) -> None:
    """A real limit: whatever fails first, it is the machine that is said to be at fault."""
    patch = (
        "import resource\n"
        "used = int(open('/proc/self/statm').read().split()[0]) * 4096\n"
        "resource.setrlimit(resource.RLIMIT_AS, (used + (2 << 20), -1))"
    )
    for command in (("generate", "model", "the"), ("compress", "model", "-o", "out")):
        ended = limited.run(*command, cwd=model.parent, patch=patch)
        assert ended.code in (0, 9) or (ended.code, ended.err) == (127, LOADER), ended.err


@pytest.mark.parametrize(
    ("error", "lacks"),
    [
        (RuntimeError("can't start new thread"), True),
        (RuntimeError("CUDA out of memory. Tried to allocate 2 GiB"), True),
        (RuntimeError("Triton Error [CUDA]: CUDA_ERROR_OUT_OF_MEMORY"), True),
        (torch.OutOfMemoryError(), True),
        (MemoryError(), True),
        (OSError(12, "Cannot allocate memory"), True),
        (ImportError("libx.so: failed to map segment from shared object"), True),
        (RuntimeError("shapes cannot be multiplied"), False),
        (ValueError("out of memory of what was"), False),
        (OSError(2, "No such file"), False),
        (KeyError("memory"), False),
    ],
)
def test_what_counts_as_lacking(error: Exception, lacks: bool) -> None:
    assert (exhausted(error) is not None) == lacks
    wrapped = ValueError("cannot be built")
    wrapped.__cause__ = error
    assert (exhausted(wrapped) is not None) == lacks


@pytest.mark.parametrize(
    "command", [("generate", "{}", "the"), ("compress", "{}", "-o", "{}-out"), ("verify", "{}")]
)
def test_a_current_folder_that_was_removed(
    command: tuple[str, ...], limited: Limited, small: Path, tmp_path: Path
) -> None:
    """MKL ends the process, without a word of ours, where it looks for its parts from there."""
    gone = "import os; os.mkdir('gone'); os.chdir('gone'); os.rmdir('../gone')"
    words = [word.format(small) for word in command]
    refused(limited.run(*words, cwd=tmp_path, patch=gone), 5, "the current folder: it was removed")


def test_a_python_without_docstrings(installed: Run, small: Path) -> None:
    """transformers, which reads its own, would fail as if there were a bug in ours."""
    for level, code in (("2", 9), ("1", 0)):
        done = installed("verify", small, env={**os.environ, "PYTHONOPTIMIZE": level})
        assert done.returncode == code, done.stderr
        assert code == 0 or "blr: error: Python leaves docstrings out" in done.stderr
