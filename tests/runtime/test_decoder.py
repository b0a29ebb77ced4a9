"""The decoder gives the tokens that transformers gives: every structure, family, batch and border."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from pico import VOCAB, save_pico
from tolerances import TOLERANCES
from torch import Tensor, nn

from blr.compressor import register
from blr.compressor.base.progress import Progress
from blr.compressor.commands.compress import Settings, compress
from blr.compressor.modeling import shared_input
from blr.compressor.modeling.models import replace_layers
from blr.compressor.modeling.shared_input import share_siblings
from blr.compressor.recipe.architectures import find_family
from blr.compressor.recipe.schema import make_recipe
from blr.compressor.runtime.decoder import Decoder
from blr.compressor.runtime.failures import BatchError, ContextError, DecoderError, UnsupportedError
from blr.compressor.runtime.phases import FAMILIES as RUN
from blr.compressor.runtime.phases import TOGETHER, make_plan, supports
from blr.compressor.structures.specs import LowRankSpec
from blr.kernels.common.available import has_triton
from blr.kernels.decode.attention.rounded import pack, unpack

register()

METHODS = {"svd": {}, "monarch": {"blocks": 4}, "blast": {"blocks": 4, "rounds": 2}, "ks": {}}
MIXTURES = ("mixtral", "qwen2-moe", "qwen3-moe", "gpt-oss")
FAMILIES = ("llama", "llama-tied", "mistral", "qwen2", "qwen3", *MIXTURES)
needs_triton = pytest.mark.skipif(not has_triton(), reason="needs triton")


def load(folder: Path) -> Any:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.eval()


def native(model: Any, ids: Tensor, new: int, mask: Tensor | None = None) -> list[list[int]]:
    """Greedy tokens by transformers, never stopping."""
    mask = torch.ones_like(ids) if mask is None else mask
    arguments = {"max_new_tokens": new, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    return model.generate(ids, attention_mask=mask, **arguments)[:, ids.shape[1] :].tolist()


def decoder(model: Any, context: int, **options: Any) -> Decoder:
    return Decoder(model, context=context, **{"ops": "torch", **options})


def prompts(*lengths: int, vocabulary: int = VOCAB, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Random prompts padded on the left, and their mask."""
    generator = torch.Generator().manual_seed(seed)
    longest = max(lengths)
    ids = torch.randint(2, vocabulary, (len(lengths), longest), generator=generator)
    mask = torch.arange(longest) >= longest - torch.tensor(lengths)[:, None]
    return ids * mask, mask.long()


@pytest.fixture(scope="module")
def trained(tiny: Path) -> Any:
    return load(tiny)


@pytest.fixture(scope="module")
def text(tiny: Path, sample: Path) -> Tensor:
    """[1, n] tokens of real text."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny)
    ids = tokenizer(sample.read_text("utf-8"), return_tensors="pt")["input_ids"]
    return ids.repeat(1, -(-1000 // ids.shape[1]))


@pytest.fixture(params=FAMILIES)
def pico(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    return load(save_pico(request.param, tmp_path))


def test_256_tokens_of_a_trained_dense_model(trained: Any, text: Tensor) -> None:
    found = decoder(trained, 512).generate(text[:, :40], max_new_tokens=256)
    assert len(set(found[0])) > 20, "a constant continuation would prove little"
    assert found == native(trained, text[:, :40], 256)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("method", METHODS)
def test_tokens_of_a_trained_compressed_model(
    method: str, tiny: Path, tmp_path: Path, text: Tensor
) -> None:
    recipe = make_recipe(method=method, cf=1.1, **METHODS[method])
    compress(tiny, recipe, tmp_path / "out", Settings("tiny", check=False), Progress(quiet=True))
    model = load(tmp_path / "out")
    found = decoder(model, 512).generate(text[:, :40], max_new_tokens=48)
    assert found == native(model, text[:, :40], 48)


@pytest.mark.parametrize("lengths", [(20,), (9, 20), (1, 20, 8, 13, 2, 3, 19, 20)], ids=len)
def test_families_and_batches_of_different_lengths(pico: Any, lengths: tuple[int, ...]) -> None:
    ids, mask = prompts(*lengths)
    found = decoder(pico, 64, batch=8).generate(ids, mask, max_new_tokens=40)
    assert found == native(pico, ids, 40, mask)


def test_padding_on_the_right_is_moved_to_the_left(trained: Any) -> None:
    ids, mask = prompts(5, 9, 3, vocabulary=4000)
    shifts = [int(-n) for n in 9 - mask.sum(1)]
    right = [torch.stack([row.roll(s) for row, s in zip(t, shifts, strict=True)]) for t in (ids, mask)]
    assert int(right[1][0, 0]) == 1 and int(right[1][0, -1]) == 0
    small = decoder(trained, 64, batch=3)
    expected = small.generate(ids, mask, max_new_tokens=6)
    assert small.generate(*right, max_new_tokens=6) == expected == native(trained, ids, 6, mask)


@pytest.mark.parametrize("length", [1, 63, 64, 127, 128, 129, 511, 512, 513])
def test_prompts_around_the_borders_of_chunks_and_splits(
    length: int, trained: Any, text: Tensor
) -> None:
    part = text[:, :length]
    found = decoder(trained, 600).generate(part, max_new_tokens=4)
    assert found == native(trained, part, 4)


def test_chunks_of_a_padded_prompt(trained: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first chunks of the short row are nothing but padding."""
    monkeypatch.setattr("blr.compressor.runtime.prompt.CHUNK", 16)
    ids, mask = prompts(50, 7, vocabulary=4000)
    found = decoder(trained, 80, batch=2).generate(ids, mask, max_new_tokens=12)
    assert found == native(trained, ids, 12, mask)


