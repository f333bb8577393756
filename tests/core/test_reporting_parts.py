"""The page on what a full audit measures beside exposure: figures, words for what was not measured, nothing unescaped."""

from __future__ import annotations

import re
from typing import Any, get_args
from xml.etree import ElementTree

import pytest
from test_reporting_html import HOSTILE, Page
from test_reporting_samples import (
    calibrated_threshold,
    canary_row,
    curve_points,
    make_bare_report,
    make_counts,
    make_decision,
    make_extraction,
    make_full_report,
    make_membership,
    make_privacy,
    make_records,
    make_report,
    record_row,
    record_set,
    with_full_figures,
)

from memguard.audit.report import AuditReport, PositiveControl
from memguard.audit.report_extraction import CanaryExtraction, FoundBy, SamplerSettings, TierCurve
from memguard.audit.report_membership import ScoreName
from memguard.audit.report_records import Threshold
from memguard.reporting import render_html, render_markdown
from memguard.reporting.parts import LARGEST_TABLE, describe_extent, shown_records, why_not_measured
from memguard.reporting.ratio_plot import draw_ratios
from memguard.reporting.terminal import findings_lines
from memguard.reporting.view import facts
from memguard.reporting.wording import SCORE_NAMES, describe_sampler

SECTIONS = ["Extraction", "Prior-Aware memorisation", "Real records", "Membership inference", "Privacy from inclusion coins"]


def text_of(report: AuditReport) -> str:
    return Page(render_html(report)).text


def section_of(report: AuditReport, title: str) -> str:
    """The text of one section of the page, by its heading."""
    (found,) = [part for part in re.split(r"(?=<h2>)", render_html(report)) if part.startswith(f"<h2>{title}<")]
    return Page(found.split("</section>")[0]).text


def headings(report: AuditReport) -> list[str]:
    return re.findall(r"<h2>([^<]+)</h2>", render_html(report))


def test_a_full_page_is_well_formed_and_reaches_for_nothing_outside_itself() -> None:
    report = make_full_report()
    text = render_html(report, make_decision(report))
    page = Page(text)
    assert page.open == []
    ids = page.attributes("id")
    assert len(ids) == len(set(ids))
    assert all(target.startswith("#") for target in page.attributes("src", "href", "xlink:href"))
    tags = [tag for tag, _ in page.tags]
    assert {"script", "link", "iframe", "img", "form"}.isdisjoint(tags)
    assert tags.count("table") == tags.count("caption") == 26
    assert all(found.get("scope") in ("col", "row") for tag, found in page.tags if tag == "th")
    assert [found["aria-label"] != "" for tag, found in page.tags if tag == "svg"] == [True] * 3
    assert "None" not in page.text.replace("None of", "")


def test_every_row_of_a_table_is_as_wide_as_its_head() -> None:
    for report in (
        make_full_report(),
        make_report(with_prior_aware=True),
        make_full_report(records=make_records(held_out=None)),
    ):
        for table in re.findall(r"<table>.*?</table>", render_html(report), flags=re.DOTALL):
            widths = set()
            for row in re.findall(r"<tr.*?</tr>", table, flags=re.DOTALL):
                cells = re.findall(r"<t[hd]\b([^>]*)>", row)
                spans = [int(found.group(1)) for cell in cells for found in [re.search(r'colspan="(\d+)"', cell)] if found]
                widths.add(len(cells) - len(spans) + sum(spans))
            assert len(widths) == 1, table[:300]


def test_the_sections_of_a_full_audit_stand_in_one_order_measured_or_not() -> None:
    for report in (make_full_report(), make_bare_report()):
        assert [title for title in headings(report) if title in SECTIONS] == SECTIONS


def test_a_short_audit_has_no_empty_section_and_says_once_what_it_measured() -> None:
    report = make_report()
    assert not set(headings(report)) & set(SECTIONS)
    assert text_of(report).count("short: it measured exposure alone; a full audit also measures") == 1
    assert "--held-out" not in text_of(report)


def test_a_short_audit_shows_what_it_did_measure() -> None:
    report = make_report(privacy=make_privacy(), with_prior_aware=True)
    assert set(headings(report)) & set(SECTIONS) == {"Privacy from inclusion coins"}
    assert describe_extent(report) == (
        "short: it measured exposure, Prior-Aware memorisation and privacy; "
        "a full audit also measures extraction, real records and membership"
    )


