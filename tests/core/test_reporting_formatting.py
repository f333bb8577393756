"""Numbers as text: three digits, separators, words for what is missing, and doctests of the package."""

from __future__ import annotations

import doctest
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memguard.reporting import formatting, parts, plots, wording
from memguard.reporting.formatting import (
    show_count,
    show_interval,
    show_number,
    show_percent,
    show_rank,
    show_share_interval,
    show_tries,
    show_value,
    show_yes_no,
)


@pytest.mark.parametrize("module", [formatting, parts, plots, wording])
def test_the_examples_in_the_docstrings_hold(module: object) -> None:
    result = doctest.testmod(module)  # type: ignore[arg-type]
    assert result.attempted > 0
    assert result.failed == 0


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (1, "1.00"),
        (9.996, "10.0"),
        (0.9996, "1.00"),
        (99.96, "100"),
        (999.6, "1,000"),
        (123456.7, "123,457"),
        (-0.6384, "−0.638"),
        (0.001, "0.00100"),
        (0.0009, "9.00×10⁻⁴"),
        (1e7, "1.00×10⁷"),
        (1.8e-14, "1.80×10⁻¹⁴"),
        (math.nan, "not finite"),
        (-math.inf, "not finite"),
    ],
)
def test_a_number_has_three_significant_digits(value: float, text: str) -> None:
    assert show_number(value) == text


@given(st.floats(min_value=-1e12, max_value=1e12, allow_nan=False))
def test_a_number_reads_back_within_half_a_unit_of_its_third_digit(value: float) -> None:
    plain = show_number(value).replace(",", "").replace("−", "-")
    mantissa, _, exponent = plain.partition("×10")
    superscripts = str.maketrans("⁻⁰¹²³⁴⁵⁶⁷⁸⁹", "-0123456789")
    read = float(f"{mantissa}e{exponent.translate(superscripts)}") if exponent else float(mantissa)
    assert read == pytest.approx(value, rel=5.1e-3, abs=0)


def test_what_is_missing_is_named_and_never_zero() -> None:
    assert show_number(None) == show_count(None) == show_percent(None) == show_value(None) == "not measured"
    assert show_number(None, missing="no ledger") == "no ledger"
    assert show_rank(None, None) == "not measured"


def test_counts_are_exact_up_to_any_size() -> None:
    assert show_count(10**15 + 1) == "1,000,000,000,000,001"


def test_a_rank_interval_of_one_place_is_one_number() -> None:
    assert show_rank(7, 7) == "7"
    assert show_rank(7, 12_000) == "7 to 12,000"


def test_an_interval_names_its_open_end() -> None:
    assert show_interval(None, 2.0) == "no lower bound to 2.00"


def test_a_share_is_shown_in_percent() -> None:
    assert show_percent(0.96875) == "96.9%"


def test_truth_is_shown_in_words() -> None:
    assert (show_yes_no(True), show_yes_no(False)) == ("yes", "no")


@pytest.mark.parametrize(
    ("log10", "text"),
    [(0.0, "1.0 tries"), (0.99, "9.8 tries"), (1.0, "10^1.0 tries"), (3.24, "10^3.2 tries"), (45.0, "10^45.0 tries")],
)
def test_expected_tries_are_a_count_below_ten_and_a_power_above(log10: float, text: str) -> None:
    assert show_tries(log10) == text


def test_a_secret_that_is_never_written_takes_no_number_of_tries() -> None:
    assert show_tries(None) == "never"


def test_an_interval_of_a_share_is_in_percent_and_whole_or_none() -> None:
    assert show_share_interval(0.0, 0.0582) == "0% to 5.82%"
    assert show_share_interval(0.1, None) == show_share_interval(None, 0.1) == "no interval"
