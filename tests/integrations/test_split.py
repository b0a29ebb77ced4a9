"""What the processes of a server hold gives together what the whole layer gives."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from threading import Barrier, Thread
from typing import Any

import pytest
import torch
from exporting import compress_to
from pico import save_pico
from safetensors.torch import load_file
from torch import Tensor
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from blr.compressor.base.errors import CapabilityError
from blr.compressor.integrations.vllm_parts import (
    PackedPart,
    Part,
    Share,
    Side,
    load_experts,
    make_experts,
    make_part,
    pack,
    product,
    shares_input,
)
from blr.compressor.loading.loader import load_written
from blr.compressor.modeling.layers import layer_of, make_layer
from blr.compressor.structures.specs import (
    BlastSpec,
    CorrectedSpec,
    DenseSpec,
    KroneckerSpec,
    LowRankSpec,
    MonarchSpec,
    QuantizedSpec,
    Spec,
    spec_from_dict,
)

I, O = 24, 32  # noqa: E741
SPECS: dict[str, Spec] = {
    "low rank": LowRankSpec(I, O, 5),
    "groups of outputs": LowRankSpec(I, O, 3, 4, "out"),
    "groups of inputs": LowRankSpec(I, O, 3, 4, "in"),
    "monarch": MonarchSpec(I, O, 4, 2),
    "blast": BlastSpec(I, O, 4, 6),
}


class Together:
    """Processes as threads: `run` gives each its rank and a sum over all that waits for all."""

    def __init__(self, size: int) -> None:
        self.size, self.barrier, self.summed = size, Barrier(size), 0
        self.held: list[Any] = [None] * size

    def run(self, work: Callable[[int, Callable[[Tensor], Tensor]], Tensor]) -> list[Tensor]:
        found: list[Any] = [None] * self.size

        def one(rank: int) -> None:
            found[rank] = work(rank, lambda x: self._sum(rank, x))

        threads = [Thread(target=one, args=(rank,)) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        return found

    def _sum(self, rank: int, x: Tensor) -> Tensor:
        self.held[rank] = x
        self.barrier.wait(60)
        total = torch.stack(self.held).sum(0)
        self.barrier.wait(60)
        self.summed = x.shape[-1]
        return total


def whole_layer(spec: Spec) -> Any:
    torch.manual_seed(0)
    return make_layer(spec.to_dict(), bias=False).double().requires_grad_(False)


def part_of(layer: Any, share: Share) -> Part:
    spec = layer.spec
    part = Part("layer", spec, (spec.out_features, spec.in_features), share, torch.float64)
    for name, factor in layer.state_dict().items():
        part.load(name, factor)
    return part


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("side", ["out", "in"])
@pytest.mark.parametrize("name", SPECS)
def test_parts_make_the_whole(name: str, side: Side, size: int) -> None:
    layer, together = whole_layer(SPECS[name]), Together(size)
    x = torch.randn(3, 2, I, dtype=torch.float64)
    parts = [part_of(layer, Share(side, rank, size)) for rank in range(size)]
    xs = x.chunk(size, -1) if side == "in" else [x] * size
    ys = together.run(lambda rank, reduce: product([parts[rank]], xs[rank], reduce))
    if name == "low rank" and side == "in" and size > 1:
        assert together.summed == SPECS[name].rank  # numbers a token, not O
        found = ys[0]
        assert all(torch.equal(y, found) for y in ys)
    else:
        assert together.summed == 0
        found = torch.cat(ys, -1) if side == "out" else torch.stack(ys).sum(0)
    torch.testing.assert_close(found, layer(x))
    held = sum(p.numel() for p in parts[0].parameters())
    assert held < SPECS[name].parameters or size == 1


def test_a_dense_layer_beside_structured_ones() -> None:
    layer, weight = whole_layer(SPECS["blast"]), torch.randn(8, I, dtype=torch.float64)
    dense = Part("dense", None, (8, I), Share("out", 1, 2), torch.float64)
    dense.load("weight", weight)
    x = torch.randn(3, I, dtype=torch.float64)
    y = product([part_of(layer, Share("out", 1, 2)), dense], x, lambda z: z)
    torch.testing.assert_close(y, torch.cat([layer(x)[:, O // 2 :], x @ weight[4:].mT], -1))


def test_low_rank_layers_of_one_input_are_one_product() -> None:
    layers = [whole_layer(LowRankSpec(I, o, r)) for o, r in ((32, 5), (8, 3), (8, 2))]
    parts = [part_of(layer, Share("out", 1, 2)) for layer in layers]
    assert shares_input(parts)
    pack(parts)
    assert len({p.get_parameter("V").untyped_storage().data_ptr() for p in parts}) == 1
    x = torch.randn(3, I, dtype=torch.float64)
    expected = torch.cat([layer(x).chunk(2, -1)[1] for layer in layers], -1)
    torch.testing.assert_close(product(parts, x, lambda z: z), expected)


@pytest.mark.parametrize(
    ("spec", "size", "said"),
    [
        (BlastSpec(I, O, 4, 6), 8, "over 8 processes; expected blocks that they divide"),
        (LowRankSpec(I, O, 5), 3, "r=5 over 3 processes"),
        (KroneckerSpec(24, 24, ((1, 4, 4, 6), (4, 6, 6, 1))), 2, "serve it in one process"),
    ],
)
def test_what_cannot_be_split_is_named(spec: Spec, size: int, said: str) -> None:
    with pytest.raises(CapabilityError, match=r"model.x_proj") as raised:
        Part("model.x_proj", spec, (spec.out_features, I), Share("out", 0, size), torch.float32)
    assert said in str(raised.value) and "\n" not in str(raised.value)


def test_a_factor_of_another_layer_is_refused() -> None:
    part = Part("x", SPECS["blast"], (O, I), Share(), torch.float32)
    with pytest.raises(ValueError, match=r"x\.U: \[4, 8, 7\], expected \[4, 8, 6\]"):
        part.load("U", torch.zeros(4, 8, 7))
    with pytest.raises(ValueError, match="expected one of U, S, V"):
        part.load("weight", torch.zeros(4))


PACKED: dict[str, Spec] = {
    "low rank": QuantizedSpec(LowRankSpec(I, O, 5), 4, 32),
    "couplings too": QuantizedSpec(BlastSpec(I, O, 4, 6), 8, 32, kept_bits=8),
    "corrected": CorrectedSpec(QuantizedSpec(DenseSpec(I, O), 2, 32), LowRankSpec(I, O, 2)),
    "float8": QuantizedSpec(LowRankSpec(I, O, 5), 8, 0, fp8=True),
}


@pytest.mark.parametrize("name", PACKED)
def test_layers_in_few_bits_are_held_whole(name: str) -> None:
    """As they are stored, beside parts of other kinds; several processes cannot share them."""
    torch.manual_seed(0)
    spec, x = PACKED[name], torch.randn(3, I)
    layer = layer_of(spec, bias=False).requires_grad_(False)
    for stored in layer.state_dict().values():
        made = (
            torch.randn(stored.shape) if stored.is_floating_point() else torch.randint(128, stored.shape)
        )
        stored.copy_(made)
    part = make_part("x", spec, (O, I), Share(), torch.float32)
    assert isinstance(part, PackedPart)
    for factor, tensor in layer.state_dict().items():
        part.load(factor, tensor)
        assert part.get_submodule("layer").state_dict()[factor].equal(tensor)
        assert f"{part.path(factor)}" in part.state_dict()
    assert part.loaded == set(part.names)
    assert product([part, part], x, lambda z: z).equal(torch.cat([layer(x)] * 2, -1))
    with pytest.raises(CapabilityError, match=r"over 2 processes.*serve it in one process"):
        make_part("x", spec, (O, I), Share("out", 0, 2), torch.float32)
    with pytest.raises(ValueError, match=r"expected one of"):
        part.load("nothing", x)


@pytest.mark.parametrize("excluded", [[], ["*.experts.down_proj.*"]])
def test_experts_of_a_server_are_those_of_the_model(excluded: list[str], tmp_path: Path) -> None:
    """Of stacks that are compressed, and beside one that is dense."""
    source = save_pico("qwen3-moe", tmp_path / "dense")
    output = compress_to(source, tmp_path / "out", method="svd", cf=1.5, exclude=excluded)
    model, start = load_written(output), "model.layers.1.mlp.experts."
    table = {n.removeprefix(start): e for n, e in model.config.blr["layers"].items() if start in n}
    assert len(table) == (8 if excluded else 12)
    with torch.device("meta"):
        native = Qwen3MoeExperts(model.config)
    stacks = {"gate_up_proj": ["gate_proj", "up_proj"], "down_proj": ["down_proj"]}
    made = make_experts(native, stacks, {name: spec_from_dict(entry) for name, entry in table.items()})
    tensors = load_file(output / "model.safetensors")
    mine = {n.removeprefix(start): t for n, t in tensors.items() if start in n}
    assert set(load_experts(made, mine.items())) == made.state_dict().keys()
    with pytest.raises(ValueError, match=r"expert gate_proj.0.U: \[1\], expected \[16, 7\]"):
        [*load_experts(made, [("gate_proj.0.U", torch.ones(1))])]
    x, (weights, chosen) = torch.randn(5, 32), torch.rand(5, 4).topk(2)
    expected = model.get_submodule(start[:-1])(x, chosen, weights)
    torch.testing.assert_close(made(x, chosen, weights), expected)
