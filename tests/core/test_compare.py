"""Comparing two audits: inert on equal ones, signed as people read it, and silent where the two do not compare."""

from __future__ import annotations

import io
import json
import math
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from test_cli import memguard, sentence
from test_reporting_samples import canary_row, make_report

from memguard.audit.comparison import Comparison, DifferenceRow, compare_reports, labels_of
from memguard.audit.report import AuditReport, CanaryRow, PriorAware
from memguard.documents import load_document
from memguard.errors import EvidenceError
from memguard.reporting.comparison import comparison_view

REFERENCES = 1024
ABOVE = [511, 300, 255, 127, 100, 63, 40, 31]  # references above eight canaries that learnt little


def planted(
    tier: int, above: Sequence[int], *, name: str = "card", references: int = REFERENCES, **changes: Any
) -> list[CanaryRow]:
    """Sampled canaries of one tier, with this many references above each."""
    rows = []
    for index, count in enumerate(above):
        bits = math.log2(references + 1) - math.log2(count + 1)
        figures: dict[str, Any] = {"id": f"{name}-{tier}-{index}", "format": name, "num_references": references}
        figures |= {"num_references_above": count, "log_prob": -35.0 + 0.69 * bits, "is_extracted": False}
        rows.append(canary_row(index, tier, bits, **(figures | changes)))
    return rows


def audited(rows: Sequence[CanaryRow], **parts: Mapping[str, Any]) -> AuditReport:
    """A report of these canaries, `subject={...}` and the like changing fields of its parts."""
    report = make_report(canaries=list(rows))
    names = list(dict.fromkeys(row.format for row in rows))
    formats = [report.formats[0].model_copy(update={"name": name}) for name in names]
    changed = {name: getattr(report, name).model_copy(update=dict(update)) for name, update in parts.items()}
    return report.model_copy(update={"formats": formats, **changed})


def find(comparison: Comparison, metric: str, tier: int, name: str | None = "card") -> DifferenceRow:
    """The one row of this metric, tier and format."""
    (row,) = [row for row in comparison.rows if (row.metric, row.tier, row.format) == (metric, tier, name)]
    return row


def doubled(above: Sequence[int]) -> list[int]:
    """Twice as many references above, 1 + b doubled: exposure falls by exactly 1 bit."""
    return [2 * count + 1 for count in above]


def test_identical_audits_differ_by_exactly_nothing() -> None:
    report = make_report()
    comparison = compare_reports(report, report)
    assert comparison.is_paired
    assert comparison.is_comparable
    assert comparison.sentences == ["A and B hold the same scores: every difference is exactly 0."]
    assert len(comparison.rows) == 9  # exposure, log_prob and extracted share of tiers 1, 4 and 16
    for row in comparison.rows:
        assert (row.difference, row.p_value, row.is_measurable) == (0.0, 1.0, False)
        assert row.metric == "extracted share" or (row.low, row.high, row.flags) == (0.0, 0.0, ["identical"])
    assert comparison.notes == ["One training run a side: variation from run to run is in no interval."]


def test_a_drop_of_one_bit_is_told_from_a_rise_and_from_no_change() -> None:
    a = audited(planted(1, ABOVE) + planted(16, ABOVE))
    b = audited(planted(1, ABOVE[::-1]) + planted(16, doubled(ABOVE)))
    there, back = compare_reports(a, b, labels=("plain", "dedup")), compare_reports(b, a, labels=("dedup", "plain"))
    row = find(there, "exposure", 16)
    assert (row.difference, row.low, row.high) == pytest.approx((-1.0, -1.0, -1.0))
    assert row.mean_b - row.mean_a == pytest.approx(-1.0)
    assert row.confidence == 1 - 2**-7
    assert there.sentences[1] == "dedup lowered exposure of tier 16 by 1.0 bits (1.0 to 1.0)."
    assert back.sentences[1] == "plain raised exposure of tier 16 by 1.0 bits (1.0 to 1.0)."
    # Tier 1 holds the same figures in another order: differences of +-x, median 0 and no p-value below 1.
    # Ends: log2 512 / 32 = 4 bits, either way.
    assert there.sentences[0] == "dedup did not change exposure of tier 1 measurably: dedup - plain is 0.0 bits (-4.0 to 4.0)."
    assert find(there, "exposure", 1).p_value == 1.0
    assert find(there, "log_prob", 16).difference == pytest.approx(-0.69)


