"""Membership inference end to end: seen on memorised samples, not on untrained models, and never mistaken for a shift."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from dataclasses import dataclass
from typing import Any, get_args

import numpy as np
import pytest
import torch

from memguard.audit import membership
from memguard.audit.membership import measure_membership
from memguard.audit.report_membership import Membership, MembershipScore, ScoreName
from memguard.errors import InputError, NonFiniteScoreError, ScoringError
from memguard.metrics.distribution_shift import ShiftEstimate, estimate_distribution_shift
from memguard.metrics.membership import estimate_auroc, loss_score, min_k_plus_plus_score, zlib_score
from memguard.scoring.audit_mode import audit_mode
from memguard.scoring.scorer import Scorer, Span
from memguard.scoring.token_scores import TokenScores, score_tokens

ALL: tuple[ScoreName, ...] = get_args(ScoreName)
PLAIN = tuple(name for name in ALL if name != "reference")


@dataclass(frozen=True)
class Sample:
    """A sample as the audit holds it."""

    text: str | None
    ids: tuple[int, ...]


@pytest.fixture(scope="module")
def rows(blocks: list[dict[str, list[int]]]) -> list[Sample]:
    """Rows of one source in random order: any two parts of them are exchangeable."""
    return [Sample(None, tuple(blocks[place]["input_ids"])) for place in np.random.default_rng(0).permutation(len(blocks))]


def memorise(model: Any, samples: list[Sample], *, steps: int = 30) -> Any:
    ids = torch.tensor([sample.ids for sample in samples])
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model.train()
    for _ in range(steps):
        model(input_ids=ids, labels=ids).loss.backward()
        optimiser.step()
        optimiser.zero_grad()
    return model


def measure(model: Any, texts_in: list[Sample], texts_out: list[Sample], tokenizer: Any, **options: Any) -> Membership:
    settings = {"scores": ["loss"], "tokenizer": tokenizer, "seed": 1, "max_tokens": 48} | options
    with audit_mode(model) as inner:
        return measure_membership(Scorer(inner, batch_size=16), texts_in, texts_out, **settings)


def score_of(found: Membership, name: str) -> MembershipScore:
    return next(one for one in found.scores if one.name == name)


def test_memorised_samples_are_told_from_held_out_ones_of_their_source(
    tiny_model: Any, tokenizer: Any, rows: list[Sample]
) -> None:
    untrained = copy.deepcopy(tiny_model).eval()
    memorise(tiny_model, rows[:60])
    with audit_mode(untrained) as beside:
        found = measure(
            tiny_model,
            rows[:60],
            rows[60:120],
            tokenizer,
            scores=ALL,
            reference=Scorer(beside),
            reference_tokenizer=copy.deepcopy(tokenizer),
        )
    assert found.label == "membership"
    assert [one.name for one in found.scores] == list(ALL)
    for name in ("loss", "reference", "min_k", "min_k_plus_plus"):
        one = score_of(found, name)
        assert one.low is not None
        assert one.auroc is not None
        assert one.p_value is not None
        assert 0.8 < one.low < one.auroc <= 1.0
        assert one.p_value < 1e-10
    assert found.reference
    assert (found.num_tokens, found.num_undefined_tokens, found.notes) == (120 * 47, 0, [])


def test_an_untrained_model_tells_nothing(tiny_model: Any, tokenizer: Any, rows: list[Sample]) -> None:
    found = measure(tiny_model, rows[:60], rows[60:120], tokenizer, scores=PLAIN)
    assert found.label == "membership"  # what the figures may be called, not that there is any
    for one in found.scores:
        assert one.low is not None
        assert one.high is not None
        assert one.low < 0.5 < one.high
    assert not found.reference


def test_held_out_samples_of_another_kind_are_called_a_shift_however_well_scores_tell_them(
    tiny_model: Any, tokenizer: Any, rows: list[Sample]
) -> None:
    # The model saw neither set: it learnt the members' source, and scores tell the sources apart.
    memorise(tiny_model, rows[200:260], steps=30)
    rng = np.random.default_rng(1)
    digits = [" ".join(str(rng.integers(10**6)) for _ in range(12)) for _ in range(60)]
    others = [Sample(None, tuple(tokenizer(text)["input_ids"][:48])) for text in digits]
    found = measure(tiny_model, rows[:60], others, tokenizer)
    low = found.scores[0].low
    assert low is not None
    assert low > 0.5
    assert found.label == "distribution shift, not membership"
    assert found.shift.is_shift
    assert found.shift.low > 0.5
    assert found.notes[0].startswith("a classifier without a model tells the sets apart, AUROC ")


def test_the_confound_check_comes_before_any_forward_pass(
    tiny_model: Any, tokenizer: Any, rows: list[Sample], monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []

    def check(*args: Any, **options: Any) -> ShiftEstimate:
        order.append("check")
        return estimate_distribution_shift(*args, **options)

    def score(*args: Any, **options: Any) -> list[TokenScores]:
        order.append("score")
        return score_tokens(*args, **options)

    monkeypatch.setattr(membership, "estimate_distribution_shift", check)
    monkeypatch.setattr(membership, "score_tokens", score)
    measure(tiny_model, rows[:12], rows[12:24], tokenizer)
    assert order == ["check", "score"]


def test_the_figures_are_those_of_scores_taken_one_by_one(tiny_model: Any, tokenizer: Any, rows: list[Sample]) -> None:
    memorise(tiny_model, rows[:20], steps=10)
    samples = rows[:40]
    found = measure(tiny_model, samples[:20], samples[20:], tokenizer, scores=["min_k_plus_plus", "zlib", "loss"])
    alone: dict[str, list[float]] = {"loss": [], "zlib": [], "min_k_plus_plus": []}
    with audit_mode(tiny_model) as inner:
        scorer = Scorer(inner, batch_size=1)
        for sample in samples:
            (one,) = score_tokens(scorer, [Span(sample.ids, 1, 48)], moments=True)
            assert one.mean_log_probs is not None
            assert one.variance_log_probs is not None
            alone["loss"].append(loss_score(one.log_probs).value)
            alone["zlib"].append(zlib_score(one.log_probs, tokenizer.decode(sample.ids)).value)
            plus = min_k_plus_plus_score(one.log_probs, one.mean_log_probs, one.variance_log_probs, 0.2)
            alone["min_k_plus_plus"].append(plus.value)
    assert [one.name for one in found.scores] == ["min_k_plus_plus", "zlib", "loss"]
    for name, values in alone.items():
        # A pair of scores closer than batches round may swap: 1 of 400 pairs is .0025.
        assert score_of(found, name).auroc == pytest.approx(estimate_auroc(values[:20], values[20:]).value, abs=0.0051)


def test_rates_are_given_where_the_non_members_allow_them(tiny_model: Any, tokenizer: Any, rows: list[Sample]) -> None:
    memorise(tiny_model, rows[:40])
    points = measure(tiny_model, rows[:40], rows[40:100], tokenizer).scores[0].tpr
    assert [(one.max_fpr, one.is_refused, one.achievable_fpr) for one in points] == [
        (0.1, False, 0.05),
        (0.01, True, 0.05),
        (0.001, True, 0.05),
    ]
    first = points[0]
    assert first.tpr is not None
    assert first.tpr_low is not None
    assert first.tpr_high is not None
    assert 0.8 < first.tpr_low < first.tpr <= first.tpr_high
    assert first.fpr_low == 0.0 or (first.fpr_low or 0.0) < (first.fpr or 0.0)
    for refused in points[1:]:
        figures = (refused.fpr, refused.fpr_low, refused.fpr_high, refused.tpr, refused.tpr_low, refused.tpr_high)
        assert figures == (None,) * 6


def test_members_and_non_members_are_scored_in_one_call(
    tiny_model: Any, tokenizer: Any, rows: list[Sample], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[list[str]] = []

    def spy(scorer: Scorer, spans: list[Span], **options: Any) -> list[TokenScores]:
        calls.append([span.label for span in spans])
        return score_tokens(scorer, spans, **options)

    monkeypatch.setattr(membership, "score_tokens", spy)
    measure(tiny_model, rows[:12], rows[12:24], tokenizer, scores=["loss", "lowercase"])
    labels = [f"member {place}" for place in range(12)] + [f"non-member {place}" for place in range(12)]
    assert calls == [labels, [f"{label} in lower case" for label in labels]]


def test_text_is_taken_as_given_or_decoded_for_all_alike(tiny_model: Any, tokenizer: Any, rows: list[Sample]) -> None:
    # Given texts say "upper" and decoded ones do not: with one text missing, or one sample cut, none of them may be used.
    given = [Sample(tokenizer.decode(one.ids).upper(), one.ids) for one in rows[:24]]
    as_given = measure(tiny_model, given[:12], given[12:], tokenizer)
    decoded = measure(tiny_model, rows[:12], rows[12:24], tokenizer)
    one_missing = measure(tiny_model, given[:12], [*given[12:23], rows[23]], tokenizer)
    assert one_missing.shift == decoded.shift != as_given.shift
    longer = Sample(given[0].text, (*given[0].ids, 5))
    one_cut = measure(tiny_model, [longer, *given[1:12]], given[12:], tokenizer)
    assert one_cut.shift == decoded.shift
    assert one_cut.notes == ["1 samples were cut to 48 tokens."]


def test_samples_are_cut_to_the_same_number_of_tokens(tiny_model: Any, tokenizer: Any, rows: list[Sample]) -> None:
    cut = [Sample(None, one.ids[:20]) for one in rows[:24]]
    whole = measure(tiny_model, rows[:12], rows[12:24], tokenizer, max_tokens=20, scores=PLAIN)
    short = measure(tiny_model, cut[:12], cut[12:], tokenizer, max_tokens=20, scores=PLAIN)
    assert whole.scores == short.scores
    assert whole.num_tokens == 24 * 19
    assert (whole.notes, short.notes) == (["24 samples were cut to 20 tokens."], [])


def test_lower_case_text_stands_behind_the_same_first_token(tiny_model: Any, tokenizer: Any, rows: list[Sample]) -> None:
    # A text without capitals is encoded again as it was: its score is 0, and so are those of all such samples.
    lower = [tokenizer(f"{place} stones and no capital letter at all")["input_ids"][:16] for place in range(24)]
    samples = [Sample(None, tuple(ids)) for ids in lower]
    found = score_of(measure(tiny_model, samples[:12], samples[12:], tokenizer, scores=["lowercase"]), "lowercase")
    assert found.auroc == pytest.approx(0.5, abs=0.2)
    span = membership._lowered(membership._Sample("member 0", rows[0].ids, "any"), tokenizer, 48)
    assert span.ids[0] == rows[0].ids[0]
    assert tokenizer.decode(span.ids[1:]) == tokenizer.decode(rows[0].ids[1:]).lower()[: len(tokenizer.decode(span.ids[1:]))]
    assert len(span.ids) <= 48


def test_samples_in_both_sets_and_copies_are_told(tiny_model: Any, tokenizer: Any, rows: list[Sample]) -> None:
    found = measure(tiny_model, [*rows[:12], rows[0]], [*rows[12:24], rows[1]], tokenizer)
    assert (found.shift.num_shared, found.shift.num_duplicate_members, found.shift.num_duplicate_non_members) == (1, 1, 0)
    assert any(note.startswith("1 texts are in both sets") for note in found.notes)
    assert any(note.startswith("1 samples repeat another of their set") for note in found.notes)


def test_samples_of_one_token_are_left_out_and_counted(tiny_model: Any, tokenizer: Any, rows: list[Sample]) -> None:
    found = measure(tiny_model, [Sample("a", (7,)), *rows[:12]], [*rows[12:24], Sample(None, ())], tokenizer)
    assert (found.scores[0].n_members, found.scores[0].n_non_members) == (12, 12)
    assert found.notes == ["2 samples of fewer than 2 tokens were left out: nothing of them is scored."]


def test_tokens_without_spread_are_counted_and_a_sample_of_none_else_gives_no_figure(
    tiny_model: Any, tokenizer: Any, rows: list[Sample], monkeypatch: pytest.MonkeyPatch
) -> None:
    def flat(scorer: Scorer, spans: list[Span], **options: Any) -> list[TokenScores]:
        scored = score_tokens(scorer, spans, **options)
        for place, size in ((0, 3), (1, flat_tokens)):
            variance = scored[place].variance_log_probs
            assert variance is not None
            variance[:size] = 0.0
        return scored

    monkeypatch.setattr(membership, "score_tokens", flat)
    flat_tokens = 5
    found = measure(tiny_model, rows[:12], rows[12:24], tokenizer, scores=["min_k_plus_plus", "loss"])
    assert found.num_undefined_tokens == 8
    assert found.scores[0].auroc is not None
    flat_tokens = 47
    found = measure(tiny_model, rows[:12], rows[12:42], tokenizer, scores=["min_k_plus_plus", "loss"])
    undefined, loss = found.scores
    assert (undefined.auroc, undefined.low, undefined.high, undefined.p_value) == (None,) * 4
    assert undefined.num_undefined_samples == 1
    assert all((point.fpr, point.tpr, point.tpr_high) == (None,) * 3 for point in undefined.tpr)
    assert not undefined.tpr[0].is_refused  # 30 non-members would have been enough
    assert loss.auroc is not None
    assert found.notes == [
        "score min_k_plus_plus is undefined for 1 samples, whose every token has no spread; no figure is given for it."
    ]


def test_the_result_is_one_of_its_seed_and_survives_json(tiny_model: Any, tokenizer: Any, rows: list[Sample]) -> None:
    one, other = (measure(tiny_model, rows[:12], rows[12:24], tokenizer, scores=PLAIN) for _ in range(2))
    assert one == other
    assert Membership.model_validate_json(one.model_dump_json()) == one
    text = json.dumps(one.model_dump(mode="json"), allow_nan=False)
    assert tokenizer.decode(rows[0].ids)[:12] not in text


def test_progress_counts_every_row(tiny_model: Any, tokenizer: Any, rows: list[Sample]) -> None:
    done: list[int] = []
    measure(tiny_model, rows[:12], rows[12:24], tokenizer, scores=["loss", "lowercase"], progress=done.append)
    assert sum(done) == 48


def test_everything_wrong_with_the_arguments_is_said_at_once(tiny_model: Any, tokenizer: Any, rows: list[Sample]) -> None:
    with pytest.raises(InputError, match="scores must name some of loss, zlib, .*, each once, got loss, gradient; ") as caught:
        measure(tiny_model, rows[:9], [*rows[9:18], Sample(None, (1,))], tokenizer, scores=["loss", "gradient"], max_tokens=1)
    assert "max_tokens must be at least 2, got 1" in str(caught.value)
    assert "; members must be at least 10 samples of 2 tokens or more, got 9" in str(caught.value)
    assert "; non-members must be at least 10 samples of 2 tokens or more, got 9" in str(caught.value)
    for scores, told in (([], "got none"), (["loss", "loss"], "got loss, loss")):
        with pytest.raises(InputError, match=f"each once, {told}"):
            measure(tiny_model, rows[:10], rows[10:20], tokenizer, scores=scores)


def test_a_reference_is_wanted_exactly_where_it_is_named_and_must_share_the_vocabulary(
    tiny_model: Any, tokenizer: Any, rows: list[Sample]
) -> None:
    sets, reference = (rows[:10], rows[10:20], tokenizer), Scorer(tiny_model)
    with pytest.raises(InputError, match="a reference model must be given where scores name 'reference', and only there"):
        measure(tiny_model, *sets, scores=["reference"])
    with pytest.raises(InputError, match="a reference model must be given where scores name 'reference', and only there"):
        measure(tiny_model, *sets, reference=reference, reference_tokenizer=tokenizer)
    other = copy.deepcopy(tokenizer)
    other.add_tokens(["one more"])
    for wrong in (None, other):
        with pytest.raises(InputError, match="must have a tokenizer with the vocabulary of the audited one"):
            measure(tiny_model, *sets, scores=["reference"], reference=reference, reference_tokenizer=wrong)


def test_samples_without_text_are_refused_by_name(tiny_model: Any, tokenizer: Any, rows: list[Sample]) -> None:
    blank = [Sample("", one.ids) if place == 3 else Sample("any", one.ids) for place, one in enumerate(rows[:20])]
    with pytest.raises(InputError, match="samples must hold text, got none in member 3"):
        measure(tiny_model, blank[:10], blank[10:], tokenizer)


def test_a_sample_with_nothing_behind_its_first_token_has_no_lower_case(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(membership, "_decode", lambda *_: "")
    with pytest.raises(InputError, match="member 5 must hold text behind its first token for the score 'lowercase'"):
        membership._lowered(membership._Sample("member 5", (1, 2), "any"), tokenizer, 48)


def test_models_that_cannot_be_scored_name_the_sample(tiny_model: Any, tokenizer: Any, rows: list[Sample]) -> None:
    long = [Sample(None, one.ids * 4) for one in rows[:20]]
    with pytest.raises(ScoringError, match="member 0 must fit the model's 128 positions, got 192"):
        measure(tiny_model, long[:10], long[10:], tokenizer, max_tokens=1000)
    with torch.no_grad():
        tiny_model.model.norm.weight.fill_(float("nan"))
    with pytest.raises(NonFiniteScoreError, match="member . must be finite, got nan"):
        measure(tiny_model, rows[:10], rows[10:20], tokenizer)


def test_the_schemas_load_no_torch_and_describe_every_field() -> None:
    code = "import sys, memguard.audit.report_membership; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
    from memguard.audit.report_membership import ShiftCheck, TprPoint

    for schema in (Membership, MembershipScore, ShiftCheck, TprPoint):
        assert all(field.description for field in schema.model_fields.values())
