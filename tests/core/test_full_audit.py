"""A full audit: extraction, calibrated ratios and exposure, real records and coins, on models taught on the spot."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from secret_search import leaks
from test_audit import NAMED, PIN, config_of, teach

from memguard.audit import AuditRunner, run_audit
from memguard.audit.calibration import calibrate
from memguard.audit.config import parse_config
from memguard.audit.extraction import _chances, _find, _Prompt, _Written
from memguard.audit.full import Sources, _above_controls
from memguard.audit.items import build_groups
from memguard.audit.membership import measure_membership
from memguard.audit.prior import PrefixSource, not_extractable
from memguard.audit.prompts import _cut
from memguard.audit.records import Record
from memguard.audit.report import AuditReport, Subject
from memguard.audit.report_records import Threshold
from memguard.canaries.drawing import draw_plan
from memguard.errors import MissingExtraError
from memguard.scoring.audit_mode import audit_mode
from memguard.scoring.sampling import Sampler, score_under_sampler
from memguard.scoring.scorer import Scorer, Span
from memguard.tracing.corpus_index import CorpusIndex
from memguard.tracing.index_build import build_index

BARE = {"positive_control": None}
START = Subject(kind="live", digest=None, global_step=0, epoch=None)


@pytest.fixture(scope="module")
def taught(tokenizer: Any) -> tuple[Any, Any, Any, set[str]]:
    """A model that knows two canaries behind their own names by heart."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=512,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            max_position_embeddings=128,
            tie_word_embeddings=True,
        )
    )
    config = config_of(NAMED, PIN, **BARE)
    plan = draw_plan(config.canaries, tokenizer)
    known = [canary.id for canary in plan.canaries if canary.format == "own" and canary.role == "canary"][:2]
    teach(model, plan, tokenizer, config, set(known), steps=120)
    return model, plan, config, set(known)


def test_a_memorised_canary_is_written_and_searched_for_in_every_prompt(taught: Any, tokenizer: Any) -> None:
    model, plan, config, known = taught
    report = run_audit(model, tokenizer, plan=plan, config=config, full=Sources())
    rows = {row.id: row for row in report.canaries}
    assert report.extraction is not None
    for one in known:
        found = rows[one].extraction
        assert found is not None
        assert "trained tokens" in found.found_by
        assert found.log10_expected_tries == pytest.approx(0.0, abs=0.3)
        assert rows[one].is_extracted
    others = [row for row in report.canaries if row.id not in known]
    # The prompts of controls and of unplanted canaries give away what was memorised: nobody else's secret.
    assert all(row.extraction is not None and not row.extraction.found_by for row in others)
    assert (report.extraction.num_found, report.extraction.num_controls_found) == (2, 0)
    assert report.extraction.chance_of_match < 1e-4
    curve = next(one for one in report.extraction.curves if one.tier == 1)
    assert [point.num_queries for point in curve.points] == [1, 100, 10_000]
    assert curve.points[0].n == 8


def written(group: int, kind: str, text: str) -> Any:
    return _Written(_Prompt((1,), group, kind), text)


def test_a_secret_is_found_in_the_continuation_of_another_prompt(taught: Any) -> None:
    _, plan, _, _ = taught
    own = [canary for canary in plan.canaries if canary.format == "own"][:2]
    groups = [SimpleNamespace(canaries=(own[0],)), SimpleNamespace(canaries=(own[1],))]
    texts = [
        written(0, "trained tokens", f" {own[0].secret}."),
        written(0, "text", f"{own[1].secret} and {own[0].secret}"),
        written(1, "text", f"0{own[0].secret}"),
    ]
    assert _find(groups, texts) == {own[0].id: ["trained tokens", "text", "another prompt"], own[1].id: ["another prompt"]}