def test_a_part_without_data_says_what_to_give() -> None:
    report = make_bare_report()
    for title, cure in zip(
        SECTIONS,
        (
            "audit.extraction is null in the configuration",
            "no training rows were given (--data, or audit.records.file)",
            "no records were given: --data, --held-out",
            "it needs records that were trained on and held-out ones: --data, --held-out",
            "no coins were thrown: draw the plan with canaries.inclusion set to coin",
        ),
        strict=True,
    ):
        assert section_of(report, title).startswith(f"{title} not measured : {cure}")


def test_a_part_that_its_data_could_not_carry_gives_the_reason_of_the_notice() -> None:
    notices = ["records were not measured: no record is long enough.", "membership was not measured: 9 members are too few."]
    reasons = why_not_measured(make_bare_report(notices=notices))
    assert reasons["records"] == "no record is long enough"
    assert reasons["membership"] == "9 members are too few"


def test_the_reason_fits_what_was_given() -> None:
    assert why_not_measured(make_full_report(membership=None))["membership"] == "audit.membership is null in the configuration"
    assert "too few coins" in why_not_measured(make_full_report(privacy=None))["privacy"]
    assert why_not_measured(make_full_report(records=make_records(max_edits=0)))["near"] == "audit.records.max_edits is 0"
    failed = why_not_measured(make_bare_report(with_failed_canary=True))
    assert failed["extraction"] == failed["privacy"] == "the audit is invalid, for the reasons on top"


def test_extraction_shows_sampler_shares_counts_and_how_canaries_were_found() -> None:
    text = section_of(make_full_report(), "Extraction")
    assert "One query draws every token at temperature 1.00, from the 40 likeliest tokens." in text
    # tier 16 at 100 queries: .352 of 6, 2 discoverable, ends as `curve_points` sets them
    assert "16 100 6 35.2% 17.6% to 55.2% 2 8.80% to 65.2% 90.0%" in text
    assert "Canaries found 2 of 18: by trained tokens 1, text 1, another prompt 1" in text
    assert "Controls found 0 of 24" in text
    assert "at most 4.20×10⁻¹³ that a match counts" in text
    assert "not called extracted" not in text


def test_canaries_found_where_chance_may_have_put_them_are_said_not_to_count() -> None:
    found = CanaryExtraction(log_prob_sampled=-3.0, log10_expected_tries=1.3, found_by=["text"])
    rows = [canary_row(1, 4, 3.0, extraction=found), canary_row(2, 4, 49.0, extraction=found)]
    text = section_of(make_report(canaries=rows, extraction=make_extraction()), "Extraction")
    assert "by text 2; 1 not called extracted, since chance may have put them there" in text


def test_a_row_of_the_canary_table_holds_tries_prompts_start_and_what_training_added() -> None:
    text = text_of(make_full_report())
    # c0644: 49.8 bits are -0.638 nats, 10^(0.638 / 2.3026) = 1.89 tries
    assert "c0644 card canary 16 48 of 48 4 in the corpus −0.638 −33.3 at the start 1 49.8" in text
    assert "yes 1.9 tries trained tokens, text not measured" in text
    # c0640: 21 bits are -20.51 nats, 20.51 / 2.3026 = 8.9; calibrated 11.5 bits
    assert "31.4 extrapolated 11.5 10.3 to 49.8 possible 10^8.9 tries none PA (certified)" in text
    assert "18.4 17.6 to 21.4 16.3 above controls" in text
    assert "0.400 0 to 1.90 no never none not extractable" in text


def test_columns_of_parts_that_were_not_measured_are_left_out() -> None:
    heads = text_of(make_report())
    assert "expected tries" not in heads
    assert "calibrated exposure" not in heads
    rows = [with_full_figures(canary_row(1, 4, 3.0)), canary_row(2, 4, 2.0)]
    mixed = text_of(make_report(canaries=rows, extraction=make_extraction()))
    assert "2.00 0.800 to 3.50 sampled not measured no not measured not measured" in mixed


def test_prior_aware_counts_stand_beside_the_papers_share_with_their_thresholds() -> None:
    text = section_of(make_full_report(), "Prior-Aware memorisation")
    assert "The paper finds .55 to .90 in large models." in text
    assert "18 6 3 2 1 0 33.3% 4.33% to 88.2%" in text
    assert "card 12.5 4.25 to no upper bound 95% quantile 24 1.15" in text
    assert "pin 10.0 no interval given 0 not measured" in text


