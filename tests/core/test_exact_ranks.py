"""Exact ranks in an audit: equal to enumeration with the text oracle, siblings out, and never a 'possible' left open."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from test_audit import config_of, teach
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from memguard.audit import AuditRunner, run_audit
from memguard.audit.config import AuditConfig
from memguard.audit.items import build_groups
from memguard.audit.report import AuditReport
from memguard.canaries.automata import iterate_secrets
from memguard.canaries.drawing import draw_plan
from memguard.canaries.encoding import SecretEncoder
from memguard.canaries.plan import CanaryPlan
from memguard.scoring.audit_mode import audit_mode
from memguard.scoring.scorer import Scorer, Span

SECRETS: list[dict[str, Any]] = [
    {"kind": "digits", "length": 4},
    {"kind": "luhn", "digits": 5},
    {"kind": "iban", "country": "DK", "digits": 3},
    {"kind": "words", "count": 2, "words": ["car", "carpet", "pet", "blue", "bluebell", "a", "ab", "zebra"]},
    {"kind": "hex", "length": 3},
]
BUDGET = 100_000


@pytest.fixture(autouse=True)
def _small_spaces_are_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans refuse spaces in which a secret could be guessed by luck; they are the ones that can be enumerated here."""
    monkeypatch.setattr("memguard.canaries.drawing.MAX_GUESS_CHANCE", 1.0)


def config_for(secret: dict[str, Any], *, template: str = "The code is {secret}.", **exposure: Any) -> AuditConfig:
    config = config_of({"name": "one", "template": template, "secret": secret}, tiers={1: 2, 4: 2}, controls=3)
    settings = config.audit.exposure.model_copy(update={"node_budget": BUDGET} | exposure)
    return config.model_copy(update={"audit": config.audit.model_copy(update={"exposure": settings})})


def ranks_by_enumeration(model: Any, tokenizer: Any, plan: CanaryPlan, config: AuditConfig) -> dict[str, tuple[int, int]]:
    """Lowest and highest rank, within 2e-5 nats, of every secret of the plan's first format, planted ones left out.

    Scores the text of every valid secret as the tokenizer writes it.
    """
    one = plan.formats[0]
    encoder = SecretEncoder(tokenizer, plan.lead_ids, plan.tail_ids)
    planted = {canary.secret for canary in plan.canaries}
    group = build_groups(plan, tokenizer, config.audit.exposure)[0]
    start = group.canary_spans[0].start
    secrets = list(iterate_secrets(one.secret))
    encoded = encoder.encode(one, secrets, [group.canaries[0].name] * len(secrets))
    carried = [(secret, item) for secret, item in zip(secrets, encoded, strict=True) if item is not None]
    with audit_mode(model) as inner:
        found = Scorer(inner).score([Span(item.ids, start, item.end) for _, item in carried]).log_probs.tolist()
    scores = dict(zip([secret for secret, _ in carried], found, strict=True))
    others = np.array([score for secret, score in scores.items() if secret not in planted])
    ranks = {}
    for canary in group.canaries:
        own = scores[canary.secret]
        ranks[canary.id] = (1 + int((others > own + 2e-5).sum()), 1 + int((others >= own - 2e-5).sum()))
    return ranks


def check_against_enumeration(report: AuditReport, expected: dict[str, tuple[int, int]]) -> int:
    """Number of exact rows; each must agree with its enumeration, which may order near ties otherwise."""
    exact = [row for row in report.canaries if row.exposure.method == "exact" and row.id in expected]
    for row in exact:
        low, high = expected[row.id]
        assert row.rank_low is not None
        assert row.rank_high is not None
        assert low <= row.rank_high
        assert row.rank_low <= high
        assert row.exposure.p_value == pytest.approx(2.0 ** -(row.exposure.bits or 0.0))
    return len(exact)


