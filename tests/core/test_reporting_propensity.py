"""How propensity is shown: on the page of a report, on a page of its own, on a terminal, and over stages."""

from __future__ import annotations

import re
from typing import Any

import pytest
from rich.console import Console
from test_reporting_parts import Page, section_of
from test_reporting_samples import make_bare_report, make_full_report, make_propensity

from memguard.audit.propensity_report import CorpusSummary, PropensityReport
from memguard.audit.propensity_stages import compare_stages
from memguard.audit.report import Subject
from memguard.errors import EvidenceError
from memguard.reporting.markdown import render_markdown
from memguard.reporting.propensity import propensity_view, render_propensity, stages_view
from memguard.reporting.terminal import findings_lines


def make_propensity_report(step: int | None = 7, **changes: Any) -> PropensityReport:
    """The sample figures of one checkpoint on one corpus."""
    values: dict[str, Any] = {
        "created_at": "2026-01-01T00:00:00+00:00",
        "memguard": "0.1.0",
        "subject": Subject(kind="checkpoint", digest=f"{step}" * 8, global_step=step, epoch=None),
        "tokenizer_digest": "ab" * 32,
        "corpus": CorpusSummary(name="mails", digest="cd" * 32, num_tokens=17_894, num_documents=50),
        "prefixes_from": "documents of the index",
        "propensity": make_propensity(),
        "duration_s": 8.7,
    }
    return PropensityReport(**{**values, **changes})


def shown(renderable: Any) -> str:
    console = Console(width=240, color_system=None)
    with console.capture() as captured:
        console.print(renderable)
    return captured.get()


def test_the_section_holds_every_estimate_with_its_interval_and_names_what_stands_apart() -> None:
    text = section_of(make_full_report(), "Propensity")
    for words in ("88.7", "64.1 to 98.5", "95.0%", "75.1% to 99.9%", "2 apart", "1 empty", "1 refused", "undefined", "12, 40"):
        assert words in text
    assert "a <b>quoted</b> span" in text  # escaped in the page, so read back as written
    assert "builtin 7" in text
    assert "50 tokens forces out" in text


def test_a_report_that_was_not_asked_for_propensity_has_no_such_section() -> None:
    report = make_bare_report()
    assert "Propensity" not in re.findall(r"<h2>([^<]+)</h2>", render_propensity(make_propensity_report()))[1:]
    assert "<h2>Propensity</h2>" not in _page(report)
    noticed = report.model_copy(update={"notices": ["propensity was not measured: it needs an index."]})
    assert "not measured : it needs an index." in section_of(noticed, "Propensity")


def _page(report: Any) -> str:
    from memguard.reporting.html import render_html

    return render_html(report)


def test_a_part_is_called_a_part_everywhere() -> None:
    partial = make_propensity(partial="the endpoint stayed away.")
    assert "A part only." in section_of(make_full_report(propensity=partial), "Propensity")
    assert "A part only." in render_markdown(make_full_report(propensity=partial))
    assert "A part only." in render_propensity(make_propensity_report(propensity=partial))


def test_the_page_of_a_propensity_report_is_well_formed_and_reaches_for_nothing_outside() -> None:
    page = Page(render_propensity(make_propensity_report()))
    assert page.open == []
    assert {"script", "link", "iframe", "img", "form"}.isdisjoint({tag for tag, _ in page.tags})
    assert "None" not in page.text
    for words in ("step 7", "corpus mails", "17,894 tokens, 50 documents", "Propensity: PM"):
        assert words in page.text
    served = make_propensity_report(subject=None, served_model="small")
    assert "nothing binds these figures to weights" in Page(render_propensity(served)).text


