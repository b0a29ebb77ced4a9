"""Choosing a variant: rules in order, buckets of n, both sources, GPUs that nobody measured."""

from __future__ import annotations

import itertools
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from blr.bench.tuned_files import table_text, write_table
from blr.compressor.base.errors import RecipeError
from blr.compressor.recipe.tuned_table import (
    TunedRule,
    read_table,
    shipped_table,
    user_table,
)
from blr.kernels.common import available, dispatch, tables
from blr.kernels.common.available import gpu_name_key, kernel_device
from blr.kernels.common.tables import BUCKETS, Shape, bucket, choose
from blr.kernels.layers.blast.variants import VARIANTS as BLAST
from blr.kernels.layers.kronecker.variants import VARIANTS as KRONECKER
from blr.kernels.layers.lowrank.variants import VARIANTS as LOWRANK
from blr.kernels.layers.monarch.variants import VARIANTS as MONARCH

pytestmark = pytest.mark.fast

BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64
VARIANTS = {"lowrank": LOWRANK, "monarch": MONARCH, "blast": BLAST, "kronecker": KRONECKER}
SHIPPED = sorted(path.stem for path in shipped_table("any").parent.glob("*.yaml"))
SHAPE = Shape(4096, 4096, 16, 1024)
RULES: list[dict[str, Any]] = [
    {"structure": "blast", "inputs": [4096, 4096], "n": [1, 8], "variant": "a", "config": {"chunk": 2}},
    {"structure": "blast", "blocks": [8, 64], "dtype": ["bfloat16", "float16"], "variant": "b"},
    {"structure": "lowrank", "features": [8192, 65536], "variant": "c"},
    {"structure": "lowrank", "rank": [1, 64], "n": [512, 16384], "variant": "d"},
    {"structure": "monarch", "n": [1, 16], "variant": "dense"},
    {"structure": "monarch", "variant": "e"},
    {"structure": "kronecker", "n": [16, 16], "dtype": "bfloat16", "variant": "f"},
    {"structure": "token", "inputs": [2048, 4096], "n": [1, 2], "variant": "persistent"},
]


@pytest.fixture
def tuned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes RULES the user's table of the GPU "mine"."""
    monkeypatch.setenv("BLR_TUNED_DIR", str(tmp_path))
    write_table(user_table("mine"), table_text("mine", "a test", RULES))
    dispatch.forget()
    yield
    monkeypatch.undo()
    dispatch.forget()


def test_buckets_are_powers_of_two_up_to_16384() -> None:
    found = [bucket(n) for n in (1, 2, 3, 8, 9, 129, 16384, 16385, 10**9)]
    assert found == [1, 2, 4, 8, 16, 256, 16384, 16384, 16384]
    assert {bucket(n) for n in range(1, 20000)} == set(BUCKETS)


@pytest.mark.parametrize(
    ("structure", "shape", "n", "dtype", "expected"),
    [
        ("blast", SHAPE, 7, BF16, ("a", {"chunk": 2})),  # the first of two that match
        ("blast", SHAPE, 9, BF16, ("b", {})),  # 9 counts as 16
        ("blast", SHAPE, 9, FP32, ("bmm_mix", {})),  # no rule for this dtype
        ("blast", SHAPE._replace(outputs=512), 9, torch.float16, ("b", {})),
        ("kronecker", SHAPE, 9, torch.float16, ("auto", {})),  # bfloat16 is another
        ("kronecker", SHAPE, 9, BF16, ("f", {})),
        ("blast", SHAPE._replace(inputs=4096, blocks=4), 9, BF16, ("bmm_mix", {})),
        ("blast", SHAPE, 7, FP64, ("reference", {})),  # whatever rules say
        ("svd", Shape(8192, 28672, 1, 4096), 1, BF16, ("c", {})),  # by the name of its spec
        ("lowrank", Shape(4096, 28672, 1, 4096), 64, BF16, ("gemm", {})),  # one size outside
        ("lowrank", Shape(64, 64, 1, 64), 300, FP32, ("d", {})),  # 300 counts as 512
        ("lowrank", Shape(64, 64, 1, 65), 300, FP32, ("gemm", {})),
        ("monarch", SHAPE, 1, BF16, ("e", {})),  # a layer cannot become dense
        ("ks", Shape(64, 64), 1, BF16, ("auto", {})),
    ],
)
def test_the_first_rule_that_holds_counts(
    tuned: None, structure: str, shape: Shape, n: int, dtype: torch.dtype, expected: Any
) -> None:
    assert choose(structure, shape, n, dtype, "mine") == expected