def test_a_share_of_no_extractable_target_is_named_and_not_a_number() -> None:
    nothing = make_counts(num_extractable=0, num_pa=0, num_common=0, num_undecided=0, common_share=None, common_low=None)
    report = make_full_report(prior_aware=nothing)
    assert "18 0 0 0 0 0 none is extractable" in section_of(report, "Prior-Aware memorisation")
    assert "Prior-Aware, canaries: none of 18 is extractable" in findings_lines(report)


def test_records_stand_beside_held_out_ones() -> None:
    text = section_of(make_full_report(), "Real records")
    assert "50 tokens behind 50" in text
    assert "members 40 7 5 12.5% 4.20% to 26.8% 6 held out 30 7 0 0% 0% to 11.6% 1" in text
    assert "up to 3 edited tokens." in text
    assert "members 10,000 40 13.1% 6.55% to 33.1% 5 3.28% to 43.1% 90.0%" in text
    assert "held out 10,000 30 0.400%" in text
    assert "50 64 40 2 5.00% 1.00% to 50.0% −20.5" in text
    assert "A factor of ten in prefix tokens moves the greedy share by 20.0 percentage points" in text
    assert "40 5 3 2 0 0 40.0% 5.27% to 88.2%" in text
    assert "once 36 3 8.33% 1.00% to 50.0% −21.5 3 8.33% 2.00% to 23.0% 0" in text
    assert "2 to 10 4 2 50.0% 1.00% to 50.0% −21.5 2 not measured 0" in text
    assert "records 12.5 4.25 to no upper bound 95% quantile 24 1.15" in text
    assert "4 prior prefixes were left out" in text
    assert "5 50 50 −2.50 yes −1.75 −1.25 PA (certified) 9.50 9.00 to no upper bound" in text
    assert "11 50 50 −71.0 no never drawn none found not extractable none" in text
    assert "Members: 40 of 40 rows" in text


def test_records_without_held_out_near_verbatim_budgets_or_a_prior_say_why() -> None:
    rows = [record_row(1, is_greedy=True, verdict=None, log_prob_sampled=None, log_prob_near=None)]
    members = record_set(rows, [0.0, 0.0, 0.0], num_near=None, curve=[])
    bare = make_records(members=members, held_out=None, prior_aware=None, threshold=None, max_edits=0, num_excluded_prefixes=0)
    text = section_of(make_full_report(records=bare, extraction=None), "Real records")
    assert "no held-out records of this length were given: --held-out, so the figures of the members have no floor" in text
    assert "Near-verbatim extraction: not measured, since audit.records.max_edits is 0." in text
    assert "Extraction by budget: not measured, since audit.extraction is null" in text
    assert "not measured : no training rows were given" in text
    assert "1 50 50 −2.50 yes not measured not measured not measured not measured" in text


def test_at_most_so_many_records_are_listed_the_written_ones_first_and_the_rest_counted() -> None:
    rows = [record_row(line) for line in range(1, 401)] + [record_row(401, 3.0, is_greedy=True)]
    shown = shown_records(rows)
    # log_prob falls with the line: the greedy one and the first 199
    assert [row.line for row in shown] == [*range(1, LARGEST_TABLE), 401]
    records = make_records(members=record_set(rows, [0.0, 0.0, 0.0]), held_out=None)
    assert "Members: 200 of 401 rows, 201 more in the JSON report" in section_of(
        make_full_report(records=records), "Real records"
    )


def test_membership_shows_label_scores_rates_refusals_and_the_check() -> None:
    text = section_of(make_full_report(), "Membership inference")
    assert text.startswith("Membership inference membership Without a model the two sets could not be told apart")
    assert "loss 400 400 0.553 0.512 to 0.593 0.00490 15.2% 7.60% to 25.2% at FPR 5.00% 1.25% to 20.0%" in text
    assert "TPR at FPR up to 0.100%" in text
    assert "once loss 350 400 0.553 0.512 to 0.593 0.00490 once reference model 400 400 undefined for 2 samples" in text
    # 3 / 400 non-members = .75%
    assert "refused 400 held-out samples allow an FPR of 0.750%" in text
    assert "reference model 400 400 undefined for 2 samples undefined undefined undefined refused" in text
    assert "AUROC 0.507 (0.464 to 0.551), p-value 0.380; an AUROC below 0.543 would not be seen" in text
    assert "median 812 characters of members, 798 of held-out samples; p-value 0.470" in text
    assert "1 members, 0 held-out samples; 2 texts in both sets" in text
    assert "17 of them left out of Min-K%++" in text
    assert "31 samples were cut to 512 tokens." in text