def mixture(model: Any) -> None:
    """Make every layer of a pico Llama another structure, so that q|k|v and gate|up disagree."""
    torch.manual_seed(0)
    shapes = {n: m.weight.shape for n, m in model.named_modules() if isinstance(m, nn.Linear)}
    kinds = [
        {"structure": "svd", "rank": 5},
        {"structure": "monarch", "blocks": 2, "block_rank": 3},
        {"structure": "svd", "rank": 3, "groups": 2, "side": "out"},
        {"structure": "svd", "rank": 3, "groups": 4, "side": "in"},
        {"structure": "blast", "blocks": 4, "rank": 6},
        {"structure": "dense"},
    ]
    layers = {}
    for number, (name, (rows, columns)) in enumerate(shapes.items()):
        kind = kinds[number % len(kinds)]
        if name != "lm_head" and kind["structure"] != "dense":
            layers[name] = {**kind, "in_features": columns, "out_features": rows}
    replace_layers(model, layers)


@pytest.mark.parametrize("ops", ["torch", pytest.param("triton", marks=needs_triton)])
def test_a_mixture_of_structures(ops: str, tmp_path: Path) -> None:
    model = load(save_pico("llama", tmp_path))
    mixture(model)
    kinds = {phase.kind for phase in make_plan(model).phases}
    assert {"stages", "gate", "attention"} <= kinds
    ids, mask = prompts(6, 3)
    new = 20 if ops == "torch" else 3
    found = decoder(model, 64, batch=2, ops=ops).generate(ids, mask, max_new_tokens=new)
    assert found == native(model, ids, new, mask)


@needs_triton
@pytest.mark.parametrize("rows", [1, 3])
def test_kernels_give_the_logits_of_the_model(rows: int, tmp_path: Path) -> None:
    model = load(save_pico("qwen3", tmp_path))
    ids, _ = prompts(*[11] * rows)
    with torch.no_grad():
        truth = model(ids).logits
    ours = decoder(model, 64, batch=3, ops="triton")
    steps = [ours.prefill(ids[:, :9])] + [ours.step(ids[:, at]) for at in (9, 10)]
    error = (torch.stack(steps, 1) - truth[:, 8:]).norm() / truth.norm()
    assert float(error) < TOLERANCES[torch.float32]


