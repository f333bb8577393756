"""The ledger: what was planned and what reached the loss, per canary id. Ids and counts only, no secret.

Written into each checkpoint as `memguard_ledger.json`. Counts follow from the schedule and the global step; `exact` is
false, with the reason, wherever that arithmetic is not proven.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from memguard.canaries.schedule import Count, Mode, When
from memguard.documents import SCHEMA_VERSION, Document, load_document
from memguard.files import write_text_atomic

LEDGER_NAME = "memguard_ledger.json"


class LedgerEntry(Document):
    """Sightings of one planted canary up to the ledger's step."""

    repetitions: int = Field(description="in force: the tier, or 1 under plant_once")
    num_insertions: int = Field(description="planned up to this step; in record mode, records among the rows to draw from")
    num_seen: int = Field(description="reached the model up to this step: counted where `verified`, else as planned")


class Ledger(Document):
    """Counts of one run at one step."""

    kind: Literal["memguard ledger"] = "memguard ledger"
    schema_version: int = SCHEMA_VERSION
    plan_digest: str
    global_step: int
    max_steps: int
    exact: bool
    notes: list[str]
    count: Count
    mode: Mode
    num_rows: int | None = Field(default=None, description="of the user's data, an epoch; null: a stream")
    rows_per_batch: int | None = Field(default=None, description="of a micro-batch over all ranks")
    accumulation: int | None = Field(default=None, description="micro-batches an optimiser step")
    schedule: When | None = Field(default=None, description="the part of the run that a total falls into; null: no schedule")
    drop_last: bool | None = Field(default=None, description="whether a short last batch is left out")
    num_ranks: int | None = Field(default=None, description="that share a batch")
    verified: bool = Field(default=False, description="whether sightings were counted in the model's forward")
    plant_once: bool
    token_share: float = Field(description="share of training tokens that are canaries")
    token_share_is_estimate: bool
    canaries: dict[str, LedgerEntry]

    def continues(self, earlier: Ledger) -> list[str]:
        """Why the counts of a run that goes on from `earlier` are not those of one run; empty when they are."""
        if earlier.plan_digest != self.plan_digest:
            return ["the run resumed from a checkpoint that was trained with another plan."]
        names = ["mode", "count", "num_rows", "rows_per_batch", "accumulation", "plant_once"]
        names += ["schedule", "drop_last", "num_ranks"]
        if self.count == "total":  # its cells are spread over the whole run
            names.append("max_steps")
        changed = [name for name in names if getattr(self, name) != getattr(earlier, name)]
        notes = [f"the run resumed with another {', '.join(changed)}: cells moved."] if changed else []
        return [*notes, *(note for note in earlier.notes if note not in notes)]

    def save(self, path: Path | str) -> None:
        """Write the ledger, whole or not at all."""
        write_text_atomic(path, self.model_dump_json(indent=1) + "\n")


def load_ledger(path: Path | str) -> Ledger:
    """Read a ledger; `InputError` when it cannot be read."""
    return load_document(path, Ledger, what="ledger")
