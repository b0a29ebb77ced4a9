"""What commands call the text that they read, what is said where one cannot be had, and when."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer.main
from fresh import blr_process
from running import Invoke

from blr.compressor.base import exhaustion as packages
from blr.compressor.base.errors import BlrError
from blr.compressor.cli import app
from blr.compressor.healing.tracking import PACKAGES
from blr.compressor.text.reading import check_text, read_documents

COMMANDS: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]
OLD_NAMES = {"compress": "--calibration", "plan": "--calibration", "heal": "--data", "sweep": "--eval"}


def names(command: str) -> set[str]:
    """All that one may type for an option of `command`."""
    found = COMMANDS[command].params
    return {name for option in found for name in (*option.opts, *option.secondary_opts)}


@pytest.mark.parametrize("command", ["compress", "plan", "heal", "sweep", "eval", "export"])
@pytest.mark.fast
def test_a_text_is_called_text_and_by_its_old_name(command: str) -> None:
    (option,) = (found for found in COMMANDS[command].params if "--text" in found.opts)
    assert option.opts == ["--text", *filter(None, [OLD_NAMES.get(command)])]


@pytest.mark.fast
def test_plan_takes_every_option_of_compress() -> None:
    assert names("compress") <= names("plan")
    by_name = {name: option for option in COMMANDS["plan"].params for name in option.opts}
    for option in COMMANDS["compress"].params:
        assert all(by_name[name].multiple == option.multiple for name in option.opts)
        assert all(
            by_name[name].is_flag == option.is_flag for name in option.opts if option.opts != ["model"]
        )


PASTED = (
    *("--method", "blast", "--cf", 2, "--text", "none.txt", "--samples", 4, "--seq-len", 16),
    *("--mix", 0.5, "--allocation", "uniform", "--refit", 0, "--finish", 0, "--solver", "precgd"),
    *("--rounds", 3, "--seed", 1, "--heal", "-o", "out", "--overwrite", "--restart", "--device", "cpu"),
    *("--threads", 1, "--max-shard-size", "1GB", "--no-check", "--stream", "--allow-pickle", "-q"),
)


def test_a_line_of_compress_is_planned(
    tiny: Path, tmp_path: Path, invoke: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of it is read or written; a text means that fits are calibrated."""
    monkeypatch.chdir(tmp_path)
    code, out, err = invoke("plan", tiny, *PASTED, "--format", "json")
    assert code == 0, err
    found = json.loads(out)
    assert list(tmp_path.iterdir()) == [] and "heal" in found
    plain = ("plan", tiny, "--method", "svd", "--format", "json")
    by = [json.loads(invoke(*plain, *o)[1]) for o in (["--calibrated"], ["--calibration", "t"], [])]
    assert by[0] == by[1] != by[2]


def test_plan_refuses_what_compress_would(tiny: Path, invoke: Invoke) -> None:
    for wrong, said in (
        (("--samples", 3), "--samples 3: nothing would use it, it belongs to --text"),
        (("--text", "self", "--mix", 0.5), "--mix 0.5 is beside a text of yours, not --text self"),
        (("--heal", "-1"), "--heal is -1, expected a number over 0"),
    ):
        for command in ("plan", "compress"):
            code, _, err = invoke(command, tiny, *wrong)
            assert code == 2 and said in err


SET = "some/set-of-texts"
NEEDED = {
    "a task": (("eval", "M", "--tasks", "hellaswag"), "lm_eval", "eval"),
    "a graph": (("export", "M", "-o", "out", "--as", "onnx"), "onnx and onnxscript", "onnx"),
    "a calibration": (("compress", "M", "--text", SET, "-o", "out"), "datasets", "eval"),
    "a mixture": (("heal", "M", "--teacher", "T", "--data", SET, "-o", "out"), "datasets", "eval"),
    "a sweep": (
        ("sweep", "M", "--eval", "t.txt", "--calibration", SET, "--cf", "2", "-o", "out"),
        *("datasets", "eval"),
    ),
}


