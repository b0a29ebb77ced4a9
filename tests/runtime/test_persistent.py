"""The persistent kernel, one program in Triton's interpreter, gives the tokens of the other modes; so
do several programs, one phase at a time, and the table gives every tile to exactly one program."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from pico import VOCAB, save_pico
from tolerances import TOLERANCES
from torch import Tensor, nn

import blr.compressor.modeling  # noqa: F401  (registers the structured model types)
from blr.compressor.modeling.layers import StructuredLinear
from blr.compressor.modeling.table import replace_layers
from blr.compressor.runtime import decoder as decoders
from blr.compressor.runtime.decoder import Decoder
from blr.compressor.runtime.failures import UnsupportedError
from blr.compressor.runtime.persistent import PersistentToken
from blr.kernels.common.available import has_triton
from blr.kernels.gemv.segments import Segment
from blr.kernels.persistent import program
from blr.kernels.persistent.fields import Kind, Product
from blr.kernels.persistent.program import (
    Piece,
    Tuning,
    make_table,
    rows_piece,
    shares,
)

needs_triton = pytest.mark.skipif(not has_triton(), reason="needs triton")
SMALL = Tuning(elements=512, whole=32, wide_columns=16)  # so that pico layers have many tiles
STRUCTURES = {
    "svd": {"structure": "svd", "rank": 5},
    "svd-out": {"structure": "svd", "rank": 3, "groups": 2, "side": "out"},
    "svd-in": {"structure": "svd", "rank": 3, "groups": 4, "side": "in"},
    "monarch": {"structure": "monarch", "blocks": 2, "block_rank": 4},
    "blast": {"structure": "blast", "blocks": 4, "rank": 6},
}


def load(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


def structured(model: Any, *kinds: str) -> Any:
    """Every layer of one of `kinds`, in turn; gate and up alike."""
    torch.manual_seed(0)
    layers, number = {}, 0
    for name, module in model.model.named_modules():
        if isinstance(module, nn.Linear):
            number += not name.endswith("up_proj")
            kind = STRUCTURES.get(kinds[number % len(kinds)])
            sizes = {"in_features": module.in_features, "out_features": module.out_features}
            if kind is not None:
                layers[f"model.{name}"] = {**kind, **sizes}
    replace_layers(model, layers)
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.std() == 0 and parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.2)
    for module in model.modules():
        if isinstance(module, StructuredLinear):
            module.relayout_()
    return model


def prompts(rows: int, length: int) -> Tensor:
    return torch.randint(2, VOCAB, (rows, length), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def error_of(model: Any, rows: int, programs: int, steps: int = 1, tuning: Tuning = SMALL) -> float:
    """Relative error of logits against the references, phase by phase if there are many programs."""
    ids = prompts(rows, 9)
    truth = Decoder(model, batch=rows, context=64, ops="torch")
    ours = Decoder(model, batch=rows, context=64, ops="torch")
    token = PersistentToken(ours.plan, ours.state, model, 64, tuning=tuning, programs=programs)
    errors = []
    truth.prefill(ids)
    ours.prefill(ids)
    for _ in range(steps):
        ours.state.tokens.copy_(truth.state.tokens)
        truth._advance()
        if programs == 1:
            token.run(rows, 128)
        else:
            for number in range(len(ours.plan.phases)):
                token.program.run(rows, 128, phase=number)
        found, wanted = (d.state.buffers["logits"].float() for d in (ours, truth))
        errors.append(float((found - wanted).norm() / wanted.norm()))
        assert ours.state.tokens.tolist() == found.argmax(-1).tolist()
        assert torch.equal(ours.state.pos, truth.state.pos)
    return max(errors)


@pytest.mark.sampled(3)
@needs_triton
@pytest.mark.parametrize(("rows", "programs"), [(2, 1), (1, 3)])
@pytest.mark.parametrize("family", ["llama-tied", "mistral", "qwen2", "qwen3"])
def test_dense_families(family: str, programs: int, rows: int, tmp_path: Path) -> None:
    """Biases, norms of queries and keys, windows, rows in chunks."""
    model = load(save_pico(family, tmp_path))
    assert error_of(model, rows, programs) < TOLERANCES[torch.float32]


@pytest.mark.sampled(3)
@needs_triton
@pytest.mark.parametrize(("rows", "programs"), [(1, 1), (2, 3)])
@pytest.mark.parametrize("structure", STRUCTURES)
def test_structures(structure: str, programs: int, rows: int, tmp_path: Path) -> None:
    model = structured(load(save_pico("llama", tmp_path)), structure)
    assert error_of(model, rows, programs) < TOLERANCES[torch.float32]


@pytest.mark.sampled(2)
@needs_triton
@pytest.mark.parametrize("programs", [1, 5])
def test_a_mixture_of_structures(programs: int, tmp_path: Path) -> None:
    """Segments of one phase differ in blocks, norms and tiles; of other numbers of stages, in phases."""
    model = structured(load(save_pico("qwen2", tmp_path)), "blast", "dense", "svd", "monarch", "svd-out")
    assert error_of(model, 2, programs, steps=2) < TOLERANCES[torch.float32]


@pytest.mark.sampled(4)
@needs_triton
@pytest.mark.parametrize("kinds", [("svd", "dense"), ("blast",), ("monarch",)], ids="-".join)
@pytest.mark.parametrize("rows", [1, 2])
def test_half_precision(rows: int, kinds: tuple[str, ...], tmp_path: Path) -> None:
    """Weights and gated activations of two bytes."""
    model = structured(load(save_pico("llama", tmp_path), torch.float16), *kinds)
    assert error_of(model, rows, 1) < TOLERANCES[torch.float16]


@needs_triton
def test_the_mode_gives_the_tokens_of_the_reference(tmp_path: Path) -> None:
    model = structured(load(save_pico("qwen3", tmp_path)), "svd")
    ids, mask = prompts(2, 8), torch.ones(2, 8, dtype=torch.int64)
    mask[1, :3] = 0
    wanted = Decoder(model, batch=2, context=64, ops="torch").generate(ids, mask, max_new_tokens=6)
    ours = Decoder(model, batch=2, context=64, mode="persistent")
    assert ours.generate(ids, mask, max_new_tokens=6) == wanted
    program = ours.persistent.program
    assert int(program.counter) == int(program.generation) == 5 * program.table.starts[-1]
    one = Decoder(model, context=64, ops="torch").generate(ids[:1], max_new_tokens=3)
    assert ours.generate(ids[:1], max_new_tokens=3) == one


@needs_triton
def test_splits_of_the_attention(tmp_path: Path) -> None:
    """The last of several splits adds them up."""
    model = load(save_pico("llama", tmp_path))
    ours = Decoder(model, context=64, ops="torch")
    token = PersistentToken(ours.plan, ours.state, model, 64, fixed=lambda bucket: 8, programs=3)
    wanted = Decoder(model, context=64, ops="torch")
    ids = prompts(1, 40)
    for decoder in (ours, wanted):
        decoder.prefill(ids)
    with torch.no_grad():
        for number in range(len(ours.plan.phases)):
            token.program.run(1, 128, 8, number)
        wanted._advance()
    found, truth = (d.state.buffers["logits"] for d in (ours, wanted))
    assert (found - truth).norm() < TOLERANCES[torch.float32] * truth.norm()
    assert int(ours.state.attention["counter"].abs().sum()) == 0


@needs_triton
def test_profile_has_the_whole_token(tmp_path: Path) -> None:
    ours = Decoder(load(save_pico("llama", tmp_path)), context=64, mode="persistent")
    ours.prefill(prompts(1, 5))
    table = ours.profile(1)
    assert table[-1][0] == "token" and table[-1][1] > 0


def transposed(model: Any) -> None:
    weight = model.model.layers[1].self_attn.o_proj.weight
    weight.data = weight.data.T.contiguous().T


def other(model: Any) -> None:
    model.model.layers[0].mlp.down_proj.__class__ = type("Other", (nn.Linear,), {})


@needs_triton
@pytest.mark.parametrize(
    ("change", "options", "text"),
    [
        (None, {"batch": 3}, "batch 3: expected 1 or 2"),
        (None, {"ops": "torch"}, "'torch'"),
        (transposed, {}, "layer.1.o has columns that are not contiguous"),
        (other, {}, "layer.0.down is of kind 'module'"),
        (lambda model: model.lm_head.bfloat16(), {}, "lm_head has tensors of"),
    ],
)
def test_what_is_refused(change: Any, options: dict[str, Any], text: str, tmp_path: Path) -> None:
    model = load(save_pico("llama", tmp_path))
    if change is not None:
        change(model)
    with pytest.raises(UnsupportedError, match=text) as raised:
        Decoder(model, context=64, mode="persistent", **options)
    assert "\n" not in str(raised.value)


@needs_triton
def test_more_kinds_of_tiles_than_a_kernel_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a model whose every layer has another rank may need; "auto" takes the graph then."""
    monkeypatch.setattr(program, "MOST_VARIANTS", 1)
    monkeypatch.setattr(decoders, "token_mode", lambda *_: "persistent")
    model = load(save_pico("llama", tmp_path))
    with pytest.raises(UnsupportedError, match="kinds of tiles: expected 1 at most; use mode 'graph'"):
        Decoder(model, context=64, mode="persistent")
    assert Decoder(model, context=64).mode == "graph"