def test_pairs_are_joined_by_id_and_not_by_place() -> None:
    a, b = planted(4, ABOVE), planted(4, doubled(ABOVE))
    assert compare_reports(audited(a), audited(b[::-1])).rows == compare_reports(audited(a), audited(b)).rows


def test_another_plan_is_compared_group_by_group() -> None:
    a = audited(planted(4, ABOVE))
    b = audited(planted(4, doubled(ABOVE)), plan={"digest": "ab" * 32})
    comparison = compare_reports(a, b)
    assert not comparison.is_paired
    assert comparison.is_comparable
    assert comparison.not_paired == ["the plans differ"]
    row = find(comparison, "exposure", 4)
    assert row.method == "Hodges-Lehmann shift, rank sum; sampled exposure"
    assert row.difference == pytest.approx(-1.0, abs=0.35)
    assert row.low < -1.0 < row.high
    assert "measurably" in comparison.sentences[0]  # a shift of 1 bit drowns in 8 canaries against 8


def test_canaries_that_one_report_lacks_are_compared_group_by_group() -> None:
    comparison = compare_reports(audited(planted(4, ABOVE)), audited(planted(4, ABOVE[:7])))
    assert not comparison.is_paired
    assert comparison.not_paired == ["canaries that one report alone holds: 1"]
    assert (find(comparison, "exposure", 4).n_a, find(comparison, "exposure", 4).n_b) == (8, 7)


def test_tiers_are_pooled_over_formats_and_told_as_one() -> None:
    def both(change: Any) -> list[CanaryRow]:
        return planted(4, change(ABOVE)) + planted(4, change(ABOVE[:4]), name="pin", references=2047, log_prob=-20.0)

    a, b = audited(both(list)), audited(both(doubled))
    comparison = compare_reports(a, b)
    assert [row.format for row in comparison.rows if row.metric == "exposure"] == ["card", "pin", None]
    pooled = find(comparison, "exposure", 4, None)
    assert (pooled.n_a, pooled.difference) == pytest.approx((12, -1.0))
    assert len([text for text in comparison.sentences if "exposure" in text]) == 1
    unpaired = compare_reports(a, b.model_copy(update={"plan": b.plan.model_copy(update={"digest": "ab" * 32})}))
    assert find(unpaired, "exposure", 4, None).n_b == 12
    # Log-probabilities of two formats lie apart: a shift between mixtures says little, so pairs alone are pooled.
    assert not [row for row in unpaired.rows if row.metric == "log_prob" and row.format is None]
    assert [row for row in comparison.rows if row.metric == "log_prob" and row.format is None]


def test_groups_of_another_mixture_are_not_pooled() -> None:
    a = audited(planted(4, ABOVE) + planted(4, ABOVE, name="pin"))
    b = audited(planted(4, ABOVE) + planted(4, ABOVE[:6], name="pin"), plan={"digest": "ab" * 32})
    comparison = compare_reports(a, b)
    assert not [row for row in comparison.rows if row.format is None]
    assert "Tier 4 is not pooled over formats: their numbers of canaries differ." in comparison.notes
    assert [text.split(" measurably")[0] for text in comparison.sentences] == [
        "B did not change exposure of tier 4 of 'card'",
        "B did not change exposure of tier 4 of 'pin'",
    ]


def test_a_known_rank_and_a_sampled_one_are_compared_as_sampled_and_the_drop_is_a_least_one() -> None:
    # A: certified at 40 bits, no reference above, so sampled it is at its cap, log2 1025. B: 15 of 1024 above: 4 bits less.
    a = audited([canary_row(i, 16, 40.0, id=f"card-16-{i}") for i in range(8)])
    b = audited(planted(16, [15] * 8))
    comparison = compare_reports(a, b)
    row = find(comparison, "exposure", 16)
    assert row.mean_a == pytest.approx(math.log2(1025))
    assert row.difference == pytest.approx(-4.0)
    assert (row.num_capped_a, row.num_capped_b) == (8, 0)
    assert row.cap_bits == pytest.approx(math.log2(1025))
    assert row.method.endswith("recomputed sampled exposure")
    assert comparison.sentences == ["B lowered exposure of tier 16 by at least 4.0 bits (4.0 to 4.0)."]
    assert comparison.notes[0].startswith("Where estimators or caps of exposure differ, both sides are recomputed")
    assert compare_reports(b, a).sentences == ["B raised exposure of tier 16 by at least 4.0 bits (4.0 to 4.0)."]


