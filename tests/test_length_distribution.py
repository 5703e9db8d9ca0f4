"""Request lengths from histograms: the mean exact, the shares those of the buckets."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from kvcache_exporter.length_distribution import LengthDistribution, length_distribution

BOUNDS = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0)


def of_lengths(lengths: list[int]) -> LengthDistribution:
    """The distribution of the histogram of these lengths."""
    numbers = [0.0] * (len(BOUNDS) + 1)
    for length in lengths:
        numbers[sum(length > bound for bound in BOUNDS)] += 1
    distribution = length_distribution(BOUNDS, numbers, sum(lengths) / len(lengths), limit=2000)
    assert distribution is not None
    return distribution


def integral(distribution: LengthDistribution, step: float = 0.25) -> float:
    """Area under the share that is longer: the mean."""
    points = int(distribution.longest / step) + 1
    return sum(distribution.share_longer((i + 0.5) * step) for i in range(points)) * step


def test_shares_at_the_bounds_are_the_histograms() -> None:
    distribution = of_lengths([3, 3, 30, 150])
    assert [distribution.share_longer(at) for at in (0, 2, 5, 20, 50, 100, 200)] == [1, 1, 0.5, 0.5, 0.25, 0.25, 0]


def test_an_empty_histogram_has_no_distribution() -> None:
    assert length_distribution(BOUNDS, [0.0] * (len(BOUNDS) + 1), 0.0) is None


def test_beyond_the_last_bound_max_model_len_is_the_end() -> None:
    assert of_lengths([1500]).longest == 2000


@given(st.lists(st.integers(1, 2000), min_size=1, max_size=50))
def test_mean_is_that_of_the_lengths(lengths: list[int]) -> None:
    distribution = of_lengths(lengths)
    # Lengths that all stand at one end of their range cannot be met wholly: the exponent has its bounds.
    assume(0.02 < distribution.exponent < 49)
    assert integral(distribution) == pytest.approx(sum(lengths) / len(lengths), rel=0.02, abs=0.5)


@given(st.lists(st.integers(1, 2000), min_size=1, max_size=50), st.floats(0.01, 1))
def test_quantile_is_the_inverse_of_the_share_that_is_longer(lengths: list[int], share: float) -> None:
    distribution = of_lengths(lengths)
    length = distribution.quantile(share)
    # Where all stand at one end of a range, the inverse is steep: a hair further holds.
    assert distribution.share_longer(length + 1e-6) <= 1 - share + 1e-6
    assert distribution.share_longer(length - 0.01) >= 1 - share - 0.05 or length < 1


@given(st.lists(st.integers(1, 2000), min_size=1, max_size=50))
def test_share_that_is_longer_falls_from_one_to_nothing(lengths: list[int]) -> None:
    distribution = of_lengths(lengths)
    shares = [distribution.share_longer(at) for at in range(0, 2101, 7)]
    assert shares[0] == pytest.approx(1)
    assert all(a >= b - 1e-9 for a, b in pairwise(shares))
    assert shares[-1] == 0
    assert distribution.variance >= 0