@pytest.mark.parametrize("gpu", ["unheard-of", *SHIPPED])
@pytest.mark.parametrize("structure", VARIANTS)
def test_every_choice_exists(gpu: str, structure: str) -> None:
    """Rules of thumb and shipped tables name variants that are there, also for odd shapes."""
    shapes = (Shape(4096, 4096, 16, 1024), Shape(96, 60, 3, 6), Shape(100_000, 3, 1, 1))
    dtypes = (torch.float16, BF16, FP32, FP64)
    for shape, n, dtype in itertools.product(shapes, BUCKETS, dtypes):
        variant, config = choose(structure, shape, n, dtype, gpu)
        assert isinstance(config, dict)
        assert variant in VARIANTS[structure]
        assert variant != "gemv" or n == 1
        assert dtype != FP64 or variant == "reference"


def test_choosing_never_runs_or_times_anything(tuned: None) -> None:
    """A name in a table is enough: no variant "a" exists."""
    assert choose("blast", SHAPE, 1, BF16, "mine")[0] == "a"


def test_rules_of_earlier_versions_are_read(tuned: None) -> None:
    """`token` chose how a token was decoded: a table that has it keeps its other rules."""
    read = [(rule["structure"], rule["variant"]) for rule in read_table(user_table("mine"))]
    assert read == [(rule["structure"], rule["variant"]) for rule in RULES]


def test_a_variant_that_this_version_lacks_falls_back(
    tuned: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "kernel_device", lambda tensor: True)
    monkeypatch.setattr(tables, "gpu_key", lambda device: "mine")
    ran: list[str] = []

    def variant(name: str) -> Any:
        return lambda x, *factors, bias, **config: ran.append((name, config)) or x

    x = torch.zeros(1, 4096)
    for known in ({"a": variant("a")}, {"gemv": variant("gemv")}, {}):
        given = (x, (), None)
        dispatch.dispatch(
            "blast",
            SHAPE,
            lambda known=known: known,
            lambda x, bias: ran.append("reference") or x,
            *given,
        )
    assert ran == [("a", {"chunk": 2}), ("gemv", {}), "reference"]


# Tables.


def test_the_users_rules_come_before_the_shipped_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = SHIPPED[0]
    shipped = read_table(shipped_table(gpu))
    mine = {"structure": "lowrank", "n": [1, 1], "variant": "gemm"}
    monkeypatch.setenv("BLR_TUNED_DIR", str(tmp_path))
    write_table(user_table(gpu), table_text(gpu, "a test", [mine]))
    dispatch.forget()
    found = tables.tuned_rules(gpu)
    dispatch.forget()
    assert [*found[0]["n"]] == [1, 1]
    assert found[1:] == shipped