@pytest.mark.parametrize("secret", SECRETS, ids=lambda secret: secret["kind"])
@pytest.mark.parametrize("budget", [BUDGET, 120], ids=["whole", "searched"])
def test_ranks_equal_enumeration_for_every_kind_of_space(
    secret: dict[str, Any], budget: int, tiny_model: Any, tokenizer: Any
) -> None:
    config = config_for(secret, node_budget=budget)
    plan = draw_plan(config.canaries, tokenizer)
    taught = {canary.id for canary in plan.canaries if canary.role == "canary" and canary.tier == 4}
    teach(tiny_model, plan, tokenizer, config, taught, steps=60)
    report = run_audit(tiny_model, tokenizer, plan=plan, config=config)
    assert report.status == "valid"
    found = check_against_enumeration(report, ranks_by_enumeration(tiny_model, tokenizer, plan, config))
    size = plan.formats[0].secret_space_size
    if size <= budget:
        assert found == len([canary for canary in plan.canaries if canary.format == "one"])
    else:
        assert found >= 1
    assert report.procedure.num_nodes > 0


def gpt2_like(corpus: str) -> Any:
    """Merges of digits as training found them: no two secrets are cut alike."""
    from tokenizers import trainers

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    text = corpus + " ".join(str(number * 7919 % 10_000) for number in range(3000))
    trainer = trainers.BpeTrainer(
        vocab_size=512, special_tokens=["<|end|>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    bpe.train_from_iterator([text], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token="<|end|>", eos_token="<|end|>", pad_token="<|end|>")


def test_a_small_space_that_does_not_factorise_is_listed_and_a_large_one_is_sampled_and_said_so(
    tiny_model: Any, corpus_text: str
) -> None:
    tokenizer = gpt2_like(corpus_text)
    config = config_for({"kind": "digits", "length": 4})
    plan = draw_plan(config.canaries, tokenizer)
    report = run_audit(tiny_model, tokenizer, plan=plan, config=config)
    assert check_against_enumeration(report, ranks_by_enumeration(tiny_model, tokenizer, plan, config)) == 7

    large = config_for({"kind": "digits", "length": 9})
    plan = draw_plan(large.canaries, tokenizer)
    teach(tiny_model, plan, tokenizer, large, {plan.canaries[0].id}, steps=60)
    report = run_audit(tiny_model, tokenizer, plan=plan, config=large)
    assert any("is ranked by sampling alone" in notice for notice in report.notices)
    assert {row.exposure.method for row in report.canaries} <= {"sampled", "certified"}


def test_three_digit_chunks_are_walked_as_chunks(tiny_model: Any) -> None:
    chunks = ["".join(digits) for digits in itertools.product("0123", repeat=3)]
    tokens = dict.fromkeys(["<|end|>", *chunks, *"0123456789 abcdefghijklmnopqrstuvwxyzTCP."])
    words = Tokenizer(models.WordLevel({token: index for index, token in enumerate(tokens)}, unk_token="<|end|>"))
    words.pre_tokenizer = pre_tokenizers.Split(Regex(r"\d{1,3}|."), "isolated")
    words.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<|end|>", eos_token="<|end|>")
    secret = {"kind": "alphabet", "alphabet": "0123", "length": 6}
    config = config_for(secret, node_budget=200)
    plan = draw_plan(config.canaries, tokenizer)
    taught = {canary.id for canary in plan.canaries if canary.role == "canary" and canary.tier == 4}
    teach(tiny_model, plan, tokenizer, config, taught, steps=60)
    report = run_audit(tiny_model, tokenizer, plan=plan, config=config)
    assert check_against_enumeration(report, ranks_by_enumeration(tiny_model, tokenizer, plan, config)) >= 1
    assert {row.num_tokens for row in report.canaries} == {2}


def test_each_named_canary_is_searched_behind_its_own_prefix(tiny_model: Any, tokenizer: Any) -> None:
    config = config_for({"kind": "digits", "length": 9}, template="The code of {name} is {secret}.", node_budget=5000)
    plan = draw_plan(config.canaries, tokenizer)
    taught = {canary.id for canary in plan.canaries if canary.role == "canary" and canary.tier == 4}
    teach(tiny_model, plan, tokenizer, config, taught, steps=150)
    report = run_audit(tiny_model, tokenizer, plan=plan, config=config)
    exact = {row.id for row in report.canaries if row.exposure.method == "exact"}
    assert exact & taught
    for row in report.canaries:
        if row.id in exact and row.is_greedy:
            assert row.rank_low == 1


def test_an_unmemorised_canary_that_beats_its_references_is_not_left_possible(tiny_model: Any, tokenizer: Any) -> None:
    config = config_for({"kind": "digits", "length": 9}, references=16, node_budget=20_000)
    open_, closed = 0, 0
    for seed in range(3):
        plan = draw_plan(config.canaries.model_copy(update={"seed": seed}), tokenizer)
        without = config.model_copy(
            update={
                "audit": config.audit.model_copy(update={"exposure": config.audit.exposure.model_copy(update={"exact": "off"})})
            }
        )
        open_ += sum(row.may_be_extracted for row in run_audit(tiny_model, tokenizer, plan=plan, config=without).canaries)
        report = run_audit(tiny_model, tokenizer, plan=plan, config=config)
        closed += sum(row.may_be_extracted for row in report.canaries)
        beaten = [row for row in report.canaries if row.num_references_above == 0]
        assert all((row.rank_low or 0) > 1 for row in beaten)
    assert open_ > 0
    assert closed == 0


def test_a_search_that_is_switched_off_samples(tiny_model: Any, tokenizer: Any) -> None:
    config = config_for({"kind": "digits", "length": 4}, exact="off")
    report = run_audit(tiny_model, tokenizer, plan=draw_plan(config.canaries, tokenizer), config=config)
    assert {row.exposure.method for row in report.canaries} <= {"sampled", "certified"}
    assert (report.procedure.exact, report.procedure.num_nodes) == ("off", 0)


def test_a_second_audit_of_a_run_finds_the_same_ranks(tiny_model: Any, tokenizer: Any) -> None:
    config = config_for({"kind": "luhn", "digits": 16}, node_budget=5000)
    plan = draw_plan(config.canaries, tokenizer)
    taught = {canary.id for canary in plan.canaries if canary.role == "canary" and canary.tier == 4}
    teach(tiny_model, plan, tokenizer, config, taught, steps=120)
    runner = AuditRunner(plan, tokenizer, config.audit)
    first, second = runner.run(tiny_model), runner.run(tiny_model)
    assert [(row.rank_low, row.rank_high) for row in first.canaries] == [
        (row.rank_low, row.rank_high) for row in second.canaries
    ]
    assert any(row.exposure.method == "exact" for row in first.canaries)
    assert first.notices == second.notices


@pytest.mark.slow
def test_exact_p_values_are_valid_over_many_null_plans(tiny_model: Any, tokenizer: Any) -> None:
    """Secrets the model never saw, in a space that is walked whole: p-values are uniform over ranks, so P(p <= t) = t."""
    torch.manual_seed(5)
    p_values = []
    for seed in range(60):
        config = config_for({"kind": "digits", "length": 3})
        plan = draw_plan(config.canaries.model_copy(update={"seed": seed}), tokenizer)
        report = run_audit(tiny_model, tokenizer, plan=plan, config=config)
        p_values += [row.exposure.p_value for row in report.canaries if row.role == "control"][:1]
    values = np.array(p_values, dtype=float)
    for level in (0.05, 0.2, 0.5):
        # 60 independent plans: within four standard errors of the level, from above only.
        assert (values <= level).mean() <= level + 4 * math.sqrt(level * (1 - level) / values.size)


def test_a_space_whose_longest_candidate_does_not_fit_the_model_is_not_walked(tiny_model: Any, tokenizer: Any) -> None:
    config = config_for(SECRETS[3])
    plan = draw_plan(config.canaries, tokenizer)
    groups = build_groups(plan, tokenizer, config.audit.exposure)
    longest = max(span.end for group in groups for span in (*group.canary_spans, *group.reference_spans))
    tiny_model.config.max_position_embeddings = longest
    report = run_audit(tiny_model, tokenizer, plan=plan, config=config)
    assert report.status == "valid"
    assert any(f"does not fit the model's {longest} positions" in notice for notice in report.notices)
    tiny_model.config.max_position_embeddings = 128
    assert report.procedure.num_nodes < run_audit(tiny_model, tokenizer, plan=plan, config=config).procedure.num_nodes
