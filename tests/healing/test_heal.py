"""`heal` end to end on a pico decoder: what comes out loads, verifies, exports, and is better."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from heal_models import QUIET, compress_pico, save_characters, save_dense
from safetensors.torch import load_file, save_file
from tolerances import TOLERANCES

from blr.compressor.base.errors import BlrError, CapabilityError
from blr.compressor.checkpoint.config import TRANSFORMERS
from blr.compressor.commands import heal as healing_run
from blr.compressor.commands.compress import Settings, compress
from blr.compressor.commands.heal import heal
from blr.compressor.exporting.job import export
from blr.compressor.exporting.options import ExportOptions
from blr.compressor.healing import trainer
from blr.compressor.healing.summary import HealSummary
from blr.compressor.loading import load as computing
from blr.compressor.loading.load import load_model
from blr.compressor.output import check as doors
from blr.compressor.recipe.schema import Recipe
from blr.compressor.recipe.settings import HealOptions
from blr.compressor.workspace.manifest import read_manifest, verify_files

SHORT = {"window": 16, "batch": 64, "own_tokens": 400, "steps": 30, "rate": 0.01, "device": "cpu"}


@pytest.fixture(autouse=True)
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    from blr.compressor.text import own

    monkeypatch.setattr(own, "CPU_BATCH", 8)


def run(compressed: Path, dense: Path, output: Path, **options: Any) -> HealSummary:
    none_own = {"own_tokens": None} if options.get("mix") == 0.0 else {}
    given = HealOptions("compressed", "dense", **{**SHORT, **none_own, **options})
    return heal(compressed, dense, output, given, QUIET)


@pytest.fixture(scope="module")
def healed(compressed: Path, dense: Path, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A healed model and the summary of its making."""
    output = tmp_path_factory.mktemp("healed") / "out"
    return output, run(compressed, dense, output, data=(str(text),))


def test_the_divergence_falls_on_every_text(healed: Any) -> None:
    _, summary = healed
    assert set(summary.before) == {"text.txt", "self"}
    for name, before in summary.before.items():
        assert summary.after[name]["kl"] < 0.9 * before["kl"]
        assert summary.after[name]["teacher"] == before["teacher"]
    assert summary.check is not None and 0 < summary.check["distance"] < 1
    assert summary.steps == 30 and summary.tokens == 30 * 64 and summary.best_step > 0


def test_factors_and_norms_are_trained_and_the_rest_is_the_same_bytes(
    healed: Any, compressed: Path
) -> None:
    before, after = (load_file(f / "model.safetensors") for f in (compressed, healed[0]))
    assert list(before) == list(after)
    changed = {n for n, t in before.items() if not torch.equal(t, after[n])}
    frozen = {n for n in before if "embed" in n}
    assert frozen and changed == set(before) - frozen
    assert all(after[n].dtype == t.dtype for n, t in before.items())


def test_what_comes_out_is_a_checkpoint_of_ours(healed: Any, dense: Path, tmp_path: Path) -> None:
    output, _ = healed
    assert verify_files(output, read_manifest(output)) == []
    ids = torch.randint(128, (1, 12))
    with torch.no_grad():
        ours = load_model(output, "AutoModelForCausalLM", dtype="float32", device="cpu")(ids).logits
        export(output, tmp_path / "fast", ExportOptions("healed"), QUIET)
        there = load_model(
            tmp_path / "fast", "AutoModelForCausalLM", dtype="float32", device="cpu", trust=True
        )
        torch.testing.assert_close(there(ids).logits, ours)
    told = [(folder / "metrics.jsonl").read_bytes() for folder in (output, tmp_path / "fast")]
    assert told[0] == told[1], "the card that came along names it"


def test_the_output_tells_what_was_done(healed: Any, compressed: Path) -> None:
    output, summary = healed
    card = (output / "README.md").read_text()
    assert "## Healed" in card and "| own text |" in card and "| text.txt |" in card
    assert "4 times the relative squared error of the blocks' outputs" in card
    assert card.startswith((compressed / "README.md").read_text())
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    assert lines[0]["held"] == summary.before and lines[-1]["step"] == 30
    assert "loss" in lines[1] and summary.tokens_per_second > 0
    records = [json.loads((f / "blr_layers.json").read_text()) for f in (compressed, output)]
    assert records[0].keys() == records[1].keys()
    assert all(records[0][m]["error"] != records[1][m]["error"] for m in records[0])
    report = json.loads((output / "report.json").read_text())
    assert report["layers"][0]["error"] == records[1][report["layers"][0]["module"]]["error"]
    assert "<h2>Healing</h2>" in (output / "report.html").read_text()
    assert read_manifest(output)["source"] == read_manifest(compressed)["source"]


