"""Experts in few bits: kernels in the interpreter, and the experts of a block that run them."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from compiling import compile_for
from exporting import compress_to
from pico import MORE, save_model
from tolerances import TOLERANCES
from torch import Tensor

from blr.compressor.loading.loader import load_written
from blr.compressor.modeling import experts
from blr.compressor.modeling.experts import KernelExperts
from blr.compressor.modeling.layers import KernelLinear, StructuredLinear
from blr.compressor.modeling.modeling_blr import Experts
from blr.compressor.modeling.stages import Packed
from blr.kernels.common.available import has_triton
from blr.kernels.decode.quantized.reference import dequantize, quantize
from blr.kernels.layers.experts import op
from blr.kernels.layers.experts.op import (
    Stack,
    Weight,
    add_mixed,
    expert_low_rank,
    expert_mixed,
    expert_products,
    expert_sums,
    expert_weights,
    mixes,
    stack_of,
)
from blr.kernels.layers.routing.launch import Routing, routed, routed_reference

E, P = 4, 2
needs_triton = pytest.mark.skipif(not has_triton(), reason="needs triton")


def made(bits: int, group: int, rows: int, K: int, ranks: int) -> tuple[Stack, Tensor, Any]:
    """A stack of experts, its dense weights in float64, and what must live as long. The corrections of
    experts have fewer and fewer ranks."""
    weights, dense = [], []
    for n in range(E * P):
        w = torch.randn(rows, K, generator=torch.Generator().manual_seed(n))
        packed, scale = quantize(w, bits, torch.float32, group)
        number = max(ranks - n // P, 0)
        u, v = torch.randn(rows, number), torch.randn(number, K)
        weights.append(Weight(packed, scale, *((u, v) if number else ())))
        dense.append(dequantize(packed, scale, bits, K, torch.float64, group) + u.double() @ v.double())
    each = [weights[n : n + P] for n in range(0, E * P, P)]
    return stack_of(each, rows, K, bits, group, True), torch.stack(dense).view(E, P * rows, K), weights


def assert_multiplies(stack: Stack, dense: torch.Tensor) -> None:
    """Products with the chosen experts and plain weights are those of `dense` [E, R, K], in float64."""
    x, chosen = torch.randn(3, stack.K), torch.tensor([2, 0, 0, 3, 2, 2])
    ends = torch.tensor([2, 2, 5, 6], dtype=torch.int32)
    with torch.no_grad():
        y = expert_products(x, chosen, stack)
    wanted = torch.einsum("prk,pk->pr", dense[chosen], x.double().repeat_interleave(2, 0))
    assert (y - wanted).norm() <= TOLERANCES[torch.float32] * wanted.norm()
    order = chosen.argsort(stable=True)
    with torch.no_grad():
        y = many(x, order // 2, ends, stack)
    assert (y - wanted[order]).norm() <= TOLERANCES[torch.float32] * wanted.norm()
    assert_gates_and_sums(stack, dense, x, chosen)


def many(x: Tensor, index: Tensor, ends: Tensor, stack: Stack) -> Tensor:
    """What many tokens take: the products of pairs in the order of their experts."""
    if not stack.bits:
        return expert_low_rank(x, index, ends, None, stack)
    plain = expert_weights(ends, stack, x)
    assert plain[1].isnan().all()
    rows = zip(
        x[index].double().split(ends.diff(prepend=ends.new_zeros(1)).tolist()), plain, strict=True
    )
    y = torch.cat([given @ w.mT.double() for given, w in rows if len(given)])
    return expert_low_rank(x[index], None, ends, y.float(), stack) if stack.ranks else y


def assert_gates_and_sums(stack: Stack, dense: Tensor, x: Tensor, chosen: Tensor) -> None:
    """Gates of products, and their weighted sums, alone and added, in float64."""
    wanted = torch.einsum("prk,pk->pr", dense[chosen], x.double().repeat_interleave(2, 0))
    if dense.shape[1] % 2 == 0:
        gate, up = wanted.chunk(2, -1)
        with torch.no_grad():
            found = expert_products(x, chosen, stack, "swiglu")
        inner = torch.nn.functional.silu(gate) * up
        assert (found - inner).norm() <= TOLERANCES[torch.float32] * inner.norm()
    alone = stack._replace(addresses=stack.addresses[:, :1].contiguous())
    if stack.rows % 2 == 0:  # gate and up are one layer
        gate, up = wanted[:, : stack.rows].chunk(2, -1)
        with torch.no_grad():
            found = expert_products(x, chosen, alone, "geglu")
        inner = torch.nn.functional.gelu(gate, approximate="tanh") * up
        assert (found - inner).norm() <= TOLERANCES[torch.float32] * inner.norm()
    given, weights = torch.randn(6, stack.K), torch.rand(3, 2)
    wanted = torch.einsum("prk,pk->pr", dense[chosen, : stack.rows], given.double())
    sums = (wanted.view(3, 2, -1) * weights[..., None]).sum(1)
    with torch.no_grad():
        found = expert_mixed(given, chosen, weights, alone)
    assert (found - sums).norm() <= TOLERANCES[torch.float32] * sums.norm()
    if mixes(alone, 2):
        before = torch.randn(3, stack.rows)
        add_mixed(given, chosen, weights, alone, y := before.clone())
        assert (y - before - sums).norm() <= TOLERANCES[torch.float32] * sums.norm()


@needs_triton
@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("ranks", [0, 5])
@pytest.mark.parametrize(("rows", "K"), [(16, 128), (19, 100)])
@pytest.mark.parametrize(("bits", "group"), [(8, 128), (4, 64), (3, 32), (2, 32)])
def test_products_with_the_chosen_experts(bits: int, group: int, rows: int, K: int, ranks: int) -> None:
    """Each token is multiplied with those it chose, of one layer or several; plain weights are those of
    experts with tokens."""
    stack, dense, _alive = made(bits, group, rows, K, ranks)
    assert_multiplies(stack, dense)


@needs_triton
@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize(("rows", "K", "ranks"), [(16, 128, 8), (19, 100, 5), (140, 260, 70)])
def test_low_rank_of_the_chosen_experts(rows: int, K: int, ranks: int) -> None:
    """Ranks differ between experts, as sensitivities give them."""
    each = [(torch.randn(rows, ranks - n), torch.randn(ranks - n, K)) for n in range(E)]
    stack = stack_of([[Weight(None, None, u, v)] for u, v in each], rows, K, 0, 0, False)
    dense = torch.stack([u.double() @ v.double() for u, v in each])
    assert_multiplies(stack, dense)


@needs_triton
@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("routing", [Routing(3, True), Routing(1, False), Routing(5, False)])
def test_the_choice_of_a_router(routing: Routing) -> None:
    """The norm, the experts and their weights by one kernel, and the weighted sums of what they give."""
    x, gain, logits = torch.randn(4, 20), torch.rand(20), torch.randn(4, 5)
    found = routed(x, gain, 1e-6, logits, routing, torch.float32, False)
    wanted = routed_reference(x, gain, 1e-6, logits, routing, torch.float32)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other)
    y = torch.randn(4 * routing.number, 33)
    sums = torch.einsum("nkc,nk->nc", y.view(4, routing.number, 33), wanted[2])
    places = torch.randperm(len(y)).view(4, -1)
    shuffled = torch.empty_like(y).index_copy_(0, places.flatten(), y)
    with torch.no_grad():
        for given in ((y, None), (shuffled, places)):
            torch.testing.assert_close(expert_sums(*given, wanted[2]), sums)


def block_of(folder: Path, name: str, dtype: torch.dtype, **method: Any) -> tuple[Experts, Experts]:
    """The experts of a model's first block, compressed, with kernels and without."""
    config, settings, model = MORE[name]
    save_model(config, settings, model, folder / "dense")
    compressed = load_written(compress_to(folder / "dense", folder / "out", **method)).to(dtype)
    for layer in compressed.modules():
        if isinstance(layer, StructuredLinear):
            layer.relayout_().widen_()
    found = copy.deepcopy(next(m for m in compressed.modules() if isinstance(m, KernelExperts)))
    plain = copy.deepcopy(found)  # copies lie at multiples of 16 bytes, what a file holds may not
    plain.__class__ = Experts
    return found, plain


