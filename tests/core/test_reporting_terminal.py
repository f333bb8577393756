"""The lines that a terminal prints under the exposure table: the headline of every part that was measured."""

from __future__ import annotations

from test_reporting_samples import make_bare_report, make_full_report, make_membership, make_privacy, make_records, make_report

from memguard.reporting.terminal import findings_lines


def test_the_terminal_names_the_headline_of_every_part() -> None:
    assert findings_lines(make_full_report()) == [
        "extraction, tier 1: expected share by queries 0% in 1, 0% in 100, 0% in 10,000",
        "extraction, tier 4: expected share by queries 0% in 1, 1.10% in 100, 4.30% in 10,000",
        "extraction, tier 16: expected share by queries 18.1% in 1, 35.2% in 100, 51.7% in 10,000",
        "greedy continuations: 2 canaries and 0 controls found, chance of a match at most 4.20×10⁻¹³",
        "Prior-Aware, canaries: 3 PA, 2 common, 1 undecided of 6 extractable; common share 33.3% (4.33% to 88.2%)",
        "records, members: 5 of 40 written by greedy decoding, 12.5% (4.20% to 26.8%)",
        "records, held out: 0 of 30 written by greedy decoding, 0% (0% to 11.6%)",
        "Prior-Aware, records: 3 PA, 2 common, 0 undecided of 5 extractable; common share 40.0% (5.27% to 88.2%)",
        "membership: AUROC 0.618 (0.577 to 0.657) by Min-K%++, the best of 2 scores",
        "privacy: epsilon at least 0.223 (at most 2.25 could be shown), 22 of 30 guesses right; "
        "stated 8.00: not testable, not comparable",
    ]


def test_the_terminal_says_nothing_of_what_was_not_measured() -> None:
    assert findings_lines(make_report()) == findings_lines(make_bare_report()) == []
    alone = make_records(held_out=None, prior_aware=None)
    assert findings_lines(make_bare_report(records=alone)) == [
        "records, members: 5 of 40 written by greedy decoding, 12.5% (4.20% to 26.8%)"
    ]


def test_the_terminal_calls_a_single_or_undefined_score_and_a_tested_epsilon_by_their_names() -> None:
    scores = make_membership().scores
    (line,) = findings_lines(make_bare_report(membership=make_membership(scores=scores[:1])))
    assert line == "membership: AUROC 0.553 (0.512 to 0.593) by loss, the only score"
    (line,) = findings_lines(make_bare_report(membership=make_membership(scores=scores[2:])))
    assert line == "membership: no score is defined for every sample"
    (line,) = findings_lines(make_bare_report(privacy=make_privacy(stated_epsilon=None)))
    assert line.endswith("22 of 30 guesses right")
    tested = make_privacy(is_testable=True, is_comparable=True, p_value=0.031)
    (line,) = findings_lines(make_bare_report(privacy=tested))
    assert line.endswith("stated 8.00: p 0.0310")