def test_the_sampled_chance_of_a_canary_is_that_of_its_span_under_the_sampler(taught: Any, tokenizer: Any) -> None:
    model, plan, config, _ = taught
    report = run_audit(model, tokenizer, plan=plan, config=config, full=Sources())
    spans = {
        canary.id: span
        for group in build_groups(plan, tokenizer, config.audit.exposure)
        for canary, span in zip(group.canaries, group.canary_spans, strict=True)
    }
    with audit_mode(model) as inner:
        scores = score_under_sampler(Scorer(inner), [spans[row.id] for row in report.canaries], Sampler(top_k=40))
    for row, score in zip(report.canaries, scores.tolist(), strict=True):
        assert row.extraction is not None
        if math.isinf(score):
            assert row.extraction.log_prob_sampled is None
            assert row.extraction.log10_expected_tries is None
        else:
            assert row.extraction.log_prob_sampled == pytest.approx(score, abs=1e-3)


def test_chance_is_judged_by_format_and_by_whose_prompt_it_is(tokenizer: Any) -> None:
    card = {"name": "card", "template": "Card {secret}.", "secret": {"kind": "luhn", "digits": 16}}
    config = config_of(NAMED, card, tiers={1: 10}, controls=2, **BARE)
    plan = draw_plan(config.canaries, tokenizer)
    groups = build_groups(plan, tokenizer, config.audit.exposure)
    assert [group.format.name for group in groups] == ["own"] * 11 + ["card"]
    texts = [written(0, "text", "0123456789"), written(1, "text", "nothing"), written(2, "text", "987654321 or 123")]
    chances = _chances(plan, groups, texts)
    # Nine digits: 2 candidates behind one canary's own prompt and 1 behind another's; 3 in all texts for 11 secrets of 10^9.
    assert chances["own", True] == pytest.approx(3e-9)
    assert chances["own", False] == pytest.approx(33e-9)
    assert chances["card", True] == chances["card", False] == 0.0