def test_ranks_that_are_known_alike_keep_their_own_exposure() -> None:
    a, b = (audited([canary_row(i, 16, bits, id=f"card-16-{i}") for i in range(8)]) for bits in (40.0, 30.0))
    row = find(compare_reports(a, b), "exposure", 16)
    assert (row.mean_a, row.difference, row.num_capped_a, row.cap_bits) == (40.0, -10.0, 0, None)
    assert row.method.endswith("certified exposure")


def test_another_number_of_references_is_compared_under_the_lower_cap() -> None:
    a = audited(planted(4, [0] * 8, references=4095), procedure={"references": 4095})
    b = audited(planted(4, [255] * 8, references=1023), procedure={"references": 1023})
    comparison = compare_reports(a, b)
    row = find(comparison, "exposure", 4)
    assert (row.mean_a, row.mean_b, row.cap_bits) == (10.0, 2.0, 10.0)  # log2 4096 = 12, cut at log2 1024
    assert comparison.is_comparable
    assert "The procedure's references differs (4095 in A, 1023 in B)." in comparison.notes
    assert "at least 8.0 bits" in comparison.sentences[0]


def test_exposure_at_its_cap_on_both_sides_says_that_it_cannot_tell() -> None:
    a, b = audited(planted(16, [0] * 8)), audited(planted(16, [0] * 8, log_prob=-30.0))
    comparison = compare_reports(a, b)
    assert comparison.sentences == [
        "B did not change exposure of tier 16 measurably: B - A is 0.0 bits (0.0 to 0.0); 8 of 8 canaries in A and 8 of 8 in B "
        "are above every reference, where exposure tells no more; log_prob did change: B - A is -1.9 nats (-1.9 to -1.9)."
    ]  # -30 less -35 + .69 log2 1025, which is -28.1
    assert find(comparison, "log_prob", 16).is_measurable


def test_a_change_of_either_sign_that_is_not_measurable_is_told_as_b_minus_a() -> None:
    # Eight pairs, seven of which fall by one bit and one of which rises by three: the interval of the median is the range.
    moved = [*doubled(ABOVE[:7]), 3]  # 1 + 31 become 1 + 3: 3 bits up
    a, b = audited(planted(4, ABOVE)), audited(planted(4, moved, log_prob=-20.0))
    down, up = compare_reports(a, b).sentences[0], compare_reports(b, a).sentences[0]
    assert down.startswith("B did not change exposure of tier 4 measurably: B - A is -1.0 bits (-1.0 to 3.0)")
    assert up.startswith("B did not change exposure of tier 4 measurably: B - A is +1.0 bits (-3.0 to 1.0)")
    assert "drop" not in down + up


def test_log_prob_is_told_where_it_changed_and_exposure_did_not() -> None:
    a, b = audited(planted(4, ABOVE)), audited(planted(4, ABOVE[::-1], log_prob=-20.0))
    changed = find(compare_reports(a, b), "log_prob", 4)
    assert changed.is_measurable
    (told,) = compare_reports(a, b).sentences
    ends = f"({changed.low:.1f} to {changed.high:.1f})"
    assert told.endswith(f"; log_prob did change: B - A is +{changed.difference:.1f} nats {ends}.")
    lowered = compare_reports(a, audited(planted(4, doubled(ABOVE)))).sentences
    assert lowered == ["B lowered exposure of tier 4 by 1.0 bits (1.0 to 1.0)."]


