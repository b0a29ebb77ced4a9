"""What every decoder loses is measured, said before and after, and refused where it is too much."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from heal_models import compress_pico, save_dense, write_text
from pico import save_pico
from running import Invoke

from blr.compressor.base.progress import Progress
from blr.compressor.checkpoint.source import open_source
from blr.compressor.cli.making import check_lines
from blr.compressor.commands import evaluate
from blr.compressor.commands.text_scores import text_scores
from blr.compressor.loading import loader
from blr.compressor.loading.load import load_model, load_tokenizer
from blr.compressor.output import loss
from blr.compressor.output.check import Bar
from blr.compressor.output.loss_messages import LossFacts, better_export, better_fit, number, told
from blr.compressor.recipe.schema import make_recipe
from blr.compressor.text.reading import beginning_of, read_calibration
from blr.compressor.workspace.manifest import read_manifest

pytestmark = pytest.mark.fast
QUICK = ("--device", "cpu", "-q", "--format", "json")


def judged(folder: Path, text: Path, found: dict[str, Any]) -> float:
    """Perplexity by `blr eval` of the tokens of a text on which a loss was measured."""
    model = load_model(folder, "AutoModelForCausalLM", dtype="float32", device="cpu")
    part = slice(found["first"], found["first"] + found["tokens"])
    tokenizer, window = load_tokenizer(folder), found["window"]
    ids = evaluate.read_tokens(text, tokenizer)[part]
    beginning = beginning_of(tokenizer)
    scored = text_scores(model, ids, window, window, 4, Progress(quiet=True), beginning)
    return evaluate.perplexity(scored)["perplexity"]


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_dense(tmp_path_factory.mktemp("loss") / "dense")


@pytest.fixture(scope="module")
def text(dense: Path) -> Path:
    return write_text(dense.parent / "text.txt", 6000)


@pytest.mark.parametrize("around", ["$A", "{|$A"])
def test_the_loss_of_a_calibrated_output_is_that_of_blr_eval(
    around: str, text: Path, tmp_path: Path, invoke: Invoke
) -> None:
    """On windows that no fit has read, before and after, in JSON, card and report alike; also where a
    tokenizer begins every text with tokens of its own."""
    dense = save_dense(tmp_path / "dense", around=around)
    given = ("--method", "svd", "--cf", 1.5, "--calibration", text, "--samples", 16)
    code, out, err = invoke("compress", dense, *given, "-o", tmp_path / "out", *QUICK)
    assert code == 0, err
    found = json.loads(out)["check"]
    facts = json.loads((tmp_path / "out/report.json").read_bytes())["facts"]["calibration"]
    assert facts["tokens"] // 64 == 16 and found["first"] + found["tokens"] == len(text.read_text())
    assert found["tokens"] >= 200
    for name, folder in (("before", dense), ("after", tmp_path / "out")):
        assert found["perplexity"][name] == pytest.approx(judged(folder, text, found), rel=0.01)
    ratio = found["perplexity"]["after"] / found["perplexity"]["before"]
    assert found["loss"] == pytest.approx(math.log(ratio)) and 0 < found["agreement"] <= 1
    assert f"Perplexity {told(found)}." in (tmp_path / "out/README.md").read_text()
    page = (tmp_path / "out/report.html").read_text()
    assert "Perplexity" in page and number(found["perplexity"]["after"]) in page
    assert json.loads((tmp_path / "out/report.json").read_bytes())["loss"]["tokens"] == found["tokens"]
    assert invoke("verify", tmp_path / "out")[0] == 0


@pytest.mark.parametrize("around", ["$A", "{|$A"])
@pytest.mark.parametrize("samples", [16, 256])
def test_compress_and_heal_report_the_same_tokens(
    samples: int, around: str, text: Path, tmp_path: Path, invoke: Invoke
) -> None:
    """A person compares the two lines: both are of the end of the text, in windows of one length,
    whatever windows the fits and the training read."""
    dense, small = save_dense(tmp_path / "dense", around=around), tmp_path / "small"
    given = ("--method", "svd", "--cf", 1.5, "--text", text, "--samples", samples)
    code, out, err = invoke("compress", dense, *given, "-o", small, *QUICK)
    assert code == 0, err
    fitted = json.loads(out)["check"]
    given = ("--teacher", dense, "--text", text, "--mix", 0, "--steps", 1, "--window", 16, "--batch", 32)
    code, out, err = invoke("heal", small, *given, "-o", tmp_path / "healed", *QUICK)
    assert code == 0, err
    healed = json.loads(out)["check"]
    for name in ("read", "tokens", "first", "window"):
        assert healed[name] == fitted[name]
    assert healed["perplexity"]["before"] == fitted["perplexity"]["before"]


def test_of_a_long_text_what_lies_behind_the_fits_is_read(
    dense: Path, text: Path, tmp_path: Path, invoke: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loss, "WHOLE", 100)
    given = ("--method", "svd", "--cf", 1.5, "--text", text, "--samples", 16)
    code, out, err = invoke("compress", dense, *given, "-o", tmp_path / "out", *QUICK)
    assert code == 0, err
    found = json.loads(out)["check"]
    assert found["first"] >= 16 * 64 and found["tokens"] >= 1024


def test_an_export_says_the_loss_on_the_text_it_is_given(
    dense: Path, text: Path, tmp_path: Path, invoke: Invoke
) -> None:
    """As `blr eval --max-tokens` of the same text does; quantized or not, dense again or not."""
    source = compress_pico(dense, tmp_path / "small", method="svd", rounds=None)
    for kind in (("--quantize", "int4"), ("--as", "dense"), ("--as", "plain"), ()):
        folder = tmp_path / f"out{len(list(tmp_path.iterdir()))}"
        code, out, err = invoke(
            "export", source, *kind, "--text", text, "-o", folder, "-q", "--format", "json"
        )
        assert code == 0, err
        found = json.loads(out)["check"]
        eval_options = ("--text", text, "--max-tokens", found["tokens"], "--window", found["window"])
        for name, judged_one in (("before", source), ("after", folder)):
            told_by = json.loads(invoke("eval", judged_one, *eval_options, *QUICK)[1])
            assert found["perplexity"][name] == pytest.approx(told_by["perplexity"], rel=0.01)
        assert f"Perplexity {told(found)}." in (folder / "README.md").read_text()


@pytest.mark.parametrize("whole", [True, False])
def test_a_loss_on_own_text_is_the_divergence(
    whole: bool, dense: Path, tmp_path: Path, invoke: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that is not loaded whole writes shorter samples."""
    if not whole:
        monkeypatch.setattr(loader, "WHOLE", 0)
    code, out, err = invoke(
        "compress", dense, "--method", "svd", "--cf", 1.5, "-o", tmp_path / "out", *QUICK
    )
    assert code == 0, err
    found = json.loads(out)["check"]
    source = open_source(dense)
    ours, theirs = (loader.load_written(f, torch.float32) for f in (tmp_path / "out", dense))
    ids = loss.own_text(theirs, source).windows
    with torch.no_grad():
        q, p = (model(ids).logits[:, :-1].log_softmax(-1).double() for model in (ours, theirs))
    divergence = float((p.exp() * (p - q)).sum(-1).mean())
    assert found["loss"] == pytest.approx(divergence, rel=1e-3, abs=1e-6)
    assert found["kl"]["mean"] == pytest.approx(divergence, rel=1e-3, abs=1e-6)
    assert found["perplexity"]["before"] == pytest.approx(math.exp(float(-(p.exp() * p).sum(-1).mean())))
    assert found["agreement"] == pytest.approx(float((p.argmax(-1) == q.argmax(-1)).double().mean()))
    assert "that the model wrote itself" in found["read"] and found["tokens"] == 1024
    assert found["window"] == (64 if whole else 16)