METHODS: dict[str, dict[str, Any]] = {
    "int4": {"method": "dense", "quantize": "int4", "group": 32},
    "int2 + low rank": {"method": "svd", "base": "int2", "rank": 4, "group": 32},
    "low rank": {"method": "svd", "rank": 8},
}


@needs_triton
@pytest.mark.parametrize("name", ["mixtral", "qwen3-moe", "gpt-oss"])
@pytest.mark.parametrize("method", METHODS)
def test_a_block_of_experts(
    name: str, method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few tokens give what the experts give one after the other, also where they are copied."""
    found, plain = block_of(tmp_path, name, torch.float16, **METHODS[method])
    x = torch.randn(5, width_of(found)).half()
    weights, chosen = torch.rand(5, found.count).topk(2)
    with torch.no_grad():
        wanted = plain(x, chosen, weights)
        with by_kernels(monkeypatch):
            y, copied = found(x, chosen, weights), copy.deepcopy(found)
            add, stream = found.adding(x, 2), torch.randn(x.shape)
            assert (add is None) == (name == "gpt-oss" or method == "low rank")
            if add is not None:
                add(x, chosen, weights, added := stream.clone())
                torch.testing.assert_close(added - stream, y.float(), rtol=1e-2, atol=1e-2)
            for tensor in (*found.buffers(), *found.parameters()):
                tensor.zero_()
            assert not found(x, chosen, weights).any() and copied(x, chosen, weights).equal(y)
    assert (y - wanted).norm() <= TOLERANCES[torch.float16] * wanted.norm()


@contextmanager
def by_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """While active, kernels run in the interpreter, and nothing else computes experts."""
    with monkeypatch.context() as patched:
        patched.setenv("BLR_KERNELS", "triton")
        patched.setattr(Packed, "runs_kernels", lambda packed: True)
        patched.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        patched.setattr(Experts, "forward", None)
        yield


def width_of(block: Experts) -> int:
    return next(m.in_features for m in block.modules() if isinstance(m, KernelLinear))


@needs_triton
def test_many_tokens_take_grouped_products(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experts, "FEW", 4)
    found, plain = block_of(tmp_path, "qwen3-moe", torch.bfloat16, **METHODS["int4"])
    x = torch.randn(1, 40, width_of(found)).bfloat16()
    weights, chosen = torch.rand(40, found.count).topk(2)
    with torch.no_grad():
        wanted = plain(x, chosen, weights)
        with by_kernels(monkeypatch):
            y = found(x, chosen, weights)
    assert (y - wanted).norm() <= TOLERANCES[torch.bfloat16] * wanted.norm()


def stack_like(rows: int, K: int, parts: int, bits: int) -> Stack:
    """A stack of the 30B's sizes; corrections of 8 ranks beside 2 bits."""
    addresses = torch.zeros(1, parts, 7, dtype=torch.int64)
    return Stack(addresses, rows, K, bits, 128, False, 8 if bits == 2 else 0, True)


@needs_triton
@pytest.mark.parametrize("bits", [4, 2])
def test_wide_loads_where_addresses_come_from_a_table(bits: int) -> None:
    """The compiler takes addresses for multiples of 16 bytes: a thread loads 16 at once, of gate and up
    and of all experts of a token before it waits."""
    common = {"table": "*i64", "chosen": "*i64", "z": "*fp32", "x": "*bf16"}
    sizes = dict.fromkeys(("rows", "K", "w_row", "scale_row"), "i32")
    gate_up, down = stack_like(768, 2048, 2, bits), stack_like(2048, 768, 1, bits)
    tile = op._tile(gate_up, gate_up.rows, op.DEEP_GATED, torch.bfloat16)
    constants = {"PARTS": 2, "ACT": "silu", "T": tile, "EARLY": True, "PDL": True}
    types = {**common, **sizes, "x_row": "i32", "each": "i32", "y": "*bf16"}
    assert_loads_wide("products_kernel", types, constants)
    tile = op._tile(down, down.rows, op.DEEP_MIXED, torch.bfloat16)
    constants = {"COUNT": 8, "ADD": True, "T": tile, "PDL": True}
    types = {**common, **sizes, "weights": "*fp32", "y": "*fp32", "y_row": "i32"}
    assert_loads_wide("mixed_kernel", types, constants)


def assert_loads_wide(kernel: str, types: dict[str, str], constants: dict[str, Any]) -> None:
    result = compile_for(
        *("blr.kernels.layers.experts.triton", kernel, types, constants, 90),
        divisible=tuple(name for name in types if name not in ("each", "scale_row")),
        num_warps=op.WARPS,
    )
    ptx = result["asm"]["ptx"]
    assert result["spills"] == 0 and "ld.global.v4.b32" in ptx
    assert ptx.index("ld.global.v4.b32") < ptx.index("griddepcontrol.wait")


COMPILED: dict[str, tuple[dict[str, str], dict[str, object], int]] = {
    "plain_kernel": (
        {"table": "*i64", "ends": "*i32", "y": "*bf16", "rows": "i32", "K": "i32"}
        | {"w_row": "i32", "scale_row": "i32"},
        {"PARTS": 2, "BITS": 2, "GROUP": 128, "LOW": 2, "MIDDLE": 1.5, "CURVED": False, "BR": 16},
        4,
    ),
    "low_rank_kernel": (
        {"x": "*bf16", "index": "*i64", "ends": "*i32", "table": "*i64", "like": "*bf16"}
        | {"base": "*bf16", "y": "*bf16"}
        | dict.fromkeys(("x_row", "x_part", "y_row", "rows", "K", "experts"), "i32"),
        {"PARTS": 2, "KIND": 3, "EVEN": True, "INDEXED": True, "ADD": False}
        | {"BM": 128, "BN": 128, "BK": 64, "BE": 128},
        8,
    ),
    "sums_kernel": (
        {"found": "*bf16", "places": "*i64", "weights": "*bf16", "y": "*bf16", "columns": "i32"},
        {"K": 8, "PLACED": True, "BC": 1024},
        4,
    ),
    "routing_kernel": (
        {"x": "*fp32", "x_row": "i32", "gain": "*bf16", "eps": "fp32", "logits": "*fp32"}
        | {"logits_row": "i32", "normed": "*bf16", "chosen": "*i64", "weights": "*fp32"}
        | {"columns": "i32", "experts": "i32"},
        {"K": 8, "SCALED": True, "BC": 2048, "BE": 128, "BK": 8, "PDL": True},
        8,
    ),
}


@needs_triton
@pytest.mark.parametrize("kernel", COMPILED)
def test_kernels_compile_for_a_gpu(kernel: str) -> None:
    """At the sizes of Qwen3-30B-A3B, with nothing spilled."""
    types, constants, warps = COMPILED[kernel]
    odd = ("x_row", "eps", "logits_row", "scale_row")
    room = "routing" if kernel == "routing_kernel" else "experts"
    result = compile_for(
        *(f"blr.kernels.layers.{room}.triton", kernel, types, constants, 90),
        divisible=tuple(name for name in types if name not in odd),
        num_warps=warps,
    )
    assert result["spills"] == 0
    assert kernel != "low_rank_kernel" or "wgmma.mma_async" in result["asm"]["ptx"]
