"""What a search adds to an exposure: exact figures, tighter ends, and p-values that stay valid whoever is searched."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memguard.metrics.exposure import KnownRank, estimate_exposure
from memguard.metrics.family import FamilyGroup, max_test

SPACE = 10_000


def test_an_exact_rank_gives_bits_p_value_and_interval_by_hand() -> None:
    # Rank 4 of 1,024: 8 bits, p = 4/1024; a tie with one more leaves rank 4 or 5 open, and the higher one counts.
    exact = estimate_exposure(-3.0, [-5.0], secret_space_size=1024, known=KnownRank(4, 4, is_exact=True))
    assert (exact.method, exact.bits, exact.p_value, exact.flags) == ("exact", 8.0, 4 / 1024, ())
    assert (exact.low_bits, exact.high_bits, exact.cap_bits) == (8.0, 8.0, 10.0)
    tied = estimate_exposure(-3.0, [-5.0], secret_space_size=1024, known=KnownRank(4, 5, is_exact=True))
    assert tied.bits == tied.low_bits == pytest.approx(10 - math.log2(5))
    assert tied.high_bits == 8.0
    assert tied.flags == ("ties",)
    assert tied.p_value == 5 / 1024


def test_bounds_of_a_search_that_did_not_end_narrow_both_ends() -> None:
    references = np.linspace(-20, -10, 99)
    alone = estimate_exposure(-8.0, references, secret_space_size=10**6)
    searched = estimate_exposure(-8.0, references, secret_space_size=10**6, known=KnownRank(65, 500, is_exact=False))
    assert (alone.rank_low, alone.high_bits) == (1, pytest.approx(math.log2(10**6)))
    assert searched.rank_low == 65
    assert searched.high_bits == pytest.approx(math.log2(10**6) - 6.02, abs=0.01)
    assert (searched.rank_high, searched.method) == (500, "certified")
    assert searched.bits == pytest.approx(math.log2(10**6 / 500))


def test_a_search_that_its_own_references_refute_is_not_believed() -> None:
    references = [-1.0] * 5 + [-9.0] * 20
    one = estimate_exposure(-3.0, references, secret_space_size=1000, known=KnownRank(2, 3, is_exact=True))
    assert (one.method, one.rank_low) == ("sampled", 6)


def test_a_nan_stays_failed_whatever_is_known() -> None:
    assert estimate_exposure(math.nan, [-1.0], secret_space_size=9, known=KnownRank(1, 1, is_exact=True)).method == "failed"


@given(
    low=st.integers(1, 400),
    extra=st.integers(0, 600),
    above=st.integers(0, 20),
    log_prob=st.floats(-9, -0.01),
    exact=st.booleans(),
)
def test_figures_are_ordered_whatever_is_known(low: int, extra: int, above: int, log_prob: float, exact: bool) -> None:
    references = np.concatenate([np.full(above, log_prob + 1.0), np.full(64 - above, log_prob - 1.0)])
    one = estimate_exposure(log_prob, references, secret_space_size=SPACE, known=KnownRank(low, low + extra, is_exact=exact))
    assert one.low_bits <= one.bits <= one.high_bits <= math.log2(SPACE) + 1e-9
    assert 1 <= one.rank_low <= one.rank_high <= SPACE
    assert 0 < one.p_value <= 1


def searched_by_score(rank: int, beaten: bool) -> KnownRank | None:
    """A search as an audit makes it: of canaries that no reference beats; exact where they stand out, else a dive."""
    if beaten:
        return None
    return KnownRank(rank, rank, is_exact=True) if rank <= 40 else KnownRank(min(rank, 15), SPACE, is_exact=False)


def null_family(rng: np.random.Generator, size: int) -> FamilyGroup:
    """Canaries the model never saw, among 64 shared references, scores falling with the rank; siblings left out of ranks."""
    drawn = rng.choice(SPACE, size=size + 64, replace=False) + 1
    canaries, references = np.sort(drawn[:size]), -np.log(drawn[size:])
    estimates = []
    for place, rank in enumerate(canaries.tolist()):
        beaten = bool((references >= -math.log(rank)).any())
        known = searched_by_score(rank - place, beaten)
        estimates.append(
            # Scores of no distribution: the mass bound is kept out by a log-prob below it.
            estimate_exposure(-math.log(rank) - 50, references - 50, secret_space_size=SPACE - size + 1, known=known)
        )
    return FamilyGroup(
        num_above=np.array([one.num_above for one in estimates]),
        num_non_members=64,
        shared=True,
        p_values=np.array([one.p_value for one in estimates]),
        rank_high=[one.rank_high for one in estimates],
        secret_space_size=SPACE - size + 1,
        is_certified=np.array([one.method in ("exact", "certified") for one in estimates]),
    )


def test_p_values_stay_valid_though_scores_decide_who_is_searched() -> None:
    rng = np.random.default_rng(0)
    values = np.concatenate([null_family(rng, 1).p_values for _ in range(6000)])
    for level in (0.0005, 0.002, 0.01, 0.05, 0.2):
        # Three standard errors above the level at most.
        assert (values <= level).mean() <= level + 3 * math.sqrt(level / values.size)


def test_the_max_test_keeps_its_size_though_scores_decide_who_is_searched() -> None:
    rng = np.random.default_rng(1)
    values = np.array([max_test([null_family(rng, 20)]).p_value for _ in range(3000)])
    for level in (0.002, 0.01, 0.05):
        assert (values <= level).mean() <= level + 3 * math.sqrt(level / values.size)
    assert (values <= 0.05).mean() > 0.01  # the search gives it power: with 64 references alone it could never fire
