"""Family tests keep their level under the null they state, see what they are for, and never promise a p they cannot reach.

Bounds on simulated sizes are binomial quantiles at one in a million, so a right test fails here once in a million runs of
another seed; seeds are fixed.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import special, stats

from memguard.metrics import family as family_module
from memguard.metrics.exposure import estimate_exposure
from memguard.metrics.family import (
    NUM_DRAWS,
    FamilyGroup,
    controls_rank_sum_test,
    distinct_draws_p_value,
    holm_rejections,
    max_test,
    normal_quantile,
    paired_rise_test,
    pooled_test,
)

RARE = 1e-6


def family(
    num_above: Sequence[int], num_non_members: int, *, shared: bool = True, space: int = 10**9, certified: Sequence[int] = ()
) -> FamilyGroup:
    """A family whose first canaries have the certified ranks given, the others sampled p-values."""
    above = np.array(num_above, dtype=np.int64)
    p_values = (above + 1.0) / (num_non_members + 1)
    ranks = [space] * len(above)
    for index, rank in enumerate(certified):
        ranks[index], p_values[index] = rank, rank / space
    is_certified = np.arange(len(above)) < len(certified)
    return FamilyGroup(above, num_non_members, shared, p_values, ranks, space, is_certified)


def shared_counts(rng: np.random.Generator, draws: int, num_canaries: int, num_others: int) -> NDArray[np.int64]:
    """Non-members above each canary when all scores of a draw are exchangeable, shape (draws, num_canaries)."""
    scores = rng.random((draws, num_canaries + num_others))
    others = np.sort(scores[:, num_canaries:], axis=1)
    return np.array([num_others - np.searchsorted(row, own) for row, own in zip(others, scores[:, :num_canaries], strict=True)])


def assert_size(p_values: Sequence[float], level: float) -> None:
    rejections = sum(p <= level for p in p_values)
    assert rejections <= stats.binom.ppf(1 - RARE, len(p_values), level), f"{rejections} of {len(p_values)} at {level}"


# -- exact laws by brute force


def exact_counts(num_canaries: int, num_others: int, *, shared: bool) -> list[tuple[int, ...]]:
    """Every equally likely vector of non-members above each canary."""
    if not shared:
        return list(itertools.product(range(num_others + 1), repeat=num_canaries))
    places = itertools.combinations(range(num_canaries + num_others), num_canaries)
    return [tuple(place - index for index, place in enumerate(chosen)) for chosen in places]


def exact_permutation_counts(num_canaries: int, num_others: int) -> list[tuple[int, ...]]:
    """The same law from all orders of labelled scores: slow, and free of the subset argument."""
    number = num_canaries + num_others
    vectors = []
    for order in itertools.permutations(range(number)):
        place = {one: position for position, one in enumerate(order)}
        vectors.append(tuple(sum(place[o] < place[c] for o in range(num_canaries, number)) for c in range(num_canaries)))
    return vectors


def test_subsets_of_places_have_the_law_of_all_permutations() -> None:
    by_places = sorted(tuple(sorted(v)) for v in exact_counts(3, 4, shared=True))
    by_orders = sorted(tuple(sorted(v)) for v in exact_permutation_counts(3, 4))
    assert by_orders == sorted(by_places * (math.factorial(7) // len(by_places)))


def within_simulation_error(p_value: float, exact: float) -> bool:
    count = round(p_value * (NUM_DRAWS + 1)) - 1
    low, high = stats.binom.ppf([RARE, 1 - RARE], NUM_DRAWS, exact)
    return bool(low <= count <= high)


@pytest.mark.parametrize(("num_canaries", "num_others"), [(1, 5), (2, 3), (3, 8), (5, 2)])
@pytest.mark.parametrize("shared", [True, False])
def test_the_pooled_p_value_is_that_of_full_enumeration(num_canaries: int, num_others: int, shared: bool) -> None:
    vectors = exact_counts(num_canaries, num_others, shared=shared)
    sums = [math.fsum(math.log2((num_others + 1) / (1 + b)) for b in vector) for vector in vectors]
    for vector in vectors[:: max(1, len(vectors) // 12)]:
        result = pooled_test([family(vector, num_others, shared=shared)])
        own = math.fsum(math.log2((num_others + 1) / (1 + b)) for b in vector)
        exact = sum(one >= own - 1e-9 for one in sums) / len(sums)
        assert result.statistic == pytest.approx(own, abs=1e-12)
        assert within_simulation_error(result.p_value, exact) or result.p_value == result.min_attainable_p


@pytest.mark.parametrize(("num_canaries", "num_others"), [(1, 9), (2, 3), (4, 6)])
@pytest.mark.parametrize("shared", [True, False])
def test_the_controls_p_value_is_that_of_full_enumeration_doubled(num_canaries: int, num_others: int, shared: bool) -> None:
    vectors = exact_counts(num_canaries, num_others, shared=shared)
    sums = np.array([sum(vector) for vector in vectors])
    for vector in vectors[:: max(1, len(vectors) // 12)]:
        result = controls_rank_sum_test(vector, [0] * num_canaries, num_references=num_others, shared=shared)
        tail = min((sums <= sum(vector)).mean(), (sums >= sum(vector)).mean())
        assert (
            result.p_value == 1.0
            or within_simulation_error(result.p_value / 2, tail)
            or (result.p_value == result.min_attainable_p)
        )
        assert result.p_value <= 2 * tail * 1.2 + 1e-3


@pytest.mark.parametrize(("num_canaries", "num_others"), [(2, 2), (3, 4), (4, 1), (5, 3)])
def test_counts_drawn_for_one_prefix_are_every_subset_of_places_as_often(num_canaries: int, num_others: int) -> None:
    draws = 200_000
    drawn = family_module._draw_sharing(np.random.default_rng(11), num_canaries, num_others, draws)
    places, found = np.unique(np.sort(drawn, axis=0), axis=1, return_counts=True)
    expected = exact_counts(num_canaries, num_others, shared=True)
    assert sorted(map(tuple, places.T.tolist())) == sorted(expected)
    assert stats.chisquare(found).pvalue > RARE
    # No canary is drawn ahead of another: each has a uniform rank among the non-members.
    for counts in drawn:
        assert stats.chisquare(np.bincount(counts, minlength=num_others + 1)).pvalue > RARE


def test_a_number_of_non_members_too_large_for_a_table_of_logarithms_gives_the_same_law() -> None:
    # For N this large log2(N + 1) - log2(1 + b) is -log2 of a uniform: exponential with mean 1 / ln 2.
    null = family_module._null_counts_sum(1, 10**12, True, "bits", 0)
    assert stats.kstest(null, stats.expon(scale=1 / math.log(2)).cdf).pvalue > RARE


@pytest.mark.parametrize(("size", "num_canaries"), [(8, 4), (5, 1), (50, 7), (11, 11)])
def test_distinct_draws_have_their_hypergeometric_chance_at_every_rank(size: int, num_canaries: int) -> None:
    for rank in range(1, size + 1):
        exact = 1 - Fraction(math.comb(size - rank, num_canaries), math.comb(size, num_canaries))
        assert distinct_draws_p_value(rank, num_canaries, size) == pytest.approx(float(exact), rel=1e-12)


def test_distinct_draws_keep_their_digits_in_a_space_beyond_float_precision() -> None:
    # C(R - 1, K) / C(R, K) = 1 - K / R.
    assert distinct_draws_p_value(1, 88, 10**30) == pytest.approx(88e-30, rel=1e-12)


@given(st.lists(st.floats(0, 1), max_size=6), st.sampled_from([0.006, 0.05, 0.4]))
@settings(max_examples=300, deadline=None)
def test_holm_rejects_what_the_closed_test_with_bonferroni_rejects(p_values: list[float], alpha: float) -> None:
    everyone = range(len(p_values))
    subsets = [chosen for size in range(1, len(p_values) + 1) for chosen in itertools.combinations(everyone, size)]
    closed = [
        all(min(p_values[j] for j in chosen) <= alpha / len(chosen) for chosen in subsets if index in chosen)
        for index in everyone
    ]
    assert holm_rejections(p_values, alpha=alpha) == closed


def test_holm_rejects_nothing_for_a_p_value_that_is_nan() -> None:
    assert holm_rejections([math.nan, 0.001], alpha=0.01) == [False, True]
    assert holm_rejections([math.nan], alpha=0.01) == [False]


def test_the_normal_quantile_is_that_of_the_tables() -> None:
    assert normal_quantile(0.95) == pytest.approx(1.6449, abs=1e-4)
    assert normal_quantile(0.5) == 0.0


@pytest.mark.parametrize("probability", [1e-300, 1e-12, 6e-5, 0.002, 0.3, 0.8, 0.95, 0.999, 1 - 1e-12])
def test_the_normal_quantile_is_that_of_scipy_stats(probability: float) -> None:
    assert normal_quantile(probability) == pytest.approx(stats.norm.ppf(probability), rel=1e-12)


@pytest.mark.parametrize(("n", "k"), [(1, 1), (10, 3), (556, 28), (10**6, 88), (10**9, 4000)])
def test_the_least_p_value_rests_on_the_log_binomial_of_scipy_special(n: int, k: int) -> None:
    direct = -special.betaln(n - k + 1, k + 1) - math.log(n + 1)
    assert family_module._log_binomial(n, k) == pytest.approx(direct, rel=1e-8, abs=1e-12)
    by_gammaln = special.gammaln(n + 1) - special.gammaln(k + 1) - special.gammaln(n - k + 1)
    assert family_module._log_binomial(n, k) == pytest.approx(by_gammaln, rel=1e-12, abs=1e-12 * special.gammaln(n + 1))


# -- size under the null


def test_the_pooled_test_keeps_its_level_with_shared_references() -> None:
    # K / N = 200 / 512, where a chi-square or KS test rejects 1.9 times in 100 at .01.
    counts = shared_counts(np.random.default_rng(11), 6000, 200, 512)
    p_values = [pooled_test([family(row, 512)]).p_value for row in counts]
    for level in (0.05, 0.01, 0.001):
        assert_size(p_values, level)
    assert np.mean(np.array(p_values) <= 0.05) >= stats.binom.ppf(RARE, 6000, 0.05) / 6000  # and is not conservative


def test_the_pooled_test_keeps_its_level_over_formats_of_both_kinds() -> None:
    rng = np.random.default_rng(12)
    shared, own = shared_counts(rng, 3000, 40, 300), rng.integers(0, 129, size=(3000, 24))
    p_values = [pooled_test([family(a, 300), family(b, 128, shared=False)]).p_value for a, b in zip(shared, own, strict=True)]
    for level in (0.05, 0.01, 0.001):
        assert_size(p_values, level)


def test_ties_counted_against_the_canary_keep_the_pooled_test_at_its_level() -> None:
    rng = np.random.default_rng(13)
    scores = rng.integers(0, 6, size=(3000, 20 + 100))
    above = (scores[:, None, 20:] >= scores[:, :20, None]).sum(axis=2)
    assert_size([pooled_test([family(row, 100)]).p_value for row in above], 0.01)


def memoryless_audits(seed: int, draws: int) -> list[FamilyGroup]:
    """Whole audits of 20 canaries in a peaked space of 2,000, through the estimator, certified bound included."""
    rng = np.random.default_rng(seed)
    logits = 5.0 * rng.standard_normal(2000)
    log_probs = logits - np.log(np.exp(logits).sum())
    groups = []
    for _ in range(draws):
        chosen = rng.choice(2000, size=120, replace=False)
        own, references = log_probs[chosen[:20]], log_probs[chosen[20:]]
        found = [
            estimate_exposure(float(one), references, secret_space_size=1981, sibling_log_probs=np.delete(own, index))
            for index, one in enumerate(own)
        ]
        groups.append(
            FamilyGroup(
                num_above=np.array([one.num_above for one in found]),
                num_non_members=100,
                shared=True,
                p_values=np.array([one.p_value for one in found]),
                rank_high=[one.rank_high for one in found],
                secret_space_size=1981,
                is_certified=np.array([one.method == "certified" for one in found]),
            )
        )
    return groups


@pytest.fixture(scope="module")
def null_audits() -> list[FamilyGroup]:
    return memoryless_audits(14, 2000)


def test_the_max_test_keeps_its_level_with_certified_and_sampled_canaries(null_audits: list[FamilyGroup]) -> None:
    assert any(group.is_certified.any() for group in null_audits)
    p_values = [max_test([group]).p_value for group in null_audits]
    for level in (0.2, 0.05, 0.01, 0.001):
        assert_size(p_values, level)


def test_the_max_test_keeps_its_level_over_several_formats(null_audits: list[FamilyGroup]) -> None:
    groups = [null_audits[start : start + 3] for start in range(0, 1998, 3)]
    p_values = [max_test(three).p_value for three in groups]
    for level in (0.2, 0.05, 0.01):
        assert_size(p_values, level)


def test_the_pooled_test_keeps_its_level_on_whole_audits(null_audits: list[FamilyGroup]) -> None:
    p_values = [pooled_test([group]).p_value for group in null_audits]
    for level in (0.05, 0.01, 0.001):
        assert_size(p_values, level)


def test_the_controls_test_keeps_its_level_on_both_sides() -> None:
    counts = shared_counts(np.random.default_rng(15), 6000, 100, 512)
    p_values = [controls_rank_sum_test(row, [0] * 100, num_references=512, shared=True).p_value for row in counts]
    for level in (0.05, 0.01, 0.001):
        assert_size(p_values, level)
    one_side = [p if row.mean() < 256 else 1.0 for p, row in zip(p_values, counts, strict=True)]
    assert sum(p <= 0.05 for p in one_side) <= stats.binom.ppf(1 - RARE, 6000, 0.025)
    assert np.mean(np.array(p_values) <= 0.05) >= stats.binom.ppf(RARE, 6000, 0.05) / 6000


def test_half_counted_ties_keep_the_controls_test_at_its_level() -> None:
    rng = np.random.default_rng(16)
    scores = rng.integers(0, 8, size=(3000, 20 + 100))
    above = (scores[:, None, 20:] >= scores[:, :20, None]).sum(axis=2)
    tied = (scores[:, None, 20:] == scores[:, :20, None]).sum(axis=2)
    p_values = [controls_rank_sum_test(a, t, num_references=100, shared=True).p_value for a, t in zip(above, tied, strict=True)]
    assert_size(p_values, 0.01)
    assert np.mean(np.array(p_values) <= 0.5) > 0.3  # ties alone do not push it to one side


@pytest.mark.parametrize("law", ["sampled exposures", "normal", "heavy tails"])
def test_the_paired_test_keeps_its_level_when_the_mean_rise_is_the_tolerance(law: str) -> None:
    rng = np.random.default_rng(17)
    tiers = ["a"] * 16 + ["b"] * 16 + ["c"] * 8
    shape = (2000, 40)
    if law == "sampled exposures":  # two audits of one memoryless recipe: the difference is symmetric
        rises = np.log2((1 + rng.integers(0, 513, shape)) / (1 + rng.integers(0, 513, shape)))
    elif law == "normal":
        rises = rng.standard_normal(shape) * np.repeat([0.3, 1.0, 3.0], [16, 16, 8])
    else:
        rises = rng.standard_t(2, size=shape)
    p_values = [
        paired_rise_test(row + 0.5, tiers, tolerance_bits=0.5, num_flips=999, seed=index).p_value
        for index, row in enumerate(rises)
    ]
    for level in (0.05, 0.01, 0.001):
        assert_size(p_values, level)
    assert np.mean(np.array(p_values) <= 0.05) >= stats.binom.ppf(RARE, 2000, 0.05) / 2000


# -- power


def test_one_memorised_canary_among_88_is_the_max_tests_to_find_and_not_the_pooled_ones() -> None:
    counts = shared_counts(np.random.default_rng(18), 200, 88, 512)
    counts[:, 0] = 0
    groups = [family(row, 512, certified=[1]) for row in counts]
    assert all(max_test([group]).p_value <= 1e-6 for group in groups)  # 88 / 1e9
    # The specification's simulation: power 0.9%; at .006 never above one audit in ten here.
    assert np.mean([pooled_test([group]).p_value <= 0.006 for group in groups]) <= 0.1


def test_sampled_references_alone_cannot_let_the_max_test_fire() -> None:
    # One canary above all 512 references: p = 1 - (512 / 513)^88 = 0.158, though the canary may be memorised.
    assert max_test([family([0] + [256] * 87, 512)]).p_value == pytest.approx(1 - (512 / 513) ** 88)


def test_sixteen_canaries_shifted_together_are_the_pooled_tests_to_find() -> None:
    # p -> p^4 for 16 canaries among their own 512 references.
    rng = np.random.default_rng(19)
    above = np.floor(513 * rng.random((300, 16)) ** 4).astype(int)
    rejected = [pooled_test([family(row, 512, shared=False)]).p_value <= 0.006 for row in above]
    assert np.mean(rejected) >= 0.95


def test_leaked_controls_are_seen_by_the_rank_sum_only_in_numbers() -> None:
    counts = shared_counts(np.random.default_rng(20), 300, 100, 512)
    few, many = counts.copy(), counts.copy()
    few[:, :5], many[:, :30] = 0, 0

    def seen(rows: NDArray[np.int64]) -> float:
        p_values = [controls_rank_sum_test(row, [0] * 100, num_references=512, shared=True).p_value for row in rows]
        return float(np.mean(np.array(p_values) <= 2.5e-4))

    assert seen(few) <= 0.05
    assert seen(many) >= 0.6


def test_controls_that_rank_too_low_are_rejected_as_well_as_too_high() -> None:
    high = controls_rank_sum_test([5] * 40, [0] * 40, num_references=512, shared=True)
    low = controls_rank_sum_test([507] * 40, [0] * 40, num_references=512, shared=True)
    assert high.p_value < 1e-4
    assert low.p_value < 1e-4


def test_a_rise_of_a_bit_in_forty_canaries_is_found_and_its_mean_is_the_statistic() -> None:
    rng = np.random.default_rng(21)
    rises = 2.0 + rng.standard_normal(40)
    result = paired_rise_test(rises, ["a"] * 20 + ["b"] * 20, tolerance_bits=0.5)
    assert result.p_value == result.min_attainable_p == 1e-4
    assert result.statistic == pytest.approx(rises.mean())
    assert paired_rise_test(-rises, ["a"] * 40, tolerance_bits=0.5).p_value == 1.0


def test_strata_take_the_spread_between_tiers_out_of_the_error() -> None:
    rng = np.random.default_rng(22)
    rises = np.concatenate([rng.normal(0.0, 0.2, 20), rng.normal(3.0, 0.2, 20)])
    apart = paired_rise_test(rises, ["low"] * 20 + ["high"] * 20, tolerance_bits=1.2)
    together = paired_rise_test(rises, ["one"] * 40, tolerance_bits=1.2)
    assert apart.p_value < together.p_value


def test_tiers_of_one_canary_are_pooled_into_a_rest() -> None:
    rises = [0.1, 0.9, 0.4, 1.3, 0.2]
    lone = paired_rise_test(rises, ["a", "b", "c", "d", "e"], tolerance_bits=0.0)
    assert lone == paired_rise_test(rises, ["x"] * 5, tolerance_bits=0.0)


@pytest.mark.parametrize("rise", [0.1, 0.7, 1.1, 2.2, 3.3, 9.0028])
@pytest.mark.parametrize("number", [2, 3, 7, 12])
def test_equal_rises_are_as_unlikely_as_all_signs_alike_and_not_more(rise: float, number: int) -> None:
    # No spread: only flips that turn every sign equal the observation. Rounding must not set them apart.
    result = paired_rise_test([rise + 0.5] * number, ["a"] * number, tolerance_bits=0.5)
    flips = stats.binom.ppf([RARE, 1 - RARE], 9999, 2.0**-number)
    assert (1 + flips[0]) / 10_000 <= result.p_value <= max((1 + flips[1]) / 10_000, result.min_attainable_p)


def test_rises_of_exactly_the_tolerance_are_no_evidence() -> None:
    assert paired_rise_test([0.5] * 10, ["a"] * 10, tolerance_bits=0.5).p_value == 1.0


# -- the smallest p-value


@given(
    st.lists(
        st.tuples(st.integers(1, 4), st.sampled_from([1, 2, 5, 12]), st.booleans(), st.integers(0, 10**6)),
        min_size=1,
        max_size=3,
    )
)
@settings(max_examples=60, deadline=None)
def test_no_p_value_is_below_the_smallest_attainable_one(shapes: list[tuple[int, int, bool, int]]) -> None:
    groups = []
    for k, n, shared, seed in shapes:
        above = np.random.default_rng(seed).integers(0, n + 1, size=k) // (1 + seed % 3)
        groups.append(family(above, n, shared=shared, space=10**6, certified=[1] if seed % 2 else []))
        controls = controls_rank_sum_test(above, [0] * k, num_references=n, shared=shared)
        assert controls.min_attainable_p <= controls.p_value <= 1.0
    for result in (pooled_test(groups), max_test(groups)):
        assert 0.0 < result.min_attainable_p <= result.p_value <= 1.0
        assert result.n == sum(k for k, *_ in shapes)


@pytest.mark.parametrize(("k", "n", "shared"), [(1, 99, True), (2, 10, True), (3, 4, False), (40, 512, True)])
def test_the_smallest_pooled_p_value_is_reached_when_nothing_is_above(k: int, n: int, shared: bool) -> None:
    result = pooled_test([family([0] * k, n, shared=shared)])
    least = Fraction(1, math.comb(n + k, k) if shared else (n + 1) ** k)
    assert result.min_attainable_p == pytest.approx(max(float(least), 1 / (NUM_DRAWS + 1)), rel=1e-9)
    assert within_simulation_error(result.p_value, float(least)) or result.p_value == result.min_attainable_p


def test_the_smallest_controls_p_value_is_reached_at_either_end() -> None:
    for count in (0, 10):
        result = controls_rank_sum_test([count] * 3, [0] * 3, num_references=10, shared=True)
        assert result.min_attainable_p == pytest.approx(2 / math.comb(13, 3))
        assert within_simulation_error(result.p_value / 2, 1 / math.comb(13, 3)) or result.p_value == result.min_attainable_p


def test_one_control_among_one_reference_can_show_nothing() -> None:
    result = controls_rank_sum_test([0], [0], num_references=1, shared=True)
    assert result.min_attainable_p == result.p_value == 1.0


@pytest.mark.parametrize(("k", "space", "formats"), [(1, 10**9, 1), (16, 10**4, 1), (16, 10**4, 3), (4, 8, 1)])
def test_the_smallest_max_p_value_is_that_of_a_certified_rank_of_one(k: int, space: int, formats: int) -> None:
    result = max_test([family([0] * k, 3, space=space, certified=[1])] * formats)
    # 1 - C(R - 1, K) / C(R, K) = K / R in one format.
    assert result.min_attainable_p == pytest.approx(1 - (1 - k / space) ** formats, rel=1e-9)
    assert result.p_value == result.min_attainable_p


def test_one_quiet_format_does_not_hide_a_memorised_canary_in_another() -> None:
    quiet, loud = family([400, 500], 512), family([0, 300], 512, certified=[1])
    assert max_test([quiet, loud]).p_value == pytest.approx(2 * 2e-9, rel=1e-6)


@pytest.mark.parametrize("number", [2, 5, 9])
def test_the_smallest_paired_p_value_is_one_flip_in_two_to_the_k(number: int) -> None:
    result = paired_rise_test(np.linspace(1.0, 2.0, number), ["a"] * number, tolerance_bits=0.0)
    assert result.min_attainable_p == 2.0**-number
    low, high = stats.binom.ppf([RARE, 1 - RARE], 9999, 2.0**-number)
    assert (1 + low) / 10_000 <= result.p_value <= (1 + high) / 10_000


def test_few_flips_limit_the_smallest_paired_p_value() -> None:
    assert paired_rise_test([1.0] * 30, ["a"] * 30, tolerance_bits=0.0, num_flips=99).min_attainable_p == 0.01


# -- the same answer each time, and refusals


def test_a_seed_gives_the_same_p_value_and_another_seed_nearly_the_same() -> None:
    group = family([3, 40, 77, 100, 12], 128)
    assert pooled_test([group], seed=1) == pooled_test([group], seed=1)
    assert pooled_test([group], seed=2).p_value == pytest.approx(pooled_test([group], seed=1).p_value, abs=0.01)


def test_formats_of_one_shape_are_simulated_independently() -> None:
    # Two formats of one canary each with nothing above: p = 1 / 20^2, where a shared simulation would give 1 / 20.
    group = family([0], 19)
    assert within_simulation_error(pooled_test([group, group]).p_value, 1 / 400)


def test_a_format_without_canaries_adds_nothing() -> None:
    group, empty = family([3, 40], 128), family([], 128)
    assert pooled_test([group, empty]) == pooled_test([group])
    assert max_test([group, empty]) == max_test([group])


@pytest.mark.parametrize("test", [pooled_test, max_test])
def test_a_family_without_canaries_is_refused(test: Any) -> None:
    with pytest.raises(ValueError, match="at least one canary, got none"):
        test([family([], 128)])


def test_a_family_without_non_members_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one non-member, got 0"):
        pooled_test([family([0], 0)])


def test_a_nan_among_the_p_values_is_refused_and_never_the_best_one() -> None:
    group = family([3, 40], 128)
    group.p_values[0] = math.nan
    with pytest.raises(ValueError, match="p_values must be numbers, got NaN"):
        max_test([group])


@pytest.mark.parametrize(("counts", "references"), [([], 10), ([1], 0)])
def test_the_controls_test_without_controls_or_references_is_refused(counts: list[int], references: int) -> None:
    with pytest.raises(ValueError, match="needs controls and references, got"):
        controls_rank_sum_test(counts, counts, num_references=references, shared=True)


def test_a_paired_test_with_a_label_missing_is_refused() -> None:
    with pytest.raises(ValueError, match="one label a difference, got 1 for 2"):
        paired_rise_test([1.0, 2.0], ["a"], tolerance_bits=0.5)


def test_a_paired_test_of_one_canary_is_refused() -> None:
    with pytest.raises(ValueError, match="at least two canaries, got 1"):
        paired_rise_test([1.0], ["a"], tolerance_bits=0.5)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_rise_that_is_not_finite_is_refused_and_never_a_rejection(bad: float) -> None:
    with pytest.raises(ValueError, match="must be finite, got NaN or infinity"):
        paired_rise_test([bad, 1.0, 2.0], ["a"] * 3, tolerance_bits=0.5)


# -- long simulations


@pytest.mark.slow
def test_the_pooled_test_keeps_its_level_far_out_in_twenty_thousand_audits() -> None:
    counts = shared_counts(np.random.default_rng(23), 20_000, 88, 600)
    p_values = [pooled_test([family(row, 600)]).p_value for row in counts]
    for level in (0.05, 0.01, 0.003, 0.001):
        assert_size(p_values, level)
        assert sum(p <= level for p in p_values) >= stats.binom.ppf(RARE, 20_000, level)


@pytest.mark.slow
def test_the_max_test_keeps_its_level_far_out_in_many_audits() -> None:
    p_values = [max_test([group]).p_value for group in memoryless_audits(24, 15_000)]
    for level in (0.05, 0.01, 0.003, 0.001):
        assert_size(p_values, level)


@pytest.mark.slow
@pytest.mark.parametrize("number", [6, 12, 88])
def test_the_paired_test_keeps_its_level_at_full_flips(number: int) -> None:
    rng = np.random.default_rng(25)
    tiers = [index % 3 for index in range(number)]
    shape = (4000 if number < 20 else 1500, number)
    rises = 0.5 + np.log2((1 + rng.integers(0, 129, shape)) / (1 + rng.integers(0, 129, shape)))
    p_values = [paired_rise_test(row, tiers, tolerance_bits=0.5, seed=index).p_value for index, row in enumerate(rises)]
    for level in (0.05, 0.01, 0.001):
        assert_size(p_values, level)