def test_a_table_on_a_terminal_and_lines_in_a_pipe_say_the_same() -> None:
    table, lines = (shown(propensity_view(make_propensity_report(), is_plain=plain)) for plain in (False, True))
    for words in ("88.7 (64.1 to 98.5)", "5.00% (0.100% to 24.9%)", "loops and degenerate", "1 prompts were refused"):
        assert words in table
        assert words in lines
    assert "setting=generic prompts  prompts=20  texts=20  ALS (tokens)=6.60 (5.02 to 27.0)" in lines


def test_markdown_and_the_findings_of_a_report_name_each_setting() -> None:
    report = make_full_report()
    assert "| generic prompts | 20 | 6.60 | 5.02 to 27.0 | 5.00% | 0.100% to 24.9% | none | none | none |" in render_markdown(
        report
    )
    lines = [line for line in findings_lines(report) if line.startswith("training prefix")]
    assert lines == [
        "training prefix: longest span 88.7 tokens (95% interval 64.1 to 98.5), 95.0% (95% interval 75.1% to 99.9%) "
        "full matches, n = 20"
    ]


def moved(factor: float) -> Any:
    """The sample with every estimate and its interval times a factor."""
    found = make_propensity()
    rows = [
        row.model_copy(
            update={
                "estimates": [
                    one.model_copy(update={name: getattr(one, name) * factor for name in ("value", "low", "high")})
                    for one in row.estimates
                ]
            }
        )
        for row in found.settings
    ]
    return found.model_copy(update={"settings": rows})


def test_a_movement_over_stages_is_named_only_where_its_interval_leaves_no_other() -> None:
    reports = [make_propensity_report(step) for step in (1, 2)]
    reports.append(make_propensity_report(3, propensity=moved(0.25)))
    comparison = compare_stages(reports, labels=["mother", "one", "two"])
    over = {(one.setting, one.metric): one for one in comparison.movements if one.what == "first to last stage"}
    prefix = over["prefix", "average_longest_span"]
    # 88.7 to 22.175; ends 0.25 * 64.1 - 98.5 and 0.25 * 98.5 - 64.1; both 95% intervals at once: 90%.
    assert (prefix.difference, prefix.low, prefix.high) == pytest.approx((-66.525, -82.475, -39.475))
    assert (prefix.direction, prefix.confidence) == ("fell", pytest.approx(0.9))
    assert over["generic", "average_longest_span"].direction == "not shown"
    assert comparison.sentences[0] == ("Corpus 'mails', first to last stage: training prefix: ALS (tokens), FMR fell.")
    text = shown(stages_view(comparison, is_plain=False))
    assert "mother to two, mails, training prefix: ALS (tokens) fell: −66.5 (−82.5 to −39.5, 90%)" in text
    assert "two" in text


def test_a_fall_and_the_way_back_are_named_where_first_and_last_are_alike() -> None:
    reports = [make_propensity_report(step) for step in (1, 2, 3)]
    reports[1] = make_propensity_report(2, propensity=moved(0.25))
    comparison = compare_stages(reports, labels=["mother", "one", "two"])
    steps = [one for one in comparison.movements if one.what == "stage to next stage" and one.setting == "prefix"]
    spans = [one for one in steps if one.metric == "average_longest_span"]
    assert [(one.earlier, one.stage, one.direction) for one in spans] == [("mother", "one", "fell"), ("one", "two", "rose")]
    assert [one.difference for one in spans] == pytest.approx([-66.525, 66.525])
    assert comparison.sentences[0] == "Corpus 'mails', first to last stage: no movement is shown at this number of prompts."
    assert comparison.sentences[1].startswith("Corpus 'mails', mother to one: training prefix: ALS (tokens), FMR")
    assert comparison.sentences[2].startswith("Corpus 'mails', one to two: training prefix: ALS (tokens), FMR")
    assert (comparison.sentences[1][-6:], comparison.sentences[2][-6:]) == (" fell.", " rose.")
    two = compare_stages(reports[:2], labels=["mother", "one"])
    assert not any(one.what == "stage to next stage" for one in two.movements)


