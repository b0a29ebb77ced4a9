"""Chains of patterns: parsing, validation, enumeration and choice."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from math import gcd

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blr.compressor.base.errors import UsageError
from blr.compressor.structures import patterns
from blr.compressor.structures.patterns import (
    SNAP_TOLERANCE,
    TOLERANCE,
    Chain,
    chain_h,
    choose_patterns,
    parameters,
    parse_patterns,
    predicted_log_error,
    two_factor_chain,
    two_factor_chains,
    validate_chain,
)

pytestmark = pytest.mark.fast

# "Fast Inference with Kronecker-Sparse Matrices", appendix E.8: (chain, i, o, cf).
PUBLISHED = {
    "vit-s-square": ("(1,192,48,2)(2,48,192,1)", 384, 384, 4.0),
    "vit-s-up": ("(1,768,192,2)(6,64,64,1)", 384, 1536, 24 / 13),
    "gpt2-medium-down": ("(1,64,256,16)(64,64,64,1)", 4096, 1024, 8.0),
}
INVALID = {
    "sizes of the layer": ("(1,192,48,2)(2,48,192,1)", 384, 768, "makes a 384x384"),
    "sizes of neighbours": ("(1,192,48,2)(2,48,192,2)", 768, 384, "do not meet"),
    "a does not divide": ("(2,4,6,1)(3,4,4,1)", 12, 8, "cannot be factorized"),
    "d does not divide": ("(1,4,6,2)(1,4,6,3)", 18, 8, "cannot be factorized"),
    "fractional rank": ("(1,128,128,3)(6,64,256,1)", 1536, 384, "block rank 128/6"),
    "zero": ("(1,0,4,1)(1,4,4,1)", 4, 4, "positive"),
}


def enumerate_chains(
    in_features: int, out_features: int, max_parameters: int | float
) -> Iterator[Chain]:
    """Every two-factor chain of a dense out×in matrix with at most `max_parameters`."""
    for d1, a2, limit, unit in two_factor_chains(in_features, out_features):
        for rank in range(1, min(limit, int(max_parameters // unit)) + 1):
            yield two_factor_chain(in_features, out_features, d1, a2, rank)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_chains(name: str) -> None:
    text, i, o, cf = PUBLISHED[name]
    chain = parse_patterns(text)
    validate_chain(chain, i, o)
    assert i * o / parameters(chain) == pytest.approx(cf)
    assert chain in set(enumerate_chains(i, o, parameters(chain)))


def test_published_down_chain_has_no_block_rank() -> None:
    """ViT-S/16 down is printed input side first, and its blocks would need rank 21⅓."""
    with pytest.raises(UsageError, match="makes a 384x384"):
        validate_chain(parse_patterns("(6,64,256,1)(1,128,128,3)"), 1536, 384)
    validate_chain(parse_patterns("(1,128,126,3)(6,63,256,1)"), 1536, 384)


@pytest.mark.parametrize("name", INVALID)
def test_invalid_chains(name: str) -> None:
    text, i, o, message = INVALID[name]
    with pytest.raises(UsageError, match=message) as caught:
        validate_chain(parse_patterns(text), i, o)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["", "1,2,3,4", "(1,2,3)", "(1,2,3,-4)", "(1,2,3,4", "wave"])
def test_unreadable_patterns(text: str) -> None:
    with pytest.raises(UsageError, match="expected a chain such as"):
        parse_patterns(text, 8, 8)


def test_spaces_and_commas_between_patterns() -> None:
    assert parse_patterns(" ( 1, 2,3 ,4 ) , (4,6,2,1) ") == ((1, 2, 3, 4), (4, 6, 2, 1))


@pytest.mark.parametrize(("i", "o"), [(2, 2), (16, 16), (32, 32), (32, 8), (8, 64), (1024, 4096)])
def test_butterfly(i: int, o: int) -> None:
    chain = parse_patterns("butterfly", i, o)
    validate_chain(chain, i, o)
    assert len(chain) == min(i, o).bit_length() - 1
    if i == o:
        assert parameters(chain) == 2 * i * len(chain)


@pytest.mark.parametrize(("i", "o", "blocks"), [(16, 16, 4), (384, 384, 16), (192, 64, 8)])
def test_monarch(i: int, o: int, blocks: int) -> None:
    chain = parse_patterns("Monarch", i, o)
    validate_chain(chain, i, o)
    assert chain == ((1, o // blocks, blocks, blocks), (blocks, blocks, i // blocks, 1))


@pytest.mark.parametrize(("name", "i", "o"), [("butterfly", 48, 48), ("monarch", 5, 7)])
def test_named_chain_that_does_not_exist(name: str, i: int, o: int) -> None:
    with pytest.raises(UsageError, match="--pattern"):
        parse_patterns(name, i, o)


def test_h() -> None:
    assert chain_h([(1, 192, 48, 2)]) == pytest.approx(1 / 192 + 1 / 48)
    assert chain_h([(1, 2, 2, 1), (1, 4, 4, 1)]) == pytest.approx(0.5)


@given(st.integers(1, 24), st.integers(1, 24), st.integers(1, 600))
@settings(max_examples=40)
def test_every_enumerated_chain_is_valid_and_within_budget(i: int, o: int, most: int) -> None:
    for chain in enumerate_chains(i, o, most):
        validate_chain(chain, i, o)
        (_, b, c, d1), (a2, _, _, _) = chain
        assert parameters(chain) == c // a2 * (a2 * o + d1 * i) <= most
        assert b * d1 == o


@given(eights := st.integers(2, 20).map(lambda n: 8 * n), eights, st.floats(1.1, 6.0), st.booleans())
@settings(max_examples=40)
def test_choice_meets_the_budget(i: int, o: int, cf: float, calibrated: bool) -> None:
    choice, _ = choose_patterns(i, o, cf, calibrated=calibrated)
    validate_chain(choice, i, o)
    assert parameters(choice) <= i * o / cf
    blocked = [c for c in enumerate_chains(i, o, i * o / cf) if c[0][3] * c[1][0] > 1]
    nearest = max(map(parameters, blocked)) * (1 - SNAP_TOLERANCE)
    assert parameters(choice) >= min(nearest, i * o / cf / (1 + TOLERANCE))
    assert choice[0][3] * choice[1][0] > 1, "that is a plain low rank"


def test_calibration_favours_column_blocks() -> None:
    """Plain, the longer side is split; with activations, the inputs."""
    plain, calibrated = (choose_patterns(384, 1024, 2.0, calibrated=c)[0] for c in (False, True))
    assert (plain[0][3], plain[1][0]) == (2, 1)
    assert calibrated[0][3] == 1 < calibrated[1][0]


def test_choice_is_among_equals_the_largest_h(monkeypatch: pytest.MonkeyPatch) -> None:
    near, _ = choose_patterns(768, 768, 2.0)
    monkeypatch.setattr(patterns, "BAND", 10.0)
    assert chain_h(choose_patterns(768, 768, 2.0)[0]) > chain_h(near)


def test_choice_falls_back_to_low_rank_when_nothing_divides() -> None:
    assert choose_patterns(13, 17, 2.0)[0] == ((1, 17, 3, 1), (1, 3, 13, 1))
    assert gcd(13, 17) == 1


def test_impossible_factor() -> None:
    with pytest.raises(UsageError, match="at most cf 6"):
        choose_patterns(12, 12, 7.0)


def test_predicted_error_falls_with_rank_and_ends_exact() -> None:
    errors = [predicted_log_error(64, 32, 2, 2, rank) for rank in (1, 4, 8, 16)]
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] == float("-inf")


def test_patterns_do_not_import_torch() -> None:
    code = "import sys, blr.compressor.structures.patterns; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