def test_a_median_of_pairs_that_the_means_contradict_says_so() -> None:
    # Seven pairs fall by 1 bit and one rises by 10: median -1, mean (10 - 7) / 8 = +.375.
    above = [*ABOVE[:7], 1023]
    a, b = audited(planted(4, above, references=2047)), audited(planted(4, [*doubled(ABOVE[:7]), 0], references=2047))
    row = find(compare_reports(a, b), "exposure", 4)
    assert row.difference == pytest.approx(-1.0)
    assert row.mean_b - row.mean_a == pytest.approx((10 - 7) / 8)
    assert "means go the other way" in row.flags
    assert compare_reports(a, b).sentences[0].endswith("; the means go the other way.")
    assert "means go the other way" not in find(compare_reports(a, a), "exposure", 4).flags


def test_a_row_says_what_its_difference_its_interval_and_its_p_value_are_of() -> None:
    def lines(a: AuditReport, b: AuditReport) -> str:
        console = Console(file=io.StringIO(), width=500)
        console.print(comparison_view(compare_reports(a, b), is_plain=True))
        return console.file.getvalue()  # type: ignore[attr-defined,no-any-return]

    few = lines(audited(planted(4, ABOVE)), audited(planted(4, doubled(ABOVE))))
    assert "mean A=3.10  mean B=2.10  B - A=−1.00 (median of pairs)  interval of the difference=" in few
    assert "method=paired order statistics, median; p: sign flips, mean; sampled exposure" in few
    many = lines(audited(planted(4, ABOVE * 3)), audited(planted(4, doubled(ABOVE * 3))))
    assert "B - A=−1.00  interval" in many
    assert "method=paired t, mean; p: sign flips, mean; sampled exposure" in many
    groups = lines(audited(planted(4, ABOVE)), audited(planted(4, doubled(ABOVE)), plan={"digest": "ab" * 32}))
    assert "(median shift)  interval" in groups


def test_a_drop_is_no_least_one_where_both_sides_hold_capped_canaries() -> None:
    # Nine pairs: at 1 - 20 / 512 the interval of the median leaves out one pair a side, the one without a drop among them.
    a, b = audited(planted(16, [0] * 9)), audited(planted(16, [0] + [15] * 8))
    (told,) = compare_reports(a, b).sentences
    assert told.startswith("B lowered exposure of tier 16 by 4.0 bits (4.0 to 4.0); 9 of 9 canaries in A and 1 of 9 in B")


def test_an_exact_rank_and_a_certified_one_are_compared_as_sampled() -> None:
    # A bound of a rank and a counted one are two estimators: the bound may be far from the rank.
    certified = canary_row(0, 16, 40.0)
    exact = certified.exposure.model_copy(update={"method": "exact"})
    a = audited([certified.model_copy(update={"id": f"card-16-{i}"}) for i in range(8)])
    b = audited([certified.model_copy(update={"id": f"card-16-{i}", "exposure": exact}) for i in range(8)])
    row = find(compare_reports(a, b), "exposure", 16)
    assert row.mean_a == pytest.approx(math.log2(1025))
    assert row.method.endswith("recomputed sampled exposure")


def test_a_handful_of_canaries_shows_nothing_at_the_confidence_asked_for() -> None:
    comparison = compare_reports(audited(planted(4, ABOVE[:4])), audited(planted(4, doubled(ABOVE[:4]))))
    row = find(comparison, "exposure", 4)
    assert (row.low, row.high, row.confidence) == pytest.approx((-1.0, -1.0, 0.875))
    assert not row.is_measurable
    assert "4 canaries are too few for an interval at 95%" in comparison.sentences[0]


def test_what_was_extracted_is_counted_on_both_sides() -> None:
    a, b = audited(planted(16, ABOVE, is_extracted=True)), audited(planted(16, doubled(ABOVE)))
    comparison = compare_reports(a, b, labels=("plain", "dedup"))
    assert comparison.sentences[1] == "Extracted in tier 16: 8 of 8 in plain, 0 of 8 in dedup."
    row = find(comparison, "extracted share", 16)
    assert (row.difference, row.is_measurable) == (-1.0, True)
    assert row.p_value == pytest.approx(2 / math.comb(16, 8))


