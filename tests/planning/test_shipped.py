"""Recipes: found, resolved, refused with a line; the shipped ones plan their models as published."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from blr.compressor.base.errors import InputError, RecipeError, UsageError
from blr.compressor.base.globs import matches
from blr.compressor.planning.outline import open_or_outline, outline
from blr.compressor.planning.plan import Plan, make_plan
from blr.compressor.recipe.architectures import Family, families
from blr.compressor.recipe.chosen import describe_recipe, load_recipe, refuse_idle, shipped_recipes
from blr.compressor.recipe.schema import Recipe, make_recipe
from blr.compressor.structures.specs import MonarchSpec
from configs import CONFIGS, model_of, save_config

PARENT = """
method: blast
blocks: 8
rules:
  - {match: "*.q_proj", rank: 4, solver: precgd}
  - {match: "*.v_proj", method: dense}
"""
# "Memory-Efficient Acceleration of Block Low-Rank Foundation Models", table 3: layer type to
# (rank, blocks of Monarch, blocks of BLAST); the low rank has the same ranks.
LLAMA_7B = dict.fromkeys(("q_proj", "k_proj", "v_proj", "o_proj"), (1024, 16, 16))
LLAMA_7B |= dict.fromkeys(("gate_proj", "up_proj", "down_proj"), (1488, 16, 16))
LLAMA_1B = {"q_proj": (256, 16, 16), "o_proj": (256, 16, 16), "gate_proj": (512, 16, 16)}
LLAMA_1B |= {"up_proj": (768, 16, 16), "down_proj": (768, 16, 16)}
GPT2 = dict.fromkeys(("c_attn", "c_fc", "mlp.c_proj"), (192, 4, 6))
VIT = dict.fromkeys(("query", "key", "value", "intermediate", "output"), (128, 4, 3))
DIT = dict.fromkeys(("attn1.q", "attn1.k", "attn1.v"), (384, 0, 9))  # Monarch was not published
DIT |= dict.fromkeys(("fc1", "adaLN"), (256, 0, 9))
TABLE_3 = {"llama-7b": LLAMA_7B, "llama-3.2-1b": LLAMA_1B, "gpt2": GPT2, "vit-b": VIT, "dit-xl-2": DIT}
PUBLISHED = [
    (m, s) for m in TABLE_3 for s in ("svd", "monarch", "blast") if (m, s) != ("dit-xl-2", "monarch")
]


def written(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        (folder / f"{name}.yaml").write_text(text)
    return folder / f"{next(reversed(files))}.yaml"


def planned(model: str, recipe: Recipe, folder: Path) -> Plan:
    return make_plan(outline(save_config(model, folder)), recipe)


@pytest.mark.parametrize("name", shipped_recipes())
def test_every_shipped_recipe_plans_its_model(name: str, tmp_path: Path) -> None:
    recipe = load_recipe(name)
    assert load_recipe(name).model_dump() == recipe.model_dump()
    assert describe_recipe(shipped_recipes()[name])
    plan = planned(model_of(name), recipe, tmp_path)
    assert all(entry.rule for entry in (*plan.layers, *plan.kept))
    if "cf" in recipe.model_fields_set:
        assert plan.cf == pytest.approx(recipe.cf, rel=0.01)


@pytest.mark.parametrize(("model", "method"), PUBLISHED)
def test_ranks_and_blocks_are_the_papers(model: str, method: str, tmp_path: Path) -> None:
    plan = planned(model, load_recipe(f"{model}-{method}"), tmp_path)
    assert {p.layer.type for p in plan.layers} == TABLE_3[model].keys()
    for layer in plan.layers:
        rank, monarch, blast = TABLE_3[model][layer.layer.type]
        if isinstance(layer.spec, MonarchSpec) and rank == 1488:
            rank = 1536  # as printed for Monarch
        blocks = {"svd": None, "monarch": monarch, "blast": blast}[method]
        assert (getattr(layer.spec, "rank", None), getattr(layer.spec, "blocks", None)) == (rank, blocks)


def test_published_chains_and_per_head_ranks(tmp_path: Path) -> None:
    found = {p.layer.type: p.spec.describe() for p in _layers("vit-s-ks", tmp_path / "vit")}
    assert found["query"] == found["attention.output"] == "(1,192,48,2)(2,48,192,1)"
    assert found["intermediate"] == "(1,768,192,2)(6,64,64,1)"
    (down,) = {p.spec.describe() for p in _layers("gpt2-medium-ks", tmp_path / "gpt2")}
    assert down == "(1,64,256,16)(64,64,64,1)"
    bert = {p.layer.type: p.spec.describe() for p in _layers("bert-base-flashsvd", tmp_path / "bert")}
    assert bert["query"] == "12 out groups of r=32"


def _layers(name: str, folder: Path) -> list[Any]:
    return planned(model_of(name), load_recipe(name), folder).layers


@pytest.mark.parametrize("settings", [{"method": "auto"}, {"rules": [{"match": "*", "method": "auto"}]}])
def test_auto_is_blast_and_says_so(settings: dict[str, Any], tmp_path: Path) -> None:
    """In a recipe and in its rules; the GPU that it took is accepted."""
    source = outline(save_config("llama-3.1-8b", tmp_path))
    curves = {
        p.layer.module: [0.99**n * (1 + k % 3) for n in range(512)]
        for k, p in enumerate(make_plan(source, make_recipe()).layers)
    }
    auto, blast = (
        make_plan(source, make_recipe(cf=2.0, **given), curves, calibrated=True)
        for given in (settings, {"method": "blast"})
    )
    assert [layer.spec for layer in auto.layers] == [layer.spec for layer in blast.layers]
    assert auto.notes == ["method auto is blast, which it always chose", *blast.notes]
    assert make_recipe(**settings).own().method == ("blast" if "method" in settings else "svd")
    refuse_idle(make_recipe(gpu="h100", **settings), {"gpu": "h100"}, calibrated=False)
    with pytest.raises(UsageError, match="gpu h100: nothing would use it"):
        refuse_idle(make_recipe(gpu="h100"), {"gpu": "h100"}, calibrated=False)


def test_auto_in_a_file_is_blast(tmp_path: Path) -> None:
    recipe = load_recipe(
        written(tmp_path, parent="method: auto\n", child="extends: parent.yaml\ncf: 3\n")
    )
    assert (recipe.method, recipe.former_methods) == ("blast", ["auto"])


def test_child_rules_come_first_and_settings_replace(tmp_path: Path) -> None:
    child = 'extends: parent.yaml\ncf: 3\nrules:\n  - {match: "*.mlp.*", method: svd}\n'
    recipe = load_recipe(written(tmp_path, parent=PARENT, child=child))
    assert (recipe.method, recipe.blocks, recipe.cf, recipe.extends) == ("blast", 8, 3.0, None)
    assert [rule.match for rule in recipe.rules] == ["*.mlp.*", "*.q_proj", "*.v_proj"]
    mlp, q = recipe.settings_for("a.mlp.up"), recipe.settings_for("a.q_proj")
    assert (mlp.method, mlp.blocks, mlp.rule) == ("svd", None, "rule 1 '*.mlp.*'")
    assert (q.method, q.blocks, q.rank, q.solver) == ("blast", 8, 4, "precgd")
    assert recipe.settings_for("a.o_proj").rule == "recipe"


def test_one_size_replaces_another(tmp_path: Path) -> None:
    (tmp_path / "ranked.yaml").write_text("rank: 8\n")
    (tmp_path / "child.yaml").write_text("extends: ./ranked.yaml\ncf: 3\n")
    child = load_recipe(tmp_path / "child.yaml")
    assert (child.rank, child.cf) == (None, 3.0) and child.sized_by_cf
    again = load_recipe(tmp_path / "child.yaml", {"rank": 4})
    assert again.rank == 4 and "cf" not in again.model_fields_set


def test_options_replace_the_same_settings_of_rules(tmp_path: Path) -> None:
    path = written(tmp_path, parent=PARENT)
    recipe = load_recipe(path, {"method": "svd", "cf": 1.5})
    q = recipe.settings_for("a.q_proj")
    assert (q.method, q.rank, q.solver) == ("svd", None, None)
    assert load_recipe(path, {"blocks": 4}).settings_for("a.q_proj").rank == 4
    assert recipe.settings_for("a.v_proj").method == "dense"
    with pytest.raises(UsageError, match="solver"):
        load_recipe(path, {"solver": "hierarchical"})


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"a": "extends: a.yaml"}, "extends itself"),
        ({"a": "extends: b.yaml", "b": "extends: a.yaml"}, "b.yaml -> a.yaml -> b.yaml"),
        ({"a": "extends: lama-7b-svd"}, "a.yaml:1: key 'extends'.*did you mean 'llama-7b-svd'"),
        ({"a": "extends: /etc/hosts.yaml"}, "relative path"),
        ({"a": "extends: absent.yaml"}, "absent.yaml"),
        ({"a": "cf: 2\nmethd: svd"}, "a.yaml:2: key 'methd'.*did you mean 'method'"),
        ({"a": "cf: 2\nrules:\n- {match: x, rnk: 2}"}, "a.yaml:3: .*did you mean 'rank'"),
        ({"b": "rules:\n- {match: x, rnk: 2}", "a": "extends: b.yaml"}, "b.yaml:2"),
        ({"a": "rules:\n- {match: x, rank: 2, cf: 3}"}, "a.yaml:2.*cf or rank, not both"),
        ({"a": "rules:\n- {match: x, method: dense, rank: 2}"}, "nothing but match"),
        ({"a": "rules:\n- {match: x, method: svd, solver: precgd}"}, "not one of svd's"),
        ({"a": "method: dense"}, "method dense keeps every layer as it is; give quantize"),
        ({"a": "method: dens"}, "a.yaml:1: key 'method'"),
        ({"a": "method: dense\nquantize: int4\ncf: 2"}, "cf does not belong to method dense"),
        ({"a": "method: dense\nquantize: int4\nrank: 2"}, "rank does not belong to method dense"),
        ({"a": "quantize: int5"}, "a.yaml:1: key 'quantize'"),
        ({"a": "quantize: int4\ngroup: 48"}, "a.yaml:2: key 'group'"),
        ({"a": "base: int2"}, "base int2 needs the size of its correction: give rank or bpw"),
        ({"a": "base: int2\nrank: 8\ncf: 2"}, "cf does not belong to base int2"),
        ({"a": "base: int2\nrank: 8\nbpw: 2.5"}, "sized by rank or bpw, not both"),
        ({"a": "base: int2\nrank: 8\nrules:\n- {match: x, cf: 2}"}, "base int2 needs the size"),
        ({"a": "base: int2\nbpw: 2.5\nmethod: ks"}, "method ks corrects no base"),
        ({"a": "bpw: 2.5"}, "give base, as int2"),
        ({"a": "tokens_per_second: 9\nbase: int2"}, "chooses what is stored; leave out base"),
        ({"a": "heads: grouped"}, "a.yaml:1: key 'heads'"),
        ({"a": "cf: 1"}, "a.yaml:1: key 'cf'"),
        ({"b": "method: blast", "a": "extends: b.yaml\npattern: butterfly"}, "belongs to method ks"),
        ({"a": "method: ks\nrank: 4"}, "rank does not belong to method ks"),
    ],
)
def test_what_is_wrong_is_named(files: dict[str, str], message: str, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=message) as caught:
        load_recipe(written(tmp_path, **files))
    assert "\n" not in str(caught.value)


def test_unknown_names_suggest_shipped_ones() -> None:
    with pytest.raises(RecipeError, match="llama-7b-blast"):
        load_recipe("lama-7b-blast")
    with pytest.raises(RecipeError, match=r"no/such\.yaml"):
        load_recipe("no/such.yaml")


def test_a_resolved_recipe_is_plain_data_that_reads_back(tmp_path: Path) -> None:
    recipe = load_recipe("bert-base-flashsvd")
    assert Recipe.model_validate(recipe.model_dump()) == recipe
    assert make_recipe(**recipe.model_dump(exclude_none=True)) == recipe


@pytest.mark.parametrize("model", CONFIGS)
def test_outlines_have_the_sizes_of_their_models(model: str, tmp_path: Path) -> None:
    source, outlined = open_or_outline(save_config(model, tmp_path))
    assert outlined
    config = CONFIGS[model]
    seven = "num_key_value_heads" in config or "_class_name" in config
    per_block = 7 if seven else 4 if "n_embd" in config else 6
    layers = next(config[key] for key in ("num_hidden_layers", "n_layer", "num_layers") if key in config)
    assert len(source.entries) == per_block * layers


def test_outline_of_a_checkpoint_has_its_shapes(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((tiny / "config.json").read_bytes())
    real, _ = open_or_outline(tiny)
    for name, entry in outline(tmp_path).entries.items():
        assert (entry.shape, entry.dtype) == (real.entries[name].shape, real.entries[name].dtype)


@pytest.mark.parametrize("family", families(), ids=lambda family: family.name)
def test_a_table_that_counts_blocks_has_the_shape_of_every_layer(family: Family) -> None:
    """So that a config.json alone can be planned; without the count it is told to come with weights."""
    counted = [glob.removesuffix("#").removeprefix("*") for glob in family.shapes if glob[-1] == "#"]
    for glob in family.modules if counted else ():
        inner = glob.split(".*.", 1)[1]
        tensor = f"{family.prefix}{counted[0]}0.{inner}.weight"
        assert any(matches(tensor, shape) for shape in family.shapes if shape[-1] != "#"), tensor


def test_outline_needs_a_known_family_with_its_sizes(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "biogpt"}')
    with pytest.raises(InputError, match="has no table"):
        outline(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "t5", "num_layers": 2}')
    with pytest.raises(InputError, match="with its weights"):
        outline(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama", "num_hidden_layers": 2}')
    with pytest.raises(InputError, match="found no"):
        outline(tmp_path)


@pytest.mark.parametrize(("method", "rank"), [("ks", None), ("auto", 16), ("blast", 16)])
def test_a_rank_is_for_what_has_ranks(method: str, rank: int | None) -> None:
    recipe = make_recipe(method="svd", rank=16, rules=[{"match": "*o_proj", "method": method}])
    assert recipe.settings_for("a.o_proj").rank == rank
