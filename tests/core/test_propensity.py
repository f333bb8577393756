"""Capability against propensity: figures by hand, prompts as the unit, and a model that gives away what it was taught."""

from __future__ import annotations

import copy
import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from rank_processes import sharded, team_of_threads, two_processes
from scipy import stats
from test_report_schema import reachable
from tiny_models import tiny_family

from memguard.audit import propensity as module
from memguard.audit.decoding import SETTINGS, Generation, Generations, Prompt, PropensitySettings
from memguard.audit.endpoint import Endpoint
from memguard.audit.propensity import measure_endpoint, measure_model
from memguard.audit.propensity_figures import MAX_ROWS, _estimate, _side, summarise_propensity
from memguard.audit.propensity_prompts import PromptSet, RefusedPrompt
from memguard.audit.records import Record
from memguard.audit.report_propensity import Propensity
from memguard.audit.traced import METRICS, Corpus, TracedItem
from memguard.errors import EvidenceError, InputError, MissingExtraError, ScoringError
from memguard.scoring.audit_mode import audit_mode
from memguard.scoring.scorer import Scorer
from memguard.scoring.team import Team


@dataclass(frozen=True)
class Found:
    """What a tracer gives, written down by hand."""

    longest_tokens: int = 0
    longest_rare_tokens: int = 0
    tier: Any = "none"
    recall: float | None = 0.0
    num_documents: int = 0
    spans: Sequence[Any] = ()
    flags: Sequence[str] = ()


class Plain:
    """A corpus of few documents: every piece of it is known, and texts that hold a text are looked for one by one."""

    def __init__(self, documents: Sequence[tuple[int, ...]], tokenizer: Any) -> None:
        self.texts, self.asked = [tokenizer.decode(document) for document in documents], list[int]()
        self.pieces: dict[tuple[int, ...], set[int]] = defaultdict(set)
        for number, ids in enumerate(documents):
            for start in range(len(ids)):
                for end in range(start + 1, len(ids) + 1):
                    self.pieces[ids[start:end]].add(number)

    def corpus(self) -> Corpus:
        return Corpus(lambda prompts: [end - start for start, end in map(self._longest, prompts)], self.trace)

    def _longest(self, ids: tuple[int, ...]) -> tuple[int, int]:
        spans = [
            (start, end)
            for start in range(len(ids))
            for end in range(start, len(ids) + 1)
            if start == end or ids[start:end] in self.pieces
        ]
        return max(spans, key=lambda span: span[1] - span[0])

    def trace(self, generations: Sequence[Generation]) -> list[Found]:
        self.asked.append(len(generations))
        found = []
        for one in generations:
            start, end = self._longest(one.ids)
            size, documents = end - start, sorted(self.pieces.get(one.ids[start:end], ()))
            places = [SimpleNamespace(document=number) for number in documents]
            tier = "full raw" if any(one.text in text for text in self.texts) else "partial"
            span = SimpleNamespace(start=start, end=end, documents=places)
            found.append(Found(size, size, tier, size / len(one.ids), len(documents), [span]))
        return found


def summary(
    found: Sequence[tuple[str, str, int, Found | None]], *, num_samples: int = 1, max_new_tokens: int = 100, **options: Any
) -> Propensity:
    """The section for continuations given as setting, prompt, tokens and what was found of them; None: empty."""
    names = list(dict.fromkeys((setting, name) for setting, name, *_ in found))
    prompts = PromptSet(tuple(Prompt(setting, name, (1,)) for setting, name in names), (), ())  # type: ignore[arg-type]
    items, given, samples = [], [], dict.fromkeys(names, 0)
    for setting, name, num_tokens, one in found:
        ids = (7,) * num_tokens if one is not None else ()
        items.append(Generation(names.index((setting, name)), samples[setting, name], ids, "", is_ended=num_tokens < 100))
        samples[setting, name] += 1
        given += [one] if one is not None else []
    items.sort(key=lambda item: (item.prompt, item.sample))
    settings = PropensitySettings(num_samples=num_samples, max_new_tokens=max_new_tokens, **options)
    corpus = Corpus(lambda some: [0] * len(some), lambda some: given)
    written = Generations(tuple(items), max_new_tokens, len(items))
    decoder = SimpleNamespace(decode=lambda ids, **_: f"{len(ids)} tokens")
    return summarise_propensity("model", prompts, written, corpus, settings, decoder, seed=0)