# -- what differs


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        ({"procedure": {"dtype": "float32"}}, "the procedure's dtype differs (bfloat16, float32)"),
        ({"procedure": {"autocast": "float16"}}, "the procedure's autocast differs (None, float16)"),
    ],
)
def test_scores_made_otherwise_are_shown_and_nothing_is_concluded(parts: Any, reason: str) -> None:
    comparison = compare_reports(audited(planted(4, ABOVE)), audited(planted(4, doubled(ABOVE)), **parts))
    assert not comparison.is_comparable
    assert comparison.not_comparable == [reason]
    assert comparison.sentences == [f"A and B do not compare: {reason}."]
    assert comparison.rows


def test_another_tokenizer_or_space_does_not_compare() -> None:
    a = audited(planted(4, ABOVE))
    other = a.model_copy(update={"tokenizer_digest": "00" * 32})
    assert compare_reports(a, other).not_comparable == ["the tokenizer differs"]
    other = a.model_copy(update={"formats": [a.formats[0].model_copy(update={"secret_space_size": 10**6})]})
    assert compare_reports(a, other).not_comparable == ["the format 'card' is another one"]


def test_another_way_of_planting_is_the_defence_and_is_noted() -> None:
    a = audited(planted(16, ABOVE, num_seen=48))
    b = audited(planted(16, doubled(ABOVE), num_seen=3), ledger={"plant_once": True})
    comparison = compare_reports(a, b, labels=("plain", "dedup"))
    assert comparison.is_comparable
    assert comparison.is_paired
    assert comparison.notes[:2] == [
        "The ledger's plant_once differs (False in plain, True in dedup): tiers are compared as planned.",
        "Sightings of canaries in training: 384 in plain, 24 in dedup.",
    ]
    unknown = compare_reports(a, audited(planted(16, ABOVE, num_seen=None), procedure={"reference_seed": "aa"}))
    assert unknown.notes[:2] == [
        "The canaries were ranked among other references, which adds noise to exposure.",
        "Sightings of canaries in training: 384 in A, unknown in B.",
    ]


def test_a_tier_of_one_report_is_left_out_and_named() -> None:
    comparison = compare_reports(audited(planted(1, ABOVE) + planted(4, ABOVE)), audited(planted(4, ABOVE)))
    assert {row.tier for row in comparison.rows} == {4}
    assert "Tier 1 of 'card' is in one report only." in comparison.notes


def test_many_intervals_are_said_to_leave_out_zero_by_chance() -> None:
    tiers = [row for tier in (1, 2, 4, 8, 16, 32, 64) for row in planted(tier, ABOVE)]
    comparison = compare_reports(audited(tiers), audited(tiers[::-1]))
    assert "Of 21 intervals at 95% about 1 leave out 0 by chance alone." in comparison.notes


# -- the log belief ratio


def _ratio(value: float | None, *, num_open: int = 0) -> PriorAware:
    return PriorAware(
        verdict="undecided" if value is not None else "not extractable",
        n=10.0,
        log_prob=-1.0,
        prior_log_prob=None if value is None else -1.0 - value,
        log_belief_ratio=value,
        low=None,
        high=None,
        confidence=0.95,
        effective_sample_size=None,
        num_prior_prefixes=500,
        num_open_prefixes=num_open,
        num_excluded_prefixes=0,
    )


def _with_ratios(ratios: Sequence[float | None], *, num_open: int = 0, n: float | str = 10.0, m: float = 1e-4) -> AuditReport:
    rows = [
        row.model_copy(update={"prior_aware": _ratio(value, num_open=num_open)})
        for row, value in zip(planted(16, ABOVE), ratios, strict=True)
    ]
    return audited(rows).model_copy(update={"prior_aware_settings": {"m": m, "n": n, "prefixes": 500}})


def test_log_belief_ratios_are_compared_where_both_were_measured() -> None:
    a, b = _with_ratios([9.0] * 7 + [None]), _with_ratios([None, *[7.0] * 7], n="calibrated")
    row = find(compare_reports(a, b), "log belief ratio", 16)
    assert (row.n_a, row.n_b, row.difference, row.unit) == (6, 6, -2.0, "nats")
    assert "lower ends" not in row.flags
    other_plan = b.model_copy(update={"plan": b.plan.model_copy(update={"digest": "ab" * 32})})
    assert find(compare_reports(a, other_plan), "log belief ratio", 16).n_a == 7
    assert "lower ends" in find(compare_reports(a, _with_ratios([7.0] * 8, num_open=3)), "log belief ratio", 16).flags


