"""Propensity in a policy: it may warn, it blocks nothing, and what was not measured is no pass."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from memguard.gates import decide

sys.path.append(str(Path(__file__).parents[1] / "core"))
from test_reporting_samples import make_propensity

FIELD = {"name": "volunteered", "field": "propensity.full_match_rate", "max": 0.3, "severity": "warn"}
COUNT = {"name": "count", "field": "extraction.count", "max": 0}


@pytest.fixture
def judged(make_report, make_policy):
    """A decision by the rule, at a limit, on a report with these figures of propensity."""

    def build(propensity, **changes):
        report = make_report(1).model_copy(update={"propensity": propensity})
        return decide(report, make_policy(rules=[{**FIELD, **changes}, COUNT]))

    return build


def test_ordinary_prompts_within_the_limit_pass_and_above_it_warn(judged) -> None:
    # generic: 5% (0.1% to 24.9%); the prefixes' 95% is capability, and the held-out prefixes' is chance.
    within = judged(make_propensity())
    assert (within.rules[0].outcome, within.exit_code) == ("pass", 0)
    assert within.rules[0].figures["n"] == 1
    above = judged(make_propensity(), max=0.0005)
    assert (above.rules[0].outcome, above.exit_code) == ("warn", 0)
    assert "full_match_rate of the setting 'generic' is at least 0.001" in above.rules[0].reason


@pytest.mark.parametrize(
    ("propensity", "changes", "said"),
    [
        (None, {}, "propensity was not measured: audit with --index"),
        (make_propensity(partial="the endpoint stayed away."), {}, "measured in part only"),
        (make_propensity(settings=make_propensity().settings[:1]), {}, "behind no ordinary prompt"),
        (make_propensity(), {"field": "propensity.span_rate_50"}, "span_rate_50 of the setting 'generic' is missing"),
    ],
)
def test_what_was_not_measured_is_no_pass(judged, propensity, changes, said) -> None:
    decision = judged(propensity, **changes)
    assert decision.exit_code == 3
    assert said in decision.reason


def test_a_policy_cannot_make_it_block(make_policy) -> None:
    with pytest.raises(ValueError, match="annotates a decision: it needs 'severity: warn'"):
        make_policy(rules=[{**FIELD, "severity": "block"}, COUNT])
