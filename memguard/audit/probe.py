"""The positive control: could memorisation be seen at all in this checkpoint?

Copies of the trainable weights take a few plain optimiser steps on two fresh secrets a format; the model is audited with
them by the same path, then given its own weights back. The weights themselves are never stepped: gradients go to the copies
alone, so that hooks, optimisers and accumulated gradients of a training run notice nothing. With several ranks each makes
its own, out of step, and that of rank 0 counts; weights that are spread over ranks are not copied.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call

from memguard.audit.items import Group, draw_fresh_group
from memguard.audit.report import PositiveControl
from memguard.canaries.encoding import SecretEncoder
from memguard.canaries.plan import CanaryPlan
from memguard.metrics.exposure import estimate_exposure
from memguard.scoring.forward import pad_right
from memguard.scoring.heads import is_sharded
from memguard.scoring.scorer import Scorer, Span

NUM_SECRETS = 2  # a format
NUM_REFERENCES = 256  # a learnt secret is ranked by the bound of the mass; references only keep the path the same
STEPS_A_RATE = 25
RATES = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2)  # Adam; the first that shows memorisation ends the probe
MAX_WEIGHTS = 2**28  # copied, with two moments of Adam each: 3 GiB of float32, whatever the model's size
ENOUGH = 0.05  # nats a token: learnt, so further steps would add nothing
DETECTED_P = 1e-3

Weights = dict[str, Tensor]


def run_probe(
    model: Any, plan: CanaryPlan, tokenizer: Any, *, batch_size: int | None, tolerance: float
) -> tuple[PositiveControl, str | None]:
    """Whether two fresh secrets a format are seen once they were learnt, and a sentence where the probe could not be made.

    Args:
        model: the innermost module, in audit mode; its weights are those it had when this returns, also on an error.
        plan: the canaries; none of their secrets is used.
        tokenizer: of the plan.
        batch_size: rows a forward pass at most.
        tolerance: scores closer than this tie; nats.
    """
    if is_sharded(model):
        return _result(0, None), "the probe could not be made: the weights of the model are spread over ranks."
    groups = _fresh_groups(plan, tokenizer)
    spans = [span for group in groups for span in group.canary_spans]
    best: float | None = None
    try:
        for only_trained in (True, False):  # an adapter may be too small to learn; the path that sees is the same
            weights = _copies(model, only_trained=only_trained)
            for rate in RATES if weights else ():
                _learn(model, weights, spans, rate)
                with _swapped(model, weights):
                    best = _best_p_value(model, groups, batch_size, tolerance)
                if best * len(spans) <= DETECTED_P:
                    return _result(len(spans), best), None
    except Exception as error:
        begun = "could not be made" if best is None else "ended before its secrets were learnt"
        return _result(len(spans) if best is not None else 0, best), f"the probe {begun}: it raised {type(error).__name__}."
    if best is None:
        return _result(0, None), "the probe could not be made: no weight of the model is small enough to be copied."
    return _result(len(spans), best), None


def _result(n: int, best: float | None) -> PositiveControl:
    return PositiveControl(
        kind="probe",
        n=n,
        mean_num_seen=None,
        best_p_value=best,
        detected=best is not None and best * n <= DETECTED_P,
    )


def _fresh_groups(plan: CanaryPlan, tokenizer: Any) -> list[Group]:
    """Secrets that nobody planned, each behind a prefix as its format has it."""
    encoder = SecretEncoder(tokenizer, plan.lead_ids, plan.tail_ids)
    groups = []
    for one in plan.formats:
        if one.positive_control:
            continue
        names: list[str | None] = [None]
        if one.has_name:  # those of controls first: nothing was ever trained behind them
            members = sorted((c for c in plan.canaries if c.format == one.name), key=lambda canary: canary.is_planted)
            names = [canary.name for canary in members[:NUM_SECRETS]]
        stream = random.Random(f"memguard/probe/{plan.placement_seed}/{one.name}")
        for name in names:
            number = 1 if one.has_name else NUM_SECRETS
            groups.append(draw_fresh_group(plan, one, encoder, stream, name=name, number=number, num_references=NUM_REFERENCES))
    return groups


def _copies(model: Any, *, only_trained: bool) -> Weights:
    """Copies of the weights that training moves, or of all: the last ones, as many as fit; one that does not is left out."""
    named = [(name, one) for name, one in model.named_parameters() if one.is_floating_point()]
    trained = [(name, one) for name, one in named if one.requires_grad]
    if not only_trained and len(trained) in (0, len(named)):
        return {}  # the first try took them all
    copied: Weights = {}
    room = MAX_WEIGHTS
    for name, one in reversed((trained or named) if only_trained else named):
        if one.numel() <= room:
            copied[name] = one.detach().clone().requires_grad_(True)
            room -= one.numel()
    return copied


def _learn(model: Any, weights: Weights, spans: Sequence[Span], rate: float) -> None:
    """A few Adam steps of the copies on the loss of the secrets' tokens."""
    optimiser = torch.optim.Adam(list(weights.values()), lr=rate)
    ids, mask = pad_right([span.ids[: span.end] for span in spans], next(iter(weights.values())).device)
    places = torch.arange(1, ids.shape[1], device=ids.device)[None]
    first = torch.tensor([span.start for span in spans], device=ids.device)[:, None]
    is_secret = (places >= first) & mask[:, 1:].bool()
    with torch.enable_grad():
        for _ in range(STEPS_A_RATE):
            out = functional_call(model, weights, args=(), kwargs={"input_ids": ids, "attention_mask": mask})
            logits = out.logits[:, -ids.shape[1] :][:, :-1]  # virtual tokens of a prompt adapter stand before
            loss = torch.nn.functional.cross_entropy(logits[is_secret].float(), ids[:, 1:][is_secret])
            if float(loss.detach()) < ENOUGH:
                return
            optimiser.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimiser.step()
            torch.clear_autocast_cache()  # an autocast around the audit would go on with the weights before the step


@contextlib.contextmanager
def _swapped(model: Any, weights: Weights) -> Iterator[None]:
    """The model with the copies in place of its own weights; those come back, also on an error."""
    own = {name: one for name, one in model.named_parameters() if name in weights}
    held = {name: one.data for name, one in own.items()}
    try:
        for name, one in own.items():
            one.data = weights[name].detach()
        torch.clear_autocast_cache()  # it keeps casts by tensor, and these tensors changed what they hold
        yield
    finally:
        for name, one in own.items():
            one.data = held[name]
        torch.clear_autocast_cache()


def _best_p_value(model: Any, groups: Sequence[Group], batch_size: int | None, tolerance: float) -> float:
    """The smallest p-value of a fresh secret among the references behind its prefix."""
    scorer = Scorer(model, batch_size=batch_size)
    spans = [span for group in groups for span in (*group.canary_spans, *group.reference_spans)]
    scores = scorer.score(spans).log_probs
    first, p_values = 0, []
    for group in groups:
        middle = first + len(group.canary_spans)
        last = middle + len(group.reference_spans)
        space = group.format.ranked_space_size - group.num_planted_in_space - len(group.canaries) + 1
        for index in range(first, middle):
            others = [float(scores[other]) for other in range(first, middle) if other != index]
            found = estimate_exposure(
                float(scores[index]),
                scores[middle:last],
                secret_space_size=space,
                sibling_log_probs=others,
                tolerance=tolerance,
            )
            p_values.append(found.p_value)
        first = last
    return min(p_values)
