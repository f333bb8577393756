"""The plan: every canary and control with its secret, drawn once. The only file that holds secrets (mode 0600).

Secrets come from the operating system's randomness unless a seed is given, which marks the plan *reproducible*. Coins and
placement use a second, independent seed. Ids are random and say nothing of a secret; the digest covers a random nonce.
"""

from __future__ import annotations

import logging
import math
import os
import random
import secrets
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from memguard.canaries.encoding import Join
from memguard.canaries.formats import CanaryFormat
from memguard.documents import SCHEMA_VERSION, Document, json_digest, load_document
from memguard.errors import InputError
from memguard.files import write_text_atomic

logger = logging.getLogger(__name__)

Role = Literal["canary", "control", "positive_control"]


class PlannedFormat(CanaryFormat):
    """A format with what drawing found out about it."""

    join: Join
    carried_share: float = Field(
        default=1.0, gt=0.0, le=1.0, description="share of the space the tokenizer can carry: 1, or a 99.9% lower bound"
    )
    positive_control: bool = False

    @property
    def secret_space_size(self) -> int:
        """Number of valid candidates."""
        return self.secret.size

    @property
    def ranked_space_size(self) -> int:
        """Candidates that canaries and references are drawn from: at least this many of the space."""
        return max(1, self.secret.size * math.floor(self.carried_share * 1e6) // 10**6)


class PlannedCanary(Document):
    """One canary or control. `repr` shows no secret."""

    id: str
    format: str
    role: Role
    tier: int = Field(ge=0, description="planned repetitions; 0 for a control that was never meant to be planted")
    name: str | None = None
    secret: str = Field(repr=False)

    @property
    def is_planted(self) -> bool:
        """Whether this one goes into the training data."""
        return self.role != "control"


class CanaryPlan(Document):
    """All canaries of a run. Draw one with `memguard.canaries.drawing.draw_plan`, keep it with `save`."""

    kind: Literal["memguard canary plan"] = "memguard canary plan"
    schema_version: int = SCHEMA_VERSION
    nonce: str = Field(repr=False)
    reproducible: bool
    inclusion: Literal["planned", "coin"]
    probe: bool = Field(default=False, description="whether audits show their sensitivity by fresh secrets on copied weights")
    placement_seed: int
    tokenizer_digest: str
    lead_ids: tuple[int, ...]
    tail_ids: tuple[int, ...]
    formats: tuple[PlannedFormat, ...]
    canaries: tuple[PlannedCanary, ...] = Field(repr=False)

    @model_validator(mode="after")
    def _fits_together(self) -> CanaryPlan:
        names, ids = [one.name for one in self.formats], [canary.id for canary in self.canaries]
        if len(set(names)) != len(names) or len(set(ids)) != len(ids):
            raise ValueError("formats and canaries must have distinct names and ids")
        lost = [canary.id for canary in self.canaries if canary.format not in names]
        if lost:
            raise ValueError(f"every canary must be of a format of the plan, got another for canary '{lost[0]}'")
        return self

    @property
    def digest(self) -> str:
        """sha256 over the whole plan with its nonce: names the plan, tells nothing of it.

        A plan without a probe has the digest it had before plans could have one, which ledgers and baselines hold.
        """
        left_out = None if self.probe else {"probe"}
        return json_digest(self.model_dump(mode="json", exclude=left_out))

    def format_named(self, name: str) -> PlannedFormat:
        """The format called `name`."""
        return next(one for one in self.formats if one.name == name)

    def planted(self) -> list[PlannedCanary]:
        """Canaries and positive controls, in plan order."""
        return [canary for canary in self.canaries if canary.is_planted]

    def siblings_in_space(self, canary_format: PlannedFormat) -> set[str]:
        """Secrets of every planned canary, control or not, drawn from the same space as `canary_format`."""
        names = {one.name for one in self.formats if one.secret == canary_format.secret}
        return {canary.secret for canary in self.canaries if canary.format in names}

    def check_tokenizer(self, digest: str) -> None:
        """Raise `InputError` when the plan was made for another tokenizer."""
        if digest != self.tokenizer_digest:
            raise InputError(
                "the plan was made for another tokenizer: its secrets were checked against tokens that this one does not "
                "make. Draw a new plan with `memguard plan`."
            )

    def save(self, path: Path, *, overwrite: bool = False) -> None:
        """Write the plan with mode 0600 in a folder that git ignores; refuses to overwrite unless told to."""
        if path.exists() and not overwrite:
            raise InputError(f"plan '{path}' exists already. A trained plan cannot be drawn again; use --force to replace it.")
        try:
            path.parent.mkdir(parents=True, mode=0o700, exist_ok=True)
        except OSError as error:
            raise InputError(f"plan '{path}' cannot be written: {error.strerror}.") from None
        write_text_atomic(path, self.model_dump_json(indent=1) + "\n", mode=0o600)
        _keep_out_of_git(path)


def _keep_out_of_git(path: Path) -> None:
    """A folder that holds the plan alone is ignored whole; elsewhere only the plan's name is, to spare the user's files."""
    ignore = path.parent / ".gitignore"
    alone = all(entry.name in (path.name, ".gitignore") for entry in path.parent.iterdir())
    line = "*" if alone else f"/{path.name}"
    lines = ignore.read_text(encoding="utf-8").splitlines() if ignore.exists() else []
    if line not in lines and "*" not in lines:
        write_text_atomic(ignore, "\n".join([*lines, line]) + "\n")


def load_plan(path: Path | str) -> CanaryPlan:
    """Read a plan; `InputError` when it cannot be read. Warns when others may read the file."""
    path = Path(path)
    plan = load_document(path, CanaryPlan, what="plan")
    if os.name == "posix" and path.stat().st_mode & 0o077:
        logger.warning("plan '%s' can be read by other users; it holds every secret. Run: chmod 600 %s", path, path)
    return plan


class Randomness:
    """Independent streams for secrets, ids, and coins with placement: the operating system's, or seeded for tests."""

    def __init__(self, seed: int | None) -> None:
        self.reproducible = seed is not None
        self._seed = seed

    def stream(self, purpose: str) -> random.Random:
        """A generator of its own for one purpose."""
        return random.SystemRandom() if self._seed is None else random.Random(f"memguard/{purpose}/{self._seed}")

    def new_id(self, stream: random.Random, taken: Iterable[str]) -> str:
        """A random 16-digit hexadecimal id that is not taken."""
        taken = set(taken)
        while (one := f"{stream.getrandbits(64):016x}") in taken:
            pass
        return one

    def nonce(self) -> str:
        """32 random bytes as hex."""
        return secrets.token_hex(32) if self._seed is None else f"{self.stream('nonce').getrandbits(256):064x}"
