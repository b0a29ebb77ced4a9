"""Captured forward passes: fixed buffers, a graph an input shape, and the eager pass where none can
be had. A graph is replaced by a function that runs the same pass on the same buffers."""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from exporting import compress_to, export_to
from pico import inputs_for, save_pico
from torch import nn
from torch.utils._pytree import tree_map
from transformers import AutoModel

from blr.compressor import register
from blr.compressor.modeling import cuda_graphs as captured
from blr.compressor.modeling import settings
from blr.compressor.modeling.cache_key import held_for
from blr.compressor.modeling.cuda_graphs import MAX_GRAPHS, ForwardGraphs
from blr.kernels.common import capturing

register()

pytestmark = pytest.mark.fast


class Graphs:
    """Stands for CUDA: counts captures, and replays into the result of the first run."""

    def __init__(self) -> None:
        self.captures = self.replays = 0

    def __call__(self, run: Callable[[], Any]) -> Callable[[], Any]:
        self.captures += 1
        kept = run()

        def replay() -> Any:
            self.replays += 1
            for key, value in run().items():
                tree_map(torch.Tensor.copy_, kept[key], value)
            return kept

        return replay


@pytest.fixture(autouse=True)
def fresh_warnings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "_said", set())


def forward(x: torch.Tensor, scale: float = 1.0, shift: Any = None) -> dict[str, torch.Tensor]:
    return {"y": x * scale + (0 if shift is None else shift)}


def test_results_are_right_and_survive_the_next_call() -> None:
    graphs = ForwardGraphs(counter := Graphs())
    x, z = torch.ones(2, 3), torch.full((2, 3), 5.0)
    results = [graphs.replayed(forward, ((t,), {"scale": 2.0}))["y"] for t in (x, z, x)]
    assert [result[0, 0].item() for result in results] == [2, 10, 2]
    assert (counter.captures, counter.replays) == (1, 3)
    graphs.replayed(forward, ((x,), {"scale": 3.0}))
    graphs.replayed(forward, ((x[:1],), {"scale": 3.0}))
    graphs.replayed(forward, ((x.double(),), {"scale": 3.0}))
    assert counter.captures == 4


def test_inputs_and_results_that_no_graph_can_hold(caplog: pytest.LogCaptureFixture) -> None:
    graphs = ForwardGraphs(counter := Graphs())
    x = torch.ones(1)
    assert graphs.replayed(lambda x, hook: hook(x), ((x, torch.neg), {})) is None
    assert counter.captures == 0 and not graphs.failed
    cache = {"y": x, "past_key_values": [x]}
    for _ in range(2):
        assert graphs.replayed(lambda x: cache, ((x,), {})) is None
    assert counter.captures == 0 and graphs.failed
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "it returns a cache" in caplog.text and "runs eagerly" in caplog.text


def test_a_capture_that_fails_is_tried_once(caplog: pytest.LogCaptureFixture) -> None:
    attempts = []

    def fail(run: Callable[[], Any]) -> Callable[[], Any]:
        attempts.append(run)
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    graphs = ForwardGraphs(fail)
    for _ in range(3):
        assert graphs.replayed(forward, ((torch.ones(1),), {})) is None
    assert len(attempts) == 1 and caplog.text.count("not permitted") == 1


def test_where_no_graph_is_worth_it_the_pass_runs_as_usual() -> None:
    attempts = []
    graphs = ForwardGraphs(lambda run: attempts.append(run))
    for value in (1.0, 2.0):
        assert graphs.replayed(forward, ((torch.full((1,), value),), {})) is None
    assert len(attempts) == 1 and not graphs.failed


def test_a_mask_that_hides_nothing_is_left_out_where_that_changes_nothing() -> None:
    full, x = torch.ones(2, 3, dtype=torch.long), torch.ones(2, 3)
    needs = lambda x, attention_mask: {"y": x * attention_mask}  # noqa: E731
    counts = lambda x, attention_mask: x if attention_mask is None else 2 * x  # noqa: E731
    for model, expected in ((forward_masked, True), (needs, False), (counts, False)):
        assert ForwardGraphs().ignores(model, (x,), {"attention_mask": full}) is expected


def forward_masked(x: torch.Tensor, attention_mask: Any = None) -> dict[str, torch.Tensor]:
    return {"y": x if attention_mask is None else x * attention_mask}


def test_threads_take_turns_at_the_buffers_of_a_graph() -> None:
    """Without turns each reads the result of whoever came last."""

    class Slow(Graphs):
        def __call__(self, run: Callable[[], Any]) -> Callable[[], Any]:
            replay = super().__call__(run)
            return lambda: (time.sleep(0.02), replay())[1]  # others copy their inputs in meanwhile

    graphs = ForwardGraphs(Slow())
    with ThreadPoolExecutor(4) as pool:
        found = pool.map(
            lambda v: graphs.replayed(forward, ((torch.full((1,), v),), {}))["y"].item(), [1.0, 2, 3, 4]
        )
    assert list(found) == [1, 2, 3, 4]


