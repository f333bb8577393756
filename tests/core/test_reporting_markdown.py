"""The markdown summary: one page, well-formed tables, nothing that breaks out of a cell."""

from __future__ import annotations

import re

import pytest
from test_reporting_samples import (
    canary_row,
    make_bare_report,
    make_decision,
    make_full_report,
    make_privacy,
    make_records,
    make_report,
)

from memguard.audit.report import LIMITS
from memguard.errors import InputError
from memguard.reporting import render_markdown


def tables_of(text: str) -> list[list[list[str]]]:
    """Runs of table lines, each split into cells at pipes that are not escaped."""
    tables: list[list[list[str]]] = [[]]
    for line in text.splitlines():
        if line.startswith("|"):
            assert line.endswith("|")
            tables[-1].append([cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]])
        elif tables[-1]:
            tables.append([])
    return [table for table in tables if table]


def test_every_table_has_one_width_and_a_rule_under_its_head() -> None:
    for report in (make_report(with_prior_aware=True), make_report(with_failed_canary=True)):
        tables = tables_of(render_markdown(report, make_decision(report)))
        assert len(tables) == 4
        for table in tables:
            assert len({len(row) for row in table}) == 1
            assert all(re.fullmatch(r"-{3,}:?", cell) for cell in table[1])


def test_no_outside_text_breaks_out_of_its_cell_or_line() -> None:
    hostile = "a|b\n\n# <script>x</script> [link](http://e) `c` *d*"
    report = make_report(notices=[hostile])
    report = report.model_copy(update={"tiers": [report.tiers[0].model_copy(update={"format": hostile})]})
    plain = make_report()
    text = render_markdown(report, make_decision(report, reason=hostile))
    assert "<script" not in text
    assert "[link]" not in re.sub(r"\\\[|\\\]", "", text)
    assert len(tables_of(text)[2][0]) == len(tables_of(text)[2][2]) == 9
    heads = [line for line in text.splitlines() if line.startswith("#")]
    assert heads == [line for line in render_markdown(plain, make_decision(plain)).splitlines() if line.startswith("#")]


def test_the_summary_fits_a_page_and_says_how_many_canaries_it_leaves_out() -> None:
    report = make_report(canaries=[canary_row(i, 4, 3.0 + i / 100) for i in range(300)])
    text = render_markdown(report, make_decision(report))
    assert len(text.splitlines()) < 70
    assert "### Most exposed canaries (10 of 300)" in text
    assert "| c012b |" in text  # the most exposed: index 299


def test_what_was_not_measured_says_so_in_markdown() -> None:
    rows = tables_of(render_markdown(make_report()))[-1]
    assert {row[-1] for row in rows[2:]} == {"not measured"}


def test_an_invalid_report_leads_with_its_reasons() -> None:
    text = render_markdown(make_report(with_failed_canary=True))
    assert text.startswith(
        "## Memorisation audit: invalid\n\n**This audit is invalid: its figures are not evidence.**\n\n- canary 'c0190'"
    )
    assert "no finite score" in text


def test_a_decision_leads_the_summary() -> None:
    report = make_report()
    text = render_markdown(report, make_decision(report))
    assert text.startswith(
        "## Memorisation audit: gate says block\n\n**block** (exit code 1): 2 of 18 canaries can be extracted.\n\n"
    )
    assert (
        "| no secret can be extracted | block | 2 canaries were extracted, limit 0. | extraction.count = 2, max = 0 |" in text
    )


def test_the_limits_are_on_the_page() -> None:
    text = render_markdown(make_report())
    assert all(f"- {limit}" in text for limit in LIMITS)


def test_a_decision_on_another_step_is_refused_in_markdown() -> None:
    report = make_report()
    other = make_decision(report, subject=report.subject.model_copy(update={"global_step": 7}))
    with pytest.raises(InputError, match="Give the decision that the gate wrote for this report"):
        render_markdown(report, other)


def test_a_full_report_has_a_compact_block_for_each_part() -> None:
    report = make_full_report()
    text = render_markdown(report, make_decision(report))
    tables = tables_of(text)
    assert len(tables) == 10
    for table in tables:
        assert len({len(row) for row in table}) == 1
        assert all(re.fullmatch(r"-{3,}:?", cell) for cell in table[1])
    for line in (
        "| 16 | 100 | 6 | 35.2% | 17.6% to 55.2% | 2 | 8.80% to 65.2% |",
        "Greedy continuations of 3 prompts hold 2 canaries and 0 controls; chance of a match at most 4.20×10⁻¹³.",
        "| canaries | 18 | 6 | 3 | 2 | 1 | 0 | 33.3% | 4.33% to 88.2% |",
        "| records | 40 | 5 | 3 | 2 | 0 | 0 | 40.0% | 5.27% to 88.2% |",
        "Belief-ratio threshold n: card 12.5 (95% quantile), pin 10.0 (given), records 12.5 (95% quantile).",
        "| members | 40 | 7 | 5 | 12.5% | 4.20% to 26.8% | 6 |",
        "| held out | 30 | 7 | 0 | 0% | 0% to 11.6% | 1 |",
        "| loss | 0.553 | 0.512 to 0.593 | 0.00490 | 15.2% (7.60% to 25.2%) | 2.10% (1.05% to 12.1%) |",
        "| refused: 0.750% is the least |",
        "Epsilon of one record is at least **0.223** at 95.0% confidence and delta 1.00×10⁻⁶; "
        "no attack with 30 guesses shows more than 2.25.",
        "Stated epsilon 8.00 at the same delta: p-value 1.00, not testable (too few guesses: 8,932, all right, would do), "
        "not comparable since canaries did not enter as records.",
        "| card | 1 | 29 | 31 | 4.75 | 3.50 to 6.00 | 0.00100 |",
    ):
        assert line in text
    assert len(text.splitlines()) < 140


def test_markdown_holds_no_block_of_a_part_that_was_not_measured() -> None:
    assert render_markdown(make_bare_report()) == render_markdown(make_report())
    alone = make_bare_report(records=make_records(held_out=None, prior_aware=None, threshold=None))
    heads = [line for line in render_markdown(alone).splitlines() if line.startswith("### ")]
    assert heads[2:-1] == ["### Real records"]
    assert "held out" not in render_markdown(alone)


def test_markdown_names_the_copies_that_a_coin_moved_as_the_limit_of_a_bound() -> None:
    text = render_markdown(make_full_report(privacy=make_privacy(repetitions=4)))
    assert "Copies: each coin moved 4 copies, which divides what can be shown by 4; canaries of tier 1 would show more." in text
    assert "not testable (because each coin moved 4 copies)" in text
    assert "too few guesses" not in text
    assert "each coin moved" not in render_markdown(make_full_report())
