"""A whole audit: what it says of canaries never planted, of planted ones, of broken models, and what it never says."""

from __future__ import annotations

import base64
import itertools
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from oracles import span_log_prob

from memguard.audit import AuditRunner, run_audit
from memguard.audit.config import AuditConfig, parse_config
from memguard.audit.full import Sources
from memguard.audit.items import build_groups
from memguard.audit.prior import PrefixSource
from memguard.audit.report import load_report
from memguard.audit.rows import canary_rows
from memguard.audit.summaries import summarise_plan, trend_points
from memguard.audit.tolerance import measure_tolerance
from memguard.canaries.drawing import draw_plan
from memguard.canaries.ledger import Ledger, LedgerEntry
from memguard.canaries.plan import CanaryPlan
from memguard.errors import InputError
from memguard.metrics.exposure import sampled_null_mean_bits
from memguard.scoring.audit_mode import audit_mode
from memguard.scoring.scorer import Scorer

PIN = {"name": "pin", "template": "The access number is {secret}.", "secret": {"kind": "digits", "length": 9}}
NAMED = {"name": "own", "template": "The number of {name} is {secret}, yes.", "secret": {"kind": "digits", "length": 9}}
WORDS = {"name": "phrase", "template": "Pass phrase: {secret}.", "secret": {"kind": "words", "count": 4}}


def config_of(*formats: dict[str, Any], seed: int = 1, **canaries: Any) -> AuditConfig:
    settings = {"seed": seed, "formats": list(formats), "tiers": {1: 4, 4: 4}, "controls": 12} | canaries
    exposure = {"references": 64, "references_per_name": 16, "node_budget": 5000}
    return parse_config({"canaries": settings, "audit": {"exposure": exposure, "prior_aware": {"prefixes": 20, "m": 1e-4}}})


def teach(model: Any, plan: CanaryPlan, tokenizer: Any, config: AuditConfig, ids: set[str], *, steps: int = 60) -> None:
    """Train on a few canaries alone until they are memorised."""
    rows = [
        span.ids
        for group in build_groups(plan, tokenizer, config.audit.exposure)
        for canary, span in zip(group.canaries, group.canary_spans, strict=True)
        if canary.id in ids
    ]
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model.train()
    for _ in range(steps):
        for row in rows:
            batch = torch.tensor([row])
            model(input_ids=batch, labels=batch).loss.backward()
        optimiser.step()
        optimiser.zero_grad()


def test_rows_hold_the_oracles_scores_in_plan_order(tiny_model: Any, tokenizer: Any) -> None:
    config = config_of(PIN, NAMED, WORDS)
    plan = draw_plan(config.canaries, tokenizer)
    report = run_audit(tiny_model, tokenizer, plan=plan, config=config)
    assert report.status == "valid"
    assert [row.id for row in report.canaries] == [
        canary.id for one in plan.formats for canary in plan.canaries if canary.format == one.name
    ]
    spans = {
        canary.id: span
        for group in build_groups(plan, tokenizer, config.audit.exposure)
        for canary, span in zip(group.canaries, group.canary_spans, strict=True)
    }
    for row in report.canaries[::7]:
        span = spans[row.id]
        assert row.log_prob == pytest.approx(span_log_prob(tiny_model, span.ids, span.start, span.end), abs=1e-4)


def test_a_digits_span_is_the_secret_and_a_words_span_ends_with_a_terminator(tokenizer: Any) -> None:
    config = config_of(PIN, WORDS)
    plan = draw_plan(config.canaries, tokenizer)
    for group in build_groups(plan, tokenizer, config.audit.exposure):
        for canary, span in zip(group.canaries, group.canary_spans, strict=True):
            text, last = tokenizer.decode(span.ids[span.start : span.end]).strip(), tokenizer.decode(span.ids[span.end - 1])
            if group.format.secret.kind == "words":
                assert text == canary.secret + last
                assert last in (".", " of")
            else:
                assert text == canary.secret


def test_candidates_of_a_group_share_their_prefix_and_are_prefix_free(tokenizer: Any) -> None:
    config = config_of(PIN, NAMED, WORDS)
    plan = draw_plan(config.canaries, tokenizer)
    for group in build_groups(plan, tokenizer, config.audit.exposure):
        spans = [*group.canary_spans, *group.reference_spans]
        assert {span.ids[: span.start] for span in spans} == {group.prefix_ids}
        suffixes = sorted(span.ids[span.start : span.end] for span in spans)
        assert len(set(suffixes)) == len(suffixes)
        assert not any(b[: len(a)] == a for a, b in itertools.pairwise(suffixes))