def test_a_match_that_chance_may_give_counts_for_nothing_and_one_of_a_larger_space_does(
    tiny_model: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that writes many numbers: five digits are met by chance, sixteen with a check digit are not."""
    card = {"name": "card", "template": "Card {secret}.", "secret": {"kind": "luhn", "digits": 16}}
    five = {"name": "five", "template": "Pin {secret}.", "secret": {"kind": "digits", "length": 5}}
    config = config_of(card, five, tiers={1: 3}, controls=4, **BARE)
    plan = draw_plan(config.canaries, tokenizer)
    known = {one: next(c for c in plan.canaries if c.format == one and c.role == "canary") for one in ("card", "five")}
    leaked = next(c for c in plan.canaries if c.format == "card" and c.role == "control")
    text = f"{known['card'].secret}, {known['five'].secret}, {leaked.secret}, 97531, 86420, 12345"
    monkeypatch.setattr(
        "memguard.audit.extraction.continue_greedily",
        lambda scorer, prompts, num_tokens: [tuple(tokenizer(text)["input_ids"])] * len(prompts),
    )
    report = run_audit(tiny_model, tokenizer, plan=plan, config=config, full=Sources())
    rows = {row.id: row for row in report.canaries}
    assert report.extraction is not None
    assert rows[known["card"].id].is_extracted
    assert not rows[known["five"].id].is_extracted
    assert rows[known["five"].id].may_be_extracted
    assert (report.extraction.num_found, report.extraction.num_controls_found) == (2, 1)
    assert report.extraction.chance_of_match <= 1e-4


def test_start_scores_give_calibrated_exposure_by_hand(taught: Any, tiny_model: Any, tokenizer: Any) -> None:
    model, plan, config, known = taught
    runner = AuditRunner(plan, tokenizer, config.audit)
    without = runner.run(model)
    assert all(row.calibrated is None and row.start_log_prob is None for row in without.canaries)
    first = runner.run(tiny_model, subject=START)
    report = runner.run(model)
    before = {row.id: row.log_prob for row in first.canaries}
    for row in report.canaries:
        assert row.start_log_prob == pytest.approx(before[row.id], abs=1e-6)
        assert row.calibrated is not None
        assert row.calibrated.method == "sampled"
    shared = next(item for item in runner.groups if not item.format.has_name)
    with audit_mode(model) as inner, audit_mode(tiny_model) as start:
        now, then = Scorer(inner).score(shared.reference_spans), Scorer(start).score(shared.reference_spans)
    gains = now.log_probs - then.log_probs
    for canary in shared.canaries[:5]:
        row = next(one for one in report.canaries if one.id == canary.id)
        above = int((gains >= row.log_prob - row.start_log_prob - 2 * report.procedure.tolerance).sum())
        assert row.calibrated.bits == pytest.approx(-math.log2((above + 1) / (len(gains) + 1)), abs=0.05)
    own = {row.id: row.calibrated.bits for row in report.canaries}
    assert all(own[one] == pytest.approx(math.log2(17)) for one in known)  # above all of its 16 references


def test_canaries_that_a_model_knew_before_training_show_in_the_test_of_its_start(
    taught: Any, tiny_model: Any, tokenizer: Any
) -> None:
    model, plan, config, _ = taught
    fresh, known = (AuditRunner(plan, tokenizer, config.audit) for _ in range(2))
    assert fresh.run(model).start_test is None
    fresh.remember_start(tiny_model)
    known.remember_start(model)
    new, old = fresh.run(model).start_test, known.run(model).start_test
    assert new is not None
    assert old is not None
    num_canaries = sum(canary.role == "canary" for canary in plan.canaries)
    assert new.n == old.n == num_canaries
    assert min(new.pooled_p or 0.0, new.max_p or 0.0) > 1e-3
    assert (old.max_p or 1.0) < 1e-6


def test_the_ratio_of_a_canary_is_calibrated_on_controls_of_its_format(taught: Any, tokenizer: Any, blocks: Any) -> None:
    model, plan, config, known = taught
    source = PrefixSource(len(blocks), lambda index: blocks[index]["input_ids"])
    report = run_audit(model, tokenizer, plan=plan, config=config, full=Sources(prior=source))
    (threshold,) = report.prior_aware_thresholds  # no canary of the other format is extractable: nothing to calibrate for
    controls = [row for row in report.canaries if row.format == "own" and row.role == "control"]
    assert (threshold.targets, threshold.method, threshold.num_targets) == ("own", "quantile", len(controls))
    assert threshold.mean_log_ratio is not None
    assert threshold.low is not None
    assert threshold.low <= threshold.n
    assert threshold.high is None  # 6 controls do not bound a 95% quantile from above
    for row in report.canaries:
        if row.id in known:
            assert row.prior_aware is not None
            assert row.prior_aware.n == threshold.n
            assert row.prior_aware.log_ratio_above_controls == pytest.approx(
                row.prior_aware.log_belief_ratio - threshold.mean_log_ratio
            )
        elif row.role == "canary" and row.format == "pin":
            assert row.prior_aware is not None
            assert (row.prior_aware.verdict, row.prior_aware.n) == ("not extractable", None)
    counts = report.prior_aware
    assert counts is not None
    assert counts.n == 16
    assert counts.num_extractable == counts.num_pa + counts.num_common + counts.num_undecided >= 2


def test_a_given_ratio_is_used_as_it_is(taught: Any, tokenizer: Any, blocks: Any) -> None:
    model, plan, config, known = taught
    audit = config.audit.model_copy(update={"prior_aware": config.audit.prior_aware.model_copy(update={"n": 7.0})})
    source = PrefixSource(len(blocks), lambda index: blocks[index]["input_ids"])
    report = AuditRunner(plan, tokenizer, audit).run(model, full=Sources(prior=source))
    assert [(one.method, one.n) for one in report.prior_aware_thresholds] == [("given", 7.0)]
    assert {row.prior_aware.n for row in report.canaries if row.id in known} == {7.0}


@pytest.fixture(scope="module")
def overfitted(tokenizer: Any, blocks: Any) -> tuple[Any, list[Record], list[Record]]:
    """A model that saw 40 rows again and again, those rows, and others."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2)
    )
    rows = torch.tensor([row["input_ids"] for row in blocks[:40]])
    optimiser = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for _ in range(120):
        loss = model(input_ids=rows, labels=rows).loss
        loss.backward()
        optimiser.step()
        optimiser.zero_grad()
    records = [Record(None, tuple(row["input_ids"]), line) for line, row in enumerate(blocks, start=1)]
    return model.eval(), records[:40], records[40:80]


