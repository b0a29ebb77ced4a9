"""`blr bench decode` on the CPU: right arms, no time without right numbers, files, and one JSON line."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tolerances import TOLERANCES
from typer.testing import CliRunner

from blr.bench import decode, decode_arms
from blr.bench.decode import DecodeRow, run_decode
from blr.bench.decode_arms import HfArm, compare_tokens, parse_arm
from blr.bench.models import Models, cache_bytes, find_model, known_models, weight_bytes
from blr.bench.options import DecodeOptions
from blr.bench.results import FAILED, OK, WRONG, BenchReport, save
from blr.compressor.base.errors import CapabilityError, UsageError
from blr.compressor.base.progress import Progress
from blr.compressor.cli.timing import bench_app

PLAIN = ("hf-dense", "ours-dense", "ours-lowrank", "ours-blast", "ours-monarch")
ARMS = (*PLAIN, "ours-dense-kv8")
PICO = {"models": ["pico"], "contexts": [6], "steps": 3, "rounds": 2, "blocks": 4, "device": "cpu"}


def _run(**options: Any) -> list[DecodeRow]:
    report, code = run_decode(DecodeOptions(**{**PICO, "dtype": "float32", **options}), Progress(True))
    assert code == 0
    return report.rows


def _models(dtype: torch.dtype = torch.float32) -> Models:
    return Models(find_model("pico"), torch.device("cpu"), dtype, 64, blocks=4)


def test_every_arm_is_right_and_timed() -> None:
    rows = _run(arms=ARMS, batches=[1]) + _run(arms=("hf-dense", "ours-lowrank"), batches=[2])
    assert [r.arm for r in rows] == [*ARMS, "hf-dense", "ours-lowrank"]
    for row in rows:
        assert row.status == OK, row.note
        rounded = TOLERANCES[torch.bfloat16] if row.arm.endswith("kv8") else 0  # a key in int8 is
        assert row.rel_error < rounded or row.rel_error < 10 * TOLERANCES[torch.float32]  # two layers
        assert row.tokens_per_second == pytest.approx(row.batch * 1e3 / row.ms)
        assert row.low <= row.ms <= row.high
        assert (row.rounds, row.steps) == (2, 3)
        base = next(r for r in rows if (r.arm, r.batch) == ("hf-dense", row.batch))
        assert row.speedup == pytest.approx(base.ms / row.ms)
        assert row.fraction is None  # no copy bandwidth on a CPU


def test_a_checkpoint_gives_the_tokens_of_transformers(tiny: Path) -> None:
    rows = _run(models=[str(tiny)], batches=[2])
    assert [(row.arm, row.status) for row in rows] == [("hf-own", OK), ("ours-own", OK)]
    assert rows[1].equal_tokens == decode.GREEDY


def test_wrong_logits_have_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    right = decode_arms.OursArm.step
    monkeypatch.setattr(
        decode_arms.OursArm, "step", lambda self, tokens=None: right(self, tokens) * 1.01
    )
    base, ours = _run(arms=["hf-dense", "ours-dense"])
    assert base.status == OK
    assert ours.status == WRONG
    assert ours.ms is ours.tokens_per_second is ours.speedup is None
    assert ours.rel_error == pytest.approx(0.01, rel=0.1)


def test_a_failing_arm_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Any) -> None:
        raise RuntimeError("no such kernel\nand more")

    monkeypatch.setattr(decode_arms.OursArm, "prefill", broken)
    base, ours = _run(arms=["hf-dense", "ours-dense"])
    assert (base.status, ours.status) == (OK, FAILED)
    assert ours.note == "RuntimeError: no such kernel"
    assert base.ms is not None


def test_a_decoder_of_dequantized_copies_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_arms.OursArm, "bytes_read", lambda self: 10**9)
    (row,) = _run(arms=["ours-lowrank"])
    assert (row.status, row.ms) == (FAILED, None)
    assert "times the bytes" in row.note


def test_tokens_that_part_are_a_near_tie_or_wrong() -> None:
    models = _models()
    model = models.get("dense")
    ids = torch.arange(8).reshape(2, 4)
    with torch.no_grad():
        plain = HfArm(model, ids, 8, compiling=False)
        right = plain.greedy(5)
        logits = model(torch.cat([ids[1], torch.tensor(right[1][:2])])[None]).logits[0, -1]
        best, second = logits.topk(2).indices.tolist()
        worst = int(logits.argmin())
        assert best == right[1][2]
        for other, wrong in ((second, False), (worst, True)):
            found = [right[0], [*right[1][:2], other, 0, 0]]
            limit = 1.01 * float(logits[best] - logits[second]) / float(logits.square().mean().sqrt())
            equal, note, refused = compare_tokens(found, plain, model, limit)
            assert (equal, refused) == (2, wrong) and note


def test_variants_share_their_ends_and_have_their_own_layers() -> None:
    models = _models(torch.bfloat16)
    dense, lowrank, int4 = models.get("dense"), models.get("lowrank"), models.get("dense", "int4")
    assert lowrank.lm_head.weight is dense.lm_head.weight
    assert lowrank.model.layers[0].mlp.up_proj.U.is_floating_point()
    inner = dense.config.hidden_size * dense.config.vocab_size * 2  # the head, in bytes
    sizes = [weight_bytes(model) - inner for model in (dense, lowrank, int4)]
    assert sizes[0] > 1.7 * sizes[1]
    assert sizes[0] > 1.7 * sizes[2]  # rows of 64 are padded to 128
    assert cache_bytes(dense, 10, 3) == 2 * 2 * 2 * 16 * 2 * 10 * 3
    assert cache_bytes(dense, 10, 3, packed=True) == 2 * 2 * 2 * (16 + 4) * 10 * 3


def test_random_weights_in_few_bits_are_drawn_and_keep_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """No scale is searched, which takes minutes for an 8B; results are as large as those of others."""
    from blr.bench import models as module

    monkeypatch.setattr(module, "quantize_dense", lambda *_: pytest.fail("was rounded"))
    monkeypatch.setattr(module, "quantize_factors", lambda *_: pytest.fail("was rounded"))
    models, x = _models(), torch.randn(200, 128)
    kinds = [("dense", f"int{bits}") for bits in (8, 4, 3, 2)]
    for kind in (*kinds, ("lowrank", "int4"), ("corrected", "int2"), ("corrected", "int3")):
        layer = models.get(*kind).model.layers[0].mlp.down_proj
        with torch.no_grad():
            assert float(layer(x).std()) == pytest.approx(1, rel=0.2), kind
            assert abs(float(layer(x).mean())) < 0.1, kind


def test_heads_are_quantized_beside_the_shared_ones() -> None:
    """Whichever is built first, the others keep a plain head of the same weights."""
    models = _models(torch.bfloat16)
    first, dense = models.get("dense", "int4", head="int8"), models.get("dense")
    assert type(dense.lm_head) is torch.nn.Linear
    weight = dense.lm_head.weight
    assert first.model.embed_tokens is dense.model.embed_tokens
    assert models.get("lowrank").lm_head.weight is weight
    found = first.lm_head.weight.float()
    assert 0 < float((found - weight.float()).norm() / weight.float().norm()) < 0.01
    bare = models.get("dense", head="int8")
    # Rows of 64 are padded to 128 bytes, and a scale of 2 bytes each; the embedding is not read.
    saved = weight.nbytes - weight.shape[0] * (128 + 2)
    assert weight_bytes(dense) - weight_bytes(bare) == saved


def test_tied_ends_stay_tied_in_other_models() -> None:
    pico = find_model("pico")
    tied = replace(pico, settings={**pico.settings, "tie_word_embeddings": True})
    models = Models(tied, torch.device("cpu"), torch.float32, 64, blocks=4)
    quantized, dense = models.get("dense", head="int8"), models.get("dense")
    assert dense.lm_head.weight is dense.model.embed_tokens.weight
    assert quantized.config.tie_word_embeddings is False and dense.config.tie_word_embeddings
    head = quantized.lm_head.packed().nbytes
    assert weight_bytes(quantized) == weight_bytes(dense) - dense.lm_head.weight.nbytes + head


@pytest.mark.parametrize(
    "arm",
    [
        "ours-lowrank-int4-head8",
        "ours-dense-head4",
        "ours-own-int8",
        "ours-own-kv8",
        "ours-lowrank-token",
        "ours-corrected-int2",
        "ours-speculative-1b-90",
        "ours-speculative-ngram",
        "ours-speculative-int2",
    ],
)
def test_arms_say_what_they_are(arm: str) -> None:
    assert str(parse_arm(arm)) == arm
    found = parse_arm("ours-lowrank-int4-head8")
    assert (found.runtime, found.structure, found.kind, found.head) == (
        *("ours", "lowrank", "int4", "int8"),
    )


def test_arms_of_other_drafts_are_timed() -> None:
    for row in _run(arms=("ours-speculative-pico-90", "ours-speculative-ngram-50")):
        assert (row.status, row.ms is not None) == (OK, True) and "accepted" in (row.note or "")
    for arm in ("ours-speculative-1b-int2", "ours-dense-1b"):
        with pytest.raises(UsageError, match="may first name a draft"):
            parse_arm(arm)


def test_arms_of_quantized_heads_are_right_and_timed(tiny: Path) -> None:
    arms = ("hf-dense", "ours-dense-head8", "ours-lowrank-int4-head8", "ours-blast-int8-head4")
    arms += ("ours-corrected-int2", "ours-dense-int3")
    for row in _run(arms=arms):
        assert (row.status, row.ms is not None) == (OK, True), row.note
    (own,) = _run(models=[str(tiny)], arms=["ours-own-int4-head8"])
    assert (own.status, own.equal_tokens) == (OK, decode.GREEDY)


def test_all_published_shapes_are_llamas() -> None:
    for name, settings in known_models().items():
        assert settings["hidden_size"] % settings["num_attention_heads"] == 0, name


@pytest.mark.parametrize(
    "name",
    [
        *("ours-ks", "hf-lowrank", "hf-dense-int8", "ours-dense-fp8", "ours-corrected", "dense", ""),
        *("hf-dense-head8", "ours-dense-head16", "ours-dense-head8-int4", "ours-dense-int4-head8-x"),
    ],
)
def test_unknown_arms_are_refused(name: str) -> None:
    with pytest.raises(UsageError, match="expected hf-dense or hf-own"):
        parse_arm(name)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"models": ["13b"]}, "neither one of 7b, 8b, 1b, pico nor a folder"),
        ({"arms": ["ours-own"]}, "none of the arms fits pico"),
        ({"dtype": "float64"}, "expected float32, float16 or bfloat16"),
    ],
)
def test_what_cannot_be_timed_is_refused_before_anything(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        _run(**options)


def test_files_hold_every_row(tmp_path: Path) -> None:
    report = BenchReport("bench decode", {}, DecodeRow)
    report.machine = {"name": "cpu"}
    report.rows = [DecodeRow("pico", "hf-dense", 6, 1, "float32", tokens_per_second=10.0, ms=100.0)]
    report.rows.append(DecodeRow("pico", "ours-dense", 6, 1, "float32", status=WRONG, note="x"))
    save(report, tmp_path)
    found = json.loads((tmp_path / "results.json").read_text())
    assert found["summary"]["tokens_per_second"] == {"pico": {"hf-dense": {"6x1": 10.0}}}
    assert found["summary"]["statuses"] == {OK: 1, WRONG: 1}
    assert len(found["rows"]) == 2
    text = report.text()
    assert "10.0" in text
    assert WRONG in text


def test_seconds_end_a_run_between_cases() -> None:
    options = DecodeOptions(**{**PICO, "arms": ["hf-dense"], "dtype": "float32", "seconds": 0.0})
    report, code = run_decode(options, Progress(True))
    assert (code, report.rows) == (0, [])
    assert report.stopped == "the seconds were spent before pico context 6 batch 1"


def test_the_command_prints_json_last_and_writes_files(tmp_path: Path) -> None:
    arguments = [
        "decode",
        "--models",
        "pico",
        "--arms",
        "hf-dense,ours-dense",
        "--contexts",
        "6",
        "--steps",
        "2",
    ]
    arguments += ["--device", "cpu", "--dtype", "float32", "--quiet", "-o", str(tmp_path / "out")]
    done = CliRunner().invoke(bench_app, arguments)
    assert done.exit_code == 0, done.output
    last = json.loads(done.stdout.splitlines()[-1])
    assert set(last["summary"]["tokens_per_second"]["pico"]) == {"hf-dense", "ours-dense"}
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["results.json"]


def test_a_large_random_model_is_not_built_on_a_cpu() -> None:
    with pytest.raises(CapabilityError, match=r"7b on the CPU.*expected a CUDA GPU"):
        run_decode(DecodeOptions(models=("pico", "7b"), device="cpu"), Progress(quiet=True))


@pytest.mark.parametrize("arguments", [["--batches", "17"], ["--contexts", "0"], ["--cf", "1"]])
def test_the_command_refuses_bad_numbers(arguments: list[str]) -> None:
    done = CliRunner().invoke(bench_app, ["decode", "--models", "pico", *arguments])
    assert isinstance(done.exception, UsageError)
