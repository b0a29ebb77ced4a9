"""Float8: rows of activations, products and complete layers against plain torch, and what shares rows.

Triton's interpreter cuts off where it rounds to float8, by which numbers may be a step (1/8) apart and
sums of many some percent, and halves some just below a power of two; what the hardware makes of it is
checked by tests/gpu/test_float8.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from compiling import compile_for
from torch import Tensor, nn

from blr.compressor.modeling import float8
from blr.compressor.modeling.models import replace_layers
from blr.compressor.structures.packing import pack_factor
from blr.compressor.structures.specs import (
    BlastSpec,
    DenseSpec,
    LowRankSpec,
    MonarchSpec,
    QuantizedSpec,
    Spec,
)
from blr.kernels.common import launching
from blr.kernels.common.available import has_triton
from blr.kernels.fp8 import launch, op
from blr.kernels.fp8.launch import LAYERS, Fp8Tile, dense
from blr.kernels.fp8.reference import (
    E4M3,
    MAKES,
    Factors,
    Scales,
    dequantize_fp8,
    even,
    even_ranks,
    layer,
    product,
    quantize_fp8,
    quantize_rows,
    scales_of,
)
from blr.kernels.layers.blast.reference import blast_linear
from blr.kernels.layers.lowrank.reference import lowrank_linear
from blr.kernels.layers.monarch.reference import monarch_linear

needs_triton = pytest.mark.skipif(not has_triton(), reason="needs triton")
SMALL = Fp8Tile(BM=16, BN=16, BK=32, warps=4)
REFERENCES: dict[str, Callable[..., Tensor]] = {"lowrank": lowrank_linear, "monarch": monarch_linear}


def relative(y: Tensor, expected: Tensor) -> float:
    return float((y.double() - expected.double()).norm() / expected.double().norm())


def weight(*shape: int) -> tuple[Tensor, Tensor, Tensor]:
    q, scale = quantize_fp8(torch.randn(shape) / shape[-1] ** 0.5, scale_dtype=torch.float32)
    return q, scale, dequantize_fp8(q, scale, torch.float64)


def inputs(n: int, i: int) -> Tensor:
    """Rows of all sizes, one of zeros, one with an outlier."""
    x = torch.randn(n, i) * torch.logspace(-6, 4, n)[:, None]
    x[n // 2] = 0
    x[-1, 3] *= 300
    return x


@needs_triton
@pytest.mark.parametrize("make", MAKES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rows_are_those_of_plain_torch(make: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, other, gain = inputs(7, 100).to(dtype), torch.randn(7, 100).to(dtype), torch.rand(100).to(dtype)
    other = other[1] if make == "layer" else other
    kept, expected = torch.full_like(x, torch.nan), torch.empty_like(x)
    found = launch.quantize_rows(x, make, other, gain, 1e-5, kept)
    right = quantize_rows(x, make, other, gain, 1e-5, expected)
    assert torch.allclose(kept.float(), expected.float(), rtol=2e-2, atol=1e-6)
    for name in ("scale", "norm", "unit_norm"):
        assert torch.allclose(getattr(found, name), getattr(right, name), rtol=2e-2), name
    back, expected = (r.q.float() * r.scale[:, None] for r in (found, right))
    close = (back - expected).abs() <= expected.abs() / 7 + right.scale[:, None] / 256
    assert float(close.float().mean()) > 0.97
    whole = MAKES[make](x, other, gain, 1e-5).float()
    assert bool(((expected - whole).abs() <= whole.abs() / 15 + right.scale[:, None] / 512).all())
    assert bool((expected.norm(dim=-1) <= right.norm).all())


@pytest.mark.parametrize("make", launch.BESIDE)
@pytest.mark.parametrize("of", [launch.quantize_rows, quantize_rows], ids=["kernel", "reference"])
def test_a_missing_second_tensor_is_never_read_elsewhere(make: str, of: Any) -> None:
    with pytest.raises((AssertionError, TypeError)):
        of(torch.ones(2, 4), make, None, torch.ones(4), 1e-5)


def test_rows_are_planned_for_the_dtypes_of_all_that_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch that is done again hands on addresses: a gain of another dtype is another launch."""
    made: list[Any] = []
    usual = op.rows_plan
    monkeypatch.setattr(op, "rows_plan", lambda *given: made.append(given) or usual(*given))
    op._PLANS.clear()
    x, wide = torch.randn(2, 32).bfloat16(), torch.rand(32)
    for gain in (wide, wide.bfloat16(), wide, None):
        op.fp8_rows(x, "" if gain is None else "rms", None, gain, 1e-5)
    for other in (x, x.float(), x):
        op.fp8_rows(x, "swiglu", other)
    assert len(made) == 5