@pytest.mark.parametrize("case", NEEDED)
def test_a_missing_package_is_told_before_torch_is_loaded(case: str) -> None:
    """Here importing torch would be a bug, of exit code 1."""
    arguments, package, extra = NEEDED[case]
    done = blr_process(*arguments, hidden=("torch", "transformers", *package.split(" and ")))
    assert done.code == 9, done.err
    be = "are" if " and " in package else "is"
    assert f"{package} {be} not installed; pip install 'blr-compress[{extra}]'" in done.err


@pytest.mark.parametrize("command", ["eval", "eval --sts", "export", "sweep"])
def test_a_text_that_is_not_there_is_told_before_torch_is_loaded(command: str, tiny: Path) -> None:
    name, _, option = command.partition(" ")
    output = () if name == "eval" else ("-o", "out")
    done = blr_process(name, tiny, option or "--text", "nothere", *output, hidden=("torch",))
    assert done.code == 4 and "nothere: found no readable file" in done.err


def test_a_missing_tracker_is_told_before_torch_is_loaded() -> None:
    arguments = ("heal", "M", "--teacher", "T", "-o", "out", "--track", "tensorboard")
    done = blr_process(*arguments, hidden=("torch", "tensorboard", "tensorboardX"))
    assert done.code == 9 and "--track tensorboard: not installed; pip install tensorboard" in done.err


def test_the_trackers_are_those_of_accelerate() -> None:
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS

    assert PACKAGES.keys() == {str(name) for name in LOGGER_TYPE_TO_CLASS}


EXPECTED = "expected a text file, .jsonl or OWNER/NAME, a hub data set"


@pytest.mark.parametrize(
    ("missing", "offline", "variable", "hint"),
    [
        (True, False, "0", " (which needs datasets: pip install 'blr-compress[eval]')"),
        (False, True, "0", " (not with --offline)"),
        (False, False, "1", " (HF_HUB_OFFLINE keeps the network off: unset it)"),
        (False, False, "0", ""),
    ],
)
@pytest.mark.fast
def test_a_word_that_is_no_file_may_be_meant_for_a_data_set(
    missing: bool, offline: bool, variable: str, hint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packages, "find_spec", lambda name: None if missing else name)
    monkeypatch.setenv("HF_HUB_OFFLINE", variable)
    with pytest.raises(BlrError) as raised:
        check_text("wikitext", offline)
    assert (
        str(raised.value) == f"wikitext: no such file; {EXPECTED}{hint}" and raised.value.exit_code == 4
    )
    with pytest.raises(BlrError) as raised:
        check_text("wikitext.txt", offline)
    assert str(raised.value) == f"wikitext.txt: no such file; {EXPECTED}"


@pytest.mark.fast
def test_texts_that_can_be_had_are_not_refused(sample: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "find_spec", lambda name: name)
    for name in (str(sample), "self", SET):
        check_text(name)
    check_text("self", offline=True)
    with pytest.raises(BlrError, match="a data set needs the hub; give a local file with --offline"):
        check_text(SET, offline=True)


@pytest.mark.parametrize(
    ("variable", "remedy"),
    [
        ("1", "HF_HUB_OFFLINE keeps the network off: unset it, or give a local file"),
        ("0", "check the name and the network, or give a local file"),
    ],
)
@pytest.mark.fast
def test_a_data_set_that_does_not_come_is_told_why(
    variable: str, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load_dataset(name: str, **_: object) -> None:
        raise ConnectionError(f"cannot reach {name}")

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    monkeypatch.setenv("HF_HUB_OFFLINE", variable)
    with pytest.raises(BlrError) as raised:
        next(read_documents(SET))
    assert str(raised.value) == f"{SET}: ConnectionError: cannot reach {SET}; {remedy}"
    assert raised.value.exit_code == 8