def estimate_of(report: Propensity, setting: str, metric: str) -> Any:
    (row,) = (row for row in report.settings if row.setting == setting)
    return next(one for one in row.estimates if one.metric == metric)


def share_of(report: Propensity, setting: str, metric: str) -> Any:
    return next(one for one in report.shares if (one.setting, one.metric) == (setting, metric))


def test_figures_are_those_worked_out_by_hand() -> None:
    """Four prefixes and four ordinary prompts, one continuation each.

    Spans of prefixes 60, 20, 0 and an empty one: mean 20 tokens; at least 20: 2 of 4; full raw and at least 50 tokens long:
    1 of 4. Ordinary: 4, 0, 0, 0: mean 1. Share of the longest span: 1 / (1 + 20) = 0.0476; of full matches, 0 of 4 against
    2 of 4, 0, whose interval by Clopper-Pearson on 0 of 2 is [0, 1 - .025^(1/2)] = [0, .8419].
    """
    report = summary(
        [
            ("prefix", "record 1", 60, Found(60, 60, "full raw", 1.0)),
            ("prefix", "record 2", 30, Found(20, 4, "full raw", 0.6)),
            ("prefix", "record 3", 100, Found(0, 0, "full normalised", 0.4)),
            ("prefix", "record 4", 0, None),
            *[("generic", f"line {place}", 100, Found(4 if place == 1 else 0)) for place in range(1, 5)],
        ]
    )
    wanted = {
        "average_longest_span": 20.0,
        "average_longest_rare_span": 16.0,
        "span_rate_20": 0.5,
        "span_rate_50": 0.25,
        "full_match_rate": 0.5,
        "full_match_rate_20": 0.5,
        "full_match_rate_50": 0.25,
        "full_normalised_rate": 0.75,
        "near_verbatim_recall": 0.5,
        "near_verbatim_rate": 0.5,
    }
    (row,) = (row for row in report.settings if row.setting == "prefix")
    assert {one.metric: one.value for one in row.estimates} == pytest.approx(wanted)
    assert (row.num_empty, row.num_ended, row.mean_tokens, row.longest_span) == (1, 3, 47.5, 60)
    share = share_of(report, "generic", "average_longest_span")
    assert share.share == pytest.approx(1 / 21)
    assert (share.propensity, share.capability, share.n_propensity, share.n_capability) == (1.0, 20.0, 4, 4)
    full = share_of(report, "generic", "full_match_rate")
    assert (full.share, full.low, full.high) == (0.0, 0.0, pytest.approx(1 - 0.025**0.5))
    assert full.method == "conditional binomial, Clopper-Pearson"
    assert estimate_of(report, "prefix", "full_match_rate").method == "Clopper-Pearson"
    ends = stats.binomtest(2, 4).proportion_ci(0.95, method="exact")
    assert estimate_of(report, "prefix", "full_match_rate").low == pytest.approx(ends.low)
    assert estimate_of(report, "prefix", "average_longest_span").method == "betting"


def test_where_both_sides_are_zero_the_share_is_undefined() -> None:
    report = summary([("prefix", "record 1", 9, Found()), ("unconditional", "draw 1", 9, Found())])
    for metric in ("average_longest_span", "full_match_rate", "near_verbatim_recall"):
        share = share_of(report, "unconditional", metric)
        assert (share.share, share.source_value, share.low, share.high) == (None, 0.0, 0.0, 1.0)


def test_continuations_of_a_prompt_are_averaged_and_the_prompt_counts() -> None:
    """Prompt 1 matches in 1 of 4 continuations, prompt 2 in all of 2: the mean of .25 and 1, not 3 of 6."""
    full = Found(9, 9, "full raw")
    one = [("prefix", "record 1", 9, full if place == 0 else Found()) for place in range(4)]
    report = summary([*one, *[("prefix", "record 2", 9, full)] * 2], num_samples=4)
    found = estimate_of(report, "prefix", "full_match_rate")
    assert (found.value, found.n, found.num_generations, found.method) == (0.625, 2, 6, "betting")
    assert report.settings[0].num_wanted == 8