def test_log_belief_ratios_of_other_settings_or_of_one_side_are_left_out() -> None:
    a = _with_ratios([9.0] * 8)
    other = compare_reports(a, _with_ratios([7.0] * 8, m=1e-3))
    assert "Log belief ratios are left out: they were measured by other settings." in other.notes
    for comparison in (other, compare_reports(a, audited(planted(16, ABOVE))), compare_reports(a, _with_ratios([None] * 8))):
        assert "log belief ratio" not in {row.metric for row in comparison.rows}


# -- no evidence


def test_an_invalid_report_is_named() -> None:
    valid, invalid = make_report(), make_report(with_failed_canary=True)
    with pytest.raises(EvidenceError, match="report 'new' is no evidence: canary 'c0190' has no finite score"):
        compare_reports(valid, invalid, labels=("old", "new"))
    with pytest.raises(EvidenceError, match="report 'old' is no evidence"):
        compare_reports(invalid, valid, labels=("old", "new"))


@pytest.mark.parametrize("changes", [{"log_prob": math.nan}, {"log_prob": None}, {"num_references_above": 2000}])
def test_a_score_that_is_missing_is_never_a_number(changes: Any) -> None:
    rows = planted(4, ABOVE)
    rows[3] = rows[3].model_copy(update=changes)
    with pytest.raises(EvidenceError, match=r"report 'B' is no evidence: canary 'card-4-3' has no finite score \(1 in all\)"):
        compare_reports(audited(planted(4, ABOVE)), audited(rows))


def test_no_canary_or_one_given_twice_is_no_evidence() -> None:
    twice = [*planted(4, ABOVE), planted(4, ABOVE)[0]]
    with pytest.raises(EvidenceError, match="report 'A' is no evidence: it must hold canaries, each once, got 9 rows"):
        compare_reports(audited(twice), audited(planted(4, ABOVE)))
    with pytest.raises(EvidenceError, match="it must hold canaries, each once, got 0 rows"):
        compare_reports(audited([]), audited(planted(4, ABOVE)))
    with pytest.raises(EvidenceError, match="the reports 'A' and 'B' share no format and tier"):
        compare_reports(audited(planted(4, ABOVE)), audited(planted(1, ABOVE)))
    with pytest.raises(ValueError, match="confidence must be between 0 and 1, got 95"):
        compare_reports(make_report(), make_report(), confidence=95)


@pytest.mark.parametrize(
    ("paths", "labels"),
    [
        (["plain/memguard_audit/report.json", "dedup/memguard_audit/report.json"], ["plain", "dedup"]),
        (["plain.json", "dedup.json"], ["plain", "dedup"]),
        (["audit/checkpoint-7/report.json", "audit/checkpoint-9/report.json"], ["checkpoint-7", "checkpoint-9"]),
        (["a/x/report.json", "a/y/report.json", "b/y/report.json"], ["A", "B", "C"]),
        (["report.json", "report.json"], ["A", "B"]),
        (["plain/report.json"], ["plain"]),
        (["plain/memguard_audit/report.json"], ["plain"]),
        (["plain/dedup.json"], ["dedup"]),
    ],
)
def test_a_label_is_the_part_of_the_path_that_sets_reports_apart(paths: list[str], labels: list[str]) -> None:
    assert labels_of([Path(path) for path in paths]) == labels


