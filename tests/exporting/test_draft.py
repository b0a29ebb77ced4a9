"""`blr export --draft`: two models in one folder, which say what the first one says alone."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from exporting import export_to
from pico import save_pico
from running import Invoke
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from blr.compressor import register
from blr.compressor.base.errors import BlrError
from blr.compressor.modeling import generation as fused
from blr.compressor.modeling import settings
from blr.compressor.runtime import drafted
from blr.compressor.runtime.drafted import ENDS, load_draft

register()

GREEDY = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": 3}


@pytest.fixture(autouse=True)
def runtime_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The runtime in plain torch; every test sees the warnings that a process gives once."""

    class OnCpu(drafted.DraftedDecoder):
        def __init__(self, *models: Any, **options: Any) -> None:
            super().__init__(*models, ops="torch", choices=drafted.DRAFTS, **options)

    monkeypatch.setattr(fused, "obstacle", lambda device: None)
    monkeypatch.setattr(drafted, "DraftedDecoder", OnCpu)
    monkeypatch.setattr(settings, "_said", set())


@pytest.fixture(scope="module")
def pair(sources: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pairs") / "pair"
    return export_to(sources["dense"], folder, draft=str(sources["svd"]), batch=2, context=128)


def load(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.mark.parametrize("name", ["dense", "svd", "blast", "export"])
def test_tokens_are_those_of_the_model_alone(
    name: str, sources: dict[str, Path], exports: dict[str, Path], tmp_path: Path
) -> None:
    draft = exports["svd"] if name == "export" else sources[name]
    folder = export_to(sources["dense"], tmp_path / "a", draft=str(draft), batch=2, context=128)
    model = load(folder.rename(tmp_path / "moved"))
    ids = torch.tensor([list(range(100, 120)), [0] * 8 + list(range(40, 52))])
    mask = (ids > 0).long()
    alone = load(sources["dense"]).generate(ids, attention_mask=mask, **GREEDY)
    assert torch.equal(model.generate(ids, attention_mask=mask, **GREEDY), alone)
    accepted = model._blr_decoder.made.acceptance
    assert accepted.rounds > 0 and (name != "dense" or accepted.total == accepted.drafts)


def test_embedding_and_head_are_stored_once(pair: Path, invoke: Invoke) -> None:
    with safe_open(pair / "draft" / "model.safetensors", "pt") as stored:
        assert not set(ENDS) & set(stored.keys())
    model = load(pair)
    draft = load_draft(model, model.config.blr["export"]["draft"])
    assert draft is not None
    assert draft.get_input_embeddings().weight is model.get_input_embeddings().weight
    assert draft.get_output_embeddings().weight is model.get_output_embeddings().weight
    assert not any("draft" in name for name in model.state_dict())
    assert invoke("verify", pair)[0] == 0


def test_a_changed_draft_is_noticed(pair: Path, tmp_path: Path, invoke: Invoke) -> None:
    folder = shutil.copytree(pair, tmp_path / "copy")
    path = folder / "draft" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\x7f")
    code, _, said = invoke("verify", folder)
    assert code != 0 and "draft/model.safetensors" in said


def test_a_folder_that_lost_its_draft_decodes_without(
    pair: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    class OnCpu(drafted.Decoder):
        def __init__(self, *models: Any, **options: Any) -> None:
            super().__init__(*models, **{"ops": "torch", **options})

    monkeypatch.setattr(drafted, "Decoder", OnCpu)
    folder = shutil.copytree(pair, tmp_path / "copy", ignore=shutil.ignore_patterns("draft"))
    ids = torch.tensor([list(range(100, 120))])
    assert torch.equal(load(folder).generate(ids, **GREEDY), load(pair).generate(ids, **GREEDY))
    assert "no draft in" in caplog.text


def test_a_folder_that_carries_its_code_has_the_rounds_and_kernels(
    sources: dict[str, Path], tmp_path: Path
) -> None:
    given = {"draft": str(sources["blast"]), "self_contained": True}
    folder = export_to(sources["dense"], tmp_path / "out", **given)
    assert "class DraftedDecoder" in (folder / "runtime_blr.py").read_text("utf-8")
    kernels = (folder / "kernels_blr.py").read_text("utf-8")
    assert "blr.kernels.decode.skinny.launch" in kernels


def test_the_card_tells_how_other_engines_take_the_two(pair: Path, sources: dict[str, Path]) -> None:
    card = (pair / "README.md").read_text("utf-8")
    line = next(line for line in card.splitlines() if line.startswith("vllm serve"))
    given = json.loads(shlex.split(line)[-1])
    assert given["method"] == "draft_model" and given["model"] == sources["svd"].name
    call = next(line for line in card.splitlines() if "assistant_model=" in line)
    ids = torch.tensor([list(range(100, 120))])
    model, assistant = load(sources["dense"]), load(sources["svd"])
    code = call.replace("AutoModelForCausalLM.from_pretrained('svd')", "assistant")
    known = {"model": model, "assistant": assistant, "inputs": {"input_ids": ids, **GREEDY}}
    assert torch.equal(eval(code, known), model.generate(ids, **GREEDY))


def test_what_is_no_draft_is_refused(sources: dict[str, Path], tmp_path: Path) -> None:
    short = shutil.copytree(sources["dense"], tmp_path / "short")
    config = json.loads((short / "config.json").read_bytes())
    config["max_position_embeddings"] = 64
    (short / "config.json").write_text(json.dumps(config), "utf-8")
    other = shutil.copytree(sources["dense"], tmp_path / "other")
    (other / "tokenizer.json").unlink()
    swapped = shutil.copytree(sources["dense"], tmp_path / "swapped")  # two rare tokens
    table = json.loads((swapped / "tokenizer.json").read_bytes())
    known = table["model"]["vocab"]
    one, two = [token for token in known if len(token) == 3][:2]
    known[one], known[two] = known[two], known[one]
    (swapped / "tokenizer.json").write_text(json.dumps(table), "utf-8")
    cases = {
        "a vocabulary of": {"draft": save_pico("llama", tmp_path / "pico")},
        "is a gpt2": {"draft": save_pico("gpt2", tmp_path / "gpt2")},
        "another tokenizer": {"draft": other},
        "another tokenizer than the model's": {"draft": swapped},
        "give --context 64": {"draft": short},
        "up to 8 sequences": {"draft": sources["svd"], "batch": 9},
        "--as dense has no use": {"draft": sources["svd"], "kind": "dense"},
    }
    for said, given in cases.items():
        with pytest.raises(BlrError, match=said) as found:
            export_to(sources["dense"], tmp_path / "x", **{**given, "draft": str(given["draft"])})
        assert "\n" not in str(found.value) and not (tmp_path / "x").exists()


def test_text_so_far_as_the_draft(sources: dict[str, Path], tmp_path: Path) -> None:
    """No second model; a copied export says the same, and its card what other engines take."""
    folder = export_to(sources["dense"], tmp_path / "a", draft="ngram", batch=2, context=128)
    assert not (folder / "draft").exists()
    model, ids = load(folder), torch.tensor([[*range(100, 120)] * 2, [*range(40, 80)]])
    alone = load(sources["dense"]).generate(ids, **GREEDY)
    assert torch.equal(model.generate(ids, **GREEDY), alone)
    assert model._blr_decoder.made.acceptance.rounds > 0
    card = (folder / "README.md").read_text("utf-8")
    line = next(line for line in card.splitlines() if line.startswith("vllm serve"))
    assert json.loads(shlex.split(line)[-1])["method"] == "ngram"
    call = next(line for line in card.splitlines() if "prompt_lookup_num_tokens=" in line)
    given = {"input_ids": ids[:1], **GREEDY}
    again = eval(call, {"model": load(sources["dense"]), "inputs": given})
    assert torch.equal(again, load(sources["dense"]).generate(ids[:1], **GREEDY))