def test_a_distribution_shift_is_a_warning_and_not_called_membership() -> None:
    report = make_full_report(membership=make_membership(is_shift=True))
    text = section_of(report, "Membership inference")
    assert text.startswith("Membership inference distribution shift, not membership The two sets can be told apart without any")
    assert re.search(r'class="banner warn" role="alert">\s*<p><strong>distribution shift, not membership', render_html(report))
    assert "may be read as membership" not in text
    assert "### Membership inference: distribution shift, not membership" in render_markdown(report)
    assert [line for line in findings_lines(report) if line.startswith("distribution shift, not membership: AUROC 0.618 (95%")]


def test_privacy_says_in_words_what_the_bound_can_and_cannot_show() -> None:
    text = section_of(make_full_report(), "Privacy from inclusion coins")
    assert "Epsilon of one record is at least 0.223 at 95.0% confidence and delta 1.00×10⁻⁶." in text
    assert "With every guess right the bound would be 2.25" in text
    assert "22 right of 30, from 60 coins; 1 not made because of ties" in text
    assert "Stated epsilon 8.00 at delta 1.00×10⁻⁶; p-value 1.00, with every guess right 0.990" in text
    assert "not testable too few guesses: 8,932, all right, would do" in text
    assert "not comparable canaries did not enter training as records before the sampler" in text
    assert "card 1 29 31 4.75 3.50 to 6.00 0.00100 2.00×10⁻⁴ log p less log p at step 0; Welch" in text
    assert "card 4 5 1 undefined undefined undefined undefined: fewer than two canaries on a side" in text


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"stated_epsilon": None, "p_value": None, "is_testable": None}, "none was stated, so none was tested"),
        ({"num_guesses_needed": None}, "not testable no number of guesses would do at this delta"),
        ({"repetitions": 4}, "not testable because each coin moved 4 copies"),
        ({"repetitions": 4}, "4: each coin moved 4 copies, which divides what can be shown by 4; canaries of tier 1"),
        ({"is_testable": True, "is_comparable": True}, "yes Can they be compared? yes: canaries entered as records"),
    ],
)
def test_a_stated_epsilon_is_called_what_the_evidence_makes_it(changes: dict[str, Any], words: str) -> None:
    assert words in section_of(make_full_report(privacy=make_privacy(**changes)), "Privacy from inclusion coins")


def test_a_probe_is_told_from_planted_positive_controls() -> None:
    text = section_of(make_full_report(), "Is the measurement sound?")
    assert "detected By a probe: copies of the weights learnt 2 fresh secrets" in text
    assert "how often a secret was seen in training does not apply; best p-value 3.00×10⁻⁹." in text
    assert "unknown number of" not in text
    failed = PositiveControl(kind="probe", n=0, mean_num_seen=None, best_p_value=None, detected=False)
    report = make_full_report(positive_control=failed)
    assert "not made The probe failed" in section_of(report, "Is the measurement sound?")
    assert [fact.value for fact in facts(report) if fact.name == "Positive control"] == ["not made"]
    unseen = PositiveControl(kind="probe", n=4, mean_num_seen=None, best_p_value=0.2, detected=False)
    assert "not detected By a probe" in text_of(make_full_report(positive_control=unseen))


def test_a_short_audit_without_a_positive_control_says_that_it_makes_no_probe() -> None:
    nothing = PositiveControl(kind="none", n=0, mean_num_seen=None, best_p_value=None, detected=False)
    assert "and a short audit makes no probe, so low figures" in text_of(make_report(positive_control=nothing))
    assert "makes no probe" not in text_of(make_bare_report(positive_control=nothing))


def test_the_size_of_the_model_is_on_the_page() -> None:
    assert "Parameters of the model 124,439,808" in text_of(make_full_report())
    assert "Parameters of the model not recorded" in text_of(make_report())


