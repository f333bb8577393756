"""Scores of the model that training began from, kept in a file so that a resumed run can still show what training added.

`start.json` holds log-probabilities (nats) by canary id, and those of the references in their drawn order: figures and random
ids, no text. It counts only for the plan, references and settings it was made with.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import Field

from memguard.audit.items import Group, reference_seed_digest
from memguard.audit.rows import GroupScores
from memguard.canaries.plan import CanaryPlan
from memguard.documents import SCHEMA_VERSION, Document, load_document
from memguard.errors import InputError
from memguard.files import write_text_atomic

START_NAME = "start.json"


class StartGroup(Document):
    """One group of canaries that share a prefix."""

    canaries: dict[str, float] = Field(description="log-probability by canary id; nats")
    references: list[float] = Field(description="log-probabilities in the order the references were drawn in; nats")


class StartScores(Document):
    """Every score of the audit before training."""

    kind: Literal["memguard start scores"] = "memguard start scores"
    schema_version: int = SCHEMA_VERSION
    plan_digest: str
    reference_seed: str = Field(description="digest of the seed that drew the references")
    groups: list[StartGroup]


def save_start(path: Path, scored: Sequence[GroupScores], plan: CanaryPlan) -> None:
    """Write the scores before training, whole or not at all.

    Raises:
        InputError: the place cannot be written to.
        OSError: the disk is full, or fails.
    """
    groups = [
        StartGroup(
            canaries=dict(zip([one.id for one in item.group.canaries], item.canary_log_probs.tolist(), strict=True)),
            references=item.reference_log_probs.tolist(),
        )
        for item in scored
    ]
    document = StartScores(plan_digest=plan.digest, reference_seed=reference_seed_digest(plan), groups=groups)
    write_text_atomic(path, document.model_dump_json() + "\n")


def load_start(path: Path, groups: Sequence[Group], plan: CanaryPlan) -> list[GroupScores]:
    """The scores before training, for the groups of this run.

    Args:
        path: `start.json`.
        groups: of the run, as `build_groups` makes them.
        plan: of the run.

    Raises:
        InputError: no such file, or one of another plan, other references or other groups.
    """
    found = load_document(path, StartScores, what="start scores")
    if (found.plan_digest, found.reference_seed) != (plan.digest, reference_seed_digest(plan)):
        raise InputError(f"start scores '{path.name}' were made for another plan.")
    shapes = [([one.id for one in group.canaries], len(group.reference_spans)) for group in groups]
    if [(list(one.canaries), len(one.references)) for one in found.groups] != shapes:
        raise InputError(f"start scores '{path.name}' were made with other references.")
    return [
        GroupScores(
            group,
            np.array(list(one.canaries.values()), dtype=np.float64),
            np.zeros(len(one.canaries), dtype=bool),
            np.array(one.references, dtype=np.float64),
        )
        for group, one in zip(groups, found.groups, strict=True)
    ]