def test_the_least_recently_used_graph_goes() -> None:
    graphs = ForwardGraphs(counter := Graphs())
    for width in (*range(1, MAX_GRAPHS + 1), 1, MAX_GRAPHS + 1):
        graphs.replayed(forward, ((torch.ones(width),), {}))
    assert len(graphs.entries) == MAX_GRAPHS and counter.captures == MAX_GRAPHS + 1
    graphs.replayed(forward, ((torch.ones(1),), {}))
    assert counter.captures == MAX_GRAPHS + 1
    graphs.replayed(forward, ((torch.ones(2),), {}))
    assert counter.captures == MAX_GRAPHS + 2


def test_an_exported_encoder_gives_the_same_through_its_graph(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = compress_to(save_pico("bert", tmp_path / "dense"), tmp_path / "c", method="svd", cf=1.5)
    model = AutoModel.from_pretrained(export_to(source, tmp_path / "out")).eval()
    inputs = inputs_for(model)
    with torch.inference_mode():
        expected = model(**inputs)
        assert "_blr_graphs" not in model.__dict__  # on the CPU nothing is captured
        monkeypatch.setattr(captured, "_capturable", lambda model: True)
        monkeypatch.setattr(captured, "captured_if_faster", counter := Graphs())
        full = {**inputs, "attention_mask": torch.ones_like(inputs["input_ids"])}
        for given in (inputs, full, inputs):
            found = model(**given)
            assert type(found) is type(expected)
            torch.testing.assert_close(found[0], expected[0])
        assert (counter.captures, counter.replays) == (1, 3)
        model.config.output_hidden_states = True
        assert model(**inputs).hidden_states is not None
        model.config.output_hidden_states = False
        seen: list[Any] = []
        handle = model.encoder.layer[0].register_forward_hook(lambda *given: seen.append(given[0]))
        model(**inputs)
        assert (len(seen), counter.replays) == (1, 4)  # a graph would not call it
        handle.remove()
        model.pooler.dense = nn.Linear(model.config.hidden_size, model.config.hidden_size)
        torch.testing.assert_close(model(**inputs)[1], model.forward(**inputs)[1])
        assert (counter.captures, counter.replays) == (3, 5)


def test_a_graph_is_captured_on_a_stream_of_the_current_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch keeps the stream of the first GPU that it captured on; on another the graph is empty."""
    used: list[Any] = []

    @contextmanager
    def graph(graph: Any, stream: Any = "the first GPU's", **options: Any) -> Iterator[None]:
        used.append(stream)
        yield

    monkeypatch.setattr(torch.cuda, "graph", graph)
    monkeypatch.setattr(torch.cuda, "default_generators", [torch.Generator(), torch.Generator()])
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: [device])
    monkeypatch.setattr(capturing, "_capture_stream", cache(capturing._capture_stream.__wrapped__))
    for device in (0, 1, 0):
        monkeypatch.setattr(torch.cuda, "current_device", lambda device=device: device)
        with capturing.capturing(None):
            pass
    assert used == [[0], [1], [0]] and used[0] is used[2], "graphs of one pool share a stream"


class Adapted(nn.Linear):
    """A layer with the attributes that layers of peft have."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self._disable_adapters, self._active_adapter = False, ["a"]
        self.merged_adapters: list[str] = []
        self.scaling = {"a": 1.0, "b": 1.0}


CHANGES: dict[str, Callable[[Any], object]] = {
    "switched off": lambda layer: setattr(layer, "_disable_adapters", True),
    "another": lambda layer: setattr(layer, "_active_adapter", ["b"]),
    "merged": lambda layer: layer.merged_adapters.append("a"),
    "scaled": lambda layer: layer.scaling.update(a=0.5),
    "of another type in the same place": lambda layer: setattr(
        layer.weight, "data", layer.weight.data.view(torch.int32)
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_no_module_or_address_shows_is_noticed(change: str) -> None:
    model = nn.Sequential(Adapted()).requires_grad_(False)
    held = held_for(model, "_made", object)
    CHANGES[change](model[0])
    assert held_for(model, "_made", object) is not held


def test_what_has_copies_of_weights_is_made_anew_when_these_change() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    held, copies = held_for(model, "_graphs", object), held_for(model, "_copies", object, values=True)
    assert held_for(model, "_copies", object, values=True) is copies
    model.load_state_dict({name: 2 * value for name, value in model.state_dict().items()})
    assert held_for(model, "_graphs", object) is held
    assert held_for(model, "_copies", object, values=True) is not copies


def test_a_model_goes_with_what_is_held_for_it() -> None:
    """Whoever deletes a model has its memory back at once, not when garbage is collected."""
    model = nn.Sequential(nn.Linear(2, 2))
    held = held_for(model, "_made", object)
    assert held_for(model, "_made", object) is held and held.basis.holds()
    gone = weakref.ref(model)
    del model
    assert gone() is None
