"""`blr eval --against`: an output and its dense model on the same tokens."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from heal_models import compress_pico, save_characters, save_dense, write_text
from pico import save_pico
from running import Invoke
from safetensors.torch import load_file, save_file
from torch import Tensor

from blr.compressor.commands import api, evaluate, text_scores
from blr.compressor.commands.text_scores import kept_at
from blr.compressor.healing import objective
from blr.compressor.loading.load import load_model, load_tokenizer
from blr.compressor.text.reading import beginning_of

pytestmark = pytest.mark.fast
QUICK = ("--device", "cpu", "-q", "--format", "json")
WINDOW, STRIDE, TOKENS, SKIPPED = 24, 9, 130, 7


def judge(invoke: Invoke, folder: Path, dense: Path, *options: object) -> dict[str, Any]:
    code, out, err = invoke("eval", folder, "--against", dense, *options, *QUICK)
    assert code == 0, err
    found: dict[str, Any] = json.loads(out)
    return found


def log_probabilities(folder: Path, contexts: list[Tensor]) -> Tensor:
    """Of what follows each, in float64 from logits in float32."""
    model = load_model(folder, "AutoModelForCausalLM", dtype="float32", device="cpu")
    with torch.no_grad():
        return torch.stack([model(one[None]).logits[0, -1] for one in contexts]).double().log_softmax(-1)


@pytest.mark.parametrize("around", ["$A", "{|$A"])
def test_figures_are_those_of_the_definitions(around: str, tmp_path: Path, invoke: Invoke) -> None:
    """Each token in the window that scores it, in float64, one by one."""
    dense = save_dense(tmp_path / "dense", around=around)
    small = compress_pico(dense, tmp_path / "small", method="svd", rounds=None)
    text = write_text(tmp_path / "text.txt", 400)
    how = ("--window", WINDOW, "--stride", STRIDE, "--max-tokens", TOKENS, "--skip-tokens", SKIPPED)
    found = judge(invoke, small, dense, "--text", text, *how)
    tokenizer = load_tokenizer(dense)
    ids, begins = evaluate.read_tokens(text, tokenizer, TOKENS, SKIPPED), beginning_of(tokenizer)
    room, places = WINDOW - len(begins), list(range(not begins, TOKENS))
    starts = [max(0, math.ceil((n + 1 - room) / STRIDE) * STRIDE) for n in places]
    contexts = [
        torch.cat([ids.new_tensor(begins), ids[start:place]])
        for start, place in zip(starts, places, strict=True)
    ]
    p, q = (log_probabilities(folder, contexts) for folder in (dense, small))
    kl, right = (p.exp() * (p - q)).sum(-1), ids[places, None]
    far, losses = found["against"], [-x.gather(1, right)[:, 0] for x in (p, q)]
    assert far["kl"]["tokens"] == found["tokens"] == len(kl)
    for name, loss in (("dense", losses[0]), ("output", losses[1]), ("ratio", losses[1] - losses[0])):
        value, error = math.exp(loss.mean()), float(loss.std()) / math.sqrt(len(loss))
        assert far["perplexities"][name]["value"] == pytest.approx(value, rel=1e-5)
        assert far["perplexities"][name]["error"] == pytest.approx(value * error, rel=1e-4)
    assert found["perplexity"] == pytest.approx(far["perplexities"]["output"]["value"])
    assert far["kl"]["mean"] == pytest.approx(float(kl.mean()), rel=1e-4)
    assert far["kl"]["error"] == pytest.approx(float(kl.std()) / math.sqrt(len(kl)), rel=1e-4)
    for name, value in far["kl"]["percentiles"].items():
        assert value == pytest.approx(float(kl.quantile(float(name) / 100)), rel=1e-3)
    was, best = p.argmax(-1), q.argmax(-1)
    had, hit, same = was == right[:, 0], best == right[:, 0], was == best
    assert far["agreement"] == pytest.approx(float(same.double().mean()))
    assert far["flips"]["lost"] == int((had & ~hit).sum())
    assert far["flips"]["gained"] == int((hit & ~had).sum())
    assert sum(far["flips"].values()) == int((~same).sum())
    change = losses[1].neg().exp() - losses[0].neg().exp()
    assert far["rms_dp"] == pytest.approx(float(change.square().mean().sqrt()), rel=1e-4)
    worst = SKIPPED + places[int(kl.argmax())]
    assert far["tokens"][0]["token"] == worst
    assert far["tokens"][0]["text"] == text.read_text()[worst]
    assert far["kl"]["worst"][0]["kl"] >= far["kl"]["mean"]


@pytest.mark.parametrize("name", ["llama-tied", "gemma2"])
def test_a_folder_is_itself_and_what_is_kept_changes_nothing(
    name: str, tmp_path: Path, invoke: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where logits are capped, so that states alone do not make them. What was kept is read: the
    dense model is not loaded again."""
    dense = save_dense(tmp_path / "dense", name)
    text = write_text(tmp_path / "text.txt", 300)
    given = ("--text", text, "--window", 32, "--batch", 3)
    found = judge(invoke, dense, dense, *given)["against"]
    assert found["kl"]["mean"] == found["kl"]["percentiles"]["100"] == found["rms_dp"] == 0
    assert found["agreement"] == 1 and found["flips"]["lost"] == 0
    assert found["perplexities"]["ratio"] == {"value": 1, "error": 0}
    small = compress_pico(dense, tmp_path / "small", method="svd", rounds=None)
    alone = judge(invoke, small, dense, *given)
    assert judge(invoke, small, dense, *given, "--keep-dense", tmp_path / "kept") == alone
    monkeypatch.setattr(objective.Replies, "run", _only(small))
    assert judge(invoke, small, dense, *given, "--keep-dense", tmp_path / "kept") == alone
    (kept,) = (tmp_path / "kept").iterdir()
    monkeypatch.undo()
    kept.write_bytes(b"of another")  # is made anew
    assert judge(invoke, small, dense, *given, "--keep-dense", tmp_path / "kept") == alone
    assert set(load_file(kept)) >= {"hidden"}
    monkeypatch.setattr(text_scores, "MOST_KEPT", 0)
    kept.unlink()
    assert judge(invoke, small, dense, *given, "--keep-dense", tmp_path / "kept") == alone
    assert not kept.exists()