class Rounded(transformers.DynamicCache):
    """transformers' cache of keys and values that went through int8."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        kept = [unpack(*pack(t), t.dtype) for t in (key_states, value_states)]
        return super().update(*kept, *args, **kwargs)


@pytest.mark.parametrize(
    ("family", "ops"),
    [("llama", "torch"), ("mistral", "torch"), pytest.param("qwen3", "triton", marks=needs_triton)],
)
def test_keys_and_values_in_int8(family: str, ops: str, tmp_path: Path) -> None:
    """A prompt and single tokens, two rows, one padded: logits of rounded keys and values."""
    model = load(save_pico(family, tmp_path))
    ids, mask = prompts(24, 20)
    ours = decoder(model, 64, batch=2, ops=ops, cache="int8")
    assert ours.state.kv.bytes_a_slot(1) * 4 == decoder(model, 64).state.kv.bytes_a_slot(1) + 4 * 4 * 4
    given = 3 if ops == "torch" else 1
    logits = [ours.prefill(ids[:, :-given], mask[:, :-given].sum(1))]
    logits += [ours.step(ids[:, at]) for at in range(-given, 0)]
    where = {"attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp_min(0)}
    with torch.no_grad():
        truth, other = (
            model(ids, past_key_values=kind(config=model.config), use_cache=True, **where).logits[
                :, ~given:
            ]
            for kind in (Rounded, transformers.DynamicCache)
        )
    found = torch.stack(logits, 1)
    assert (found - truth).norm() <= 1e-3 * truth.norm()  # a key on the border of two steps may fall
    assert (found - other).norm() > 3 * (found - truth).norm()


SCALED = {"rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}


@pytest.mark.parametrize("kind", ["linear", "llama3", "yarn"])
def test_rotary_embeddings_that_scale(kind: str, tmp_path: Path) -> None:
    folder = save_pico("llama", tmp_path)
    extra = {"low_freq_factor": 1.0, "high_freq_factor": 4.0} if kind == "llama3" else {}
    config = transformers.AutoConfig.from_pretrained(folder)
    config.rope_parameters = {"rope_type": kind, **SCALED, **extra}
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, config=config, dtype=torch.float32)
    plain = load(folder)
    ids, _ = prompts(20)
    found = decoder(model.eval(), 64).generate(ids, max_new_tokens=40)
    assert found == native(model, ids, 40) != native(plain, ids, 40)


def test_layers_of_unknown_kind_are_called(tmp_path: Path) -> None:
    """A layer that no stage describes runs by its own forward, after a norm."""

    class Doubled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    model = load(save_pico("llama", tmp_path))
    for layer, name in (
        (model.model.layers[0].mlp, "up_proj"),
        (model.model.layers[1].self_attn, "o_proj"),
    ):
        getattr(layer, name).__class__ = Doubled
    names = [phase.name for phase in make_plan(model).phases if phase.kind == "module"]
    assert names == ["layer.0.up", "layer.1.o"]
    ids, _ = prompts(7)
    assert decoder(model, 64).generate(ids, max_new_tokens=20) == native(model, ids, 20)


def test_low_rank_layer_takes_nine_phases_and_dense_five(tmp_path: Path) -> None:
    model = load(save_pico("llama", tmp_path))
    assert sum(phase.name.startswith("layer.0.") for phase in make_plan(model).phases) == 5
    specs = {}
    for name, module in model.model.named_modules():
        if isinstance(module, nn.Linear):
            sizes = {"in_features": module.in_features, "out_features": module.out_features}
            specs[f"model.{name}"] = {"structure": "svd", "rank": 4, **sizes}
    replace_layers(model, specs)
    names = [phase.name for phase in make_plan(model).phases if phase.name.startswith("layer.1.")]
    stages = ["qkv.V", "qkv.U", "attention", "o.V", "o.U", "gate_up.V", "gate_up.U", "down.V", "down.U"]
    assert names == [f"layer.1.{stage}" for stage in stages]
    made = Decoder(model, context=64, ops="torch")
    read = {phase.name: made.bytes_of(phase) for phase in made.plan.phases}
    layer = model.model.layers[1]
    assert read["layer.1.down.U"] == layer.mlp.down_proj.U.numel() * 4


def test_rows_end_with_their_first_stop_token(trained: Any, text: Tensor) -> None:
    ours = decoder(trained, 128, batch=2)
    batch = torch.cat((text[:, :30], text[:, 30:60]))
    free = ours.generate(batch, max_new_tokens=40)
    stop = free[0][11]
    streamed: list[list[int]] = [[], []]
    found = ours.generate(
        batch,
        max_new_tokens=40,
        stop_ids=[stop],
        on_token=lambda row, token: streamed[row].append(token),
    )
    cut = [row[: row.index(stop) + 1] if stop in row else row for row in free]
    assert len(cut[0]) <= 12
    assert found == cut
    assert streamed == found


def test_all_rows_stopped_ends_the_decoding(trained: Any, text: Tensor) -> None:
    ours = decoder(trained, 128)
    first = ours.generate(text[:, :30], max_new_tokens=1)[0][0]
    assert ours.generate(text[:, :30], max_new_tokens=90, stop_ids=[first]) == [[first]]
    assert ours.position < 40


def test_sampling_follows_the_seed_and_greedy_limits(trained: Any, text: Tensor) -> None:
    ours, part = decoder(trained, 128), text[:, :30]

    def sample(**options: Any) -> list[list[int]]:
        return ours.generate(part, max_new_tokens=20, **{"temperature": 1.0, "seed": 1, **options})

    assert sample() == sample() != sample(seed=2)
    greedy = ours.generate(part, max_new_tokens=20)
    assert sample(top_k=1) == sample(top_p=1e-6) == greedy


def test_a_prompt_forgets_the_one_before(trained: Any, text: Tensor) -> None:
    ours = decoder(trained, 128, batch=2)
    alone = ours.generate(text[:, :20], max_new_tokens=10)
    ours.generate(torch.cat((text[:, 20:90], text[:, 90:160])), max_new_tokens=10)
    assert ours.generate(text[:, :20], max_new_tokens=10) == alone


def test_profile_covers_a_token(trained: Any, text: Tensor) -> None:
    ours = decoder(trained, 64)
    ours.prefill(text[:, :20])
    table = ours.profile(2)
    names = [name for name, _, _ in table]
    assert names[0] == "embed" and names[-1] == "token" and "layer.*.attention" in names
    assert all(microseconds > 0 for _, microseconds, _ in table)
    layers = trained.config.num_hidden_layers
    parts = sum(size * (layers if "*" in name else 1) for name, _, size in table[:-1])
    assert table[-1][2] == parts
    assert parts > sum(p.numel() * 4 for p in trained.parameters()) * 0.99


@pytest.mark.parametrize(
    ("call", "error", "text_of_it"),
    [
        (
            lambda d, ids: d.generate(ids, max_new_tokens=57),
            ContextError,
            "65 tokens: expected at most 64",
        ),
        (lambda d, ids: d.prefill(ids.repeat(1, 9)), ContextError, "72 tokens"),
        (lambda d, ids: d.prefill(ids.repeat(3, 1)), BatchError, "3 rows"),
        (lambda d, ids: d.prefill(ids[:, :0]), BatchError, "0 tokens"),
        (lambda d, ids: d.prefill(ids, torch.tensor([9])), BatchError, "lengths"),
        (lambda d, ids: d.step(ids[0, :2]), BatchError, "a prompt before"),
        (lambda d, ids: d.generate(ids, ids * 0, max_new_tokens=2), BatchError, "holes or empty"),
        (lambda d, ids: d.generate(ids, max_new_tokens=0), BatchError, "max_new_tokens"),
        (lambda d, ids: d.generate(ids, max_new_tokens=2, temperature=-1), ValueError, "temperature"),
        (lambda d, ids: Decoder(d.model, context=65, ops="torch"), ContextError, "model's 64"),
        (lambda d, ids: Decoder(d.model, context=64, batch=17, ops="torch"), BatchError, "1 to 16"),
        (lambda d, ids: Decoder(d.model, context=64, mode="fast"), UnsupportedError, "'fast'"),
        (lambda d, ids: Decoder(d.model, context=64, ops="cuda"), UnsupportedError, "'cuda'"),
    ],
)
def test_what_is_refused(call: Any, error: type, text_of_it: str, tmp_path: Path) -> None:
    model = load(save_pico("llama", tmp_path))
    with pytest.raises(error, match=text_of_it) as raised:
        call(decoder(model, 64, batch=2), prompts(8)[0])
    assert "\n" not in str(raised.value)


def test_cache_filled_to_its_last_slot(tmp_path: Path) -> None:
    model = load(save_pico("llama", tmp_path))
    ids, _ = prompts(8)
    ours = decoder(model, 16)
    assert ours.generate(ids, max_new_tokens=8) == native(model, ids, 8)
    ours.prefill(ids.repeat(1, 2))
    with pytest.raises(ContextError, match="17 tokens"):
        ours.step(ids[0, :1])


def test_unsupported_models_say_why(tmp_path: Path) -> None:
    model = load(save_pico("gpt2", tmp_path))
    assert "gpt2" in supports(model)
    with pytest.raises(DecoderError, match="gpt2"):
        decoder(model, 64)
    llama = load(save_pico("llama", tmp_path / "llama"))
    assert supports(llama) is None
    llama.config.rope_parameters = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    assert "dynamic" in supports(llama)


def test_prompts_through_shared_layers_give_the_same_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers of one input that were rewired on a GPU; a decoder leaves them as they are."""
    monkeypatch.setattr(shared_input, "_on_gpu", lambda tensor: True)
    model, (ids, mask) = load(save_pico("llama", tmp_path)), prompts(3, 7)
    linear = {n: m for n, m in model.model.named_modules() if type(m) is nn.Linear}
    specs = {n: LowRankSpec(m.in_features, m.out_features, 4) for n, m in linear.items()}
    replace_layers(model.model, {name: spec.to_dict() for name, spec in specs.items()})
    expected = decoder(model, 64, batch=2).generate(ids, mask, max_new_tokens=6)
    assert share_siblings(model) == 2 * model.config.num_hidden_layers
    assert decoder(model, 64, batch=2).generate(ids, mask, max_new_tokens=6) == expected


@pytest.mark.parametrize("model_type", [name for name in RUN if name.replace("_", "-") not in MIXTURES])
def test_layers_of_one_input_are_those_of_the_family(model_type: str) -> None:
    family = find_family(model_type)
    assert family is not None
    known = {group.modules for group in family.groups if len(group.modules) > 1}
    assert known == {tuple(f"{owner}.{name}" for name in names) for owner, names in TOGETHER.items()}
