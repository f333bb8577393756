"""The rule `privacy.stated_epsilon`: does the audit refute the guarantee that the run states?

Not refuting it proves nothing: with r guesses no audit shows more than its cap. A comparison counts only where canaries
passed through the DP sampler as records do. Source: statistics specification, section 6.
"""

from __future__ import annotations

from memguard.audit.report import AuditReport
from memguard.gates.evidence import Figures
from memguard.gates.judged import finite
from memguard.gates.measured import Measured, Unmeasured
from memguard.metrics.privacy import num_guesses_needed


def measure_stated_epsilon(report: AuditReport, *, share: float) -> Measured | Unmeasured:
    """The p-value of the stated guarantee, or why there is none.

    Args:
        report: the audit.
        share: of alpha, at which the rule would fire.
    """
    found = report.privacy
    if found is None:
        return Unmeasured(
            "test",
            "invalid",
            "no coins were thrown (inclusion: coin), so nothing can be held against the guarantee",
        )
    figures = finite(found.p_value, found.min_attainable_p)
    if found.stated_epsilon is None or len(figures) < 2:
        return Unmeasured("test", "invalid", "the run states no epsilon: write dp: {epsilon, delta} in memguard.yaml")
    if not found.is_comparable:
        reason = "the bound may not be held against the stated epsilon: canaries did not enter as records before the DP sampler"
        return Unmeasured("test", "invalid", reason)
    p_value, least = figures
    shown: Figures = {
        "epsilon_lower_bound": found.epsilon_lower_bound,
        "cap": found.cap,
        "stated_epsilon": found.stated_epsilon,
        "delta": found.delta,
        "num_correct": found.num_correct,
    }
    coins = found.num_coins / found.num_guesses
    needed = num_guesses_needed(
        found.stated_epsilon, significance=share, delta=found.delta, coins_per_guess=coins, repetitions=found.repetitions
    )
    return Measured(
        p_value=p_value,
        min_attainable_p=least,
        n=found.num_guesses,
        finding=f"{found.num_correct} of {found.num_guesses} guesses were right; epsilon {found.stated_epsilon:g} is stated "
        f"and at least {found.epsilon_lower_bound:.2f} was shown, of at most {found.cap:.2f}",
        needed=None if needed is None else f"{needed} guesses",
        sees=None,
        detectable_bits=None,
        canaries=[],
        figures=shown,
    )
