"""The gate inside training: decides on every audit, may stop the run, may veto a push. It decides nothing by itself."""

from __future__ import annotations

import hashlib
from typing import Any

import torch

from memguard.audit.config import GateSettings
from memguard.audit.report import AuditReport, Decision
from memguard.errors import EvidenceError
from memguard.gates import decide, load_baseline, load_policy
from memguard.scoring.audit_mode import innermost
from memguard.scoring.heads import is_sharded


class RunGate:
    """Policy and baseline of one run, and which weights passed.

    Args:
        settings: the `gate` part of the configuration.

    Raises:
        InputError: a policy or baseline that cannot be read.
    """

    def __init__(self, settings: GateSettings) -> None:
        self.settings = settings
        policy = settings.policy
        self._policy = load_policy(policy)
        self._baseline = load_baseline(settings.baseline) if settings.baseline is not None else None
        self._num_looks = 0
        self._passed: set[str] = set()
        self._last: Decision | None = None

    def decide(self, report: AuditReport) -> Decision:
        """What `memguard gate` would decide on this report; a live model never passes."""
        return decide(report, self._policy, self._baseline)

    def stops(self, report: AuditReport) -> str | None:
        """Why training should stop after this audit, one sentence; None when it should go on.

        A rule that fails is enough, and what a checkpoint alone can show is not asked for: a live model has no file, a short
        audit makes no probe. An invalid report stops nothing. A strict policy divides its alpha by the looks so far.
        """
        if self.settings.stop_when != "blocked" or report.status != "valid":
            return None
        self._num_looks += 1
        looked = decide(report, self._policy, self._baseline, attempts=self._num_looks)
        failed = [rule for rule in looked.rules if rule.outcome == "block"]
        if not failed:
            return None
        more = f" (and {len(failed) - 1} more rules)" if len(failed) > 1 else ""
        return f"{failed[0].name}{more}: {failed[0].reason}"

    def remember(self, decision: Decision, model: Any) -> None:
        """Note a verdict, and whose weights it is about; only verdicts on a checkpoint open a push."""
        self._last = decision
        if self.settings.push != "gated" or decision.subject.kind != "checkpoint":
            return
        weights = weights_digest(model)
        if weights is not None:
            (self._passed.add if decision.outcome == "pass" else self._passed.discard)(weights)

    def check_push(self, model: Any) -> None:
        """Let weights pass that the gate passed as a checkpoint, and no others.

        Raises:
            EvidenceError: these weights did not pass; names the last decision.
        """
        if self.settings.push != "gated" or weights_digest(model) in self._passed:
            return
        last = "no audit was decided on yet" if self._last is None else f"the last decision was '{self._last.outcome}'"
        raise EvidenceError(
            f"the push is vetoed (gate.push: gated): these weights passed no gate as a checkpoint, {last}. "
            "Push weights whose saved checkpoint passed."
        )


def weights_digest(model: Any) -> str | None:
    """sha256 over names, types and bytes of the weights in memory; None where they are spread over ranks."""
    inner = innermost(model)
    if is_sharded(inner):
        return None
    digest = hashlib.sha256()
    for name, tensor in sorted(inner.state_dict().items()):
        flat = tensor.detach().cpu().contiguous()
        digest.update(f"{name} {flat.dtype} {tuple(flat.shape)}\n".encode())
        digest.update(flat.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