RECORDS = {"prefix_tokens": 12, "suffix_tokens": 10, "max_edits": 2, "contexts": [2, 5], "offsets": [3]}


def record_config(**audit: Any) -> Any:
    exposure = {"references": 32, "references_per_name": 16, "exact": "off"}
    settings = {"seed": 1, "formats": [PIN], "tiers": {1: 2}, "controls": 4, "positive_control": None}
    base = {"exposure": exposure, "prior_aware": {"prefixes": 24}, "records": RECORDS, "membership": None}
    return parse_config({"canaries": settings, "audit": base | audit})


@pytest.fixture(scope="module")
def record_report(overfitted: Any, tokenizer: Any) -> AuditReport:
    model, members, held_out = overfitted
    config = record_config()
    plan = draw_plan(config.canaries, tokenizer)
    source = PrefixSource(len(members), lambda index: members[index].ids)
    return run_audit(model, tokenizer, plan=plan, config=config, full=Sources(prior=source, members=members, held_out=held_out))


def test_memorised_records_are_extractable_and_held_out_ones_are_not(record_report: AuditReport, overfitted: Any) -> None:
    records = record_report.records
    assert records is not None
    assert records.held_out is not None
    assert records.members.num_greedy >= 30
    assert records.held_out.num_greedy <= 2
    assert records.members.greedy_low > records.held_out.greedy_high
    model, members, _ = overfitted
    for row in records.members.rows[::9]:
        ids = torch.tensor([members[row.line - 1].ids[:12]])
        wrote = model.generate(ids, do_sample=False, max_new_tokens=10, eos_token_id=None, pad_token_id=0)[0, 12:].tolist()
        assert row.is_greedy == (tuple(wrote) == members[row.line - 1].ids[12:22])


def test_the_chances_of_a_record_are_ordered(record_report: AuditReport) -> None:
    records = record_report.records
    assert records is not None
    for row in records.members.rows:
        if row.log_prob_sampled is not None:
            assert row.log_prob_near is not None
            assert row.log_prob_sampled >= row.log_prob - 1e-3  # top-k gives what it cuts to the rest
            assert row.log_prob_near >= row.log_prob_sampled - 1e-3
    shares = [point.expected_share for point in records.members.curve]
    assert shares == sorted(shares)
    assert records.members.num_near is not None
    assert records.members.num_near >= sum((row.log_prob_sampled or -99.0) >= math.log(1e-3) for row in records.members.rows)


def test_the_ratio_of_records_is_calibrated_on_held_out_records(record_report: AuditReport) -> None:
    records = record_report.records
    assert records is not None
    assert records.threshold is not None
    assert (records.threshold.method, records.threshold.num_targets) == ("quantile", 40)
    counts = records.prior_aware
    assert counts is not None
    assert counts.n == 40
    assert counts.num_not_measured == 0
    assert counts.num_extractable == counts.num_pa + counts.num_undecided >= 30  # memorised text is not called common
    assert counts.num_pa >= 10
    assert counts.common_share is not None
    assert counts.common_low <= counts.common_share <= counts.common_high


def test_records_are_asked_for_behind_shorter_prefixes_and_further_in(record_report: AuditReport, overfitted: Any) -> None:
    records = record_report.records
    assert records is not None
    assert [(row.prefix_tokens, row.offset) for row in records.prompts] == [(2, 0), (5, 0), (12, 0), (12, 3)]
    assert {row.n for row in records.prompts} == {40}
    assert records.prompts[2].num_greedy == records.members.num_greedy
    assert records.prompts[2].mean_log_prob == pytest.approx(sum(row.log_prob for row in records.members.rows) / 40, abs=1e-6)
    (slope,) = records.prompt_slopes  # one offset is no line
    assert (slope.against, slope.n) == ("prefix_tokens", 3)
    assert slope.slope > 0  # more of its own context gives more away
    assert records.prompts[3].num_greedy < records.prompts[2].num_greedy  # trained at the start of the window alone


