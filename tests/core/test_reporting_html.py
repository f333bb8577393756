"""The page of a report: well-formed, self-contained, safe, accessible, and honest about what was not measured."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
from html.parser import HTMLParser
from typing import Any

import pytest
from test_reporting_samples import canary_row, make_decision, make_report

from memguard.audit.report import LIMITS, LedgerSummary, PositiveControl, Subject
from memguard.errors import InputError
from memguard.reporting import render_html
from memguard.reporting.definitions import DEFINITIONS

VOID = {"meta", "br", "link", "img", "hr", "input"}
HOSTILE = '<script>alert(1)</script>"><img src=//evil.example onerror=x>'


class Page(HTMLParser):
    """Tags with their attributes, text in reading order, and whether every tag closes in turn."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()
        self.text = " ".join(" ".join(self.words).split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, f"</{tag}> closes nothing"

    def handle_data(self, data: str) -> None:
        if self.open[-1:] not in (["style"], ["script"]):
            self.words.append(data)

    def attributes(self, *names: str) -> list[str]:
        return [value or "" for _, found in self.tags for name, value in found.items() if name in names]


def page_of(decided: bool = True, **changes: Any) -> Page:
    report = make_report(**changes)
    return Page(render_html(report, make_decision(report) if decided else None))


def test_every_tag_closes_in_turn_and_no_id_is_used_twice() -> None:
    page = page_of(with_prior_aware=True)
    assert page.open == []
    ids = page.attributes("id")
    assert len(ids) == len(set(ids))


def test_the_page_reaches_for_nothing_outside_itself() -> None:
    text = render_html(make_report(), make_decision(make_report()))
    page = Page(text)
    assert all(target.startswith("#") for target in page.attributes("src", "href", "xlink:href", "srcset", "action", "data"))
    assert {tag for tag, _ in page.tags}.isdisjoint({"script", "link", "iframe", "object", "embed", "img", "base", "form"})
    assert not re.search(r"@import|url\((?!#)", text)
    assert "http" not in re.sub(r'xmlns(:xlink)?="[^"]*"', "", text)


def test_links_to_canaries_lead_to_their_rows() -> None:
    page = page_of()
    ids = set(page.attributes("id"))
    links = [target for tag, found in page.tags if tag == "a" for target in [found["href"] or ""]]
    assert links
    assert all(link[1:] in ids for link in links)


def test_hostile_text_from_a_report_or_decision_stays_text() -> None:
    report = make_report(invalid_reasons=[HOSTILE], status="invalid", notices=[HOSTILE])
    report = report.model_copy(
        update={
            "formats": [report.formats[0].model_copy(update={"name": HOSTILE})],
            "tiers": [report.tiers[0].model_copy(update={"format": HOSTILE})],
            "canaries": [canary_row(1, 4, 3.0, id=HOSTILE, format=HOSTILE)],
            "environment": report.environment.model_copy(update={"device": HOSTILE}),
            "ledger": report.ledger.model_copy(update={"notes": [HOSTILE]}),
        }
    )
    decision = make_decision(report, reason=HOSTILE, limits=[HOSTILE])
    rule = decision.rules[0].model_copy(update={"name": HOSTILE, "figures": {HOSTILE: HOSTILE}, "canaries": [HOSTILE]})
    text = render_html(report, decision.model_copy(update={"rules": [rule]}))
    page = Page(text)
    assert "script" not in {tag for tag, _ in page.tags}
    assert "img" not in {tag for tag, _ in page.tags}
    assert not page.attributes("onerror")
    assert page.open == []
    assert page.text.count("alert(1)") >= 10


def test_the_page_can_be_read_by_ear_and_keyboard() -> None:
    page = page_of()
    tags = [tag for tag, _ in page.tags]
    assert page.tags[0] == ("html", {"lang": "en"})
    assert tags.count("title") == tags.count("h1") == tags.count("main") == 1
    assert tags.count("table") == tags.count("caption") > 5
    assert all(found.get("scope") in ("col", "row") for tag, found in page.tags if tag == "th")
    levels = [int(tag[1]) for tag in tags if re.fullmatch(r"h[1-6]", tag)]
    assert all(b - a <= 1 for a, b in itertools.pairwise(levels))
    figures = [found for tag, found in page.tags if tag == "svg"]
    assert len(figures) == 2
    assert all(found["role"] == "img" and found["aria-label"] for found in figures)
    regions = [found for _, found in page.tags if found.get("class") == "scroll"]
    assert all(found.get("tabindex") == "0" and found.get("aria-label") for found in regions)


def test_the_page_serves_phones_dark_mode_and_paper() -> None:
    text = render_html(make_report())
    assert 'name="viewport"' in text
    assert "@media (prefers-color-scheme: dark)" in text
    assert "@media print" in text


def test_what_was_not_measured_says_so() -> None:
    page = page_of(decided=False)
    assert "Prior-Aware settings not measured" in page.text
    assert "c0644 card canary 16 48 of 48" in page.text
    row = page.text.split("c0644 card")[1].split("c0645 card")[0]
    assert row.rstrip().endswith("yes not measured")


def test_a_prior_aware_annotation_shows_verdict_ratio_interval_and_effective_size() -> None:
    text = page_of(with_prior_aware=True).text
    assert "PA (certified) 18.4 17.6 to 21.4 14.2 of 500" in text
    assert "not extractable not measured not measured of 500" in text
    assert "m = 1.00×10⁻⁴" in text


def test_a_canary_row_shows_its_figures_with_units_interval_and_method() -> None:
    text = page_of().text
    assert "log-prob (nats)" in text
    # tier 16, 28.5 bits: rank at most 10^15 / 2^28.5 = 2,634,178
    assert re.search(
        r"c0641 card canary 16 48 of 48 −15\.3 1 to 2,634,\d+ 28\.5 27\.3 to 49\.8 certified 31\.4 extrapolated possible", text
    )
    assert "10.0 8.80 to 49.8 sampled, capped no" in text
    assert "card luhn 1.00×10¹⁵ (49.8 bits) 44 shared clean no 1,024 −33.1 2.27 0.310" in text


def test_an_invalid_report_says_so_with_its_reasons_on_top() -> None:
    text = page_of(decided=False, with_failed_canary=True).text
    top = text.split("Extracted")[0]
    assert "This audit is invalid: its figures are not evidence." in top
    assert "canary 'c0190' has no finite score." in top
    assert "The audit is valid" not in text
    assert "c0190 card canary 4 12 of 12 no finite score 1 to 1.00×10¹⁵ no finite score failed" in text
    assert "tier 16, certified, 48.6 to 49.8; 1 without a finite score" in text
    assert "None" not in text.replace("None of", "")


def test_a_decision_shows_outcome_reason_rules_and_figures() -> None:
    text = page_of().text
    assert "Gate decision: block (exit code 1) 2 of 18 canaries can be extracted." in text
    assert (
        "no secret can be extracted limit block 2 canaries were extracted, limit 0. extraction.count: 2 max: 0 c0644 c0645"
        in text
    )
    assert "p: 1.80×10⁻¹⁴" in text
    assert "min_attainable_p: not measured" in text


def test_without_a_decision_the_page_decides_nothing() -> None:
    text = page_of(decided=False).text
    assert "No gate decision was given" in text
    assert "Gate decision" not in text


def test_a_decision_on_another_checkpoint_is_refused() -> None:
    report = make_report()
    other = make_decision(report, subject=report.subject.model_copy(update={"digest": "99" * 32}))
    with pytest.raises(InputError, match="decision must be about the report's subject"):
        render_html(report, other)


def test_the_limits_and_a_definition_of_every_number_are_on_the_page() -> None:
    text = page_of(decided=False).text
    assert all(limit in text for limit in LIMITS)
    assert all(definition.text in text for definition in DEFINITIONS)
    assert "arXiv 2602.18733" in text
    assert "USENIX Security 2019" in text


def test_limits_that_report_and_decision_share_are_shown_once() -> None:
    report = make_report()
    text = Page(render_html(report, make_decision(report, limits=LIMITS))).text
    assert text.count(LIMITS[0]) == 1


def test_a_missing_ledger_step_and_positive_control_are_named() -> None:
    ledger = LedgerSummary(
        found=False,
        exact=False,
        notes=[],
        count=None,
        mode=None,
        plant_once=None,
        num_insertions=0,
        num_seen=None,
        token_share=None,
    )
    text = page_of(
        decided=False,
        ledger=ledger,
        subject=Subject(kind="live", digest=None, global_step=None, epoch=None, notice="adapter"),
        positive_control=PositiveControl(kind="none", n=0, mean_num_seen=None, best_p_value=None, detected=False),
        canaries=[canary_row(1, 4, 3.0, num_seen=None)],
        controls=[],
        trend=[],
    ).text
    assert "whether the canaries were trained on is unknown" in text
    assert "a live model cannot be promoted adapter" in text
    assert "Token share of canaries not measured" in text
    assert "no ledger of 12" in text
    assert "No curve" in text
    assert "low figures may mean that nothing could be seen" in text
    assert "The report holds no controls." in text


def test_importing_the_package_loads_no_torch_matplotlib_or_jinja() -> None:
    code = (
        "import sys, memguard.reporting.jsonl_tracker, memguard.reporting.wandb_tracker\n"
        "bad = {'torch', 'matplotlib', 'jinja2', 'wandb', 'scipy', 'numpy'} & set(sys.modules)\n"
        "assert not bad, bad\n"
        "memguard.reporting.render_html\n"
        "assert 'torch' not in sys.modules and 'matplotlib' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_an_unknown_name_of_the_package_is_an_attribute_error() -> None:
    import memguard.reporting

    with pytest.raises(AttributeError, match="render_pdf"):
        _ = memguard.reporting.render_pdf


def test_the_figures_behind_the_curves_say_that_their_interval_is_of_the_median() -> None:
    text = page_of().text
    # Six values hold the median between the ends with a chance of 1 - 2 / 2^6 = 96.9%, five with 93.8%.
    assert "The interval is of the median and need not hold the mean: at least 95% coverage from 6 canaries on" in text
    assert "mean (bits) interval of the median (bits)" in text
