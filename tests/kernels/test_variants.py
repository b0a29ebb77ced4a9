"""Complete layers by our kernels, their parts, and what the compiler makes of them.

Numbers come from Triton's interpreter against float64: float32 and float16 (its bfloat16 dots are
meaningless).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from compiling import compile_for
from tolerances import TOLERANCES
from torch import Tensor

from blr.kernels.common.available import has_triton
from blr.kernels.decode.gemm import launch as gemm
from blr.kernels.layers.blast import variants as blast
from blr.kernels.layers.lowrank import variants as lowrank
from blr.kernels.layers.monarch import variants as monarch

pytestmark = [
    pytest.mark.skipif(not has_triton(), reason="needs triton"),
    pytest.mark.usefixtures("poison"),
]
DTYPES = [torch.float32, torch.float16]
TOKENS = [0, 1, 3, 8, 17, 129]
# blocks, p, q, r of a block and tokens: odd ones, powers of two, more than sixteen
CASES = [
    *((3, 5, 7, 11, tokens) for tokens in TOKENS),
    *((1, 7, 5, 9, tokens) for tokens in (1, 17)),
    *((4, 9, 6, 8, tokens) for tokens in (2, 129)),
    (9, 5, 3, 7, 3),
    (16, 4, 3, 5, 1),
    (18, 2, 3, 3, 5),
]
FEW = 16  # tokens that decoding kernels take
SOME = range(1, 65)  # that narrow products take


def random(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape).to(dtype)


def check(run: Callable[..., Tensor], reference: Callable[..., Tensor], *tensors: Tensor | None) -> None:
    """`run` within the tolerance of its dtype of `reference` in float64."""
    found = run(*tensors)
    wide = reference(*(None if t is None else t.double() for t in tensors))
    assert found.shape == wide.shape and found.dtype == tensors[0].dtype
    assert (found - wide).norm() <= TOLERANCES[found.dtype] * wide.norm()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("blocks, p, q, r, tokens", CASES)
def test_blast(blocks: int, p: int, q: int, r: int, tokens: int, dtype: torch.dtype) -> None:
    """Decoding and prefill, both kinds of mix, columns of x two apart."""
    torch.manual_seed(tokens)
    x = random(tokens, 2 * blocks * p, dtype=dtype)[:, ::2]
    factors = [random(*shape, dtype=dtype) for shape in ((blocks, q, r), (blocks, blocks, r))]
    factors.append(random(blocks, r, p, dtype=dtype).transpose(1, 2))
    bias = random(blocks * q, dtype=dtype)
    check(blast.bmm_mix, blast.reference, x, *factors, bias)
    check(blast.bmm, blast.reference, x, *factors, bias)
    if tokens in SOME:
        check(blast.narrow, blast.reference, x, *factors, bias)
    if tokens <= FEW:
        check(blast.gemv, blast.reference, x, *factors, bias)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("blocks, p, q, r, tokens", CASES)
def test_monarch(blocks: int, p: int, q: int, r: int, tokens: int, dtype: torch.dtype) -> None:
    torch.manual_seed(tokens)
    x = random(tokens, 2 * blocks * p, dtype=dtype)[:, ::2]
    V = random(blocks, blocks * r, p, dtype=dtype).transpose(1, 2)
    factors, bias = (random(blocks, q, blocks * r, dtype=dtype), V), random(blocks * q, dtype=dtype)
    check(monarch.permuted_store, monarch.reference, x, *factors, bias)
    check(monarch.bmm, monarch.reference, x, *factors, bias)
    if tokens in SOME:
        check(monarch.narrow, monarch.reference, x, *factors, bias)
    if tokens <= FEW:
        check(monarch.gemv, monarch.reference, x, *factors, bias)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("i, o, r", [(7, 5, 3), (70, 33, 18)])
def test_lowrank(i: int, o: int, r: int, tokens: int, dtype: torch.dtype) -> None:
    torch.manual_seed(tokens)
    x = random(tokens, 2 * i, dtype=dtype)[:, ::2]
    factors, bias = (random(o, r, dtype=dtype), random(r, i, dtype=dtype).t()), random(o, dtype=dtype)
    if tokens in SOME:
        check(lowrank.narrow, lowrank.reference, x, *factors, bias)
    if tokens <= FEW:
        check(lowrank.gemv, lowrank.reference, x, *factors, bias)


@pytest.mark.parametrize(
    "config",
    [
        {"first": {"SPLIT": 4, "BK": 16}, "add": "second"},
        {"first": {"SPLIT": 3, "BK": 16}, "add": "between", "second": {"BK": 16}},
        {"first": {"STAGES": 2, "BK": 16, "BR": 16}, "second": {"STAGES": 2, "BK": 16, "BR": 64}},
    ],
)
@pytest.mark.parametrize("tokens", [2, 16, 33, 64])
def test_parts_of_columns_are_added_in_their_order(tokens: int, config: dict[str, Any]) -> None:
    """Twice the same bits, whichever stage adds them, and tiles that end within a part."""
    torch.manual_seed(tokens)
    x, U, V = random(tokens, 150, dtype=torch.float32), torch.randn(37, 19), torch.randn(19, 150).t()
    run = partial(lowrank.narrow, **config)
    check(run, lowrank.reference, x, U, V, torch.randn(37))
    assert torch.equal(run(x, U, V), run(x, U, V))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("part", [None, 3, 16])
@pytest.mark.parametrize("m, k", [(1, 5), (70, 33), (130, 64)])
def test_product_with_bias_and_permuted_columns(
    m: int, k: int, part: int | None, dtype: torch.dtype
) -> None:
    """The batched product reads any strides, and its epilogue puts columns where it is told."""
    torch.manual_seed(m)
    batch, n = 3, 48
    a, b = random(batch, k, m, dtype=dtype).transpose(1, 2), random(batch, k, n, dtype=dtype)
    bias = random(batch, n, dtype=dtype)
    if part is None:
        out = torch.empty(batch, m, n, dtype=dtype)
        whole = out
    else:  # [batch, m, groups, part] inside [groups, m, batch, part]
        whole = torch.empty(n // part, m, batch, part, dtype=dtype)
        out = whole.permute(2, 1, 0, 3)
    gemm.bmm(a, b, out, bias, part=part)
    wide = a.double() @ b.double() + bias.double().unsqueeze(1)
    assert (out.reshape(batch, m, n) - wide).norm() <= TOLERANCES[dtype] * wide.norm()
    assert not whole.isnan().any()


def test_descriptors_take_only_what_they_can_read() -> None:
    """Batches below or beside one another, of half precision, on a GPU that has the copy engine."""
    a, b = torch.empty(2, 64, 32), torch.empty(2, 32, 64)
    assert not gemm.tma_ready(a, b), "not on a CPU"
    assert gemm.flat(torch.empty(4, 6, 8))[1:] == (6, 0)
    assert gemm.flat(torch.empty(6, 4, 8).transpose(0, 1))[1:] == (0, 8)


HALF = "*bf16"


@pytest.mark.parametrize("capability", [80, 90])
def test_product_compiles_to_matrix_instructions(capability: int) -> None:
    """No spills and two programs a multiprocessor; wgmma on Hopper."""
    pointers = ("a", "b", "bias", "c")
    config = gemm.tile_shape(4096, 1536, 256, torch.bfloat16)
    options = {name: config.pop(name) for name in ("num_warps", "num_stages")}
    constants = {**config, "BIAS": True, "RUN": 16, "ACT": "gelu", "PRECISION": "tf32"}
    scalars = ["M", "N", "K", "a_batch", "a_row", "b_batch", "b_col", "bias_batch"]
    scalars += ["c_batch", "c_row", "c_part", "part"]
    signature = dict.fromkeys(pointers, HALF) | dict.fromkeys(scalars, "i32")
    constants |= {"a_col": 1, "b_row": 1}
    signature |= dict.fromkeys(constants, "constexpr")
    made = compile_for(
        "blr.kernels.decode.gemm.triton", "bmm_kernel", signature, constants, capability,
        divisible=(*pointers, *scalars), **options,
    )  # fmt: skip
    assert made["spills"] == 0 and made["regs"] <= 255
    assert made["shared"] <= (227 if capability >= 90 else 163) * 1024 // 2
    assert ("wgmma" in made["asm"]["ptx"]) == (capability >= 90)
    assert "st.global.v4" in made["asm"]["ptx"], "permuted columns are stored 16 bytes at a time"


@pytest.mark.sampled(3)
@pytest.mark.parametrize("parts", [1, 4], ids=["whole", "parts"])
def test_narrow_products_compile_to_copies_ahead(parts: int) -> None:
    """Weights and tokens go to shared memory by asynchronous copies of 16 bytes; 64 rows by wgmma."""
    scalars = ["x_tokens", "y_tokens", "rows", "K", "x_block", "x_part", "w_block", "w_row"]
    scalars += ["y_row", "y_part", "part", "blocks", "x_col" if parts > 1 else "x_token"]
    constants: dict[str, Any] = {"BK": 64 if parts > 1 else 128, "BR": 64, "N": 16, "STAGES": 4}
    constants |= {"SPLIT": 1 if parts > 1 else 4, "PARTS": parts, "BIAS": True, "PDL": True}
    constants |= {"PRECISION": "ieee", "y_token": 1, "x_token" if parts > 1 else "x_col": 1}
    signature = dict.fromkeys(("w", "bias", "y"), HALF) | dict.fromkeys(scalars, "i32")
    signature |= {"x": "*fp32" if parts > 1 else HALF} | dict.fromkeys(constants, "constexpr")
    pointers = ("x", "w", "bias", "y")
    made = compile_for(
        "blr.kernels.decode.narrow.triton", "product_kernel", signature, constants, 90,
        divisible=(*pointers, *scalars), num_warps=4,
    )  # fmt: skip
    assert made["spills"] == 0 and made["shared"] <= 227 * 1024 // 2
    assert "wgmma" in made["asm"]["ptx"] and "cp.async.cg" in made["asm"]["ptx"]


@pytest.mark.parametrize("kernel", ["mix_fma_kernel", "mix_dot_kernel"])
@pytest.mark.parametrize("capability", [80, 90])
def test_mix_compiles_without_spills(kernel: str, capability: int) -> None:
    constants: dict[str, Any] = {"B": 16, "OUT": 16, "BN": 512}
    if kernel == "mix_dot_kernel":
        constants = {"B": 16, "BR": 4, "BN": 128, "PRECISION": "ieee"}
    scalars = ["tokens", "z_block", "z_rank", "s_out", "s_in", "s_rank", "w_block", "w_rank"]
    scalars += ["ranks", "blocks"] if kernel == "mix_dot_kernel" else []
    signature = {"z": HALF, "s": HALF, "w": HALF} | dict.fromkeys(scalars, "i32")
    signature |= dict.fromkeys(constants, "constexpr")
    made = compile_for(
        "blr.kernels.layers.blast.triton", kernel, signature, constants, capability,
        divisible=("z", "s", "w", *scalars), num_warps=4,
    )  # fmt: skip
    assert made["spills"] == 0
    if kernel == "mix_dot_kernel":
        assert "mma.sync" in made["asm"]["ptx"], "the batch of b×b products is on the tensor cores"