# -- the executable


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with the reports of a plain run and of one with a defence, and worse ones."""
    a, b = audited(planted(16, ABOVE)), audited(planted(16, doubled(ABOVE)))
    a.save(tmp_path / "plain" / "report.json")
    b.save(tmp_path / "dedup" / "report.json")
    a.model_copy(update={"tokenizer_digest": "00" * 32}).save(tmp_path / "other" / "report.json")
    make_report(with_failed_canary=True).save(tmp_path / "broken" / "report.json")
    return tmp_path


def test_compare_prints_one_plain_line_a_row_when_piped(place: Path) -> None:
    done = memguard("compare", "plain/report.json", "dedup/report.json", cwd=place)
    lines = done.stdout.splitlines()
    assert lines[0].endswith("the same canaries, pair by pair, dedup minus plain.")
    assert lines[1] == "dedup lowered exposure of tier 16 by 1.0 bits (1.0 to 1.0)."
    assert lines[2].startswith("tier=16  format=card  metric=exposure (bits)  n=8  mean plain=")
    assert len(lines) == 6  # head, sentence, three rows, one note


def test_compare_prints_one_json_document_and_writes_the_same(place: Path) -> None:
    as_json = memguard("compare", "plain/report.json", "dedup/report.json", "--json", "-o", "out/diff.json", cwd=place)
    document = load_document(place / "out" / "diff.json", Comparison, what="comparison")
    assert json.loads(as_json.stdout) == json.loads(document.model_dump_json())
    assert "dedup lowered" in as_json.stderr
    assert (document.a.label, document.b.label) == ("plain", "dedup")


def test_compare_says_of_one_report_twice_that_nothing_differs(place: Path) -> None:
    done = memguard("compare", "plain/report.json", "plain/report.json", "--json", cwd=place)
    document = Comparison.model_validate_json(done.stdout)
    assert all(row.difference == 0.0 and not row.is_measurable for row in document.rows)
    assert document.sentences == ["A and B hold the same scores: every difference is exactly 0."]


MISTAKES = {
    "missing": (2, ["plain/report.json", "none.json"], "report 'none.json' does not exist"),
    "invalid": (3, ["plain/report.json", "broken/report.json"], "report 'broken' is no evidence"),
    "one report": (2, ["plain/report.json"], "give two reports to compare, got 1"),
    "overwrite": (2, ["plain/report.json", "dedup/report.json", "-o", "dedup/report.json"], "not be written over what is read"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", sorted(MISTAKES))
def test_compare_answers_a_mistake_with_its_exit_code_and_one_sentence(mistake: str, place: Path) -> None:
    code, arguments, words = MISTAKES[mistake]
    before = {path: path.read_bytes() for path in place.rglob("*.json")}
    done = memguard("compare", *arguments, cwd=place, code=code)
    assert words in sentence(done)
    assert done.stdout == ""
    assert {path: path.read_bytes() for path in place.rglob("*.json")} == before


def test_compare_exits_three_when_the_two_do_not_compare_and_says_why(place: Path) -> None:
    done = memguard("compare", "plain/report.json", "other/report.json", "--json", cwd=place, code=3)
    assert "plain and other do not compare: the tokenizer differs." in sentence(done)
    assert not json.loads(done.stdout)["is_comparable"]


def test_compare_tells_even_a_quiet_user_why_two_reports_do_not_compare(place: Path) -> None:
    done = memguard("-q", "compare", "plain/report.json", "other/report.json", cwd=place, code=3)
    assert sentence(done) == "plain and other do not compare: the tokenizer differs."
    assert done.stdout == ""


WITHOUT_TORCH = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "transformers"):
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Blocked())
import memguard.cli
sys.argv = ["memguard", *sys.argv[1:]]
memguard.cli.main()
"""


@pytest.mark.parametrize("command", ["compare", "scaling"])
def test_the_command_runs_where_torch_is_not_installed(command: str, place: Path) -> None:
    arguments = [sys.executable, "-c", WITHOUT_TORCH, command, "plain/report.json", "dedup/report.json"]
    done = subprocess.run(arguments, cwd=place, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "'plain'" in done.stdout if command == "scaling" else "dedup lowered exposure" in done.stdout


def test_a_terminal_gets_a_table_and_no_name_is_read_as_markup() -> None:
    name = "[red]card[/red]"
    a, b = audited(planted(16, ABOVE, name=name)), audited(planted(16, doubled(ABOVE), name=name))
    console = Console(file=io.StringIO(), width=250, force_terminal=True)
    console.print(comparison_view(compare_reports(a, b, labels=("[b]plain[/b]", "dedup")), is_plain=False))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert f"│ {name} │ exposure (bits) │ 8 │" in text
    assert "[b]plain[/b] (abababababab, step 1,200) against dedup" in text