@needs_triton
def test_auto_is_what_the_table_says_where_the_model_allows_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load(save_pico("llama", tmp_path))
    assert Decoder(model, context=64).mode == "graph"
    monkeypatch.setattr(decoders, "token_mode", lambda *_: "persistent")
    assert Decoder(model, context=64).mode == "persistent"
    assert Decoder(model, context=64, batch=3).mode == "graph"
    assert Decoder(model, context=64, ops="torch").mode == "graph"


def piece(number: int, rows: int, blocks: int, columns: int) -> Piece:
    """A piece that is known by the `number` in place of its weights' address."""
    w, x = torch.zeros(blocks, rows, columns), torch.zeros(1, blocks * columns)
    made = rows_piece(Segment(x, w, torch.zeros(1, blocks * rows)))
    return replace(made, words={**made.words, Product.W: number})


@pytest.mark.parametrize("programs", [2, 7, 132])
def test_every_tile_has_one_program(programs: int) -> None:
    """Also where there are fewer programs than pieces, or fewer tiles than programs."""
    phases = [[piece(1, 1000, 1, 64), piece(2, 100, 3, 5000), piece(3, 3, 1, 9)], [piece(4, 1, 1, 8)]]
    table = make_table(phases, programs, Tuning())
    assert len(table.words) == table.starts[-1] * programs + 1
    done: dict[int, list[range]] = {}
    for words in table.words[:-1].tolist():
        head = words[Product.HEAD]
        kind, first, count = head & 255, head >> 8 & 0xFFFFFFF, head >> 36
        done.setdefault(words[Product.W], []).extend((t, kind) for t in range(first, first + count))
    for own in (p for phase in phases for p in phase):
        tiles = done[own.words[Product.W]]
        kind, rows = table.variants[tiles[0][1]][:2]
        assert kind == Kind.ROWS
        assert sorted(t for t, _ in tiles) == list(range(own.tiles(rows)))


def test_programs_go_where_the_bytes_are() -> None:
    assert shares((3, 3, 3), 132) == [44, 44, 44]
    assert shares((400, 100, 100), 132) == [88, 22, 22]
    assert shares((1, 1000), 3) == [1, 2]
    with pytest.raises(ValueError, match="1 programs"):
        shares((1, 1), 1)