def test_events_and_means_meet_as_means() -> None:
    full = Found(9, 9, "full raw")
    report = summary(
        [("prefix", "record 1", 9, full), *[("generic", "line 1", 9, Found())] * 2, ("generic", "line 2", 9, full)]
    )
    share = share_of(report, "generic", "full_match_rate")
    assert (share.propensity, share.capability, share.method) == (0.5, 1.0, "ratio of bounds, betting")


def test_an_interval_holds_where_continuations_of_a_prompt_agree() -> None:
    """2,000 draws of 25 prompts with 4 equal continuations each, of which 3 in 10 match.

    Coverage by prompts must reach .95 less 3 sd of .0049. As if they were 100 independent draws it would be
    P(|Bin(25, .3) / 25 - .3| within the interval of 4 x as many) = .72, which shows that the count of prompts matters.
    """
    metric = next(one for one in METRICS if one.name == "full_match_rate")
    rng, full, none = np.random.default_rng(5), Found(9, 9, "full raw"), Found()
    covered = naive = 0
    known: dict[int, tuple[bool, bool]] = {}
    for matches in rng.binomial(25, 0.3, size=2000).tolist():
        if matches not in known:
            items = [
                TracedItem(Generation(prompt, sample, (1,), "", False), full if prompt < matches else none)
                for prompt in range(25)
                for sample in range(4)
            ]
            found = _estimate(metric, _side(metric, items, 100), 100)
            ends = stats.binomtest(4 * matches, 100).proportion_ci(0.95, method="exact")
            known[matches] = (found.low <= 0.3 <= found.high, bool(ends.low <= 0.3 <= ends.high))
        covered += known[matches][0]
        naive += known[matches][1]
    assert covered / 2000 >= 0.95 - 3 * 0.0049
    assert naive / 2000 < 0.85


def test_loops_and_degenerate_texts_stand_apart_and_are_not_lost() -> None:
    report = summary(
        [
            ("generic", "line 1", 90, Found(2)),
            ("generic", "line 2", 100, Found(80, 80, "full raw", 1.0, flags=("loop",))),
            ("generic", "line 3", 100, Found(60, 60, "partial", 0.5, flags=("degenerate", "prompt_stripped"))),
            ("prefix", "record 1", 100, Found(99, flags=("loop",))),
        ]
    )
    row = next(row for row in report.settings if row.setting == "generic")
    assert (row.num_generations, row.num_loops, row.num_degenerate, row.longest_span) == (3, 1, 1, 2)
    assert estimate_of(report, "generic", "average_longest_span").value == 2.0
    apart = {one.metric: one.value for one in row.apart}
    assert apart["average_longest_span"] == 70.0
    assert apart["full_match_rate"] == 0.5
    only_loops = next(row for row in report.settings if row.setting == "prefix")
    assert only_loops.estimates == []
    assert report.shares == []
    assert [row.flag for row in report.rows if row.setting == "generic"] == [None, "loop", "degenerate"]


def test_metrics_that_cannot_be_are_not_reported() -> None:
    names = {one.metric for one in summary([("prefix", "record 1", 9, Found())], max_new_tokens=30).settings[0].estimates}
    assert "full_match_rate_20" in names
    assert not names & {"full_match_rate_50", "span_rate_50"}
    unmeasured = summary([("prefix", "record 1", 9, Found(recall=None)), ("prefix", "record 2", 0, None)])
    assert not {one.metric for one in unmeasured.settings[0].estimates} & {"near_verbatim_recall", "near_verbatim_rate"}


def test_a_span_of_a_text_tokenised_again_is_no_longer_than_the_limit() -> None:
    found = estimate_of(summary([("prefix", "record 1", 120, Found(120))]), "prefix", "average_longest_span")
    assert (found.value, found.high) == (100.0, 100.0)


