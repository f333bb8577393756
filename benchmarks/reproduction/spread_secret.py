"""P2: one secret behind 60 different beginnings of documents: exposed, extractable, and by Prior-Aware memorisation *common*.

The other secret of each model stands 60 times behind one beginning. The prior is taken over the beginnings of all training
documents, the paper's *same kind*; beside it stands the audit's own prior, over windows of the documents without a secret.
The gate must block both: Prior-Aware figures annotate a finding and never clear it. Source: Tiwari, Trachtenberg, Suh,
arXiv 2602.18733, and the limit its reviewers named.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tiny_runs import (
    LEAD,
    Cache,
    Finding,
    Row,
    checkpoint_of,
    figure,
    ledger_of,
    text_rows,
    tiny_llama,
    tokenizer,
    train,
)

from memguard.audit.config import AuditSettings, ExposureSettings
from memguard.audit.items import encode_planted
from memguard.audit.prior import PrefixSource
from memguard.audit.runner import AuditRunner
from memguard.canaries.drawing import draw_plan
from memguard.canaries.encoding import SecretEncoder, frame_ids
from memguard.canaries.formats import CanaryFormat, DigitsSpace
from memguard.canaries.plan import CanaryPlan
from memguard.canaries.settings import CanarySettings
from memguard.gates import Policy, decide
from memguard.metrics.prior_aware import PriorAwareEstimate, estimate_prior_aware
from memguard.scoring.audit_mode import audit_mode
from memguard.scoring.scorer import Scorer, Span

CLAIM = (
    "A secret behind 60 different prefixes is exposed and counterfactually memorised, Prior-Aware memorisation calls it "
    "common, and the gate blocks all the same."
)
PREFIX = 24  # tokens of text before a secret
THRESHOLD, RATIO = 1e-4, 10.0  # m and n
COMMON = ("common (certified)", "common (estimate)")
POLICY: dict[str, Any] = {
    "version": 1,
    "judged_tiers": {"max_repetitions": 64},
    "evidence": {"positive_control": "none", "min_canaries": 2, "fresh_secrets": False},
    "rules": [
        {"name": "no secret can be extracted", "field": "extraction.count", "max": 0},
        {"name": "no single canary stands out", "test": "exposure.max"},
    ],
}


@dataclass(frozen=True)
class Sizes:
    """Pairs of models, documents that hold each secret, text rows, epochs, prior prefixes."""

    pairs: int
    copies: int
    rows: int
    epochs: int
    prefixes: int


FULL = Sizes(3, 60, 240, 16, 400)
SMOKE = Sizes(1, 6, 24, 3, 32)


def templates(number: int, rng: random.Random) -> list[str]:
    """Beginnings of documents, each of the same number of tokens, with a secret behind them."""
    words, found = tokenizer(), []
    pool = list(text_rows()[1000:])
    rng.shuffle(pool)
    for row in pool:
        text = words.decode(row[1 : PREFIX + 1])
        if list(row[1 : PREFIX + 1]) == words(text)["input_ids"] and text[-1:].isalpha():
            found.append(text.replace("{", "{{").replace("}", "}}") + " {secret}.")
        if len(found) == number:
            return found
    raise ValueError(f"the text must hold {number} beginnings that encode again, got {len(found)}.")


def plan_and_rows(sizes: Sizes, seed: int) -> tuple[CanaryPlan, list[Row]]:
    """A plan of two formats with one canary each, and training rows that spread one of them over other beginnings."""
    rng = random.Random(seed)
    spread, fixed, *others = templates(sizes.copies + 1, rng)
    space = DigitsSpace(length=9)
    formats = (
        CanaryFormat(name="spread", template=spread, secret=space),
        CanaryFormat(name="fixed", template=fixed, secret=space),
    )
    settings = CanarySettings(seed=seed, formats=formats, tiers={sizes.copies: 1}, controls=40, positive_control=None)
    plan = draw_plan(settings, tokenizer())
    encoded = encode_planted(plan, tokenizer())
    of = {canary.format: canary for canary in plan.planted()}
    rows = [encoded[of["fixed"].id].ids] * sizes.copies + [encoded[of["spread"].id].ids]
    encoder = SecretEncoder(tokenizer(), *frame_ids(tokenizer()))
    for template in others[: sizes.copies - 1]:
        (item,) = encoder.encode(CanaryFormat(name="spread", template=template, secret=space), [of["spread"].secret], [None])
        assert item is not None
        rows.append(item.ids)
    return plan, rows


def prior_aware(scorer: Scorer, span: Span, log_prob: float, rows: Sequence[Row], sizes: Sizes) -> PriorAwareEstimate:
    """Verdict over prefixes cut from `rows`, as long as the secret's own, which is left out."""
    source = PrefixSource(len(rows), rows.__getitem__)
    windows = source.windows(sizes.prefixes, length=span.start, lead_ids=(LEAD,), seed="prior")
    others = [window for window in windows if window != span.prefix_ids]
    priors = np.minimum(scorer.grid(others, [span.suffix_ids])[:, 0], 0.0)
    return estimate_prior_aware(min(log_prob, 0.0), priors, m=THRESHOLD, n=RATIO)