def test_a_record_of_the_report_holds_no_text(record_report: AuditReport, overfitted: Any, tokenizer: Any) -> None:
    text = record_report.model_dump_json()
    for record in overfitted[1][:5]:
        assert tokenizer.decode(record.ids)[:40] not in text
        assert ", ".join(map(str, record.ids[:6])) not in text


def test_short_records_are_a_notice_and_no_failure(overfitted: Any, tokenizer: Any) -> None:
    config = record_config(records={"prefix_tokens": 200, "suffix_tokens": 10})
    plan = draw_plan(config.canaries, tokenizer)
    report = run_audit(overfitted[0], tokenizer, plan=plan, config=config, full=Sources(members=overfitted[1]))
    assert report.status == "valid"
    assert report.records is None
    assert any("records were not measured: data must hold a record of at least 210 tokens" in one for one in report.notices)


def test_without_held_out_records_the_ratio_is_said_to_be_uncalibrated(overfitted: Any, tokenizer: Any) -> None:
    config = record_config()
    plan = draw_plan(config.canaries, tokenizer)
    members = overfitted[1]
    source = PrefixSource(len(members), lambda index: members[index].ids)
    report = run_audit(overfitted[0], tokenizer, plan=plan, config=config, full=Sources(prior=source, members=members))
    assert report.records is not None
    assert report.records.threshold is not None
    assert (report.records.threshold.method, report.records.threshold.n) == ("given", 10.0)
    assert any("no held-out record was given" in one for one in report.notices)


def test_membership_of_overfitted_records_is_seen(overfitted: Any, tokenizer: Any) -> None:
    config = record_config(membership={"scores": ["loss", "min_k_plus_plus"]})
    plan = draw_plan(config.canaries, tokenizer)
    model, members, held_out = overfitted
    report = run_audit(model, tokenizer, plan=plan, config=config, full=Sources(members=members, held_out=held_out))
    assert report.membership is not None
    assert [one.name for one in report.membership.scores] == ["loss", "min_k_plus_plus"]
    assert all(one.low is not None and one.low > 0.5 for one in report.membership.scores)


def test_membership_and_canaries_are_split_by_what_the_index_holds(overfitted: Any, tokenizer: Any, tmp_path: Path) -> None:
    model, members, held_out = overfitted
    config = record_config(membership={"scores": ["loss"]})
    plan = draw_plan(config.canaries, tokenizer)
    form = plan.formats[0]
    texts = [tokenizer.decode(record.ids) for record in members]
    canary = next(one for one in plan.canaries if one.role == "canary")
    secrets = ["".join(form.split(canary.secret, name=form.name))] * 3
    build_index([*texts, *texts[:15], *secrets], tmp_path / "index", tokenizer)
    with_index = Sources(members=members, held_out=held_out, index=CorpusIndex.open(tmp_path / "index"))
    report = run_audit(model, tokenizer, plan=plan, config=config, full=with_index)
    assert report.membership is not None
    parts = {one.copies: one.scores[0] for one in report.membership.by_copies}
    assert {name: one.n_members for name, one in parts.items()} == {"once": 25, "2 to 10": 15}
    for name, part in (("2 to 10", members[:15]), ("once", members[15:])):
        alone = run_audit(model, tokenizer, plan=plan, config=config, full=Sources(members=part, held_out=held_out)).membership
        assert alone is not None
        assert (parts[name].auroc, parts[name].low) == pytest.approx((alone.scores[0].auroc, alone.scores[0].low))
    counted = {row.id: row.num_copies for row in report.canaries}
    assert counted == {row.id: 3 * (row.id == canary.id) for row in report.canaries}
    assert canary.secret not in report.model_dump_json()


