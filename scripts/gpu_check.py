"""Checks on a GPU that every kernel variant computes what the float64 reference does.

    python scripts/gpu_check.py [--checkpoint DIR ...] [--rows FILE] [--precisions bfloat16,…]

Every structure × variant × precision × shape × number of tokens, outputs poisoned with NaN, factors
in canonical and in kernel layout, inputs contiguous or not; then layers under torch.compile, in
CUDA graphs, with gradients; then greedy tokens of checkpoints against the CPU's. One line a group
with its worst error, one line a failure, and last ``PASS n/n`` or ``FAIL k/n`` (exit code 1).

Work is spread over processes, since compiling kernels takes the longest; one that a kernel breaks is
replaced (processes.py). With --device cpu, BLR_KERNELS=triton and TRITON_INTERPRET=1 it checks itself.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from processes import run_tasks
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
from tolerances import TOLERANCES

from blr.compressor.bench.precision import PRECISIONS, computing_in
from blr.compressor.bench.subjects import reference_of
from blr.compressor.load import load_model
from blr.compressor.modeling.layers import StructuredLinear, structured_linear
from blr.compressor.modeling.shared import pack_shared_input
from blr.compressor.structures.specs import (
    BlastSpec,
    KroneckerSpec,
    LowRankSpec,
    MonarchSpec,
    Spec,
)
from blr.compressor.tune import variants_of
from blr.kernels.common.available import kernel_device
from blr.kernels.common.layout import in_order, order_of
from blr.kernels.lowrank.op import lowrank_group

Task = Any  # partial(check, *arguments), giving rows

TOKENS = (1, 2, 3, 8, 17, 129, 1000)
SPECS: dict[str, list[Spec]] = {
    "svd": [
        LowRankSpec(100, 36, 7),
        LowRankSpec(130, 258, 1),
        LowRankSpec(96, 160, 24),
        LowRankSpec(1024, 768, 256),
    ],
    "monarch": [
        MonarchSpec(60, 36, 3, 5),
        MonarchSpec(192, 288, 6, 11),
        MonarchSpec(144, 216, 9, 2),
        MonarchSpec(1024, 768, 16, 4),
    ],
    "blast": [
        BlastSpec(60, 36, 3, 10),
        BlastSpec(192, 288, 6, 33),
        BlastSpec(144, 216, 9, 40),
        BlastSpec(1024, 768, 16, 64),
    ],
    "ks": [
        KroneckerSpec(12, 12, ((1, 6, 4, 2), (2, 2, 3, 2))),
        KroneckerSpec(1080, 648, ((3, 24, 40, 9),)),
        KroneckerSpec(40, 24, ((2, 3, 5, 4),)),
        KroneckerSpec(384, 384, ((1, 192, 48, 2), (2, 48, 192, 1))),
    ],
}
GROUPED = (LowRankSpec(96, 160, 6, 4, "out"), LowRankSpec(96, 160, 6, 4, "in"))


@dataclass
class Row:
    """One comparison. `error` is relative, NaN where there is none to give."""

    group: str
    case: str
    error: float
    limit: float
    note: str = ""

    @property
    def ok(self) -> bool:
        return not self.note and self.error <= self.limit


def relative(found: Tensor, expected: Tensor) -> float:
    """Relative Frobenius error; NaN if shapes differ, 1 if anything found is no number."""
    if found.shape != expected.shape:
        return float("nan")
    found = found.double().to(expected.device)
    if not bool(found.isfinite().all()):
        return float("inf")
    return float((found - expected).norm() / expected.norm().clamp_min(1e-300))


def limit_of(precision: str) -> float:
    """TF32 has the significand of float16."""
    return TOLERANCES[torch.float16 if precision == "tf32" else PRECISIONS[precision].dtype]


@contextmanager
def poisoned() -> Iterator[None]:
    """What torch allocates uninitialized for kernels is full of NaN."""
    kept = torch.empty, torch.empty_like, torch.empty_strided, Tensor.new_empty

    def filled(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def call(*arguments: Any, **options: Any) -> Tensor:
            made = make(*arguments, **options)
            return made.fill_(float("nan")) if made.is_floating_point() else made

        return call

    torch.empty, torch.empty_like, torch.empty_strided, Tensor.new_empty = map(filled, kept)
    try:
        yield
    finally:
        torch.empty, torch.empty_like, torch.empty_strided, Tensor.new_empty = kept


def layer_of(spec: Spec, dtype: torch.dtype, device: str, bias: bool) -> StructuredLinear:
    torch.manual_seed(0)
    layer = structured_linear(spec.to_dict(), bias)
    if bias:
        torch.nn.init.normal_(layer.bias)
    return layer.to(device, dtype).requires_grad_(False)


def input_of(spec: Spec, n: int, dtype: torch.dtype, device: str, kind: str = "whole") -> Tensor:
    """[n, i]: contiguous, every other column of a wider tensor, or stored transposed."""
    random = torch.Generator().manual_seed(n)
    wide = torch.randn(n, 2 * spec.in_features, generator=random).to(device, dtype)
    if kind == "strided":
        return wide[:, ::2]
    x = wide[:, : spec.in_features].contiguous()
    return x.T.contiguous().T if kind == "transposed" else x


def exact(spec: Spec, layer: StructuredLinear, x: Tensor) -> Tensor:
    """The layer in float64."""
    factors = [layer.get_parameter(name).double() for name in spec.shapes()]
    y = reference_of(spec.structure)(x.double(), *factors)
    return y if layer.bias is None else y + layer.bias.double()


def attempt(group: str, case: str, limit: float, run: Callable[[], tuple[Tensor, Tensor]]) -> Row:
    """A row of what `run` finds and expects. Errors of the device break the process: they pass."""
    try:
        return Row(group, case, relative(*run()), limit)
    except Exception as error:
        if "CUDA error" in str(error) or "an illegal" in str(error):
            raise
        where = traceback.extract_tb(error.__traceback__)[-1]
        said = (str(error).strip().splitlines() or [""])[0][:200]
        place = f"{Path(where.filename).name}:{where.lineno}"
        return Row(group, case, float("nan"), limit, f"{type(error).__name__} at {place}: {said}")


# Checks, each run in any process.


def check_variants(structure: str, index: int, precision: str, device: str) -> Iterator[Row]:
    """Every variant of a structure at one shape: layouts and inputs alternate with n."""
    spec, dtype = SPECS[structure][index], PRECISIONS[precision].dtype
    layer = layer_of(spec, dtype, device, bias=index % 2 == 0).relayout_()
    table, _ = variants_of(structure)
    for position, n in enumerate(tokens(device)):
        kind = {3: "strided", 129: "transposed"}.get(n, "whole")
        x = input_of(spec, n, dtype, device, kind)
        relaid = [layer.get_parameter(name).detach() for name in spec.shapes()]
        kernel_layout = position % 2 == 0
        factors = relaid if kernel_layout else [factor.contiguous() for factor in relaid]
        expected = exact(spec, layer, x)
        where = f"{'kernel' if kernel_layout else 'canonical'} layout, {kind} x"
        bias = "bias" if layer.bias is not None else "no bias"
        case = f"{spec.in_features}→{spec.out_features} {spec.describe()} n={n}, {where}, {bias}"
        runs = {name: partial(run, x, *factors, bias=layer.bias) for name, run in table.items()}
        runs["entry point"] = partial(layer, x)
        for name, run in runs.items():
            if name == "gemv" and n > 8:
                continue  # meant for at most 8 tokens
            pair = lambda run=run, expected=expected: (run(), expected)  # noqa: E731
            with poisoned():
                row = attempt(f"{structure}/{name} {precision}", case, limit_of(precision), pair)
            yield row


def check_compiled(structure: str, index: int, device: str) -> Iterator[Row]:
    """torch.compile in one graph, for two numbers of tokens, against the eager layer."""
    spec = (*SPECS[structure], *(GROUPED if structure == "svd" else ()))[index]
    layer = layer_of(spec, torch.bfloat16, device, bias=True)
    compiled = torch.compile(layer, fullgraph=True)
    for n in (17, 3):
        x = input_of(spec, n, torch.bfloat16, device)
        case = f"{spec.describe()} n={n}"
        run = lambda x=x: (compiled(x), layer(x).double())  # noqa: E731
        yield attempt(f"{structure} torch.compile", case, limit_of("bfloat16"), run)


def check_graph(structure: str, index: int, device: str) -> Iterator[Row]:
    """A captured layer, replayed on other inputs, against the eager layer."""
    spec = SPECS[structure][index]
    layer = layer_of(spec, torch.bfloat16, device, bias=True)
    for n in (1, 17, 129):

        def run(n: int = n) -> tuple[Tensor, Tensor]:
            static, other = (input_of(spec, n, torch.bfloat16, device) * f for f in (1, -3))
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream), torch.no_grad():
                layer(static)
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.no_grad(), torch.cuda.graph(graph):
                y = layer(static)
            static.copy_(other)
            y.fill_(float("nan"))
            graph.replay()
            return y, exact(spec, layer, other)

        yield attempt(f"{structure} CUDA graph", f"{spec.describe()} n={n}", limit_of("bfloat16"), run)


def check_gradients(structure: str, index: int, precision: str, device: str) -> Iterator[Row]:
    """Gradients of everything against the same in float64 on the CPU."""
    spec, dtype = SPECS[structure][index], PRECISIONS[precision].dtype
    layer = layer_of(spec, dtype, device, bias=True)
    x = input_of(spec, 33, dtype, device)
    expected = gradients(copy.deepcopy(layer).cpu().double(), x.cpu().double())
    found = gradients(layer, x)
    for name, gradient in found.items():
        group = f"{structure} gradients {precision}"
        pair = lambda g=gradient, name=name: (g, expected[name].to(device))  # noqa: E731
        yield attempt(group, f"{spec.describe()} d{name}", limit_of(precision), pair)


def gradients(layer: StructuredLinear, x: Tensor) -> dict[str, Tensor]:
    x = x.detach().requires_grad_()
    layer.requires_grad_(True)
    y = layer(x)
    # the same weights in every dtype, so that only the layer's arithmetic differs
    weights = torch.linspace(-1, 1, y.numel(), dtype=torch.float64).view_as(y).to(torch.bfloat16)
    y.backward(weights.to(y))
    return {"x": x.grad, **{name: p.grad for name, p in layer.named_parameters()}}


def check_layouts(structure: str, index: int, device: str) -> Iterator[Row]:
    """A layer that lands on a GPU is in kernel layout, and gives its first state back."""
    spec = (*SPECS[structure], *(GROUPED if structure == "svd" else ()))[index]
    before = layer_of(spec, torch.float32, "cpu", bias=True)
    layer = copy.deepcopy(before).to(device)
    for name in spec.shapes():
        factor = layer.get_parameter(name)
        laid = in_order(factor, order_of(spec.structure, name, factor.dim()))
        state = layer.state_dict()[name]
        note = "" if laid and state.is_contiguous() else f"strides {factor.stride()}, {state.stride()}"
        error = relative(state, before.get_parameter(name).detach().double().to(device))
        yield Row(f"{structure} layout", f"{spec.describe()} {name}", error, 0.0, note)


def check_group(precision: str, device: str) -> Iterator[Row]:
    """Layers of one input, packed into one stored V, against float64."""
    dtype = PRECISIONS[precision].dtype
    specs = [LowRankSpec(96, o, r) for o, r in ((96, 24), (32, 7), (32, 9))]
    layers = [layer_of(spec, dtype, device, bias=o != 1) for o, spec in enumerate(specs)]
    for packed, n in ((False, 5), (True, 1), (True, 17)):
        if packed:
            pack_shared_input(layers)
        x = input_of(specs[0], n, dtype, device)
        ys = lowrank_group(x, [p.U for p in layers], [p.V for p in layers], [p.bias for p in layers])
        for spec, layer, y in zip(specs, layers, ys, strict=True):
            case = f"r={spec.rank} n={n} {'packed' if packed else 'apart'}"
            pair = lambda y=y, spec=spec, layer=layer, x=x: (y, exact(spec, layer, x))  # noqa: E731
            yield attempt(f"svd group {precision}", case, limit_of(precision), pair)


def check_checkpoint(folder: str, device: str) -> Iterator[Row]:
    """Greedy tokens and logits of a decoder on the device against the CPU's."""

    def run() -> tuple[Tensor, Tensor]:
        ids, found = torch.arange(1, 13)[None], []
        for where in ("cpu", device):
            model = load_model(Path(folder), "AutoModelForCausalLM", dtype="float32", device=where)
            options = {"max_new_tokens": 32, "do_sample": False, "eos_token_id": None}
            found.append(model.generate(ids.to(where), **options).cpu())
        return found[1], found[0].double()

    yield attempt("checkpoint tokens", Path(folder).name, 0.0, run)