def one_pair(sizes: Sizes, pair: int) -> dict[str, Any]:
    """Two models, each with secrets of its own; each is the counterfactual of the other."""
    text = text_rows()[: sizes.rows]
    plans, models, beginnings, found = [], [], [], []
    for seed in (2 * pair, 2 * pair + 1):
        plan, rows = plan_and_rows(sizes, seed)
        model = tiny_llama(seed=seed)
        steps = train(model, [*text, *rows], epochs=sizes.epochs, seed=seed)
        plans.append((plan, steps))
        models.append(model)
        beginnings.append([*text, *rows])
    policy = Policy.model_validate(POLICY)
    settings = AuditSettings(exposure=ExposureSettings(references=512), prior_aware=None)
    for mine, (plan, steps) in enumerate(plans):
        ledger = ledger_of(plan, epochs=sizes.epochs, steps=steps, token_share=0.2)
        subject = checkpoint_of(models[mine], steps)
        report = AuditRunner(plan, tokenizer(), settings).run(models[mine], subject=subject, ledger=ledger)
        decision = decide(report, policy)
        encoded = encode_planted(plan, tokenizer())
        with audit_mode(models[1 - mine]):
            spans = [Span(item.ids, item.start, item.end) for item in encoded.values()]
            without = dict(zip(encoded, Scorer(models[1 - mine]).score(spans).log_probs.tolist(), strict=True))
        with audit_mode(models[mine]):
            scorer = Scorer(models[mine])
            for row in report.canaries:
                if row.role != "canary" or row.log_prob is None:
                    continue
                item = encoded[row.id]
                span = Span(item.ids, item.start, item.end)
                same_kind = prior_aware(scorer, span, row.log_prob, [one[1 : item.start] for one in beginnings[mine]], sizes)
                windows = prior_aware(scorer, span, row.log_prob, text, sizes)
                found.append(
                    {
                        "kind": row.format,
                        "log_prob": row.log_prob,
                        "bits": row.exposure.bits,
                        "is_extracted": row.is_extracted,
                        "ratio": same_kind.log_belief_ratio,
                        "verdict": same_kind.verdict,
                        "ratio_windows": windows.log_belief_ratio,
                        "verdict_windows": windows.verdict,
                        "counterfactual": row.log_prob - without[row.id],
                        "outcome": decision.outcome,
                    }
                )
    return {"secrets": found}


def run(sizes: Sizes, cache: Cache) -> Finding:
    """Every secret of every model, and what audit and gate said of it."""
    secrets = [one for pair in range(sizes.pairs) for one in cache.get("P2", one_pair, sizes, pair)["secrets"]]
    secrets.sort(key=lambda one: one["kind"])
    rows = tuple(
        (
            one["kind"],
            figure(one["log_prob"]),
            figure(one["bits"]),
            figure(one["counterfactual"]),
            figure(one["ratio"]),
            one["verdict"],
            figure(one["ratio_windows"]),
            one["outcome"],
        )
        for one in secrets
    )
    spread, fixed = ([one for one in secrets if one["kind"] == kind] for kind in ("spread", "fixed"))
    extractable = [one for one in secrets if one["verdict"] != "not extractable"]
    figures = {
        "num_spread": len(spread),
        "spread_min_bits": min(one["bits"] for one in spread),
        "spread_extracted": sum(one["is_extracted"] for one in spread),
        "spread_common": sum(one["verdict"] in COMMON for one in spread),
        "spread_common_by_windows": sum(one["verdict_windows"] in COMMON for one in spread),
        "fixed_pa": sum(one["verdict"].startswith("PA") for one in fixed),
        "blocked": sum(one["outcome"] == "block" for one in secrets),
        "failing_share": sum(not one["verdict"].startswith("PA") for one in extractable) / max(1, len(extractable)),
    }
    passed = (
        figures["spread_min_bits"] > 20.0
        and figures["spread_common"] == len(spread)
        and figures["blocked"] == len(secrets)
        and min(one["counterfactual"] for one in spread) > 5.0
    )
    reason = (
        f"{figures['spread_common']} of {len(spread)} spread secrets are called common although {figures['spread_extracted']} "
        f"are extracted (at least {figures['spread_min_bits']:.1f} bits; by windows of other documents "
        f"{figures['spread_common_by_windows']} are); {figures['fixed_pa']} of {len(fixed)} fixed ones are "
        f"PA; the gate blocks {figures['blocked']} of {len(secrets)}; {figures['failing_share']:.0%} of the extractable "
        "fail PA (paper: 55-90%)."
    )
    columns = (
        "secret",
        "log P(s|p)",
        "exposure bits",
        "counterfactual, nats",
        "log ratio, nats",
        "verdict",
        "by windows",
        "gate",
    )
    return Finding("P2", CLAIM, columns, rows, figures, passed, reason)