@needs_triton
@pytest.mark.parametrize(("batch", "M", "N", "K"), [(1, 5, 20, 70), (3, 33, 17, 32), (2, 16, 48, 64)])
def test_products_scale_add_a_bias_and_permute(batch: int, M: int, N: int, K: int) -> None:
    torch.manual_seed(0)
    a, b = torch.randn(batch, M, K).to(E4M3), torch.randn(batch, N, K).to(E4M3)
    by_row, by_col, bias = torch.rand(M), torch.rand(batch, N), torch.randn(batch, N)
    expected = product(a, b, by_row, by_col, torch.float32, bias)
    y = launch.product(a, b, by_row, by_col, torch.full_like(expected, torch.nan), bias, tile=SMALL)
    assert relative(y, expected) < 1e-5
    if N % 4 == 0:
        room = torch.full((4, M, batch, N // 4), torch.nan)
        launch.product(a, b, by_row, by_col, room.permute(2, 1, 0, 3), bias, part=N // 4, tile=SMALL)
        assert relative(room.permute(2, 1, 0, 3).flatten(2), expected) < 1e-5


@needs_triton
@pytest.mark.parametrize("lasting", [False, True])
def test_products_through_the_copy_engine(lasting: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches below and beside one another, sizes that are no multiples of a tile."""
    torch.manual_seed(0)
    monkeypatch.setattr(launch, "multiprocessors", lambda device: 2)
    monkeypatch.setattr(
        launch, "tma_ready", lambda a, b: launch.engine_reads(a) and launch.engine_reads(b)
    )
    tile = SMALL._replace(lasting=lasting)
    for batch, M, N, K in ((1, 37, 40, 48), (3, 32, 32, 64), (3, 20, 48, 32)):
        wide = torch.randn(M, batch * K).to(E4M3).view(M, batch, K).transpose(0, 1)
        for a in (wide, wide.contiguous()):
            b, by_row, by_col = torch.randn(batch, N, K).to(E4M3), torch.rand(M), torch.rand(batch, N)
            bias = torch.randn(batch, N)
            expected = product(a, b, by_row, by_col, torch.float32, bias)
            beside = torch.full((M, batch, N), torch.nan).transpose(0, 1)
            for out in (beside, beside.contiguous()):
                launch.product(a, b, by_row, by_col, out, bias, tile=tile)
                assert relative(out, expected) < 1e-5


@needs_triton
@pytest.mark.parametrize("blocks", [1, 3, 16])
def test_the_mix_is_of_all_blocks(blocks: int) -> None:
    torch.manual_seed(0)
    z, s = torch.randn(blocks, 21, 40), torch.rand(blocks, blocks, 40)
    expected = torch.einsum("klr,lnr->knr", s, z)
    assert relative(launch.mix(z, s, torch.full_like(z, torch.nan)), expected) < 1e-5


def test_tiles_fill_the_gpu() -> None:
    for sizes in ((512, 1024, 4096, 1), (512, 896, 1024, 4), (512, 256, 1024, 16)):
        M, N, _, batch = sizes
        tile = launch.tile_for(*sizes)
        assert -(-M // tile.BM) * -(-N // tile.BN) * batch >= 100
    assert launch.tile_for(8192, 4096, 1024).BN == 256 and launch.tile_for(33, 1024, 4096).BM == 64


def made(structure: str, b: int, p: int, q: int, r: int) -> tuple[list[Tensor], Scales, list[Tensor]]:
    """Weights, scales and, in float64, the factors in canonical shape."""
    b = 1 if structure == "lowrank" else b
    (U, us, Ud), (V, vs, Vd) = weight(b, q, r), weight(b, r, p)
    S = torch.randn(b, b, r) if structure == "blast" else None
    scales = scales_of(us, V, vs, S)
    exact = [Ud, Vd.mT] if S is None else [Ud, S.double(), Vd.mT]
    return [U, V], scales, [f[0] for f in exact] if structure == "lowrank" else exact


CASES = [(4, 16, 12, 8), (3, 10, 7, 6), (2, 40, 24, 20)]


@pytest.mark.parametrize("sizes", CASES, ids=str)
@pytest.mark.parametrize("structure", ["lowrank", "monarch", "blast"])
def test_layers_lose_what_float8_loses(
    structure: str, sizes: tuple[int, int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In every row: those of zeros are the bias, large and small ones as exact as others."""
    monkeypatch.setattr(launch, "tile_for", lambda *sizes: SMALL)
    torch.manual_seed(0)
    weights, scales, exact = made(structure, *sizes)
    blocks, p = weights[1].shape[0], weights[1].shape[2]
    rows, bias = quantize_rows(inputs(9, blocks * p)), torch.randn(op.outputs_of(weights))
    given = rows.q.double() * rows.scale[:, None]
    right = {**REFERENCES, "blast": blast_linear}[structure](given, *exact)
    args = [t for t in scales if t is not None]
    y = layer(structure, rows, weights, args, torch.float32, None).double()
    assert bool(((y - right).norm(dim=-1) <= 0.08 * right.norm(dim=-1)).all())
    z = layer(structure, rows, weights, args, torch.float32, bias)
    assert bool(((z - y - bias).norm(dim=-1) <= 1e-3 * (y.norm(dim=-1) + bias.norm())).all())
    if has_triton():
        found = LAYERS[structure](rows, *weights, scales, torch.float32)
        missed = (found - right).norm(dim=-1) / right.norm(dim=-1).clamp_min(1e-30)
        assert float(missed.median()) < 0.15 and torch.equal(found[4], torch.zeros_like(found[4]))


@pytest.mark.parametrize("structure", ["lowrank", "monarch", "blast"])
def test_ranks_of_zeros_change_nothing(structure: str) -> None:
    torch.manual_seed(0)
    for b, p, q, r in ((3, 10, 7, 15), (4, 16, 12, 52), (2, 8, 8, 32)):
        b = 1 if structure == "lowrank" else b
        r = r // b * b
        (U, us, _), (V, vs, _) = weight(b, q, r), weight(b, r, p)
        S = torch.randn(b, b, r) if structure == "blast" else None
        rows, ys = quantize_rows(inputs(5, b * p)), []
        plain = Factors(U, V, us, vs, S)
        for f in (plain, even_ranks(structure, plain)):
            scales = [t for t in scales_of(f.U_scale, f.V, f.V_scale, f.S) if t is not None]
            ys.append(layer(structure, rows, [f.U, f.V], scales, torch.float32))
        assert relative(ys[1], ys[0]) < 1e-5
    assert [even(rank) for rank in (1, 5, 13, 15, 29, 64, 1593)] == [1, 6, 16, 16, 32, 64, 1600]


def test_launches_after_the_first_call_what_was_compiled() -> None:
    class Kernel:
        arg_names = ("x", "n", "WIDE")

        def __init__(self) -> None:
            self.compiled: list[str] = []
            self.run: list[object] = []

        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., object]:
            def call(x: Tensor, n: int, *, WIDE: int, num_warps: int) -> object:
                self.compiled.append(f"{x.dtype} {n} {WIDE} {num_warps}")
                return self

            def again(*given: object) -> None:
                self.run.append((grid, *given[1:]))

            return again if len(grid) == 3 else call

    kernel, x = Kernel(), torch.zeros(64)
    cases = ((x, 3, 4), (x, 5, 4), (x, 16, 4), (x, 3, 8), (x.half(), 3, 4))
    for given, n, warps in cases:
        launching.launch(kernel, (7,), (given, n), {"WIDE": 8}, num_warps=warps)
    assert len(kernel.compiled) == 4 and kernel.run == [((7, 1, 1), 5, 8)]


@needs_triton
def test_a_dense_layer_is_a_product(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "tile_for", lambda *sizes: SMALL)
    W, scale, exact = weight(24, 50)
    rows, bias = quantize_rows(inputs(5, 50)), torch.randn(24)
    y = dense(rows, W, None, Scales(None, scale.view(-1)), torch.float32, bias)
    assert relative(y, rows.q.double() * rows.scale[:, None] @ exact.mT + bias) < 1e-5


def test_no_z_leaves_the_range() -> None:
    """Inputs along the longest row of V, the worst that there is."""
    torch.manual_seed(0)
    (U, us, _), (V, vs, Vd) = weight(1, 8, 4), weight(1, 4, 64)
    x = torch.stack([Vd[0, 0], torch.full((64,), 3e4), torch.full((64,), 1e-20)]).float()
    V_flat = torch.ones(1, 4, 64).to(E4M3)
    for weights, scale in (((U, V), vs), ((U, V_flat), torch.ones(1, 4, 1))):
        rows, scales = quantize_rows(x), scales_of(us, weights[1], scale)
        assert scales.first is not None
        z = product(rows.q[None], weights[1], rows.unit_norm, scales.first, torch.float32)
        assert 200 < float(z.abs().max()) <= 448


class Block(nn.Module):
    """q, k and v of one input, and a layer of another."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(32, n) for n in (32, 16, 16))
        self.o_proj = nn.Linear(32, 32, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.nn.functional.rms_norm(x, (32,))
        v = torch.cat([self.k_proj(x), self.v_proj(x)], -1)
        return self.o_proj(torch.tanh(self.q_proj(x) * v))


SPECS: dict[str, Spec] = {
    "q_proj": LowRankSpec(32, 32, 9),
    "k_proj": BlastSpec(32, 16, 4, 6),
    "v_proj": MonarchSpec(32, 16, 4, 2),
    "o_proj": DenseSpec(32, 32),
}


@pytest.fixture
def block(monkeypatch: pytest.MonkeyPatch) -> tuple[nn.Module, list[int]]:
    """One in float8, on a device that is said to multiply so, and how often rows were made."""
    torch.manual_seed(0)
    count, run = [0], op._run_rows

    def counted(x: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        count[0] += 1
        return run(x, *rest)

    monkeypatch.setattr(float8, "fp8_device", lambda device: True)
    monkeypatch.setattr(op, "_run_rows", counted)
    model = Block().to(torch.bfloat16)
    packing = {name: QuantizedSpec(spec, 8, 0, fp8=True) for name, spec in SPECS.items()}
    replace_layers(model, {name: spec.to_dict() for name, spec in packing.items()})
    for name, spec in packing.items():
        for factor, shape in spec.shapes().items():
            made = pack_factor(spec, factor, torch.randn(shape) / shape[-1] ** 0.5, torch.bfloat16)
            for stored, tensor in made.items():
                getattr(model.get_submodule(name), stored).data.copy_(tensor)
    return model.requires_grad_(False), count


@torch.no_grad()
def test_layers_of_one_input_share_its_rows(block: tuple[nn.Module, list[int]]) -> None:
    model, count = block
    x = torch.randn(2, 7, 32, dtype=torch.bfloat16)
    y = model(x)
    assert count[0] == 2  # of q, k and v together, and of o
    with torch.enable_grad():
        expected = model(x.clone().requires_grad_())  # dequantized
    assert count[0] == 2 and relative(y, expected.detach()) < 0.12
    q, k = model.get_submodule("q_proj"), model.get_submodule("k_proj")
    first = q(x)
    x.mul_(2)
    assert relative(q(x) - first, first) < 0.02 and count[0] == 4  # written to in between
    assert k(torch.zeros(0, 32, dtype=torch.bfloat16)).shape == (0, 16)


def test_a_bias_gets_its_gradient(block: tuple[nn.Module, list[int]]) -> None:
    """Of inputs that ask for none: a layer that dequantizes has one."""
    model, count = block
    bias = model.get_parameter("q_proj.bias").requires_grad_()
    model.get_submodule("q_proj")(torch.randn(3, 32, dtype=torch.bfloat16)).sum().backward()
    assert count[0] == 0 and bias.grad is not None and bool((bias.grad == 3).all())


def test_compiled_layers_are_one_graph_that_shares_rows(block: tuple[nn.Module, list[int]]) -> None:
    model, _ = block
    x = torch.randn(2, 7, 32, dtype=torch.bfloat16)
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, _: object) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    expected = model(x)  # what a compiler cannot make is there behind this, as behind a move to a GPU
    y = torch.compile(model, backend=keep, fullgraph=True)(x)
    assert relative(y, expected) < 0.02
    assert sum(node.target is op._ROWS.op for node in graphs[-1].graph.nodes) == 2


def test_where_nothing_multiplies_in_float8_weights_are_dequantized(
    block: tuple[nn.Module, list[int]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model, count = block
    monkeypatch.setattr(float8, "fp8_device", lambda device: False)
    monkeypatch.setattr("blr.compressor.modeling.settings._said", set())
    for _ in range(2):
        assert torch.isfinite(model(torch.randn(3, 32, dtype=torch.bfloat16))).all()
    assert count[0] == 0 and caplog.text.count("dequantized at every product") == 1


@needs_triton
@pytest.mark.parametrize("lasting", [False, True])
def test_the_hopper_product_has_wide_instructions_and_no_spills(lasting: bool) -> None:
    tile = "tensordesc<fp8e4nv[{},128]>"
    names = "M N K BATCHES a_rows a_cols b_rows b_cols by_batch bias_batch c_batch c_row c_part part"
    to = "tensordesc<bf16[128,128]>" if lasting else tile.format(128)
    signature = {"a": tile.format(128), "b": tile.format(256), "to": to, "bias": "*bf16", "c": "*bf16"}
    signature |= {"by_row": "*fp32", "by_col": "*fp32"} | dict.fromkeys(names.split(), "i32")
    constants = {"BM": 128, "BN": 256, "BK": 128, "GROUP": 8, "BIAS": False, "RUN": 16}
    constants |= {"HALVES": lasting, "FLATTEN": lasting, "STAGES": 3}
    made = compile_for(
        "blr.kernels.fp8.triton", "product_tma_kernel", signature, constants, 90, num_warps=8
    )
    assert "wgmma.mma_async.sync.aligned.m64n256k32.f32.e4m3.e4m3" in made["asm"]["ptx"]
    assert made["spills"] == 0 and made["shared"] <= 232448