def test_a_broken_table_of_the_user_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is only about speed: generation goes on, by what is shipped."""
    monkeypatch.setenv("BLR_TUNED_DIR", str(tmp_path))
    (tmp_path / "mine.yaml").write_text("gpu: mine\nsource: x\nrules: [{variant: 3}]\n")
    dispatch.forget()
    with pytest.warns(UserWarning, match=r"mine\.yaml:3: .*structure"):
        assert choose("lowrank", SHAPE, 1, BF16, "mine") == ("gemv", {})
    dispatch.forget()


def test_where_the_users_table_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BLR_TUNED_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert user_table("h200") == Path("/somewhere/blr/tuned/h200.yaml")
    monkeypatch.setenv("BLR_TUNED_DIR", "/else")
    assert user_table("h200") == Path("/else/h200.yaml")


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ("{structure: blast}", "variant"),
        ("{structure: dense, variant: gemm}", "structure"),
        ("{structure: blast, variant: a, n: [8, 1]}", "found n from 8 to 1"),
        ("{structure: blast, variant: a, n: [1, 2, 3]}", "n"),
        ("{structure: blast, variant: a, dtype: float64}", "dtype"),
        ("{structure: blast, variant: a, colour: red}", "colour"),
        ("{structure: blast, variant: a, config: {x: [1]}}", "config"),
    ],
)
def test_wrong_rules_are_refused_with_their_line(rule: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "gpu.yaml"
    path.write_text(f"gpu: mine\nsource: a test\nrules:\n  - {rule}\n")
    with pytest.raises(RecipeError, match=rf"gpu\.yaml:4: .*{message}"):
        read_table(path)


_BOUNDS = st.tuples(st.integers(0, 9), st.integers(10, 99)).map(list)
_SCALARS = st.one_of(
    st.booleans(),
    st.integers(-9, 999),
    st.floats(allow_nan=False, allow_infinity=False),
    st.sampled_from(["plain", "true", "Null", "two words", "10", "1e5", 'quo"te', "col: on", ""]),
)
_CONFIGS = st.dictionaries(
    st.sampled_from(["BLOCK_N", "num_warps", "chunk", "first"]),
    _SCALARS | st.dictionaries(st.sampled_from(["BK", "num_warps"]), st.integers(0, 64), min_size=1),
    max_size=3,
)


@given(
    st.fixed_dictionaries(
        {"structure": st.sampled_from(list(VARIANTS)), "variant": st.sampled_from(["gemv", "dense"])},
        optional={
            "n": _BOUNDS,
            "rank": _BOUNDS,
            "dtype": st.sampled_from(["bfloat16", ["float16", "float32"]]),
            "config": _CONFIGS,
        },
    )
)
def test_written_tables_read_back(rule: dict[str, Any]) -> None:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "new" / "gpu.yaml"
        write_table(path, table_text("gpu", 'said "so": yes', [rule]))
        found = read_table(path)
    assert found == [TunedRule(**rule).model_dump(exclude_none=True, exclude_defaults=True)]


# What this process can run.


def test_names_of_gpus() -> None:
    """Variants of one card share a table; slices of one and unknown names go by capability."""
    names = {
        "NVIDIA H200": "h200",
        "NVIDIA A100-SXM4-80GB": "a100",
        "NVIDIA A100 80GB PCIe": "a100",
        "NVIDIA H100 80GB HBM3": "h100",
        "NVIDIA GH200 480GB": "gh200",
        "NVIDIA GeForce RTX 4090": "rtx4090",
        "NVIDIA L40S": "l40s",
        "NVIDIA A40": "a40",
        "NVIDIA H200 MIG 1g.18gb": "sm_90",
        "Orin": "sm_90",
    }
    assert {name: gpu_name_key(name, (9, 0)) for name in names} == names


def test_kernels_on_the_cpu_only_if_asked_and_interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.zeros(1)
    monkeypatch.setattr(available, "has_triton", lambda: True)
    found = {}
    for mode, interpret in itertools.product(("auto", "torch", "triton"), ("0", "1")):
        monkeypatch.setenv("BLR_KERNELS", mode)
        monkeypatch.setenv("TRITON_INTERPRET", interpret)
        found[mode, interpret] = kernel_device(x)
    assert [key for key, runs in found.items() if runs] == [("triton", "1")]


def test_kernels_that_are_not_there_are_an_error_if_insisted_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(available, "has_triton", lambda: False)
    monkeypatch.setenv("BLR_KERNELS", "triton")
    with pytest.raises(RuntimeError, match="no triton; install it"):
        kernel_device(torch.zeros(1))
    monkeypatch.setenv("BLR_KERNELS", "fast")
    with pytest.raises(RuntimeError, match="'fast': expected one of auto, torch, triton"):
        kernel_device(torch.zeros(1))
