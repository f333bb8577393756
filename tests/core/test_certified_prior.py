"""Bounds of a prior mean hold while they tighten, and a certified verdict is the full estimator's verdict, always."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import special
from tiny_models import tiny_family

from memguard.audit.config import PriorAwareSettings
from memguard.audit.prior import PrefixSource, PriorMeasurement
from memguard.errors import NonFiniteScoreError
from memguard.metrics.prior_aware import PriorAwareThresholds, estimate_prior_aware
from memguard.scoring.audit_mode import audit_mode
from memguard.scoring.certified import PriorBounds, PriorPrefixes, prior_bounds
from memguard.scoring.scorer import Scorer, Span

LOG = st.floats(-30.0, 0.0)


@given(done=st.lists(LOG, max_size=12), open_=st.lists(LOG, min_size=1, max_size=12), seed=st.integers(0, 99))
def test_bounds_hold_whatever_the_open_pairs_become(done: list[float], open_: list[float], seed: int) -> None:
    rng = np.random.default_rng(seed)
    bounds = prior_bounds(np.array(done), np.array(open_))
    final = np.concatenate([done, np.array(open_) - rng.exponential(3.0, len(open_)) * rng.integers(0, 2, len(open_))])
    mean = special.logsumexp(final) - math.log(final.size)
    size = math.exp(2 * special.logsumexp(final) - special.logsumexp(2 * final))
    assert bounds.log_mean_low <= mean + 1e-9
    assert mean <= bounds.log_mean_high + 1e-9
    assert bounds.effective_size_low <= size + 1e-6
    assert size <= bounds.effective_size_high + 1e-6


def prefixes_of(number: int, *, seed: int = 0) -> list[tuple[int, ...]]:
    rng = random.Random(seed)
    return [tuple(rng.randrange(517) for _ in range(rng.choice([3, 6, 6, 6]))) for _ in range(number)]


@pytest.mark.parametrize("name", ["llama", "gemma2", "opt", "mamba"])
def test_pairs_followed_to_the_end_have_the_plain_scores(name: str) -> None:
    model = tiny_family(name)
    prefixes, suffix = prefixes_of(20), (5, 80, 411, 3, 3, 17, 60)
    with audit_mode(model) as inner:
        scorer = Scorer(inner)
        pairs = PriorPrefixes(scorer, prefixes)
        state = pairs.begin(suffix)
        assert pairs.decide(state, lambda _: None) is None
        plain = Scorer(inner).grid(prefixes, [suffix])[:, 0]
    assert not state.is_open.any()
    assert state.log_products == pytest.approx(plain, abs=1e-4)


def test_stopped_pairs_are_resumed_and_only_the_asked_ones_move() -> None:
    model = tiny_family("llama")
    prefixes, suffix = prefixes_of(12), (5, 80, 411, 3, 9)
    with audit_mode(model) as inner:
        scorer = Scorer(inner)
        pairs = PriorPrefixes(scorer, prefixes)
        state = pairs.begin(suffix)
        first = state.log_products.copy()
        pairs.resume(state, np.array([2, 7]))
        assert state.num_tokens.tolist() == [2 if index in (2, 7) else 1 for index in range(12)]
        still = np.delete(np.arange(12), [2, 7])
        assert (state.log_products[still] == first[still]).all()
        assert (state.log_products[[2, 7]] <= first[[2, 7]]).all()
        pairs.resume(state, np.array([2]))
        pairs.resume(state, np.array([2]))
        plain = Scorer(inner).grid([prefixes[2]], [suffix])[0, 0]
    assert state.num_tokens[2] == 5
    assert state.log_products[2] == pytest.approx(plain, abs=1e-4)


def test_a_verdict_that_is_certain_at_the_first_token_costs_no_forward_pass() -> None:
    model = tiny_family("llama")
    with audit_mode(model) as inner:
        scorer = Scorer(inner)
        pairs = PriorPrefixes(scorer, prefixes_of(12))
        pairs.begin((5, 6))
        before = scorer.model.num_token_forwards
        state = pairs.begin((80, 6, 7))
        verdict = pairs.decide(state, lambda bounds: "sure" if bounds.log_mean_high < 0 else None)
    assert verdict == "sure"
    assert scorer.model.num_token_forwards == before
    assert state.num_token_forwards == 0


@given(
    seed=st.integers(0, 10_000),
    log_prob=st.floats(-9.0, 0.0),
    n=st.floats(1.5, 100.0),
    spread=st.floats(0.1, 8.0),
    count=st.integers(16, 80),
)
@settings(max_examples=60, deadline=None)
def test_a_decision_is_the_full_estimators_verdict(seed: int, log_prob: float, n: float, spread: float, count: int) -> None:
    rng = np.random.default_rng(seed)
    tokens = -rng.exponential(spread, (count, 5))
    priors = tokens.sum(axis=1)
    thresholds = PriorAwareThresholds(m=1e-4, n=n)
    full = estimate_prior_aware(log_prob, priors, m=1e-4, n=n).verdict
    have = np.ones(count, dtype=np.int64)
    products = tokens[:, 0].copy()
    verdict = None
    while verdict is None:
        is_open = have < 5
        bounds = prior_bounds(products[~is_open], products[is_open])
        verdict = thresholds.decide(
            log_prob,
            count,
            log_mean=(bounds.log_mean_low, bounds.log_mean_high),
            effective_size=(bounds.effective_size_low, bounds.effective_size_high),
        )
        if not is_open.any():
            break
        best = np.flatnonzero(is_open)[np.argmax(products[is_open])]
        products[best] += tokens[best, have[best]]
        have[best] += 1
    assert verdict in (full, None)


def memorising_model(rows: list[tuple[int, ...]], *, steps: int = 60) -> Any:
    model = tiny_family("llama", vocab_size=64, initializer_range=0.05)
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-2)
    batch = torch.tensor(rows)
    for _ in range(steps):
        model(batch, labels=batch).loss.backward()
        optimiser.step()
        optimiser.zero_grad()
    return model


def test_certified_and_full_mode_give_every_sequence_the_same_verdict_on_a_trained_model() -> None:
    rng = random.Random(4)
    common = tuple(rng.randrange(64) for _ in range(6))
    rows = [tuple(rng.randrange(64) for _ in range(6)) + common for _ in range(12)]
    rows += [tuple(rng.randrange(64) for _ in range(12)) for _ in range(12)]
    model = memorising_model(rows)
    source = PrefixSource(len(rows), lambda index: rows[index][:6])
    spans = [Span(row, 6, 12, f"row {index}") for index, row in enumerate(rows)]
    found: dict[str, list[Any]] = {}
    with audit_mode(model) as inner:
        for mode in ("certified", "full"):
            scorer = Scorer(inner)
            log_probs = scorer.score(spans).log_probs
            for n in (2.0, 10.0, 200.0):
                settings_ = PriorAwareSettings(prefixes=60, m=1e-4, mode=mode)
                measurement = PriorMeasurement(scorer, source, settings_, lead_ids=(), seed=3, tolerance=1e-5)
                results = [measurement.measure(span, float(score), n=n) for span, score in zip(spans, log_probs, strict=True)]
                found.setdefault(mode, []).extend(results)
    verdicts = [one.verdict for one in found["full"]]
    assert [one.verdict for one in found["certified"]] == verdicts
    assert {verdict.split()[0] for verdict in verdicts} >= {"PA", "common"}
    for quick, full in zip(found["certified"], found["full"], strict=True):
        if full.prior_log_prob is None:
            assert quick.prior_log_prob is None
            continue
        assert (quick.prior_log_prob_low if quick.prior_log_prob_low is not None else -math.inf) <= full.prior_log_prob + 1e-4
        assert full.prior_log_prob <= quick.prior_log_prob + 1e-4
        assert quick.low <= full.low + 1e-4
        assert quick.high is None or quick.high >= full.high - 1e-4
    assert any(one.num_open_prefixes > 0 for one in found["certified"])


def test_a_near_tie_runs_the_full_estimator_and_takes_its_verdict() -> None:
    rows = prefixes_of(40, seed=2)
    model = tiny_family("llama")
    span = Span((*rows[0], 5, 6), len(rows[0]), len(rows[0]) + 2)
    source = PrefixSource(len(rows), rows.__getitem__)
    with audit_mode(model) as inner:
        scorer = Scorer(inner)
        full = PriorMeasurement(
            scorer, source, PriorAwareSettings(prefixes=30, m=1e-9, mode="full"), lead_ids=(), seed=1
        ).measure(span, -0.5, n=10.0)
        assert full.low is not None
        n = math.exp(full.low)  # whether PA is certified hangs on the last float
        for mode in ("certified", "full"):
            settings_ = PriorAwareSettings(prefixes=30, m=1e-9, mode=mode)
            measurement = PriorMeasurement(scorer, source, settings_, lead_ids=(), seed=1, tolerance=1e-4)
            one = measurement.measure(span, -0.5, n=n)
            assert one.num_open_prefixes == 0
            assert one.log_belief_ratio == pytest.approx(full.log_belief_ratio, abs=1e-12)
            assert one.verdict != "PA (certified)"


def test_nan_behind_a_prior_prefix_is_an_error() -> None:
    model = tiny_family("llama")
    with torch.no_grad():
        model.model.norm.weight.fill_(float("nan"))
    with audit_mode(model) as inner:
        pairs = PriorPrefixes(Scorer(inner), prefixes_of(4))
        with pytest.raises(NonFiniteScoreError, match="behind prior prefixes must be finite"):
            pairs.begin((1, 2))


def test_prefixes_that_do_not_fit_in_memory_are_encoded_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memguard.scoring.certified.KEPT_BYTES", 0)
    model = tiny_family("llama")
    prefixes, suffix = prefixes_of(10), (5, 80, 411)
    with audit_mode(model) as inner:
        pairs = PriorPrefixes(Scorer(inner), prefixes)
        state = pairs.begin(suffix)
        pairs.decide(state, lambda _: None)
        plain = Scorer(inner).grid(prefixes, [suffix])[:, 0]
    assert state.log_products == pytest.approx(plain, abs=1e-4)


@pytest.mark.parametrize("short_of", ["encode", "extend"])
def test_fewer_prefixes_are_encoded_at_a_time_when_memory_runs_out(short_of: str) -> None:
    model = tiny_family("llama")
    prefixes, suffix = prefixes_of(20), (5, 80, 411, 3, 9, 60)
    with audit_mode(model) as inner:
        plain = Scorer(inner).grid(prefixes, [suffix])[:, 0]
        scorer = Scorer(inner)
        pairs = PriorPrefixes(scorer, prefixes)
        scorer.model.check([(*prefixes[0], *suffix)])
        whole = getattr(scorer.model, short_of)

        def short_of_memory(first: Any, *others: Any) -> Any:
            rows = len(first) if short_of == "encode" else len(first.cache.layers[0].keys)
            if rows > 3:
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return whole(first, *others)

        setattr(scorer.model, short_of, short_of_memory)
        state = pairs.begin(suffix)
        pairs.decide(state, lambda _: None)
    assert not state.is_open.any()
    assert state.log_products == pytest.approx(plain, abs=1e-4)


def test_bounds_are_what_the_specification_says() -> None:
    # Completed 0.5 and 0.2, open 0.1: A = .7, B = .29, U = .1, Q = .01; c = 3.
    bounds = prior_bounds(np.log([0.5, 0.2]), np.log([0.1]))
    assert isinstance(bounds, PriorBounds)
    assert math.exp(bounds.log_mean_low) == pytest.approx(0.7 / 3)
    assert math.exp(bounds.log_mean_high) == pytest.approx(0.8 / 3)
    assert bounds.effective_size_low == pytest.approx(0.7**2 / 0.30)
    assert bounds.effective_size_high == pytest.approx(0.8**2 / 0.29)
