"""`generate` of an export: what goes to the fused runtime, with the tokens of transformers, and what
does not. The runtime stands on its plain torch operations here, which run without a GPU."""

from __future__ import annotations

import copy
import pickle
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from exporting import export_to
from pico import inputs_for, save_pico
from running import Invoke
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.generation.streamers import BaseStreamer

from blr.compressor import register
from blr.compressor.modeling import generation as fused
from blr.compressor.modeling import settings
from blr.compressor.modeling.generation import Request, read_request
from blr.compressor.runtime.failures import DecoderError

register()

GREEDY = {"max_new_tokens": 12, "do_sample": False}
PADDED = [[7, 8, 9, 10, 11], [0, 0, 50, 51, 52]]
MASK = [[1, 1, 1, 1, 1], [0, 0, 1, 1, 1]]


class Recorder(BaseStreamer):
    """Keeps what it is given."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.ended = False

    def put(self, value: torch.Tensor) -> None:
        self.tokens += value.reshape(-1).tolist()

    def end(self) -> None:
        self.ended = True


@pytest.fixture(autouse=True)
def fresh_warnings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test sees the warnings that a process gives once."""
    monkeypatch.setattr(settings, "_said", set())


def load(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Runs the runtime on the CPU; lists the arguments of every generation by it."""
    from blr.compressor.runtime.decoder import Decoder

    seen: list[dict[str, Any]] = []

    class Recorded(Decoder):
        def generate(self, *args: Any, **kwargs: Any) -> list[list[int]]:
            seen.append(kwargs)
            return super().generate(*args, **kwargs)

    def make(model: Any, given: settings.ExportSettings) -> Decoder:
        sizes = {"batch": given.batch, "context": given.context}
        return Recorded(model, **sizes, ops="torch", cache=given.cache)

    monkeypatch.setattr(fused, "obstacle", lambda device: None)
    monkeypatch.setattr(fused, "_make_decoder", make)
    return seen


@pytest.mark.parametrize("name", ["dense", "svd", "monarch", "blast", "ks"])
def test_tokens_of_the_runtime_are_those_of_transformers(
    name: str, sources: dict[str, Path], exports: dict[str, Path], calls: list[dict[str, Any]]
) -> None:
    model, source = load(exports[name]), load(sources[name])
    ids = torch.tensor([list(range(100, 130))])
    assert torch.equal(model.generate(ids, **GREEDY), source.generate(ids, **GREEDY))
    batch = {"attention_mask": torch.tensor(MASK), "pad_token_id": 3, **GREEDY}
    assert torch.equal(
        model.generate(torch.tensor(PADDED), **batch), source.generate(torch.tensor(PADDED), **batch)
    )
    assert len(calls) == 2


def test_keys_and_values_in_int8(
    sources: dict[str, Path], calls: list[dict[str, Any]], tmp_path: Path, invoke: Invoke
) -> None:
    """The runtime keeps them so, by the option or as the checkpoint's own cache does."""
    folder = export_to(sources["svd"], tmp_path / "out", kv_quantize="int8")
    assert "keys and values in int8" in (folder / "README.md").read_text("utf-8")
    model, source = load(folder), load(sources["svd"])
    ids = torch.tensor([list(range(100, 130))])
    found, right = (m.generate(ids, **GREEDY) for m in (model, source))
    assert model._blr_decoder.made.state.kv.data.dtype == torch.int8 and len(calls) == 1
    assert torch.equal(found[:, :33], right[:, :33])  # rounding may part them later
    code, _, said = invoke("export", sources["svd"], "-o", tmp_path / "x", "--kv-quantize", "int4")
    assert code == 2 and "--kv-quantize int4: expected one of int8, none" in said


@pytest.fixture
def model(exports: dict[str, Path], calls: list[dict[str, Any]]) -> Any:
    """An export whose generations `calls` lists."""
    return load(exports["svd"])


@pytest.fixture
def source(sources: dict[str, Path]) -> Any:
    """What `model` was exported from."""
    return load(sources["svd"])


def test_a_row_ends_at_its_stop_token_and_is_padded(
    model: Any, source: Any, calls: list[dict[str, Any]]
) -> None:
    ids, mask = torch.tensor(PADDED), torch.tensor(MASK)
    free = source.generate(ids, attention_mask=mask, eos_token_id=None, pad_token_id=1, **GREEDY)
    stop = [int(free[0, 7]), int(free[1, 9])]
    for pad in (1, None):
        options = {"attention_mask": mask, "eos_token_id": stop, "pad_token_id": pad, **GREEDY}
        found, expected = (m.generate(input_ids=ids, **options) for m in (model, source))
        assert torch.equal(found, expected) and expected.shape[1] < free.shape[1]
    assert len(calls) == 2


@pytest.mark.parametrize(
    "options",
    [
        {"max_length": 11, "do_sample": False},
        {"generation_config": GenerationConfig(max_new_tokens=3, eos_token_id=None)},
        {},
        {"max_new_tokens": 4, "num_beams": 1, "use_cache": True, "logits_processor": None},
    ],
    ids=["max-length", "config", "defaults", "spelled-out"],
)
def test_plain_calls_however_they_are_written(
    options: dict[str, Any], model: Any, source: Any, calls: list[dict[str, Any]]
) -> None:
    ids = torch.tensor([PADDED[0]])
    assert torch.equal(model.generate(ids, **options), source.generate(ids, **options))
    assert len(calls) == 1


def test_padding_is_inferred_as_transformers_infers_it(
    model: Any, source: Any, calls: list[dict[str, Any]]
) -> None:
    ids = torch.tensor(PADDED)
    for pad in (0, 3):  # 0 is this model's end of text: then nothing is padding
        options = {"pad_token_id": pad, **GREEDY}
        assert torch.equal(model.generate(ids, **options), source.generate(ids, **options))
    assert len(calls) == 2


def test_a_streamer_gets_prompt_and_tokens_as_from_transformers(
    model: Any, source: Any, calls: list[dict[str, Any]]
) -> None:
    ids, streams = torch.tensor([PADDED[0]]), (Recorder(), Recorder())
    model.generate(ids, streamer=streams[0], **GREEDY)
    source.generate(ids, streamer=streams[1], **GREEDY)
    assert streams[0].tokens == streams[1].tokens and streams[0].ended and len(calls) == 1


def test_sampling_follows_the_seed_and_its_settings(model: Any, calls: list[dict[str, Any]]) -> None:
    ids = torch.tensor([PADDED[0]])
    options = {"do_sample": True, "max_new_tokens": 12, "temperature": 0.9, "top_p": 0.95}
    drawn = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        drawn.append(model.generate(ids, **options).tolist())
    assert drawn[0] == drawn[1] != drawn[2]
    followed = {"temperature": 0.9, "top_p": 0.95, "top_k": 50}  # 50 is what transformers adds
    assert all(followed.items() <= call.items() for call in calls) and len(calls) == 3
    greedy = model.generate(ids, **GREEDY)
    assert torch.equal(model.generate(ids, do_sample=True, top_k=1, max_new_tokens=12), greedy)


UNUSUAL = [
    {"num_beams": 2},
    {"num_return_sequences": 2, "do_sample": True},
    {"repetition_penalty": 1.3},
    {"return_dict_in_generate": True},
    {"min_new_tokens": 2},
    {"use_cache": False},
    {"no_repeat_ngram_size": 2},
]


@pytest.mark.parametrize("options", UNUSUAL, ids=lambda options: next(iter(options)))
def test_everything_else_is_answered_by_transformers(
    options: dict[str, Any],
    model: Any,
    source: Any,
    calls: list[dict[str, Any]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    ids, results = torch.tensor([PADDED[0]]), []
    for which in (model, source):
        torch.manual_seed(0)
        results.append(which.generate(ids, **{**GREEDY, **options}))
    tokens = [getattr(result, "sequences", result) for result in results]
    assert torch.equal(*tokens) and calls == []
    assert next(iter(options)) in caplog.text


def test_inputs_that_the_runtime_does_not_take(
    model: Any, source: Any, calls: list[dict[str, Any]]
) -> None:
    ids = torch.tensor([PADDED[0]])
    embedded = {"inputs_embeds": source.get_input_embeddings()(ids)}
    right = {"input_ids": ids, "attention_mask": torch.tensor([[1, 1, 1, 1, 0]])}
    for inputs in (embedded, right):
        found, expected = (m.generate(**inputs, **GREEDY) for m in (model, source))
        assert torch.equal(found, expected)
    model.train()
    assert torch.equal(model.generate(ids, **GREEDY), source.generate(ids, **GREEDY))
    assert calls == []


def test_more_than_was_exported_for_is_a_warning_and_right(
    model: Any, source: Any, calls: list[dict[str, Any]], caplog: pytest.LogCaptureFixture
) -> None:
    three = torch.tensor([[5, 6], [7, 8], [9, 10]])
    long = torch.tensor([list(range(10, 130))])
    for ids, message in ((three, "3 sequences, exported for 2"), (long, "132 tokens, exported for")):
        caplog.clear()
        for _ in range(2):
            assert torch.equal(model.generate(ids, **GREEDY), source.generate(ids, **GREEDY))
        assert caplog.text.count(message) == 1 and len(caplog.records) == 1
    assert calls == []


def test_more_than_the_model_has_positions_is_an_error(model: Any) -> None:
    with pytest.raises(ValueError, match="5 prompt tokens and 1020 new ones exceed the 1024 positions"):
        model.generate(torch.tensor([PADDED[0]]), max_new_tokens=1020)


def test_moved_weights_get_a_decoder_of_their_own(model: Any, calls: list[dict[str, Any]]) -> None:
    ids = torch.tensor([PADDED[0]])
    first = model.generate(ids, **GREEDY)
    held = model.__dict__["_blr_decoder"].made
    model.generate(ids, **GREEDY)
    assert model.__dict__["_blr_decoder"].made is held
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    assert torch.equal(model.generate(ids, **GREEDY), first) and len(calls) == 3
    assert model.__dict__["_blr_decoder"].made is not held


def test_threads_take_turns_at_the_one_cache(model: Any, calls: list[dict[str, Any]]) -> None:
    """A server answers requests in threads: none may read what another one decodes."""
    prompts = [torch.tensor([list(range(start, start + 9))]) for start in (20, 120, 220, 320)]
    expected = [model.generate(ids, **GREEDY) for ids in prompts]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda ids: model.generate(ids, **GREEDY), prompts * 2))
    assert all(map(torch.equal, found, expected * 2)) and len(calls) == 12


def test_a_sequence_inside_another_is_an_error(model: Any, calls: list[dict[str, Any]]) -> None:
    ids = torch.tensor([PADDED[0]])

    class Nested:
        def put(self, value: Any) -> None:
            if value.numel() == 1:
                model.generate(ids, **GREEDY)

        def end(self) -> None:
            """Nothing is left to do."""

    with pytest.raises(DecoderError, match="expected one at a time"):
        model.generate(ids, streamer=Nested(), **GREEDY)
    assert model.generate(ids, **GREEDY).shape[1] > ids.shape[1]  # and nothing is held


def test_copies_and_pickles_decode_by_themselves(model: Any, calls: list[dict[str, Any]]) -> None:
    ids = torch.tensor([PADDED[0]])
    expected = model.generate(ids, **GREEDY)
    copied = copy.deepcopy(model)
    assert copied.__dict__["_blr_decoder"] is None
    assert torch.equal(copied.generate(ids, **GREEDY), expected)
    assert copied.__dict__["_blr_decoder"].made.model is copied
    assert pickle.loads(pickle.dumps(model.__dict__["_blr_decoder"])) is None


def _native(model: Any, ids: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
    with monkeypatch.context() as patch:
        patch.setattr(fused, "obstacle", lambda device: "asked for")
        return model.generate(ids, **GREEDY)


def test_what_changes_in_a_model_changes_its_tokens(
    model: Any, calls: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Adapters put layers in the place of others; merges replace weights; neither moves all of them."""
    ids = torch.tensor([PADDED[0]])
    found = [model.generate(ids, **GREEDY)]
    mlp = model.model.layers[0].mlp
    mlp.down_proj = nn.Linear(mlp.down_proj.in_features, mlp.down_proj.out_features, bias=False)
    found += [model.generate(ids, **GREEDY), _native(model, ids, monkeypatch)]
    model.model.norm.weight = nn.Parameter(-model.model.norm.weight)
    found += [model.generate(ids, **GREEDY), _native(model, ids, monkeypatch)]
    assert torch.equal(found[1], found[2]) and torch.equal(found[3], found[4])
    assert not torch.equal(found[0], found[1]) and not torch.equal(found[1], found[3])
    assert len(calls) == 3


def test_hooks_and_other_forwards_see_every_token(
    model: Any, calls: list[dict[str, Any]], caplog: pytest.LogCaptureFixture
) -> None:
    ids, seen = torch.tensor([PADDED[0]]), []
    expected = model.generate(ids, **GREEDY)
    layer = model.model.layers[1]
    handle = layer.register_forward_hook(lambda *given: seen.append(given[0]))
    assert torch.equal(model.generate(ids, **GREEDY), expected)
    assert len(seen) == 12 and len(calls) == 1 and "a hook on one of its modules" in caplog.text
    handle.remove()
    model.generate(ids, **GREEDY)
    assert len(seen) == 12 and len(calls) == 2
    assert model(ids, output_hidden_states=True).hidden_states is not None  # leaves hooks
    model.generate(ids, **GREEDY)
    assert len(calls) == 3
    forward = layer.mlp.forward
    layer.mlp.forward = lambda x: 0 * forward(x)
    assert not torch.equal(model.generate(ids, **GREEDY), expected) and len(calls) == 3


def test_without_a_gpu_one_warning_and_the_tokens_of_transformers(
    exports: dict[str, Path], source: Any, caplog: pytest.LogCaptureFixture
) -> None:
    model, ids = load(exports["svd"]), torch.tensor([PADDED[0]])
    for _ in range(2):
        assert torch.equal(model.generate(ids, **GREEDY), source.generate(ids, **GREEDY))
    assert [record.getMessage() for record in caplog.records] == [
        "blr: the model is not on a GPU: generating with transformers instead of the fused runtime"
    ]


def test_a_model_that_the_runtime_does_not_know(
    tmp_path: Path, calls: list[dict[str, Any]], caplog: pytest.LogCaptureFixture
) -> None:
    dense = save_pico("gpt2", tmp_path / "dense")
    model, source = load(export_to(dense, tmp_path / "out")), load(dense)
    prompt = inputs_for(source)["input_ids"][:1]
    options = {"pad_token_id": 0, **GREEDY}
    assert torch.equal(model.generate(prompt, **options), source.generate(prompt, **options))
    assert calls == [] and "'gpt2'" in caplog.text


def test_settings_of_the_models_own_generation_config_count(model: Any) -> None:
    ids = torch.tensor([PADDED[0]])
    model.generation_config.update(do_sample=True, temperature=0.6, top_p=0.9)
    request = read_request(model, ids, None, {"max_new_tokens": 5})
    assert isinstance(request, Request)
    assert (request.temperature, request.top_p, request.top_k) == (0.6, 0.9, 50)
    assert (request.new_tokens, request.stop_ids, request.length) == (5, (0,), 5)
    model.generation_config.repetition_penalty = 1.05
    assert read_request(model, ids, None, {}) == "repetition_penalty"


def test_the_command_streams_what_the_runtime_generates(
    exports: dict[str, Path], calls: list[dict[str, Any]], invoke: Invoke
) -> None:
    arguments = ("generate", exports["svd"], "The protocol", "--max-new-tokens", 8)
    code, streamed, err = invoke(*arguments)
    assert code == 0 and calls[0]["on_token"] is not None, err
    tokenizer = AutoTokenizer.from_pretrained(exports["svd"])
    ids = tokenizer("The protocol", return_tensors="pt")["input_ids"]
    model = load(exports["svd"])
    tokens = model.generate(ids, max_new_tokens=8, do_sample=False)[0, ids.shape[1] :]
    assert tokenizer.decode(tokens, skip_special_tokens=True).strip() in streamed


def test_profile_needs_a_gpu(exports: dict[str, Path], invoke: Invoke) -> None:
    code, out, err = invoke("generate", exports["svd"], "a", "--profile", "--device", "cpu")
    assert (code, out) == (9, "") and "a profile needs a CUDA GPU" in err