def test_hostile_text_in_any_part_stays_text() -> None:
    report = make_full_report(
        prior_aware_thresholds=[calibrated_threshold(HOSTILE)],
        records=make_records(
            threshold=calibrated_threshold(HOSTILE), members=record_set([record_row(1, 3.0, verdict=HOSTILE)], [0.0, 0.0, 0.0])
        ),
        membership=make_membership(notes=[HOSTILE]),
        privacy=make_privacy(notes=[HOSTILE], method=HOSTILE, flags=[HOSTILE]),
    )
    counterfactual = [row.model_copy(update={"format": HOSTILE, "method": HOSTILE}) for row in report.counterfactual]
    report = report.model_copy(update={"counterfactual": counterfactual})
    page = Page(render_html(report))
    assert {"script", "img"}.isdisjoint(tag for tag, _ in page.tags)
    assert not page.attributes("onerror")
    assert page.open == []
    assert page.text.count("alert(1)") == 11  # thresholds, a verdict, a note, three of privacy, two of each tier
    assert "<script" not in render_markdown(report)
    noticed = make_bare_report(notices=[f"records were not measured: {HOSTILE}"])
    assert "script" not in {tag for tag, _ in Page(render_html(noticed)).tags}


def test_the_ratios_are_xml_with_a_text_alternative_and_colours_for_light_and_dark() -> None:
    text = draw_ratios(make_records()) or ""
    root = ElementTree.fromstring(text)
    # ratios .25, 1.5, 9.5, 20.5, 31.25: median 9.5
    assert root.attrib["aria-label"] == (
        "Log belief ratio in nats of 5 records: 2 common, 0 undecided, 3 PA; median 9.50, from 0.250 to 31.2. "
        "The dashed line is the threshold n 12.5."
    )
    light, dark = text.split("prefers-color-scheme:dark")
    used = set(re.findall(r"var\((--mg-[a-z0-9-]+)\)", text))
    assert used == {"--mg-ink", "--mg-control", "--mg-tier-2"}
    assert all(f"{name}:#" in light and f"{name}:#" in dark for name in used)
    assert not re.search(r"(fill|stroke): #", text)
    assert "log belief ratio (nats)<" in text
    assert "n = 12.5<" in text


def test_the_ratios_of_records_of_which_none_is_extractable_are_not_drawn() -> None:
    members = record_set([record_row(line) for line in range(1, 9)], [0.0, 0.0, 0.0])
    assert draw_ratios(make_records(members=members)) is None
    report = make_full_report(records=make_records(members=members))
    assert "No picture of the ratios: no record is extractable." in section_of(report, "Real records")
    one = record_set([record_row(1, 2.0)], [0.0, 0.0, 0.0])
    assert draw_ratios(make_records(members=one, threshold=None))


def test_every_score_and_prompt_has_a_word() -> None:
    assert list(SCORE_NAMES) == list(get_args(ScoreName))
    for kind in get_args(FoundBy):
        found = CanaryExtraction(log_prob_sampled=-1.0, log10_expected_tries=0.4, found_by=[kind])
        report = make_report(canaries=[canary_row(1, 4, 3.0, extraction=found)], extraction=make_extraction())
        assert f"Canaries found 2 of 1: by {kind} 1" in section_of(report, "Extraction")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, "from the 40 likeliest tokens."),
        ({"top_k": None}, "from all tokens."),
        ({"top_k": None, "top_p": 0.9}, "from the likeliest tokens that hold 90.0% of the mass."),
        ({"top_k": 50, "top_p": 0.9}, "from those of the 50 likeliest tokens that hold 90.0% of the mass."),
    ],
)
def test_the_sampler_is_a_sentence(settings: dict[str, Any], words: str) -> None:
    assert describe_sampler(SamplerSettings(**settings)).endswith(words)


def test_empty_curves_and_given_thresholds_leave_the_page_whole() -> None:
    report = make_full_report(
        extraction=make_extraction(curves=[]),
        prior_aware_thresholds=[],
        counterfactual=[],
        records=make_records(threshold=Threshold(targets="records", n=10.0, method="given"), num_excluded_prefixes=0),
    )
    assert Page(render_html(report)).open == []
    assert "Counterfactual" not in section_of(report, "Privacy from inclusion coins")
    only = make_extraction(curves=[TierCurve(tier=64, points=curve_points([0.5, 0.75, 1.0], n=4)[:1])])
    assert "64 1 4 50.0%" in section_of(make_full_report(extraction=only), "Extraction")