def in_precision(precision: str, check: Callable[..., Iterator[Row]], *arguments: Any) -> Iterator[Row]:
    """`check(*arguments)`, float32 products with TF32 exactly if `precision` says so."""
    with computing_in(PRECISIONS[precision]):
        yield from check(*arguments)


def tokens(device: str) -> tuple[int, ...]:
    """Fewer in the interpreter, which is slow."""
    return TOKENS if device != "cpu" else (1, 3, 8, 17)


def all_tasks(arguments: argparse.Namespace) -> list[Task]:
    device, precisions = arguments.device, arguments.precisions.split(",")
    ieee = partial(partial, in_precision, "float32")
    tasks: list[Task] = [ieee(check_checkpoint, folder, device) for folder in arguments.checkpoint]
    for structure in arguments.structures.split(","):
        every = range(len(SPECS[structure]))
        more = range(len(every), len(every) + len(GROUPED)) if structure == "svd" else ()
        if device != "cpu":
            tasks += [ieee(check_compiled, structure, index, device) for index in (1, *more)]
            tasks += [ieee(check_graph, structure, index, device) for index in (1, 3)]
            tasks += [ieee(check_layouts, structure, index, device) for index in (*every, *more)]
        for precision in precisions:
            within = partial(partial, in_precision, precision)
            rest = (precision, device)
            tasks.append(within(check_gradients, structure, 1, *rest))
            tasks += [within(check_variants, structure, index, *rest) for index in reversed(every)]
            tasks += [within(check_group, *rest)] if structure == "svd" else []
    return tasks


