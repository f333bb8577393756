"""The scripts of the real propensity runs: how texts are read, and the pages made of the reports. Nothing is fetched."""

from __future__ import annotations

import importlib
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from test_reporting_propensity import make_propensity_report, moved

from memguard.audit.propensity_stages import PropensityComparison, compare_stages

HOME = Path(__file__).parents[2] / "benchmarks"

pytestmark = pytest.mark.skipif(not HOME.exists(), reason="benchmarks are not part of an installed wheel")


@pytest.fixture(scope="module")
def scripts() -> Iterator[dict[str, ModuleType]]:
    before = list(sys.path)
    sys.path.insert(0, str(HOME / "propensity"))
    yield {name: importlib.import_module(name) for name in ("texts", "real_run", "staged_run")}
    sys.path[:] = before


def test_the_body_of_a_mail_is_its_first_plain_part(scripts: dict[str, ModuleType]) -> None:
    mail = (
        "From: a@example.org\nContent-Type: multipart/alternative; boundary=b\n\n--b\nContent-Type: text/plain\n\n"
        "Hello there,  \nsee you.\n--b\nContent-Type: text/html\n\n<p>Hello</p>\n--b--\n"
    )
    assert scripts["texts"]._body(mail.encode()) == "Hello there,\nsee you."


@pytest.mark.parametrize(
    ("headers", "payload", "text"),
    [
        (
            "Content-Type: text/plain; charset=iso-8859-1\nContent-Transfer-Encoding: quoted-printable",
            "sm=F8r=\nrebr=F8d",
            "smørrebrød",
        ),
        ("Content-Type: text/plain; charset=utf-8\nContent-Transfer-Encoding: base64", "w6l0w6k=", "été"),
        ("Content-Type: text/plain; charset=no-such", "plain", "plain"),
        ("Content-Type: text/html", "<p>none</p>", ""),
    ],
)
def test_a_mail_is_read_as_its_headers_say(scripts: dict[str, ModuleType], headers: str, payload: str, text: str) -> None:
    assert scripts["texts"]._body(f"From: a@example.org\n{headers}\n\n{payload}\n".encode("latin-1")) == text


def test_a_page_loses_its_markup_and_its_scripts(scripts: dict[str, ModuleType]) -> None:
    page = "<html><head><title>no</title></head><body><script>no()</script><p>\u00c5bne&nbsp;<b>filer</b></p></body></html>"
    assert scripts["texts"]._plain(page) == "\u00c5bne filer"


def test_texts_count_once_and_only_where_they_are_long_enough(scripts: dict[str, ModuleType]) -> None:
    long = "word " * 200
    assert scripts["texts"]._distinct([long, "short", long]) == [long]


def test_the_page_of_the_real_run_holds_both_models_and_the_control(scripts: dict[str, ModuleType]) -> None:
    real = scripts["real_run"]
    reports = {"untouched": make_propensity_report(1, propensity=moved(0.1)), "trained": make_propensity_report(2)}
    counts = {"indexed": 9_000, "members": 32, "held_out": 48}
    page = real.render(reports, make_propensity_report(3), counts, real.FULL, 0.044, 700.0)
    assert "## untouched model" in page
    assert "| training prefix | 20 | 88.7 (64.1 to 98.5) | 95.0% (75.1% to 99.9%) |" in page
    assert "20 openings (1 more were refused" in page
    assert "index of 9,000 e-mails that are no spam and Danish help pages, those of 600 characters or more" in page


def test_the_page_of_the_stages_holds_every_stage_and_what_moved(scripts: dict[str, ModuleType]) -> None:
    staged = scripts["staged_run"]
    reports = [make_propensity_report(1), make_propensity_report(2, propensity=moved(0.25))]
    page = staged.render(compare_stages(reports, labels=["mother", "stage-1"]), ["mother: 600 steps"], staged.FULL, 600.0)
    assert "| ALS (tokens) | stage-1 | 22.2 (16 to 24.6) | 1.65 (1.25 to 6.75) |" in page
    assert "- mother to stage-1, mails, training prefix: ALS (tokens) fell: -66.5 (-82.5 to -39.5, 90%)" in page


@pytest.mark.parametrize("name", ["propensity_real.md", "propensity_stages.md"])
def test_the_committed_pages_are_of_full_runs(name: str) -> None:
    page = (HOME / "results" / name).read_text(encoding="utf-8")
    assert " on one thread, 20" in page
    assert "prompts" in page


def test_prefixes_bring_out_more_than_ordinary_prompts_in_the_committed_stages() -> None:
    data = json.loads((HOME / "results" / "propensity_stages.json").read_text(encoding="utf-8"))
    found = PropensityComparison.model_validate(data)
    assert (found.stages, found.corpora) == (["mother", "stage-1", "stage-2", "stage-3"], ["old", "new"])
    at = {(row.corpus, row.stage, row.setting): row for row in found.rows if row.metric == "average_longest_span"}
    for corpus, stage in (("old", "mother"), ("new", "stage-3")):
        assert at[corpus, stage, "prefix"].low > at[corpus, stage, "generic"].value


def _intervals(page: str, model: str, column: int) -> dict[str, tuple[float, float]]:
    """Ends of the intervals of one column in the table of a model, by setting."""
    section = page.split(f"## {model} model")[1].split("## ")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in section.splitlines() if line.startswith("| ")]
    found = {row[0]: re.search(r"\(([\d.]+)%? to ([\d.]+)%?\)", row[column]) for row in rows[1:]}
    return {name: (float(ends[1]), float(ends[2])) for name, ends in found.items() if ends is not None}


@pytest.mark.parametrize("column", [2, 3, 4])
def test_prefixes_stand_clear_of_ordinary_prompts_and_of_chance_in_the_committed_real_run(column: int) -> None:
    page = (HOME / "results" / "propensity_real.md").read_text(encoding="utf-8")
    trained, untouched = (_intervals(page, model, column) for model in ("trained", "untouched"))
    assert len(trained) == len(untouched) == 6
    for setting in ("generic prompts", "specific prompts", "held-out prefix"):
        assert trained["training prefix"][0] > trained[setting][1]
    assert trained["training prefix"][0] > untouched["training prefix"][1]
    assert untouched["training prefix"][0] <= untouched["held-out prefix"][1]


def test_the_committed_control_matches_nothing_of_the_corpus() -> None:
    page = (HOME / "results" / "propensity_real.md").read_text(encoding="utf-8")
    said = re.search(r"(\d+) openings .* FMR 0% .* span of 50 0% .* longest span (\d+) tokens", page)
    assert said is not None
    assert int(said[1]) >= 5
    assert int(said[2]) < 20