def test_other_weights_of_the_same_times_are_told_apart(tmp_path: Path) -> None:
    """A copy keeps the time at which weights were written; the system's own time of a change differs."""
    dense = save_dense(tmp_path / "dense")
    weights, before = dense / "model.safetensors", kept_at(tmp_path, dense, 1)
    assert kept_at(tmp_path, dense, 1) == before != kept_at(tmp_path, dense, 2)
    times = weights.stat().st_atime_ns, weights.stat().st_mtime_ns
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    os.utime(weights, ns=times)
    assert kept_at(tmp_path, dense, 1) != before


@pytest.mark.parametrize("place", ["small", "dense", "small/inside", "text.txt"])
def test_states_are_kept_in_no_model(place: str, tmp_path: Path, invoke: Invoke) -> None:
    """An output would no longer verify, and a file is no folder."""
    dense, text = save_dense(tmp_path / "dense"), write_text(tmp_path / "text.txt", 300)
    small = compress_pico(dense, tmp_path / "small", method="svd", rounds=None)
    given = ("--against", dense, "--text", text, "--keep-dense", tmp_path / place)
    code, _, err = invoke("eval", small, *given)
    assert code == 5 and "choose another --keep-dense" in err and err.count("\n") == 1
    assert invoke("verify", small)[0] == 0


def test_the_interface_takes_paths_as_text(tmp_path: Path) -> None:
    dense, text = save_dense(tmp_path / "dense", "llama"), write_text(tmp_path / "text.txt", 300)
    given: dict[str, Any] = {"against": str(dense), "keep_dense": str(tmp_path / "kept")}
    found = api.evaluate(str(dense), str(text), window=32, device="cpu", **given)
    assert found["against"]["agreement"] == 1  # type: ignore[index]
    assert len([*(tmp_path / "kept").iterdir()]) == 1