def prepare_process() -> None:
    """Processes share the cores: one thread each, and no compile workers of their own."""
    torch.set_num_threads(1)
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"


def rows_of(task: Task, found: list[Row], broken: str) -> list[Row]:
    """What a task found, and a failed row if it could not end."""
    if not broken:
        return found
    _, check, *arguments = task.args
    last = found[-1].case if found else "its start"
    name = f"{check.__name__} {' '.join(map(str, arguments))}"
    return [*found, Row(name, f"after {last}", float("nan"), 0.0, broken)]


# Report.


def show(rows: list[Row]) -> int:
    """Groups with their worst errors, then failures, then the verdict. Returns the exit code."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row.group, []).append(row)
    for name in sorted(groups):
        good = [row for row in groups[name] if row.ok]
        worst = max(good, key=lambda row: row.error, default=None)
        told = f"worst {worst.error:.1e} of {worst.limit:.1e} at {worst.case}" if worst else ""
        verdict = "PASS" if len(good) == len(groups[name]) else "FAIL"
        print(f"{verdict} {name}: {len(good)}/{len(groups[name])} {told}")
    failed = [row for row in rows if not row.ok]
    for row in failed:
        print(f"FAIL {row.group}: {row.case}: error {row.error:.1e}, limit {row.limit:.1e} {row.note}")
    verdict = f"FAIL {len(failed)}/{len(rows)}" if failed else f"PASS {len(rows)}/{len(rows)}"
    print(verdict)
    return 1 if failed or not rows else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--checkpoint", action="append", default=[], help="Decoder folder; repeatable.")
    parser.add_argument("--precisions", default="bfloat16,float16,float32,tf32")
    parser.add_argument("--structures", default="svd,monarch,blast,ks")
    parser.add_argument("--processes", type=int, default=min(os.cpu_count() or 1, 16))
    parser.add_argument("--rows", type=Path, help="JSON lines of every row.")
    parser.add_argument("--device", default="cuda")
    arguments = parser.parse_args()
    if not kernel_device(torch.empty(0, device=arguments.device)):
        print("FAIL: kernels do not run here (GPU, triton, BLR_KERNELS)")
        return 1
    started = time.perf_counter()
    outcomes = run_tasks(all_tasks(arguments), arguments.processes, prepare_process)
    rows = [row for outcome in outcomes for row in rows_of(*outcome)]
    if arguments.rows:
        arguments.rows.write_text("".join(json.dumps(asdict(row)) + "\n" for row in rows))
    print(f"{time.perf_counter() - started:.0f} s, {arguments.processes} processes")
    return show(rows)


if __name__ == "__main__":
    sys.exit(main())
