"""The table and the lines that a terminal prints: notices first, then every part with its n, interval and confidence."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console
from test_reporting_samples import (
    canary_row,
    make_bare_report,
    make_full_report,
    make_membership,
    make_privacy,
    make_records,
    make_report,
)

from memguard.audit.report import AuditReport
from memguard.reporting.terminal import exposure_table, findings_lines
from memguard.reporting.wording import describe_not_testable


def quiet(make: Any = make_bare_report, **changes: Any) -> AuditReport:
    """A report without notices and without canaries that may be extracted, so that a part's lines stand alone."""
    return make(notices=[], canaries=[], **changes)  # type: ignore[no-any-return]


def table_of(report: AuditReport) -> str:
    console = Console(file=io.StringIO(), width=200)
    console.print(exposure_table(report, title="run"))
    return console.file.getvalue()  # type: ignore[attr-defined,no-any-return]


def test_the_terminal_names_the_headline_of_every_part() -> None:
    queries = "expected share by queries (upper end of the 95% interval)"
    assert findings_lines(make_full_report()) == [
        "notice: Canaries make up more than 0.1% of the training tokens.",
        "extracted: 2 of 18 canaries; 4 more cannot be excluded",
        "extraction: one query draws every token at temperature 1.00, from the 40 likeliest tokens",
        f"extraction, tier 1, n = 6: {queries} 0% (up to 20.0%) in 1, 0% (up to 20.0%) in 100, 0% (up to 20.0%) in 10,000",
        f"extraction, tier 4, n = 6: {queries} 0% (up to 20.0%) in 1, 1.10% (up to 21.1%) in 100, "
        "4.30% (up to 24.3%) in 10,000",
        f"extraction, tier 16, n = 6: {queries} 18.1% (up to 38.1%) in 1, 35.2% (up to 55.2%) in 100, "
        "51.7% (up to 71.7%) in 10,000",
        "greedy continuations of 3 prompts: 2 of 18 canaries, 0 of 24 controls found; chance of a match at most 4.20×10⁻¹³",
        "Prior-Aware, canaries: 3 PA, 2 common, 1 undecided of 6 extractable, n = 18; common share 33.3% "
        "(95% interval 4.33% to 88.2%)",
        "records, members: 5 of 40 written by greedy decoding, 12.5% (95% interval 4.20% to 26.8%)",
        "records, held out: 0 of 30 written by greedy decoding, 0% (95% interval 0% to 11.6%)",
        "records that stand once in the corpus: 3 of 36 written by greedy decoding, 8.33% (95% interval 1.00% to 50.0%)",
        "records that stand 2 to 10 in the corpus: 2 of 4 written by greedy decoding, 50.0% (95% interval 1.00% to 50.0%)",
        "Prior-Aware, records: 3 PA, 2 common, 0 undecided of 5 extractable, n = 40; common share 40.0% "
        "(95% interval 5.27% to 88.2%)",
        "membership: AUROC 0.618 (95% interval 0.577 to 0.657; 400 members, 400 non-members) by Min-K%++, "
        "the best of 2 scores, not corrected for that; 1 more undefined",
        "training prefix: longest span 88.7 tokens (95% interval 64.1 to 98.5), 95.0% (95% interval 75.1% to 99.9%) "
        "full matches, n = 20",
        "generic prompts: longest span 6.60 tokens (95% interval 5.02 to 27.0), 5.00% (95% interval 0.100% to 24.9%) "
        "full matches, n = 20",
        "held-out prefix: longest span 5.90 tokens (95% interval 4.50 to 26.0), 0% (95% interval 0% to 16.8%) "
        "full matches, n = 20",
        "privacy: epsilon at least 0.223 at 95% confidence and delta 1.00×10⁻⁶ (at most 2.25 could be shown), "
        "22 of 30 guesses right; stated 8.00: p 1.00, not testable (too few guesses: 8,932, all right, would do), "
        "not comparable",
    ]


def test_the_terminal_says_nothing_of_what_was_not_measured() -> None:
    assert findings_lines(quiet(make_report)) == findings_lines(quiet()) == []
    alone = make_records(held_out=None, prior_aware=None, by_copies=[])
    assert findings_lines(quiet(records=alone)) == [
        "records, members: 5 of 40 written by greedy decoding, 12.5% (95% interval 4.20% to 26.8%)"
    ]


def test_the_terminal_begins_with_every_notice_on_a_line_of_its_own() -> None:
    notices = ["records were not measured: no record is long enough.", "two\nlines\x1b[2J"]
    assert findings_lines(make_full_report(notices=notices))[:3] == [
        "notice: records were not measured: no record is long enough.",
        "notice: two lines[2J",  # the escape that would clear the screen is gone
        "extracted: 2 of 18 canaries; 4 more cannot be excluded",
    ]


def test_canaries_that_may_be_extracted_are_counted_in_the_table_and_beside_it() -> None:
    report = make_report(notices=[])
    assert findings_lines(report) == ["extracted: 2 of 18 canaries; 4 more cannot be excluded"]
    head, *rows = [line for line in table_of(report).splitlines() if "format" in line or "card" in line]
    assert "not excluded" in head
    assert [line.split("│")[-2].strip() for line in rows] == ["0", "0", "4", ""]
    known = make_report(notices=[], canaries=[canary_row(1, 4, 2.0)])
    assert findings_lines(known) == []
    assert "not excluded" not in table_of(known)


def test_the_terminal_calls_a_single_or_undefined_score_and_a_tested_epsilon_by_their_names() -> None:
    scores = make_membership().scores
    (line,) = findings_lines(quiet(membership=make_membership(scores=scores[:1])))
    n = "400 members, 400 non-members"
    assert line == f"membership: AUROC 0.553 (95% interval 0.512 to 0.593; {n}) by loss, the only score"
    (line,) = findings_lines(quiet(membership=make_membership(scores=scores[2:])))
    assert line == "membership: no score is defined for every sample"
    (line,) = findings_lines(quiet(privacy=make_privacy(stated_epsilon=None)))
    assert line.endswith("22 of 30 guesses right")
    tested = make_privacy(is_testable=True, is_comparable=True, p_value=0.031)
    (line,) = findings_lines(quiet(privacy=tested))
    assert line.endswith("stated 8.00: p 0.0310")


def test_copies_of_a_canary_are_named_with_what_they_cost() -> None:
    (line,) = findings_lines(quiet(privacy=make_privacy(repetitions=4)))
    assert line.endswith(
        "22 of 30 guesses right; each coin moved 4 copies, which divides what can be shown by 4; canaries of tier 1 would show "
        "more; stated 8.00: p 1.00, not testable (because each coin moved 4 copies), not comparable"
    )


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"repetitions": 4}, "because each coin moved 4 copies"),
        ({"repetitions": 4, "num_guesses_needed": None}, "because each coin moved 4 copies"),
        ({"num_guesses_needed": None}, "no number of guesses would do at this delta"),
        ({}, "too few guesses: 8,932, all right, would do"),
    ],
)
def test_a_stated_epsilon_that_cannot_be_tested_is_given_its_cause(changes: dict[str, Any], words: str) -> None:
    assert describe_not_testable(make_privacy(**changes)) == words