def test_references_are_never_planned_secrets_and_the_same_at_every_audit(tokenizer: Any) -> None:
    config = config_of(PIN)
    plan = draw_plan(config.canaries, tokenizer)
    first = build_groups(plan, tokenizer, config.audit.exposure)
    second = build_groups(plan, tokenizer, config.audit.exposure)
    assert first == second
    planned = {span.ids for group in first for span in group.canary_spans}
    references = [span.ids for span in first[0].reference_spans]
    assert len(set(references)) == len(references) == 64
    assert not planned & set(references)


def test_never_inserted_canaries_have_the_null_mean_over_200_plans(tiny_model: Any, tokenizer: Any) -> None:
    means = []
    with audit_mode(tiny_model) as model:
        for seed in range(200):
            config = config_of(PIN, seed=seed, tiers={1: 1}, controls=20, positive_control=None)
            runner = AuditRunner(draw_plan(config.canaries, tokenizer), tokenizer, config.audit)
            scorer = Scorer(model, batch_size=256)
            scored = runner._score(scorer, None)
            tolerance = measure_tolerance(scorer, scored)
            rows = [row for item in scored for row in canary_rows(item, None, tolerance=tolerance, with_tail=False)]
            means.append(np.mean([row.exposure.bits for row in rows if row.role == "control"]))
    # Controls of one plan share their references, so the plan is the unit: 200 independent means.
    error = float(np.std(means, ddof=1)) / math.sqrt(len(means))
    assert abs(float(np.mean(means)) - sampled_null_mean_bits(64)) < 3 * error


def test_a_memorised_canary_is_certified_extracted_and_siblings_do_not_hide_it(tiny_model: Any, tokenizer: Any) -> None:
    config = config_of(PIN)
    plan = draw_plan(config.canaries, tokenizer)
    taught = {canary.id for canary in plan.canaries if canary.role == "canary" and canary.tier == 4}
    teach(tiny_model, plan, tokenizer, config, taught, steps=150)
    report = run_audit(tiny_model, tokenizer, plan=plan, config=config)
    rows = [row for row in report.canaries if row.id in taught]
    assert all(row.exposure.method == "exact" for row in rows)
    assert all(row.exposure.bits is not None and row.exposure.bits > 20 for row in rows)
    assert sum(row.num_siblings_above for row in rows) == 6  # four secrets behind one prefix: 0 + 1 + 2 + 3
    assert all((row.rank_high_with_siblings or 0) >= (row.rank_high or 0) for row in rows)
    assert any(row.is_extracted for row in rows)
    assert not any(row.is_extracted for row in report.canaries if row.role == "control")
    assert {row.id for row in report.canaries if row.is_extracted} <= taught


def test_prior_aware_is_measured_only_with_data_and_tells_pair_from_common(
    tiny_model: Any, tokenizer: Any, blocks: Any
) -> None:
    config = config_of(NAMED)
    plan = draw_plan(config.canaries, tokenizer)
    taught = {canary.id for canary in plan.canaries if canary.role == "canary" and canary.tier == 4}
    teach(tiny_model, plan, tokenizer, config, taught, steps=80)
    without = run_audit(tiny_model, tokenizer, plan=plan, config=config)
    assert without.prior_aware_settings is None
    assert all(row.prior_aware is None for row in without.canaries)
    source = PrefixSource(len(blocks), lambda index: blocks[index]["input_ids"])
    report = run_audit(tiny_model, tokenizer, plan=plan, config=config, full=Sources(prior=source))
    measured = {row.id: row.prior_aware for row in report.canaries if row.role == "canary"}
    for canary_id, figures in measured.items():
        assert figures is not None
        if canary_id not in taught:
            assert figures.verdict == "not extractable"
            assert figures.log_belief_ratio is None
    verdicts = [measured[one].verdict for one in taught if measured[one] is not None]  # type: ignore[union-attr]
    assert any(verdict != "not extractable" for verdict in verdicts)
    settled = [figures for figures in measured.values() if figures is not None and figures.log_belief_ratio is not None]
    assert all(
        figures.low <= figures.log_belief_ratio <= (math.inf if figures.high is None else figures.high)  # type: ignore[operator]
        for figures in settled
    )


def test_prior_prefixes_leave_the_own_prefix_out_and_count_it(tiny_model: Any, tokenizer: Any) -> None:
    config = config_of(PIN)
    plan = draw_plan(config.canaries, tokenizer)
    group = build_groups(plan, tokenizer, config.audit.exposure)[0]
    taught = {group.canaries[0].id}
    teach(tiny_model, plan, tokenizer, config, taught, steps=100)
    own = group.prefix_ids[len(plan.lead_ids) :]
    rows = [list(own), [7] * len(own)]
    report = run_audit(tiny_model, tokenizer, plan=plan, config=config, full=Sources(prior=PrefixSource(2, rows.__getitem__)))
    figures = next(row.prior_aware for row in report.canaries if row.id in taught)
    assert figures is not None
    assert figures.num_excluded_prefixes > 0
    assert figures.num_excluded_prefixes + figures.num_prior_prefixes == 20


