"""Launches done again without the Python that led to them, with a driver that notes what it is given."""

from __future__ import annotations

import ast
import importlib
import threading
import weakref
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from driver import Compiled
from torch import Tensor

from blr.kernels.common import launching, replay, tables
from blr.kernels.common.launching import run_kernel
from blr.kernels.layers.blast import variants as blast
from blr.kernels.layers.monarch import variants as monarch


class Kernel:
    """Launches of it give what was compiled, as Triton's do."""

    arg_names = ("x", "both", "y", "n", "BLOCK")

    def __init__(self, compiled: Compiled) -> None:
        self.compiled = compiled

    def __getitem__(self, grid: Any) -> Any:
        return lambda *arguments, **options: self.compiled


def variant(kernel: Kernel) -> Any:
    """Two launches; the second reads the factor two rows on."""

    def run(x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
        z = torch.empty(len(x), 4)
        y = torch.empty(len(x), 8)
        run_kernel(kernel, (3,), x, (w, 5, z), z, 7, BLOCK=16)
        run_kernel(kernel, (2, 4), z, (w[2:], 6, y), y, 8, BLOCK=32)
        return y

    return run


def given() -> tuple[Tensor, Tensor]:
    """Input and factor of a `variant`."""
    return torch.zeros(2, 12), torch.zeros(4, 8)


def test_launches_are_done_again_at_other_addresses(compiled: Compiled) -> None:
    run = variant(Kernel(compiled))
    y, found = replay.recorded(run, *given(), None)
    assert found is not None and y.shape == (2, 8)
    x, w = given()
    y = found(x, w, None)
    first, second = compiled.ran
    assert first[:9] == (3, 1, 1, 77, "function", "metadata", None, None, None)
    assert first[9:] == (x.data_ptr(), (w.data_ptr(), 5, first[11]), first[11], 7, 16)
    assert second[:4] == (2, 4, 1, 77)
    end = y.data_ptr()
    assert second[9:] == (first[11], (w.data_ptr() + 64, 6, end), end, 8, 32)
    assert len({x.data_ptr(), w.data_ptr(), first[11], end}) == 4


def test_kernels_without_scratch_memory_go_to_the_driver_at_once(compiled: Compiled) -> None:
    """Past the part of Triton's launcher that asks for that memory; with it, as Triton does."""

    class Launcher:
        launch_cooperative_grid, launch_pdl = False, True
        global_scratch_size = profile_scratch_size = 0

        def __init__(self) -> None:
            self.launch = compiled.run  # type: ignore[method-assign]

        def __call__(self, *arguments: Any) -> None:
            compiled.ran.append(("Triton", *arguments))

    made = SimpleNamespace(run=Launcher(), function="function", packed_metadata="metadata")
    run = variant(Kernel(made))  # type: ignore[arg-type]
    _, found = replay.recorded(run, *given(), None)
    assert found is not None and found(*given(), None) is not None
    assert compiled.ran[0][:6] == (3, 1, 1, 77, "function", False)
    assert compiled.ran[0][6:13] == (True, None, None, "metadata", None, None, None)
    made.run.global_scratch_size = 64
    _, found = replay.recorded(run, *given(), None)
    assert found is not None and found(*given(), None) is not None
    assert compiled.ran[-1][:9] == ("Triton", 2, 4, 1, 77, "function", "metadata", None, None)


def test_intermediates_share_one_allocation(compiled: Compiled) -> None:
    """They do not overlap, and begin where torch's own allocations may."""
    kernel = Kernel(compiled)

    def run(x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
        z, y, v = torch.empty(len(x), 4), torch.empty(len(x), 8), torch.empty(300)
        run_kernel(kernel, (3,), x, v, z, 7, BLOCK=16)
        run_kernel(kernel, (2,), z, v, y, 8, BLOCK=32)
        return y

    _, found = replay.recorded(run, *given(), None)
    assert found is not None
    y = found(*given(), None)
    (*_, v, z, _, _), (*_, z_again, v_again, last, _, _) = compiled.ran
    assert (z, v, last) == (z_again, v_again, y.data_ptr())
    assert v - z == 512 and v % 16 == 0


def test_descriptors_are_told_of_other_addresses(compiled: Compiled) -> None:
    """Results are several."""

    @dataclass
    class Descriptor:
        base: Tensor
        shape: list[int]
        strides: list[int]
        block_shape: list[int]
        padding: str = "zero"

    kernel = Kernel(compiled)

    def run(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        y, z = torch.empty(1, 2, 8), torch.empty(4)
        described = Descriptor(x[1:], [1, 12], [12, 1], [1, 4])
        run_kernel(kernel, (5,), described, z, y, n=3, BLOCK=16)
        return y[0], z

    again = replay.Launches(run)
    for _ in range(3):
        x, w = given()
        y, z = again(x, w)
        assert y.shape == (2, 8) and z.shape == (4,)
    ((*head, told, first, second, n, block),) = compiled.ran[-1:]
    assert head[:3] == [5, 1, 1] and (n, block) == (3, 16)
    assert told.base.data_ptr() == x.data_ptr() + 48 and (first, second) == (z.data_ptr(), y.data_ptr())
    assert (told.shape, told.strides, told.padding) == ([1, 12], [12, 1], "zero")


def test_an_input_with_gaps_is_done_again_where_it_lies_as_it_did(compiled: Compiled) -> None:
    again = replay.Launches(variant(Kernel(compiled)))
    wide, w = torch.zeros(2, 16), given()[1]
    for _ in range(2):
        again(wide[:, :12], w, None)
    assert len(compiled.ran) == 2 and compiled.ran[0][9] == wide.data_ptr()
    again(torch.zeros(2, 12), w, None)
    assert len(compiled.ran) == 2, "no gaps this time"


def test_what_is_not_as_it_was_takes_the_usual_way(
    compiled: Compiled, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = variant(Kernel(compiled))
    x, w = given()
    _, found = replay.recorded(run, x, w, None)
    assert found is not None
    assert found(torch.zeros(12, 2).t(), w, None) is None, "strides of the input"
    assert found(x, torch.zeros(8, 4).t(), None) is None, "strides of a factor"
    assert found(torch.zeros(26)[1:25].view(2, 12), w, None) is None, "an address that is not aligned"
    monkeypatch.setattr(replay, "_is_profiled", lambda: True)
    assert found(x, w, None) is None, "somebody listens to launches"
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 1)
    assert found(x, w, None) is None, "another current GPU"
    assert compiled.ran == []


def test_more_than_launches_is_not_done_again(compiled: Compiled) -> None:
    kernel = Kernel(compiled)
    run = variant(kernel)

    def launching(what: Any) -> Any:
        """A launch with something else among its arguments."""

        def of_it(x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
            y = torch.empty(2, 8)
            run_kernel(kernel, (1,), x, what(x, w), y, 7, BLOCK=16)
            return y

        return of_it

    held = torch.zeros(4)
    others = {
        "a product": lambda x, w, bias: run(x + 1, w, bias),
        "a write": lambda x, w, bias: run(x, w, bias).mul_(2),
        "zeros": lambda x, w, bias: run(x, torch.zeros(4, 8), bias),
        "no launch": lambda x, w, bias: torch.empty(2, 8),
        "part of an allocation": lambda x, w, bias: run(x, w, bias)[:, :4],
        "a descriptor": launching(lambda x, w: SimpleNamespace(base=w)),
        "a tuple in a tuple": launching(lambda x, w: (1, (w, 2))),
        "memory of its own": launching(lambda x, w: held),
    }
    for what, other in others.items():
        assert replay.recorded(other, *given(), None)[1] is None, what
    storage = torch.zeros(4, 20)
    x, w = storage[:2, :12], storage[:, 12:]  # rows of one lie between rows of the other
    assert replay.recorded(lambda x, w, bias: run(x, w, bias), x, w, None)[1] is None


def test_only_known_releases_of_triton(compiled: Compiled, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint's own code meets releases that were not there when it was written."""
    monkeypatch.undo()
    run = variant(Kernel(compiled))
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: None, raising=False)
    for version, known in (("3.6.1", True), ("3.60.0", False), ("4.0", False)):
        hooks = SimpleNamespace(runtime=SimpleNamespace(launch_enter_hook=None))
        found = SimpleNamespace(__version__=version, knobs=hooks)
        monkeypatch.setattr(replay, "_triton", lambda found=found: found)
        replay._is_known.cache_clear()
        assert (replay.recorded(run, *given(), None)[1] is not None) == known
    replay._is_known.cache_clear()


def test_a_thread_notes_its_own_launches_and_keeps_nothing(compiled: Compiled) -> None:
    """Also where what is recorded fails, or other threads launch and record meanwhile."""
    kernel = Kernel(compiled)
    run, found = variant(kernel), list[Any]()

    def record() -> None:
        found.append(replay.recorded(run, *given(), None)[1])

    def disturbed(x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
        for task in (record, lambda: run(x, w, bias)):
            other = threading.Thread(target=task)
            other.start()
            other.join()
        return run(x, w, bias)

    def failing(x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
        run(x, w, bias)
        raise RuntimeError("no room")

    x, w = given()
    with pytest.raises(RuntimeError, match="no room"):
        replay.recorded(failing, x, w, None)
    found.append(replay.recorded(disturbed, x, w, None)[1])
    assert [len(one.launches) for one in found] == [2, 2]
    with launching.noting() as kept:
        pass
    run(x, w, None)
    assert kept == []
    tensors = [weakref.ref(t) for t in (x, w)]
    del x, w
    assert [t() for t in tensors] == [None, None]


def test_what_a_launch_wrote_to_may_be_its_result(compiled: Compiled) -> None:
    kernel = Kernel(compiled)

    def in_place(x: Tensor, w: Tensor) -> Tensor:
        run_kernel(kernel, (1,), x, (w, 2), x, 7, BLOCK=16)
        return x

    again = replay.Launches(in_place)
    for _ in range(3):
        x, w = given()
        assert again(x, w) is x
    assert len(compiled.ran) == 2
    assert compiled.ran[-1][9:] == (x.data_ptr(), (w.data_ptr(), 2), x.data_ptr(), 7, 16)


class Jitted(Kernel):
    """With the arguments of a kernel of ours; `seen` is what launches were given, by name."""

    def __init__(self, compiled: Compiled, names: list[str]) -> None:
        super().__init__(compiled)
        self.arg_names, self.seen = names, list[dict[str, Any]]()

    def __getitem__(self, grid: Any) -> Any:
        def launched(*arguments: Any, **options: Any) -> Compiled:
            self.seen.append(dict(zip(self.arg_names, arguments, strict=False)) | options)
            return self.compiled

        return launched


STAGES = {
    "monarch": (monarch.permuted_store, "decode.gemm.triton.bmm_kernel", ((3, 5, 24), (3, 4, 24))),
    "blast": (blast.bmm_mix, "layers.blast.triton.mix_fma_kernel", ((4, 5, 8), (4, 4, 8), (4, 3, 8))),
    "blast, many blocks": (
        blast.bmm_mix,
        "layers.blast.triton.mix_dot_kernel",
        ((3, 5, 8), (3, 3, 8), (3, 4, 8)),
    ),
}


@pytest.mark.parametrize("name", STAGES)
def test_a_stage_is_done_again_with_what_it_was_given(
    name: str, compiled: Compiled, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library's products around it run every time."""
    variant, path, shapes = STAGES[name]
    native = importlib.import_module("blr.kernels." + path.rpartition(".")[0])
    attribute = path.rpartition(".")[2]
    kernel = Jitted(compiled, list(getattr(native, attribute).arg_names))
    monkeypatch.setattr(native, attribute, kernel)
    monkeypatch.setattr(launching, "_compiled", {})
    again, factors = replay.Again(), [torch.randn(*shape).bfloat16() for shape in shapes]
    inputs = factors[-1].shape[0] * factors[-1].shape[1]
    for _ in range(3):
        x = torch.randn(2, 8, inputs).bfloat16()
        assert variant(x, *factors, by=again).shape == (2, 8, shapes[0][0] * shapes[0][1])
    (seen,), ran = kernel.seen, dict(zip(kernel.arg_names, compiled.ran[-1][9:], strict=True))
    assert len(compiled.ran) == 2
    for argument, usual in seen.items():
        assert isinstance(usual, Tensor) or argument not in ran or usual == ran[argument], argument
    read = {"a": x, "b": factors[1]} if name == "monarch" else {"s": factors[1]}
    assert {argument: ran[argument] for argument in read} == {a: t.data_ptr() for a, t in read.items()}


def test_variants_that_are_replayed_launch_in_one_way() -> None:
    """By `launching`, which recordings see, and by no operator that would record itself."""
    kernels = Path(launching.__file__).parents[1]
    files = [f for folder in ("gemv", "narrow", "gemm") for f in kernels.glob(f"decode/{folder}/*.py")]
    files.append(kernels / "layers" / "blast" / "launch.py")
    assert tables.MOST.keys() == {"gemv", "narrow"} and len(files) > 6
    for path in files:
        tree = ast.parse(path.read_text("utf-8"))
        calls = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
        named = [ast.unparse(call.value) for call in calls if isinstance(call, ast.Subscript)]
        assert [name for name in named if "kernel" in name] == [], path
        taken = [n.module or "" for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)]
        assert not any(name.endswith((".op", ".dispatch", ".replay")) for name in taken), path