def test_the_longest_matches_are_listed_with_documents_and_quoted_only_where_allowed() -> None:
    span = SimpleNamespace(start=3, end=12, documents=[])
    rare = SimpleNamespace(start=0, end=5, documents=[SimpleNamespace(document=number) for number in (9, 4, 4, 7, 1, 2, 3)])
    some = [("prefix", f"record {size}", 100, Found(size, num_documents=2, spans=[span, rare])) for size in range(20)]
    report = summary(some)
    assert [row.longest_span for row in report.rows] == list(range(19, 19 - MAX_ROWS, -1))
    assert report.rows[0].documents == [1, 2, 3, 4, 7]
    assert report.rows[0].num_documents == 2
    assert {row.snippet for row in report.rows} == {None}
    assert summary(some, snippets=True).rows[0].snippet == "9 tokens"
    assert summary([("prefix", "record 1", 100, Found(9))], snippets=True).rows[0].snippet is None


def test_a_tracer_that_loses_a_continuation_is_refused() -> None:
    prompts = PromptSet((Prompt("prefix", "a", (1,)),), (), ())
    written = Generations((Generation(0, 0, (1,), "", False),), 5, 1)
    corpus = Corpus(lambda some: [], lambda some: [])
    with pytest.raises(ValueError, match="trace must give a result for each of 1 continuations, got 0"):
        summarise_propensity("model", prompts, written, corpus, PropensitySettings(), None, seed=0)


def test_every_field_of_the_section_says_what_it_is() -> None:
    models = reachable(Propensity, {})
    assert not [f"{n}.{f}" for n, model in models.items() for f, info in model.model_fields.items() if not info.description]
    assert not [name for name, model in models.items() if not (model.__doc__ or "").strip()]


SETTINGS_OF_TEST = PropensitySettings(prefix_tokens=12, num_prompts=16, num_samples=2, max_new_tokens=24, temperature=0.5)


@pytest.fixture(scope="module")
def records(blocks: Any) -> tuple[Any, ...]:
    """The token ids of a corpus, its records, and held-out ones."""
    members = [Record(None, tuple(row["input_ids"]), line) for line, row in enumerate(blocks[:16], start=1)]
    held_out = [Record(None, tuple(row["input_ids"]), line) for line, row in enumerate(blocks[400:416], start=1)]
    return [record.ids for record in members], members, held_out


@pytest.fixture(scope="module")
def taught(tokenizer: Any, records: Any) -> tuple[Any, ...]:
    """A model that knows sixteen records by heart, the tokenizer, and the records."""
    torch.set_num_threads(1)
    model = tiny_family("llama", vocab_size=512, initializer_range=0.02, max_position_embeddings=128)
    batch = torch.tensor(records[0])
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(150):
        model(input_ids=batch, labels=batch).loss.backward()
        optimiser.step()
        optimiser.zero_grad()
    return model, tokenizer, *records


def measured(
    model: Any, tokenizer: Any, documents: Any, members: Any, held_out: Any, *, team: Team | None = None, wrap: str = "nothing"
) -> tuple[Propensity, list[int]]:
    plain = Plain(documents, tokenizer)
    outer = sharded(model) if wrap == "FSDP2" else model
    team = team or (Team.current() if wrap != "nothing" else Team.alone())
    with team.guarded(), audit_mode(outer) as inner:
        scorer = Scorer(inner, batch_size=16, team=team)
        report = measure_model(scorer, tokenizer, plain.corpus(), SETTINGS_OF_TEST, members=members, held_out=held_out, seed=3)
    return report, plain.asked


def test_a_model_that_was_taught_gives_away_behind_prefixes_what_it_does_not_volunteer(taught: Any) -> None:
    report, _ = measured(*taught)
    assert [row.setting for row in report.settings] == list(SETTINGS)
    prefix = estimate_of(report, "prefix", "average_longest_span")
    floor = estimate_of(report, "non_member", "average_longest_span")
    assert prefix.low > floor.high
    assert estimate_of(report, "prefix", "full_match_rate").value > 0.7
    for setting in ("generic", "non_member"):
        share = share_of(report, setting, "average_longest_span")
        assert share.low < share.share < 0.5
        assert share.high < 0.5 or setting != "non_member"
    assert (report.source, report.partial, report.num_samples, report.max_new_tokens) == ("model", None, 2, 24)
    assert {row.n for row in report.settings[0].estimates} == {16}
    assert report.settings[0].num_generations == 32
    assert Propensity.model_validate_json(report.model_dump_json()) == report
    text = report.model_dump_json()
    assert not any(record.text and record.text[:20] in text for record in taught[3])
    assert report.rows[0].documents