@pytest.mark.parametrize(
    "settings",
    [{"method": "svd"}, {"method": "monarch"}, {"method": "ks"}],
    ids=["svd", "monarch", "ks"],
)
def test_other_structures_heal_too(settings: dict[str, Any], dense: Path, tmp_path: Path) -> None:
    compressed = compress_pico(dense, tmp_path / "compressed", **settings)
    summary = run(compressed, dense, tmp_path / "out")
    assert summary.after["self"]["kl"] < 0.95 * summary.before["self"]["kl"]


@pytest.mark.parametrize("name", ["gpt2", "qwen2"])
def test_other_families_heal_too(name: str, tmp_path: Path) -> None:
    """GPT-2 keeps its weights transposed; Qwen2 has biases."""
    dense = save_dense(tmp_path / "dense", name)
    compressed = compress_pico(dense, tmp_path / "compressed", "svd")
    summary = run(compressed, dense, tmp_path / "out")
    assert summary.after["self"]["kl"] < 0.95 * summary.before["self"]["kl"]
    before, after = (load_file(f / "model.safetensors") for f in (compressed, tmp_path / "out"))
    changed = {n for n, t in before.items() if not torch.equal(t, after[n])}
    assert any(n.endswith(".bias") for n in changed) and any(n.endswith(".U") for n in changed)


@pytest.mark.parametrize(
    ("options", "improved"),
    [
        ({"loss": "lm", "mix": 0.0}, "student"),
        ({"top_k": 5}, "kl"),
        ({"hidden": 0.0}, "kl"),
        ({"train": ("norms",)}, "kl"),
        ({"train": ("factors", "norms", "embeddings"), "checkpointing": True}, "kl"),
        ({"epochs": 1.0, "steps": None}, "kl"),
    ],
)
def test_what_can_be_asked_for(
    options: dict[str, Any], improved: str, compressed: Path, dense: Path, text: Path, tmp_path: Path
) -> None:
    summary = run(compressed, dense, tmp_path / "out", data=(str(text),), **options)
    first = str(text.name)
    assert summary.after[first][improved] < summary.before[first][improved]
    assert ("self" in summary.after) == (options.get("mix") != 0.0)


