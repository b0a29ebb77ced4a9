"""Every float8 kernel on a GPU against its reference, before `fp8.py` times it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from blr.compressor.tune.float8 import TILES
from blr.kernels.fp8 import launch, layers, library, reference
from blr.kernels.fp8.op import fp8_product, fp8_rows
from blr.kernels.fp8.reference import Scales, dequantize_fp8, quantize_fp8
from blr.kernels.layers.blast.reference import blast_linear as blast_reference
from blr.kernels.layers.lowrank.reference import lowrank_linear as lowrank_reference
from blr.kernels.layers.monarch.reference import monarch_linear as monarch_reference

BF16 = torch.bfloat16


def relative(y: Tensor, expected: Tensor) -> float:
    lost = (y.double() - expected.double()).norm() / expected.double().norm()
    return float(lost) if bool(torch.isfinite(y.float()).all()) else float("nan")


def weight(*shape: int, terms: int) -> tuple[Tensor, Tensor, Tensor]:
    """Random float8 [..., R, K], its scales [..., R, 1] and what it stands for in float32."""
    w = torch.randn(*shape, device="cuda") / terms**0.5
    q, scale = quantize_fp8(w, 0, torch.float32)
    return q, scale, dequantize_fp8(q, scale, torch.float32)


def check_kernels() -> bool:
    """Every kernel against its reference; prints what misses."""
    torch.manual_seed(0)
    fine = True

    def say(name: str, error: float, limit: float) -> None:
        nonlocal fine
        good = error <= limit
        fine &= good
        print(f"{'ok  ' if good else 'BAD '} {name}: {error:.2e} (limit {limit:g})")

    for n, K in ((1, 100), (33, 4096), (257, 14336)):
        x, other = torch.randn(2, n, K, device="cuda", dtype=BF16).unbind()
        x = x.clone()
        x[0], gain = 0, torch.rand(K, device="cuda", dtype=BF16)
        worst, apart = 0.0, 0.0
        for make in reference.MAKES:
            beside = other[0] if make == "layer" else other
            found = launch.quantize_rows(x, make, beside, gain, 1e-5)
            right = reference.quantize_rows(x, make, beside, gain, 1e-5)
            back, expected = (r.q.float() * r.scale[:, None] for r in (found, right))
            if (
                make == "layer"
            ):  # torch's sums are other ones: numbers on an edge of bfloat16 are rounded
                say(f"layer norm {n}x{K}", relative(back, expected), 2e-2)  # to either side
            else:
                worst = max(worst, relative(back, expected) if n > 1 else 0.0)
            apart = max(
                apart, float((found.norm - right.norm).abs().max() / right.norm.max().clamp_min(1e-9))
            )
        say(f"quantize {n}x{K}", worst, 5e-3)
        say("  its norms", apart, 1e-2)
    cases = [(1, 64, 48, 16), (129, 512, 384, 100), (300, 1024, 768, 272), (513, 4096, 4096, 1024)]
    for n, i, o, r in cases:
        x = torch.randn(n, i, device="cuda", dtype=BF16)
        x[0] *= 1000
        rows, bias = launch.quantize_rows(x), torch.randn(o, device="cuda", dtype=BF16)
        (W, ws, _Wd), (U, us, Ud), (V, vs, Vd) = (
            weight(o, i, terms=i), weight(o, r, terms=r), weight(r, i, terms=i)
        )  # fmt: skip
        given = rows.q.float() * rows.scale[:, None]
        expected = reference.product(
            rows.q[None], W[None], rows.scale, ws.view(1, -1), BF16, bias[None]
        )[0]
        for name, tile in {"default": None, **TILES}.items():
            if n < 129 and name != "default":
                continue
            y = layers.dense(rows, W, ws.view(-1), BF16, bias, tile)
            error = relative(y, expected)
            if name == "default" or not error <= 4e-3:
                say(f"dense {o}x{i}, {n} tokens, {name}", error, 4e-3)
        scales = layers.scales_of(us[None], V[None], vs[None])
        exact = lowrank_reference(given.double(), Ud.double(), Vd.double().mT, bias.double())
        y = layers.lowrank(rows, U[None], V[None], scales, BF16, bias)
        say(f"low rank {o}x{i}, rank {r}, {n} tokens", relative(y, exact), 0.04)
        say("  as layers call it", again("lowrank", x, (U[None], V[None]), scales, exact, bias), 0.04)
        say("  of its other rows", relative(y[1:], exact[1:]) if n > 1 else 0.0, 0.04)
        if i % 16 == o % 16 == 0:
            y = library.dense(rows, W, ws.view(-1), BF16, None)
            say("  dense by the library", relative(y, expected.float() - bias.float()), 6e-3)
    for n, b, p, q, r in ((5, 4, 64, 48, 32), (300, 16, 256, 256, 1024), (300, 3, 112, 80, 48)):
        x = torch.randn(n, b * p, device="cuda", dtype=BF16)
        rows, bias = launch.quantize_rows(x), torch.randn(b * q, device="cuda", dtype=BF16)
        (U, us, Ud), (V, vs, Vd) = weight(b, q, r, terms=r), weight(b, r, p, terms=p)
        given = (rows.q.float() * rows.scale[:, None]).double()
        exact = monarch_reference(given, Ud.double(), Vd.double().mT, bias.double())
        y = layers.monarch(rows, U, V, layers.scales_of(us, V, vs), BF16, bias)
        say(f"Monarch {b}, {n} tokens", relative(y, exact), 0.04)
        scales = layers.scales_of(us, V, vs)
        say("  as layers call it", again("monarch", x, (U, V), scales, exact, bias), 0.04)
        S = torch.randn(b, b, r, device="cuda") / b**0.5
        exact = blast_reference(given, Ud.double(), S.double(), Vd.double().mT, bias.double())
        y = layers.blast(rows, U, V, layers.scales_of(us, V, vs, S), BF16, bias)
        say(f"BLAST {b}, {n} tokens", relative(y, exact), 0.04)
        scales = layers.scales_of(us, V, vs, S)
        say("  as layers call it", again("blast", x, (U, V), scales, exact, bias), 0.04)
    return fine


@torch.no_grad()
def again(
    structure: str, x: Tensor, weights: Sequence[Tensor], scales: Scales, exact: Tensor, bias: Tensor
) -> float:
    """The worst error of four calls at other addresses each: the third is a launch of the second's."""
    worst, kept = 0.0, list[Any]()
    for _ in range(4):
        rows = fp8_rows(x.clone())
        y = fp8_product(structure, rows, weights, scales, BF16, bias)
        worst = max(worst, relative(y, exact))
        kept += [rows, y]
    return worst


def main() -> int:
    """Twice each, since a second launch takes another way than the first."""
    fine = True
    for launch.OVERLAP in (False, True):
        print("kernels start while those before them end" if launch.OVERLAP else "kernels one by one")
        fine = all([fine, check_kernels(), check_kernels()])
    print("all right" if fine else "SOMETHING IS WRONG")
    return 0 if fine else 1


if __name__ == "__main__":
    raise SystemExit(main())