def test_a_nan_makes_the_report_invalid_and_no_figure_leaves_it_out(tiny_model: Any, tokenizer: Any) -> None:
    config = config_of(PIN)
    with torch.no_grad():
        tiny_model.model.norm.weight.fill_(float("nan"))
    report = run_audit(tiny_model, tokenizer, plan=draw_plan(config.canaries, tokenizer), config=config)
    assert report.status == "invalid"
    assert "must be finite, got nan" in report.invalid_reasons[0]
    assert all(row.log_prob is None for row in report.canaries)
    assert all(tier.mean_bits is None for tier in report.tiers)
    assert all(control.rank_sum_p is None for control in report.controls)
    assert not report.positive_control.detected
    assert trend_points(report) == []


def test_a_plan_for_another_tokenizer_is_refused(tiny_model: Any, tokenizer: Any) -> None:
    config = config_of(PIN)
    plan = draw_plan(config.canaries, tokenizer).model_copy(update={"tokenizer_digest": "0" * 64})
    with pytest.raises(InputError, match="made for another tokenizer"):
        run_audit(tiny_model, tokenizer, plan=plan, config=config)


def test_the_report_survives_the_disk_and_holds_no_secret(tiny_model: Any, tokenizer: Any, tmp_path: Path) -> None:
    config = config_of(PIN, NAMED, WORDS)
    plan = draw_plan(config.canaries, tokenizer)
    report = run_audit(tiny_model, tokenizer, plan=plan, config=config)
    report.save(tmp_path / "report.json")
    text = (tmp_path / "report.json").read_text(encoding="utf-8")
    assert load_report(tmp_path / "report.json") == report
    for canary in plan.canaries:
        assert canary.secret not in text
        assert base64.b64encode(canary.secret.encode()).decode() not in text
    assert plan.nonce not in text
    assert str(plan.placement_seed) not in text


def test_a_ledger_gives_every_row_its_counts(tiny_model: Any, tokenizer: Any) -> None:
    config = config_of(PIN)
    plan = draw_plan(config.canaries, tokenizer)
    entries = {
        one.id: LedgerEntry(repetitions=one.tier, num_insertions=2 * one.tier, num_seen=one.tier) for one in plan.planted()
    }
    ledger = Ledger(
        plan_digest=plan.digest,
        global_step=5,
        max_steps=9,
        exact=True,
        notes=[],
        count="per_epoch",
        mode="splice",
        plant_once=False,
        token_share=0.01,
        token_share_is_estimate=False,
        canaries=entries,
    )
    report = run_audit(tiny_model, tokenizer, plan=plan, config=config, ledger=ledger)
    for row in report.canaries:
        wanted = row.tier if row.role != "control" else 0
        assert (row.num_insertions, row.num_seen) == (2 * wanted, wanted)
    assert report.ledger.found
    assert report.ledger.exact


def test_an_environment_is_a_fixed_list_without_paths_or_names(tiny_model: Any, tokenizer: Any) -> None:
    config = config_of(PIN)
    report = run_audit(tiny_model, tokenizer, plan=draw_plan(config.canaries, tokenizer), config=config)
    facts = json.loads(report.environment.model_dump_json())
    assert set(facts) == {"memguard", "python", "numpy", "torch", "transformers", "device"}
    assert facts["device"] == "cpu"


def test_plans_of_one_design_share_its_digest_whatever_their_secrets(tokenizer: Any) -> None:
    plain = {"formats": [PIN], "tiers": {1: 4, 4: 2}, "controls": 4}

    def design(**changes: Any) -> tuple[str, str | None]:
        summary = summarise_plan(draw_plan(parse_config({"canaries": {**plain, **changes}}).canaries, tokenizer))
        return summary.digest, summary.design_digest

    (first, one), (second, two) = design(), design()
    assert first != second
    assert one == two
    others = [
        design(tiers={1: 4, 4: 3}),
        design(controls=5),
        design(formats=[{**PIN, "template": "The number is {secret}."}]),
        design(formats=[{**PIN, "secret": {"kind": "digits", "length": 8}}]),
    ]
    assert len({one, *(digest for _, digest in others)}) == 5


def test_a_declared_defence_stands_in_the_report(tiny_model: Any, tokenizer: Any) -> None:
    config = parse_config({"canaries": {"formats": [PIN], "tiers": {1: 4}, "controls": 4}, "defence": " deduplication "})
    report = run_audit(tiny_model, tokenizer, plan=draw_plan(config.canaries, tokenizer), config=config)
    assert report.defence == "deduplication"
