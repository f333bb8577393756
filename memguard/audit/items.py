"""What an audit scores: every planned secret and its references, encoded behind their prefix. Drawn once for a run.

A *group* is the set of candidates behind one prefix: a whole format, or one canary where the format has `{name}`.
References are drawn without replacement from the space less every planned secret, by a seed kept in the plan, so that
every audit of the plan ranks among the same ones.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from memguard.audit.config import ExposureSettings
from memguard.canaries.drawing import draw_secrets
from memguard.canaries.encoding import EncodedSecret, SecretEncoder
from memguard.canaries.plan import CanaryPlan, PlannedCanary, PlannedFormat
from memguard.errors import CanaryError
from memguard.scoring.scorer import Span


@dataclass(frozen=True)
class Group:
    """Candidates behind one prefix: planned secrets, then references."""

    format: PlannedFormat
    canaries: tuple[PlannedCanary, ...]
    canary_spans: tuple[Span, ...]
    reference_spans: tuple[Span, ...]
    num_planted_in_space: int

    @property
    def prefix_ids(self) -> tuple[int, ...]:
        """The ids before the scored span, the same for every candidate."""
        span = self.canary_spans[0]
        return span.ids[: span.start]


def reference_seed_digest(plan: CanaryPlan) -> str:
    """Names the seed that draws references, without telling it."""
    return hashlib.sha256(f"memguard/references/{plan.placement_seed}".encode()).hexdigest()[:16]


def build_groups(plan: CanaryPlan, tokenizer: Any, settings: ExposureSettings) -> list[Group]:
    """Encode every planned secret and draw its references.

    Raises:
        CanaryError: a planned secret that the tokenizer no longer writes back, or a space with too few candidates.
    """
    encoder = SecretEncoder(tokenizer, plan.lead_ids, plan.tail_ids)
    groups = []
    for one in plan.formats:
        members = [canary for canary in plan.canaries if canary.format == one.name]
        own_prefix = one.has_name
        for canaries in ([canary] for canary in members) if own_prefix else [members] if members else []:
            few = own_prefix or one.positive_control
            number = settings.references_per_name if few else settings.references
            groups.append(_build_group(plan, one, canaries, encoder, number=number))
    return groups


def encode_planted(plan: CanaryPlan, tokenizer: Any) -> dict[str, EncodedSecret]:
    """Canary id -> encoding of every planned secret that goes into the data."""
    encoder = SecretEncoder(tokenizer, plan.lead_ids, plan.tail_ids)
    encoded = {}
    for one in plan.formats:
        members = [canary for canary in plan.planted() if canary.format == one.name]
        encoded.update(_encode_members(one, members, encoder))
    return encoded


def _encode_members(one: PlannedFormat, members: Iterable[PlannedCanary], encoder: SecretEncoder) -> dict[str, EncodedSecret]:
    members = list(members)
    found = {}
    secrets, names = [member.secret for member in members], [member.name for member in members]
    for member, item in zip(members, encoder.encode(one, secrets, names), strict=True):
        if item is None:
            raise CanaryError(f"canary '{member.id}' must survive decode and encode with this tokenizer; draw a new plan.")
        found[member.id] = item
    return found


def _build_group(
    plan: CanaryPlan, one: PlannedFormat, canaries: list[PlannedCanary], encoder: SecretEncoder, *, number: int
) -> Group:
    name = canaries[0].name if one.has_name else None
    stream = random.Random(f"memguard/references/{plan.placement_seed}/{one.name}/{name or ''}")
    encoded = _encode_members(one, canaries, encoder)
    spans = [_span(encoded[canary.id], f"canary '{canary.id}'") for canary in canaries]
    references = _draw_references(plan, one, encoder, stream, name=canaries[0].name, number=number, taken=set())
    return _as_group(plan, one, canaries, spans, references)


def draw_fresh_group(
    plan: CanaryPlan,
    one: PlannedFormat,
    encoder: SecretEncoder,
    stream: random.Random,
    *,
    name: str | None,
    number: int,
    num_references: int,
) -> Group:
    """Secrets of a format that the plan does not hold, with references behind the same prefix."""
    siblings = plan.siblings_in_space(one)
    fresh = draw_secrets(one, encoder, stream, number=number, taken=siblings, name=name)
    canaries = [
        PlannedCanary(id=f"fresh-{index}", format=one.name, role="positive_control", tier=0, name=name, secret=secret)
        for index, (secret, _) in enumerate(fresh)
    ]
    spans = [_span(item, f"a fresh secret of format '{one.name}'") for _, item in fresh]
    taken = {secret for secret, _ in fresh}
    references = _draw_references(plan, one, encoder, stream, name=name, number=num_references, taken=taken)
    return _as_group(plan, one, canaries, spans, references)


def _draw_references(
    plan: CanaryPlan,
    one: PlannedFormat,
    encoder: SecretEncoder,
    stream: random.Random,
    *,
    name: str | None,
    number: int,
    taken: set[str],
) -> list[Span]:
    siblings = plan.siblings_in_space(one) | taken
    # A quarter of what is left keeps drawing without replacement quick in small spaces.
    number = max(1, min(number, (one.ranked_space_size - len(siblings)) // 4))
    drawn = draw_secrets(one, encoder, stream, number=number, taken=siblings, name=name)
    return [_span(item, f"a reference of format '{one.name}'") for _, item in drawn]


def _as_group(
    plan: CanaryPlan, one: PlannedFormat, canaries: list[PlannedCanary], spans: list[Span], references: list[Span]
) -> Group:
    together = _behind_common_prefix([*spans, *references])
    planted = len(plan.siblings_in_space(one))
    return Group(one, tuple(canaries), tuple(together[: len(canaries)]), tuple(together[len(canaries) :]), planted)


def _span(item: EncodedSecret, label: str) -> Span:
    return Span(item.ids, item.start, item.end, label)


def _behind_common_prefix(spans: list[Span]) -> list[Span]:
    """Let every span of a group start where its ids first differ from another's, at the latest at the secret.

    Matters only where a token glues template and secret together; elsewhere all spans start at the same place already.
    """
    start = min(span.start for span in spans)
    common = next((at for at in range(start) if len({span.ids[at] for span in spans}) > 1), start)
    return [replace(span, start=max(1, min(start, common))) for span in spans]
