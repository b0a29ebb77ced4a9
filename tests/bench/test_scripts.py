"""The script that makes the table of kernels that ships: it can be started, and chooses well."""

from __future__ import annotations

from blr.bench import tune_table
from blr.kernels.common.tables import BUCKETS


def test_the_script_can_be_started() -> None:
    assert callable(tune_table.main)


def test_rules_of_the_shipped_table_follow_from_times() -> None:
    """Ours where it is faster at every layer, the plain form where it is not at one."""
    shape = {"inputs": 4096, "outputs": 4096, "blocks": 1, "rank": 1024}
    times = {4: [(1.0, 2.0), (1.0, 2.0)], 16: [(1.0, 2.0), (1.9, 1.0)]}  # of ours and the plain form
    rows = [
        {"structure": "lowrank", "shape": shape, "n": n, "times": {"narrow": a, "gemm": b, "dense": 3.0}}
        for n, both in times.items()
        for a, b in both
    ]
    found = [(tuple(rule["n"]), rule["variant"]) for rule in tune_table.rules_of(rows)]
    assert found == [((4, 4), "narrow"), ((5, BUCKETS[-1]), "gemm")]