def test_parts_of_the_members_too_small_for_a_score_are_named(overfitted: Any, tokenizer: Any) -> None:
    model, members, held_out = overfitted
    short = [Record(None, members[0].ids[:1]), *members]
    split: Any = {"once": range(36), "2 to 10": range(36, 41)}
    scores: Any = {"scores": ("loss",), "tokenizer": tokenizer, "seed": 0, "max_tokens": 64}
    with audit_mode(model) as inner:
        found = measure_membership(Scorer(inner), short, held_out, split=split, **scores)
    assert [(one.copies, one.scores[0].n_members) for one in found.by_copies] == [("once", 35)]  # the short one is not scored
    assert found.notes[-1] == "by copies in the corpus, fewer than 10 members have no scores of their own: 5 2 to 10"


def test_a_nan_in_a_full_part_makes_the_audit_invalid(taught: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, plan, config, _ = taught
    original = Sampler.log_probs
    monkeypatch.setattr(Sampler, "log_probs", lambda self, logits: original(self, logits) * math.nan)
    report = run_audit(model, tokenizer, plan=plan, config=config, full=Sources())
    assert report.status == "invalid"
    assert "must be a number, got NaN" in report.invalid_reasons[0]


def test_coins_give_a_bound_and_what_inclusion_did(tiny_model: Any, tokenizer: Any) -> None:
    config = config_of(PIN, tiers={1: 32}, inclusion="coin", **BARE)
    config = config.model_copy(
        update={"dp": parse_config({"canaries": {"formats": [PIN]}, "dp": {"epsilon": 2, "delta": 0}}).dp}
    )
    plan = draw_plan(config.canaries, tokenizer)
    runner = AuditRunner(plan, tokenizer, config.audit, dp=config.dp)
    runner.run(tiny_model, subject=START)
    report = runner.run(tiny_model)
    assert report.privacy is not None
    assert (report.privacy.num_coins, report.privacy.num_guesses) == (32, 16)
    assert report.privacy.epsilon_lower_bound <= report.privacy.cap
    assert (report.privacy.stated_epsilon, report.privacy.is_comparable) == (2.0, False)
    assert report.privacy.is_testable is (report.privacy.cap >= 2.0)
    assert [(one.format, one.tier, one.n_in + one.n_out) for one in report.counterfactual] == [("pin", 1, 32)]
    few = draw_plan(config_of(PIN, tiers={1: 2}, inclusion="coin", **BARE).canaries, tokenizer)
    nothing = run_audit(tiny_model, tokenizer, plan=few, config=config).privacy
    assert nothing is not None
    assert (nothing.num_guesses, nothing.epsilon_lower_bound, nothing.cap) == (0, 0.0, 0.0)
    planned = draw_plan(config_of(PIN, **BARE).canaries, tokenizer)
    without = run_audit(tiny_model, tokenizer, plan=planned, config=config)
    assert (without.privacy, without.counterfactual) == (None, [])


def test_no_secret_is_in_a_full_report(taught: Any, tokenizer: Any, blocks: Any) -> None:
    model, plan, config, _ = taught
    source = PrefixSource(len(blocks), lambda index: blocks[index]["input_ids"])
    text = run_audit(model, tokenizer, plan=plan, config=config, full=Sources(prior=source)).model_dump_json()
    assert leaks(text.encode(), plan, tokenizer) == []


def test_records_that_the_model_has_no_positions_for_cost_their_part_alone(tiny_model: Any, tokenizer: Any) -> None:
    config = record_config(records={"prefix_tokens": 100, "suffix_tokens": 50})
    plan = draw_plan(config.canaries, tokenizer)
    members = [Record(None, tuple(range(1, 201)), line) for line in range(1, 4)]  # the model has 128 positions
    report = run_audit(tiny_model, tokenizer, plan=plan, config=config, full=Sources(members=members))
    assert (report.status, report.records) == ("valid", None)
    assert any(
        "records were not measured: data must hold a record of at least 150 tokens that fits" in n for n in report.notices
    )


def test_what_goes_wrong_in_one_part_is_a_notice_and_the_others_are_measured(
    overfitted: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise MissingExtraError("the confound check", "hf")

    monkeypatch.setattr("memguard.audit.full.measure_membership", fail)
    config = record_config(membership={"scores": ["loss"]})
    plan = draw_plan(config.canaries, tokenizer)
    model, members, held_out = overfitted
    report = run_audit(model, tokenizer, plan=plan, config=config, full=Sources(members=members, held_out=held_out))
    assert report.status == "valid"
    assert report.membership is None
    assert report.records is not None
    assert any(one.startswith("membership was not measured: the confound check needs the extra 'hf'") for one in report.notices)


def test_a_ratio_that_is_a_lower_end_is_not_compared_with_the_controls_mean() -> None:
    threshold = Threshold(targets="own", n=10.0, method="quantile", mean_log_ratio=2.0)
    measured = not_extractable(-1.0).model_copy(update={"verdict": "PA (certified)", "log_belief_ratio": 5.0})
    assert _above_controls(measured, threshold).log_ratio_above_controls == 3.0
    is_open = measured.model_copy(update={"num_open_prefixes": 7})
    assert _above_controls(is_open, threshold).log_ratio_above_controls is None


def test_calibration_takes_a_random_sample_of_many_targets_and_not_the_first() -> None:
    asked: list[int] = []

    class Measurement:
        def log_ratios(self, spans: Any, log_probs: Any) -> list[float]:
            asked.extend(spans)
            return [0.0] * len(spans)

    found = calibrate(Measurement(), list(range(1000)), [-1.0] * 1000, targets="records", seed=3)  # type: ignore[arg-type]
    assert found is not None
    assert found.num_targets == len(set(asked)) == 64
    assert asked == sorted(asked)
    assert sum(asked) / 64 == pytest.approx(500, abs=4 * 1000 / math.sqrt(12 * 64))  # four standard errors


def test_prior_prefixes_of_rows_that_begin_with_the_lead_hold_it_once() -> None:
    rows = [[9, 1, 2, 3, 4], [9, 5, 6], [7, 8, 1, 2, 3, 4]]
    windows = PrefixSource(3, rows.__getitem__).windows(200, length=4, lead_ids=(9,), seed="s")
    assert all(window[0] == 9 and 9 not in window[1:] for window in windows)
    assert {window for window in windows if 5 in window} == {(9, 5, 6)}  # the whole short row
    assert {window for window in windows if 7 in window} == {(9, 7, 8, 1)}
    bare = PrefixSource(1, lambda _: [9]).windows(3, length=4, lead_ids=(9,), seed="s")
    assert set(bare) == {(9, 9)}  # a row of nothing but the lead has nothing else to give


def test_a_shorter_context_keeps_what_every_prefix_begins_with() -> None:
    span = Span((9, 1, 2, 3, 4, 5), 4, 6)
    assert (_cut(span, 2, (9,)).ids, _cut(span, 2, (9,)).start) == ((9, 2, 3, 4, 5), 3)
    assert (_cut(span, 2, ()).ids, _cut(span, 2, ()).start) == ((2, 3, 4, 5), 2)
    assert _cut(Span((8, 1, 2, 3, 4, 5), 4, 6), 2, (9,)).ids == (2, 3, 4, 5)


def test_training_rows_without_tokens_cost_prior_aware_memorisation_alone(taught: Any, tokenizer: Any) -> None:
    model, plan, config, known = taught
    report = run_audit(model, tokenizer, plan=plan, config=config, full=Sources(prior=PrefixSource(2, lambda _: [])))
    assert report.status == "valid"
    assert (report.prior_aware, report.prior_aware_thresholds) == (None, [])
    assert any(one.startswith("Prior-Aware memorisation was not measured: prior prefixes must") for one in report.notices)
    assert all(row.is_extracted for row in report.canaries if row.id in known)