def test_longest_spans_and_full_matches_are_set_against_each_other_between_corpora() -> None:
    found = moved(0.25)
    kept = next(one for one in make_propensity().settings[0].estimates if one.metric == "full_match_rate")
    prefix, *others = found.settings
    mixed = [kept if one.metric == "full_match_rate" else one for one in prefix.estimates]
    rows = [prefix.model_copy(update={"estimates": mixed}), *others]
    other = CorpusSummary(name="pages", digest="12" * 32, num_tokens=1, num_documents=1)
    reports = [
        make_propensity_report(1),
        make_propensity_report(1, propensity=found.model_copy(update={"settings": rows}), corpus=other),
    ]
    comparison = compare_stages(reports, labels=["a", "a"])
    between = {one.metric: one for one in comparison.movements if one.what == "corpus to corpus" and one.setting == "prefix"}
    assert set(between) == {"average_longest_span", "full_match_rate"}
    assert {(one.earlier, one.corpus, one.stage) for one in between.values()} == {("mails", "pages", "a")}
    assert comparison.sentences == [
        "Stage 'a', training prefix: ALS (tokens) is greater on 'mails', FMR is not shown to differ."
    ]
    assert "mails to pages, a, training prefix: ALS (tokens) fell" in shown(stages_view(comparison, is_plain=False))


def test_near_verbatim_texts_are_set_against_those_that_match_to_the_letter() -> None:
    found = make_propensity()
    near = [
        row.model_copy(
            update={
                "estimates": [
                    *row.estimates,
                    row.estimates[1].model_copy(
                        update={"metric": "near_verbatim_rate", "value": 0.9, "low": 0.7, "high": 0.99}
                    ),
                ]
            }
        )
        for row in found.settings
    ]
    reports = [make_propensity_report(1, propensity=found.model_copy(update={"settings": near})), make_propensity_report(2)]
    comparison = compare_stages(reports, labels=["a", "b"])
    shifts = {one.setting: one.direction for one in comparison.movements if one.what == "verbatim to near-verbatim"}
    assert shifts == {"prefix": "not shown", "generic": "rose", "non_member": "rose"}
    assert comparison.sentences[-1] == (
        "Corpus 'mails': near-verbatim texts exceed those that match to the letter in a (generic prompts), a (held-out prefix)."
    )


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"tokenizer_digest": "00" * 32}, "the tokenizers differ"),
        ({"propensity": make_propensity(max_new_tokens=50)}, "the limits of a continuation differ"),
        ({"propensity": make_propensity(sampler=None, num_samples=0)}, "the samplers differ"),
        ({"propensity": make_propensity(prefix_tokens=20)}, "the lengths of prefixes differ"),
        ({"propensity": make_propensity(seed=1)}, "the seeds of prompts differ"),
        (
            {"corpus": CorpusSummary(name="mails", digest="ef" * 32, num_tokens=1, num_documents=1)},
            "corpus 'mails' is not the same index in all reports",
        ),
    ],
)
def test_reports_that_were_made_differently_do_not_compare(changes: dict[str, Any], said: str) -> None:
    comparison = compare_stages([make_propensity_report(1), make_propensity_report(2, **changes)], labels=["a", "b"])
    assert not comparison.is_comparable
    assert comparison.movements == []
    assert comparison.sentences == [f"Not comparable: {said}."]


def test_a_part_or_a_stage_given_twice_is_no_evidence() -> None:
    partial = make_propensity_report(2, propensity=make_propensity(partial="the endpoint stayed away."))
    with pytest.raises(EvidenceError, match="the report of 'b' on corpus 'mails' is only a part"):
        compare_stages([make_propensity_report(1), partial], labels=["a", "b"])
    with pytest.raises(EvidenceError, match="stage 'a' was traced to corpus 'mails' twice: name corpora apart"):
        compare_stages([make_propensity_report(1), make_propensity_report(1)], labels=["a", "a"])
