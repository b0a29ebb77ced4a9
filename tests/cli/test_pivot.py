"""`--pivot` end to end: low rank in fewer numbers, from the plan to what reads an export."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from exporting import compress_to, export_to
from pico import VOCAB, inputs_for, save_pico
from running import Invoke
from safetensors.torch import load_file, save_file
from spoiling import words_tokenizer
from tolerances import TOLERANCES
from transformers import AutoModelForCausalLM

from blr.compressor import register
from blr.compressor.base.errors import CapabilityError
from blr.compressor.base.progress import Progress
from blr.compressor.commands.compress import Settings, compress
from blr.compressor.integrations.vllm_parts import Share, make_part
from blr.compressor.modeling.layers import make_layer
from blr.compressor.recipe.schema import make_recipe
from blr.compressor.runtime.decoder import Decoder
from blr.compressor.structures.restore import restored
from blr.compressor.structures.specs import LowRankSpec, PivotedSpec, spec_from_dict
from blr.kernels.common.available import has_triton

register()

WEIGHTS = "model.safetensors"
GREEDY = {"do_sample": False, "eos_token_id": None, "max_new_tokens": 12}


def rows(text: str) -> dict[str, dict[str, object]]:
    return {row["module"]: row for row in json.loads(text)["layers"]}


def tokens(folder: Path) -> list[int]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.generate(torch.arange(2, 12)[None], **GREEDY)[0].tolist()


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_pico("qwen2", tmp_path_factory.mktemp("pico") / "dense")  # q, k and v have biases
    words_tokenizer().save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def pivoted(dense: Path) -> Path:
    return compress_to(dense, dense.parent / "pivoted", pivot=True, cf=1.3)


def test_the_same_budget_buys_more_rank(tiny: Path, invoke: Invoke) -> None:
    plain, pivot = (
        json.loads(invoke("plan", tiny, "--cf", "2", *more, "--all", "--format", "json")[1])
        for more in ((), ("--pivot",))
    )
    for before, after in zip(plain["layers"], pivot["layers"], strict=True):
        assert int(after["rank"].removeprefix("r=")) > 1.05 * int(before["rank"].removeprefix("r="))
    assert pivot["cf"] == pytest.approx(2, rel=0.01)
    index = 32 * sum(layer["shape"][0] for layer in pivot["layers"])
    totals = pivot["totals"]
    assert 8 * totals["bytes"] == 16 * totals["parameters"] + index


def test_the_function_is_that_of_svd_at_the_same_rank(dense: Path, tmp_path: Path) -> None:
    known = {"rank": 9, "dtype": "float32"}
    found = [compress_to(dense, tmp_path / n, pivot=n == "p", **known) for n in ("p", "s")]
    stored = [load_file(folder / WEIGHTS) for folder in found]
    for module, fields in json.loads((found[0] / "config.json").read_text())["blr"]["layers"].items():
        spec = spec_from_dict(fields)
        assert isinstance(spec, PivotedSpec)
        pair = zip((spec, spec.low_rank()), stored, strict=True)
        weights = [
            restored(s, {n: t[f"{module}.{n}"] for n in s.stored()}, torch.float64) for s, t in pair
        ]
        missed = (weights[0] - weights[1]).norm() / weights[1].norm()
        assert float(missed) < TOLERANCES[torch.float32]


def test_both_ways_out_compute_the_same(pivoted: Path, tmp_path: Path, invoke: Invoke) -> None:
    """The runtime keeps the pivots; a dense checkpoint holds what they multiply out to."""
    exported = export_to(pivoted, tmp_path / "fast", batch=4, context=32)
    plain = export_to(pivoted, tmp_path / "plain", kind="dense")
    assert tokens(exported) == tokens(pivoted) == tokens(plain)
    for folder in (pivoted, exported):
        assert invoke("verify", folder)[0] == 0
    kept, before = (rows(invoke("inspect", f, "--format=json")[1]) for f in (exported, pivoted))
    assert kept == before and all(row["structure"] == "pivoted" for row in kept.values())
    size = sum(path.stat().st_size for path in exported.glob("*.safetensors"))
    assert size < 1.02 * sum(path.stat().st_size for path in pivoted.glob("*.safetensors"))


@pytest.fixture(scope="module")
def mixed(dense: Path) -> Path:
    """Pivoted layers beside dense and low-rank ones."""
    rules = [{"match": "*k_proj", "method": "dense"}, {"match": "*.1.*up_proj", "pivot": False}]
    return compress_to(dense, dense.parent / "mixed", pivot=True, cf=1.2, rules=rules)


def test_the_runtime_decodes_by_stages_with_any_neighbours(
    dense: Path, mixed: Path, tmp_path: Path
) -> None:
    """Packed or not, alone and in batches."""
    packed = {"quantize": "int8", "group": 32}
    ids = torch.randint(2, VOCAB, (4, 9), generator=torch.Generator().manual_seed(0))
    for folder in (mixed, compress_to(dense, tmp_path / "packed", pivot=True, cf=1.1, **packed)):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        decoder = Decoder(model, context=32, batch=4, ops="torch")
        names = {phase.name for phase in decoder.plan.phases if phase.kind == "gather"}
        assert {"layer.0.o.P", "layer.0.gate_up.P", "layer.1.down.P"} <= names
        for given in (ids[:1], ids):
            expected = model.generate(given, attention_mask=torch.ones_like(given), **GREEDY)[:, 9:]
            assert decoder.generate(given, max_new_tokens=12) == expected.tolist()


@pytest.mark.skipif(not has_triton(), reason="needs triton")
@torch.no_grad()
def test_its_kernels_give_the_logits_of_the_model(mixed: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(mixed, dtype=torch.float32).eval()
    decoder = Decoder(model, context=16, batch=2, ops="triton")
    ids = torch.randint(2, VOCAB, (2, 5), generator=torch.Generator().manual_seed(0))
    decoder.prefill(ids[:, :-1])
    expected = model(ids).logits[:, -1]
    torch.testing.assert_close(decoder.step(ids[:, -1]), expected, atol=1e-4, rtol=1e-4)


def test_a_saved_model_is_one_again(pivoted: Path, tmp_path: Path, invoke: Invoke) -> None:
    model = AutoModelForCausalLM.from_pretrained(pivoted)
    model.to(torch.bfloat16).save_pretrained(tmp_path / "saved")
    stored = load_file(tmp_path / "saved" / WEIGHTS)
    assert {t.dtype for n, t in stored.items() if n.endswith("places")} == {torch.int32}
    assert invoke("verify", tmp_path / "saved")[0] == 0
    assert set(rows(invoke("inspect", tmp_path / "saved", "--format=json")[1])) == set(
        rows(invoke("inspect", pivoted, "--format=json")[1])
    )


def test_gradients_and_casts_leave_the_order_alone(pivoted: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(pivoted).to(torch.float64)
    model(**inputs_for(model)).logits.square().sum().backward()
    for module in model.modules():
        if isinstance(spec := getattr(module, "spec", None), PivotedSpec):
            assert module.places.dtype == torch.int32
            assert all(float(module.get_parameter(n).grad.norm()) > 0 for n in spec.shapes())


def test_a_calibrated_fit_is_that_of_svd_with_pivots(dense: Path, sample: Path, tmp_path: Path) -> None:
    """One layer, so that nothing that was rounded is before it; in few bits then refitted."""
    known = {"include": ["*.0.mlp.up_proj"], "dtype": "float32", "rank": 12, "samples": 4, "seq_len": 32}
    given = Settings("pico", calibration=str(sample), device="cpu", check=False)
    found = {}
    for name, settings in {
        "svd": {},
        "pivot": {"pivot": True},
        "packed": {"pivot": True, "refit": 4, "quantize": "int2", "group": 32},
    }.items():
        recipe = make_recipe(**known, **settings)
        compress(dense, recipe, tmp_path / name, given, Progress(quiet=True))
        layers = json.loads((tmp_path / name / "blr_layers.json").read_text())
        found[name] = next(iter(layers.values()))
    assert found["pivot"]["weighted_error"] == pytest.approx(found["svd"]["weighted_error"], rel=1e-4)
    before, after = found["packed"]["refit"]
    assert after < before


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--method", "blast", "--pivot"), "pivot belongs to method svd, not blast"),
        (("--method", "auto", "--pivot"), "pivot belongs to method svd, not blast"),
        (("--pivot", "--heads", "per-head"), "pivot takes whole layers, not heads per-head"),
        (("--pivot", "--base", "int2", "--rank", "4"), "pivot corrects no int2"),
        (("--pivot", "--tokens-per-second", "100"), "leave out pivot"),
    ],
    ids=lambda value: value[0] if isinstance(value, str) else "-".join(value),
)
def test_what_it_does_not_go_with_is_said(
    dense: Path, tmp_path: Path, invoke: Invoke, options: tuple[str, ...], said: str
) -> None:
    code, out, err = invoke("compress", dense, "-o", tmp_path / "out", *options)
    assert (code, out) == (2, "") and said in err and err.count("\n") == 1


@pytest.mark.parametrize("spoilt", ["beyond", "twice", "negative"])
def test_places_that_are_no_order_are_refused(
    pivoted: Path, tmp_path: Path, invoke: Invoke, spoilt: str
) -> None:
    """Before anything is looked up by them: a GPU would stop at one that is out of range."""
    folder = Path(shutil.copytree(pivoted, tmp_path / "copy"))
    (folder / "blr_manifest.json").unlink()
    stored = load_file(folder / WEIGHTS)
    places = next(t for n, t in stored.items() if n.endswith("places"))
    places[0] = {"beyond": len(places), "twice": int(places[1]), "negative": -1}[spoilt]
    save_file(stored, folder / WEIGHTS, {"format": "pt"})
    for command in (("export", folder, "-o", tmp_path / "out"), ("generate", folder, "a")):
        code, out, err = invoke(*command)
        assert (code, out) == (4, "") and "places is no order of" in err and err.count("\n") == 1


def test_a_server_holds_them_in_one_process() -> None:
    layer = make_layer(PivotedSpec(10, 16, 4).to_dict(), False)
    layer.places.copy_(torch.randperm(16))
    part = make_part("up", layer.spec, (16, 10), Share(), torch.float32)
    for name, tensor in layer.state_dict().items():
        part.load(name, tensor)
    x = torch.randn(3, 10)
    assert part(x, lambda y: y).equal(layer(x))
    with pytest.raises(CapabilityError, match="over 2 processes"):
        make_part("up", layer.spec, (16, 10), Share("out", 0, 2), torch.float32)


def test_keys_and_values_in_ranks_stay_low_rank(dense: Path, tmp_path: Path, invoke: Invoke) -> None:
    folder = compress_to(dense, tmp_path / "out", pivot=True, kv_rank=4, cf=1.2)
    found = rows(invoke("inspect", folder, "--format=json")[1])
    kinds = {module.rpartition(".")[2]: row["structure"] for module, row in found.items()}
    assert kinds["k_proj"] == kinds["v_proj"] == LowRankSpec.structure
    assert kinds["q_proj"] == PivotedSpec.structure