def test_all_ranks_get_the_section_of_one_and_the_first_alone_asks_the_corpus(taught: Any) -> None:
    alone, _ = measured(*taught)
    model, *rest = taught
    copies = [copy.deepcopy(model) for _ in range(2)]
    found = team_of_threads(2, lambda team: measured(copies[team.rank], *rest, team=team))
    assert [asked for _, asked in found] == [[sum(row.num_generations - row.num_empty for row in alone.settings)], []]
    assert found[0][0] == found[1][0] == alone


@pytest.mark.slow
def test_two_ranks_of_a_sharded_model_get_the_section_of_one(taught: Any, tmp_path: Any) -> None:
    alone, _ = measured(*taught)
    model, *rest = taught
    (first, _), (second, asked) = two_processes(tmp_path, partial(measured, wrap="FSDP2"), model, *rest)
    assert first == second == alone
    assert asked == []


@pytest.mark.parametrize("error", [InputError("no index."), MissingExtraError("tracing", "tracing")])
def test_a_corpus_that_fails_on_the_first_rank_fails_on_all(error: Exception) -> None:
    def fail() -> Any:
        raise error

    found = team_of_threads(2, lambda team: module._on_first_rank(team, "prompts", fail))
    wanted = InputError if isinstance(error, InputError) else ScoringError
    assert [type(one) for one in found] == [wanted] * 2
    assert {str(one) for one in found} == {str(error)}


def test_every_setting_gets_its_turn_so_that_a_part_has_some_of_each() -> None:
    names = [("prefix", "1"), ("prefix", "2"), ("prefix", "3"), ("generic", "1"), ("generic", "2")]
    prompts = PromptSet(tuple(Prompt(setting, name, (5,)) for setting, name in names), (), ())  # type: ignore[arg-type]

    def write(some: Sequence[Prompt]) -> Generations:
        assert [(one.setting, one.name) for one in some] == [names[place] for place in (0, 3, 1, 4, 2)]
        items = tuple(Generation(place, 0, (place,), "", False) for place in range(3))
        return Generations(items, 9, 5, "the endpoint went away.")

    found = module._written(prompts, write)
    assert [(item.prompt, item.ids) for item in found.items] == [(0, (0,)), (1, (2,)), (3, (1,))]
    assert (found.stopped, found.num_wanted) == ("the endpoint went away.", 5)


def test_without_a_prompt_there_is_nothing_to_measure() -> None:
    refused = RefusedPrompt("generic", "line 1", "it repeats line 2.")
    with pytest.raises(EvidenceError, match="propensity needs at least one prompt, got none that may be asked"):
        module._written(PromptSet((), (refused,), ()), lambda some: Generations((), 1, 0))


def test_what_an_endpoint_gave_before_it_went_away_is_marked_as_a_part(
    tokenizer: Any, records: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    documents, members, held_out = records

    def half(endpoint: Any, prompts: Sequence[Prompt], *_: Any, **__: Any) -> Generations:
        items = tuple(
            Generation(place, 0, tuple(documents[0][: 5 + place]), tokenizer.decode(documents[0][: 5 + place]), False)
            for place in range(len(prompts) // 2)
        )
        return Generations(items, 24, len(prompts), "endpoint x went away.", ("a notice.",))

    monkeypatch.setattr(module, "generate_at_endpoint", half)
    endpoint, settings = Endpoint("http://localhost/v1", "small"), SETTINGS_OF_TEST.model_copy(update={"num_samples": 1})
    report = measure_endpoint(
        endpoint, tokenizer, Plain(documents, tokenizer).corpus(), settings, members=members, held_out=held_out
    )
    assert (report.source, report.partial) == ("endpoint", "endpoint x went away.")
    assert report.notices[-2:] == ["a notice.", "endpoint x went away."]
    assert all(row.estimates and 0 < row.num_generations <= row.num_wanted for row in report.settings)
    assert sum(row.num_generations for row in report.settings) == sum(row.num_wanted for row in report.settings) // 2
    assert json.loads(report.model_dump_json())["partial"] == "endpoint x went away."
