"""Laws of depth: the right one is found, and its coefficients."""

import math

import pytest

from ckbench.reports._laws import Law, fitted

MIB = 2**20
DEPTHS = [4, 9, 16, 25, 36]


def fit(depths: list[int], n_bytes: list[int]) -> Law | None:
    return fitted("every-k:4", depths, n_bytes).law


@pytest.mark.parametrize("is_root", [False, True])
def test_a_law_is_found_again(is_root: bool) -> None:
    exact = [3 * MIB + 2 * MIB * (math.sqrt(depth) if is_root else depth) for depth in DEPTHS]
    law = fit(DEPTHS, [round(value) for value in exact])
    assert law is not None and law.is_root == is_root
    assert law.a_bytes == pytest.approx(3 * MIB, abs=2) and law.b_bytes == pytest.approx(2 * MIB, abs=2)
    assert law.r_squared == pytest.approx(1.0)
    assert str(law) == f"3.00 MiB + 2.00 MiB·{'√L' if is_root else 'L'}, R² 1.0000"
    assert law.at(49) == pytest.approx((3 + 2 * (7 if is_root else 49)) * MIB, rel=1e-6)


def test_what_fits_badly_says_so() -> None:
    law = fit(DEPTHS, [1, 9, 2, 8, 3])
    assert law is not None and 0 <= law.r_squared < 0.2


def test_what_does_not_grow_is_a_line() -> None:
    law = fit(DEPTHS, [7 * MIB] * 5)
    assert law is not None and not law.is_root and law.b_bytes == 0 and law.r_squared == 1
    assert str(law).startswith("7.00 MiB + 0 B·L")


def test_what_shrinks_has_a_minus() -> None:
    assert " - 1.00 MiB·L" in str(fit(DEPTHS, [(50 - depth) * MIB for depth in DEPTHS]))


@pytest.mark.parametrize("depths", [[], [4], [4, 8, 12], [4, 4, 8, 12]])
def test_too_few_depths_have_no_law(depths: list[int]) -> None:
    assert fit(depths, [depth * MIB for depth in depths]) is None


@pytest.mark.parametrize(
    ("strategy", "is_root"), [("none", False), ("per-block,skip_last", False), ("sqrt", True), ("sqrt+offload", False)]
)
def test_theory_names_the_law_of_some(strategy: str, is_root: bool) -> None:
    """Even where the other fits better; what changes the strategy leaves it open."""
    other = [round((math.sqrt(depth) if not is_root else depth) * MIB) for depth in DEPTHS]
    found = fitted(strategy, DEPTHS, other if strategy != "sqrt+offload" else [depth * MIB for depth in DEPTHS])
    assert found.law is not None and found.other is not None
    assert found.law.is_root == is_root and found.is_expected == (strategy != "sqrt+offload")
    if found.is_expected:
        assert found.other.r_squared > found.law.r_squared