def test_what_loses_over_a_nat_is_not_written_and_goes_on_with_force(
    tiny: Path, tmp_path: Path, invoke: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Low rank at CF 2 of the bundled model, by its weights alone: perplexity in the thousands."""
    given = ("compress", tiny, "--method", "svd", "--cf", 2, "-o", tmp_path / "out", "--device", "cpu")
    code, _, err = invoke(*given, "-q")
    assert code == 7 and not (tmp_path / "out").exists()
    assert "nats a token lost (perplexity " in err and "expected at most 1" in err
    partial = tmp_path / "out.blr-partial"
    assert "--text TEXT" in err and f"--force, which writes what {partial} keeps" in err
    assert "train that (blr heal)" in err and partial.is_dir()
    fitted = []
    from blr.compressor.structures import lowrank

    fit = lowrank.fit
    monkeypatch.setattr(lowrank, "fit", lambda *a, **k: fitted.append(1) or fit(*a, **k))
    code, out, err = invoke(*given, "--force", "-q")
    assert code == 0 and not fitted, err
    assert "blr: warning: " in err and "nats a token lost" in err
    assert "perplexity:" in out and "-> " in out and "from the source's results" not in out


def test_without_a_check_nothing_is_measured_and_that_is_said(
    dense: Path, tmp_path: Path, invoke: Invoke
) -> None:
    given = ("compress", dense, "--method", "svd", "--cf", 1.5, "-o", tmp_path / "out", "--no-check")
    code, out, err = invoke(*given, "--device", "cpu", "-q")
    assert code == 0 and "perplexity not measured" in out, err
    assert "Perplexity not measured: --no-check." in (tmp_path / "out/README.md").read_text()


@pytest.mark.parametrize("what", ["no text", "too large"])
def test_why_nothing_was_measured(
    what: str, dense: Path, tmp_path: Path, invoke: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A large model writes no text here, and one larger still reads none."""
    if what == "no text":
        monkeypatch.setattr(loss, "OWN_BYTES", 0)
    else:
        monkeypatch.setattr(loss, "WORK", 1.0)
    given = ("compress", dense, "--method", "svd", "--cf", 1.5, "-o", tmp_path / "out")
    code, out, err = invoke(*given, *QUICK)
    assert code == 0, err
    why = {"no text": "no text was given", "too large": "too large to be run"}[what]
    assert why in json.loads(out)["check"]["unmeasured"]
    assert f"blr: warning: perplexity not measured: {json.loads(out)['check']['unmeasured']}" in err
    assert why in (tmp_path / "out/README.md").read_text()
    assert why in (tmp_path / "out/report.html").read_text()


def test_large_models_read_fewer_tokens(dense: Path) -> None:
    source = open_source(dense)
    parameters = sum(entry.parameters for entry in source.entries.values())
    sizes = {n: replace(e, shape=(10**9 // parameters, *e.shape)) for n, e in source.entries.items()}
    assert loss.most_tokens(source) == 4096
    assert 128 < loss.most_tokens(replace(source, entries=sizes)) < 3000


def test_encoders_keep_their_check(tmp_path: Path, invoke: Invoke) -> None:
    save_pico("distilbert", tmp_path / "dense")
    given = ("compress", tmp_path / "dense", "--cf", 1.5, "-o", tmp_path / "out", "-q")
    code, out, err = invoke(*given)
    assert code == 0 and "loaded and run on 16 tokens, " in out, err
    assert "perplexity" not in out and "Perplexity" not in (tmp_path / "out/README.md").read_text()
    assert "<!--" not in (tmp_path / "out/README.md").read_text()


def test_healing_is_judged_by_its_end(
    dense: Path, text: Path, tmp_path: Path, invoke: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in the run that compressed: what is trained may lose anything before. A refused one is not
    trained again."""
    monkeypatch.setattr("blr.compressor.output.check.MOST", -1.0)
    monkeypatch.setattr("blr.compressor.output.check.LARGE", -1.0)
    source = compress_pico_forced(dense, tmp_path / "small")
    given = ("heal", source, "--teacher", dense, "--data", text, "--steps", 2, "--window", 32)
    given = (*given, "--batch", 128, "-o", tmp_path / "healed", *QUICK)
    code, _, err = invoke(*given)
    assert code == 7 and not (tmp_path / "healed").exists(), err
    assert "nats a token lost" in err and "--minutes" in err
    monkeypatch.setattr("blr.compressor.healing.trainer.Trainer.backward", None)
    code, out, err = invoke(*given, "--force")
    assert code == 0 and "blr: warning: " in err, err
    found = json.loads(out)["check"]
    assert found["perplexity"]["before"] == pytest.approx(judged(dense, text, found), rel=0.01)
    assert found["perplexity"]["after"] == pytest.approx(
        judged(tmp_path / "healed", text, found), rel=0.01
    )
    assert f"Perplexity {told(found)}." in (tmp_path / "healed/README.md").read_text()
    assert json.loads((tmp_path / "healed/report.json").read_bytes())["loss"]["first"] == found["first"]


def compress_pico_forced(dense: Path, output: Path) -> Path:
    """By the library, whatever it loses."""
    from blr.compressor.commands.compress import Settings, compress

    settings = Settings("dense", force=True, device="cpu")
    compress(dense, make_recipe(method="svd", cf=1.5), output, settings, Progress(quiet=True))
    return output


def test_healing_after_a_compression_is_judged_once(
    dense: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from blr.compressor.commands.compress import Settings, compress

    held: list[LossFacts] = []
    monkeypatch.setattr(Bar, "hold", lambda self, loss: held.append(loss))
    settings = Settings("dense", heal=0.002, calibration=str(text), device="cpu")
    recipe = make_recipe(method="svd", cf=1.5, samples=8)
    found = compress(dense, recipe, tmp_path / "out", settings, Progress(quiet=True))
    assert found is not None and found.check is not None and len(held) == 1
    assert found.check["perplexity"]["after"] == pytest.approx(
        judged(tmp_path / "out", text, found.check), rel=0.01
    )
    assert read_manifest(tmp_path / "out")["files"]["README.md"]


def lost(nats: float) -> LossFacts:
    perplexity = {"before": 20.0, "after": 20.0 * math.exp(nats)}
    found: Any = {"read": "text", "loss": nats, "agreement": 0.8, "perplexity": perplexity}
    return {**found, "kl": {"mean": 0.4}, "tokens": 1024, "window": 64, "first": None}


def test_from_a_quarter_of_a_nat_on_a_warning_names_what_loses_less(tmp_path: Path) -> None:
    said: list[str] = []
    bar = Bar(tmp_path / "out", "take --quantize int8", False, said.append)
    bar.hold(lost(0.38))
    bar.hold(lost(0.2))
    assert said == ["0.38 nats a token lost (perplexity 20.00 -> 29.25 on text); take --quantize int8"]


def test_next_to_no_loss_has_no_minus() -> None:
    facts = lost(-5e-8)
    assert ": 0.000 nats a token lost" in told(facts)
    assert dict(check_lines({**facts, "ran": "x", "distance": 0.0}))["loss"].startswith("0.000 nats")


@pytest.mark.parametrize(
    ("settings", "calibrated", "healed", "advised"),
    [
        ({"method": "svd", "cf": 2.0}, False, False, "--text TEXT"),
        ({"method": "svd", "cf": 2.0}, True, False, "--heal"),
        ({"method": "svd", "cf": 2.0}, True, True, "smaller --cf than 2"),
        ({"quantize": "int3"}, False, False, "--text TEXT"),
        ({"quantize": "int3"}, True, False, "--base int3 --method svd --rank 16"),
        ({"method": "svd", "base": "int2", "rank": 16}, True, True, "larger --rank"),
        ({"method": "svd", "rank": 16}, True, True, "larger --rank than 16"),
    ],
)
def test_what_is_advised_goes_with_what_the_run_was(
    settings: dict[str, Any], calibrated: bool, healed: bool, advised: str
) -> None:
    assert advised in better_fit(make_recipe(**settings), calibrated, healed)


@pytest.mark.parametrize(
    ("knows", "healed", "advised"),
    [
        (False, False, "compress the model with --text TEXT first, or take --quantize int8, or heal"),
        (True, False, "take --quantize int8, or heal the checkpoint first"),
        (True, True, "take --quantize int8, or heal the checkpoint longer"),
    ],
)
def test_what_is_advised_for_an_export(knows: bool, healed: bool, advised: str) -> None:
    assert better_export("int4", None, knows, healed).startswith(advised)


def test_held_back_windows_are_none_that_a_fit_reads(dense: Path, text: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(dense)
    every = tokenizer(text.read_text(), verbose=False)["input_ids"]
    for samples, fitted in ((16, 16), (1000, 178)):  # of 187 windows: the last twentieth is held back
        found = read_calibration(str(text), tokenizer, samples=samples, seq_len=32, packed=True)
        read = torch.cat(found.ids).flatten().tolist()
        assert len(read) == 32 * fitted and found.held is not None
        assert read == every[: len(read)]
        assert found.held.tolist() == every[len(read) :][:4096]
    short = write_text(tmp_path / "short.txt", 80)
    found = read_calibration(str(short), tokenizer, samples=9, seq_len=32, packed=True)
    assert found.tokens == 64 and found.held is not None and len(found.held) == 16