def test_minutes_end_a_run_by_the_clock(
    compressed: Path, dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ticks = count(0, 0.02)  # seconds from each look at it to the next
    monkeypatch.setattr(trainer, "monotonic", lambda: next(ticks))
    summary = run(compressed, dense, tmp_path / "out", minutes=0.02, steps=None)
    assert 10 < summary.steps < 60
    assert summary.after["self"]["kl"] < summary.before["self"]["kl"]


def test_checkpointed_blocks_give_the_same_model(compressed: Path, dense: Path, tmp_path: Path) -> None:
    for name, kept in (("a", False), ("b", True)):
        run(compressed, dense, tmp_path / name, checkpointing=kept, steps=5)
    tensors = [load_file(tmp_path / name / "model.safetensors") for name in "ab"]
    for name, tensor in tensors[0].items():
        torch.testing.assert_close(tensor, tensors[1][name])


def test_what_does_not_run_is_not_committed(
    compressed: Path, dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    door = doors._DOORS[TRANSFORMERS]

    def broken(folder: Path) -> Any:
        model = door.written(folder)
        next(model.parameters()).data.fill_(float("nan"))
        return model

    monkeypatch.setitem(doors._DOORS, TRANSFORMERS, replace(door, written=broken))
    with pytest.raises(BlrError, match="found NaN or Inf in the results for 16 tokens"):
        run(compressed, dense, tmp_path / "out", steps=2)
    assert not (tmp_path / "out").exists()
    assert run(compressed, dense, tmp_path / "out", steps=2, check=False).check is None


def test_a_run_that_only_gets_worse_keeps_the_start(
    compressed: Path, dense: Path, tmp_path: Path
) -> None:
    summary = run(compressed, dense, tmp_path / "out", rate=0.9, steps=20, patience=3)
    assert summary.best_step == 0 and summary.after == summary.before
    assert summary.steps < 20, "three evaluations without a new best end a run"
    files = [(f / "model.safetensors").read_bytes() for f in (compressed, tmp_path / "out")]
    assert files[0] == files[1]


def test_nan_ends_the_run_and_keeps_the_state_before(
    compressed: Path, dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_all, calls = trainer.Passes.__call__, []

    def broken(self: trainer.Passes, rows: torch.Tensor) -> torch.Tensor:
        calls.append(rows)
        return run_all(self, rows) * (float("nan") if len(calls) == 8 else 1)

    monkeypatch.setattr(trainer.Passes, "__call__", broken)
    with pytest.raises(BlrError, match=r"not finite at step 8; lower --lr, now 0\.01") as raised:
        run(compressed, dense, tmp_path / "out", save_minutes=0.0)
    assert raised.value.exit_code == 7 and not (tmp_path / "out").exists()
    assert list((tmp_path / "out.blr-partial" / "journal").glob("*.safetensors"))
    monkeypatch.undo()
    assert run(compressed, dense, tmp_path / "out").steps == 30


def test_half_precision_keeps_masters_in_float32(
    compressed: Path, dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a GPU computes in, on the CPU; small rates would be lost in bfloat16."""
    monkeypatch.setattr(computing, "model_dtype", lambda device: "bfloat16")
    summary = run(compressed, dense, tmp_path / "out", rate=0.002, batch=128)
    assert summary.after["self"]["kl"] < 0.99 * summary.before["self"]["kl"]
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    trained = [n for n in tensors if n.endswith((".U", "norm.weight"))]
    assert trained and all(tensors[n].dtype == torch.float32 for n in trained)
    assert any(not torch.equal(tensors[n], tensors[n].bfloat16().float()) for n in trained)


def test_out_of_memory_makes_parts_smaller_and_changes_nothing_else(
    compressed: Path, dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = run(compressed, dense, tmp_path / "whole", steps=4)
    eager, sizes = trainer.Passes._eager, []

    def small(self: trainer.Passes, part: torch.Tensor) -> torch.Tensor:
        sizes.append(len(part))
        if len(part) > limit:
            raise torch.OutOfMemoryError
        return eager(self, part)

    monkeypatch.setattr(trainer.Passes, "_eager", small)
    limit = 1
    parts = run(compressed, dense, tmp_path / "parts", steps=4).after["self"]
    near = {"rel": TOLERANCES[torch.float32], "abs": 2e-6}  # sums of parts, told to six places
    assert parts == pytest.approx(whole.after["self"], **near)
    assert sizes[:4] == [4, 2, 1, 1]
    limit = 0
    with pytest.raises(BlrError, match="1 windows of 16 tokens do not fit") as raised:
        run(compressed, dense, tmp_path / "none", steps=4)
    assert raised.value.exit_code == 9


def other_vocabulary(folder: Path, dense: Path) -> tuple[Path, dict[str, Any]]:
    other = save_dense(folder / "other")
    save_characters(other, range(127, -1, -1))
    return other, {}


def larger_vocabulary(folder: Path, dense: Path) -> tuple[Path, dict[str, Any]]:
    other = save_dense(folder / "other")
    config = json.loads((other / "config.json").read_text())
    tensors = load_file(other / "model.safetensors")
    table = "model.embed_tokens.weight"
    save_file({**tensors, table: tensors[table].repeat(2, 1)}, other / "model.safetensors")
    (other / "config.json").write_text(json.dumps({**config, "vocab_size": 256}))
    return other, {}


def text_of(contents: str | bytes, name: str = "bad.txt") -> Callable[..., tuple[Path, dict[str, Any]]]:
    def make(folder: Path, dense: Path) -> tuple[Path, dict[str, Any]]:
        data = contents.encode() if isinstance(contents, str) else contents
        (folder / name).write_bytes(data)
        return dense, {"data": (str(folder / name),)}

    return make


def given(**options: Any) -> Callable[..., tuple[Path, dict[str, Any]]]:
    return lambda folder, dense: (dense, options)


@pytest.mark.parametrize(
    ("make", "code", "said"),
    [
        (other_vocabulary, 4, "a tokenizer that gives other ids"),
        (larger_vocabulary, 4, "a vocabulary of .256. tokens, not .128. as"),
        (given(data=("nowhere.txt",)), 4, "no such file"),
        (text_of(b"\xff\xfe\x00"), 4, "UTF-8"),
        (text_of(""), 4, "empty"),
        (text_of("abc"), 4, "3 tokens, expected at least three windows"),
        (text_of('{"text": 1}\n', "bad.jsonl"), 4, "string field 'text'"),
        (given(steps=3, epochs=1.0), 2, "one of --minutes"),
        (given(rate=-1.0), 2, "--lr is -1, expected a number over 0"),
        (given(train=("wings",)), 2, "--train is 'wings', expected it to be 'factors'"),
        (given(train=("head",)), 2, "the model has none of these"),
        (given(loss="mse"), 2, "--loss is 'mse'"),
        (given(mix=0.5), 2, "a mixture needs a text"),
        (given(batch=10), 2, "less than a window"),
    ],
)  # fmt: skip
def test_refusals(
    make: Callable[..., tuple[Path, dict[str, Any]]], code: int, said: str,
    compressed: Path, dense: Path, tmp_path: Path,
) -> None:  # fmt: skip
    teacher, options = make(tmp_path, dense)
    with pytest.raises(BlrError, match=said) as raised:
        run(compressed, teacher, tmp_path / "out", **options)
    assert raised.value.exit_code == code and not (tmp_path / "out").exists()


def test_the_two_models_must_not_be_mixed_up(compressed: Path, dense: Path, tmp_path: Path) -> None:
    for student, teacher, said in (
        (dense, dense, "nothing to heal"),
        (compressed, compressed, "teacher"),
    ):
        with pytest.raises(BlrError, match=said) as raised:
            run(student, teacher, tmp_path / "out")
        assert raised.value.exit_code == 4


def test_a_left_state_of_other_settings_is_refused(
    compressed: Path, dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(
            healing_run.HealRun, "_contents", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt)
        )
        with pytest.raises(KeyboardInterrupt):
            run(compressed, dense, tmp_path / "out")
    with pytest.raises(BlrError, match=r"heal\.rate was 0\.01, now 0\.02") as raised:
        run(compressed, dense, tmp_path / "out", rate=0.02)
    assert raised.value.exit_code == 5
    assert run(compressed, dense, tmp_path / "out", rate=0.02, restart=True).steps == 30


@pytest.mark.parametrize(
    "settings",
    [{"method": "dense", "quantize": "int2"}, {"method": "svd", "base": "int2", "rank": 2}],
    ids=["rounded", "corrected"],
)
def test_layers_in_few_bits_are_trained_and_stay_in_them(
    settings: dict[str, Any], dense: Path, text: Path, tmp_path: Path
) -> None:
    packed = tmp_path / "packed"
    compress(dense, Recipe(group=32, **settings), packed, Settings("dense", check=False), QUIET)
    fast = {"rate": 0.04, "steps": 40}  # latent weights start on their levels, half a step from the next
    summary = run(packed, dense, tmp_path / "out", data=(str(text),), mix=0.0, **fast)
    assert summary.after["text.txt"]["kl"] < 0.9 * summary.before["text.txt"]["kl"]
    before, after = (load_file(f / "model.safetensors") for f in (packed, tmp_path / "out"))
    assert list(before) == list(after)
    assert all(after[n].dtype == t.dtype and after[n].shape == t.shape for n, t in before.items())
    levels = [n for n in before if n.endswith("weight_q")]
    assert levels and any(not torch.equal(before[n], after[n]) for n in levels)
    assert verify_files(tmp_path / "out", read_manifest(tmp_path / "out")) == []
    found = load_model(tmp_path / "out", "AutoModelForCausalLM", dtype="float32", device="cpu")
    assert bool(found(torch.randint(128, (1, 12))).logits.isfinite().all())
    export(tmp_path / "out", tmp_path / "fast", ExportOptions("healed"), QUIET)
    card = (
        tmp_path / "fast/README.md"
    ).read_text()  # norms are healed, so they are not the dense model's
    assert "All other tensors are unchanged. 14 layers are packed as in the checkpoint" in card


def test_additions_to_layers_in_few_bits_are_refused(dense: Path, text: Path, tmp_path: Path) -> None:
    packed = tmp_path / "packed"
    recipe = Recipe(method="dense", quantize="int4", group=32)
    compress(dense, recipe, packed, Settings("dense", check=False), QUIET)
    with pytest.raises(CapabilityError, match="stored in few bits"):
        run(packed, dense, tmp_path / "out", data=(str(text),), mix=0.0, lora=2)


def test_tied_tensors_that_are_both_stored_stay_tied(dense: Path, text: Path, tmp_path: Path) -> None:
    """One parameter is trained: the other name must not keep what it was."""
    both = shutil.copytree(dense, tmp_path / "both")
    tensors = load_file(both / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, both / "model.safetensors", {"format": "pt"})
    student = compress_pico(both, tmp_path / "compressed", "svd")
    given = {"data": (str(text),), "train": ("embeddings",), "steps": 2, "mix": 0.0}
    run(student, both, tmp_path / "out", **given)
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(found["lm_head.weight"], found["model.embed_tokens.weight"])
    assert not torch.equal(found["lm_head.weight"], tensors["lm_head.weight"])