def _only(folder: Path) -> Any:
    """States of the model in one folder alone."""
    native = objective.Replies.run

    def run(self: Any, ids: Tensor) -> Any:
        assert self.model.name_or_path == str(folder)
        return native(self, ids)

    return run


def test_a_copy_in_bfloat16_is_as_far_as_its_rounding(
    tmp_path: Path, invoke: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some 1e-5 nats, to 1%; logits made a few at a time, or all at once."""
    dense = save_dense(tmp_path / "dense")
    rounded = save_dense(tmp_path / "rounded")
    stored = load_file(dense / "model.safetensors")
    copied = {name: tensor.bfloat16().float() for name, tensor in stored.items()}
    save_file(copied, rounded / "model.safetensors", {"format": "pt"})
    text = write_text(tmp_path / "text.txt", 1200)
    ids = evaluate.read_tokens(text, load_tokenizer(dense))
    models = [
        load_model(f, "AutoModelForCausalLM", dtype="float32", device="cpu") for f in (dense, rounded)
    ]
    windows = ids[: len(ids) // 64 * 64].view(-1, 64)
    with torch.no_grad():
        p, q = (model(windows).logits[:, :-1].double().log_softmax(-1) for model in models)
    expected = float((p.exp() * (p - q)).sum(-1).mean())
    assert 0 < expected < 1e-3
    for chunk in (1 << 26, 5 * 128):
        monkeypatch.setattr(objective, "CHUNK", chunk)
        found = judge(invoke, rounded, dense, "--text", text, "--max-tokens", windows.numel())
        assert found["against"]["kl"]["mean"] == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize("what", ["a vocabulary of 120 tokens, expected 128", "other tokens"])
def test_a_model_that_reads_otherwise_is_refused(what: str, tmp_path: Path, invoke: Invoke) -> None:
    folders = save_dense(tmp_path / "a"), save_dense(tmp_path / "b")
    if what == "other tokens":
        save_characters(folders[1], order=range(127, -1, -1))
    else:
        path = folders[1] / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"vocab_size": 120}))
    text = write_text(tmp_path / "text.txt", 100)
    code, out, err = invoke("eval", folders[0], "--against", folders[1], "--text", text, *QUICK)
    assert code == 4 and what in err and "the model that it was made from" in err, err
    assert json.loads(out)["error"]


def test_encoders_are_compared_by_their_embeddings(tmp_path: Path, invoke: Invoke) -> None:
    dense = save_pico("distilbert", tmp_path / "dense")
    save_characters(dense, pad_token="\x00")
    code, _, err = invoke(
        "compress", dense, "--method", "svd", "--cf", 1.5, "-o", tmp_path / "small", "--device", "cpu"
    )
    assert code == 0, err
    rows = [f"{'abcdefgh'[n]}bc{n},d{'xyzuvwst'[n]}e,{n}" for n in range(8)]
    (tmp_path / "sts.csv").write_text("\n".join(rows))
    itself = judge(invoke, dense, dense, "--sts", tmp_path / "sts.csv")
    assert itself["against"]["cosine_to_dense"] == pytest.approx(1)
    assert itself["against"]["spearman_to_dense"] == pytest.approx(100)
    found = judge(invoke, tmp_path / "small", dense, "--sts", tmp_path / "sts.csv")
    assert found["against"]["dense_spearman"] == itself["spearman"]
    assert found["against"]["lowest_cosine"] <= found["against"]["cosine_to_dense"] < 1
    code, out, _ = invoke("eval", dense, "--against", dense, "--sts", tmp_path / "sts.csv", "-q")
    assert code == 0 and "cosine to dense: 1.0000\n" in out


def test_the_dense_model_s_states_belong_to_a_comparison_on_text(tmp_path: Path, invoke: Invoke) -> None:
    code, _, err = invoke("eval", tmp_path, "--text", tmp_path / "t", "--keep-dense", tmp_path / "k")
    assert code == 2 and "belongs to --against" in err
