"""What could not have been seen is no pass: rules out of reach, canaries out of training, a baseline that is no other run."""

from __future__ import annotations

import math
import re
import threading
from pathlib import Path

import pytest

from memguard.documents import document_digest
from memguard.errors import InputError
from memguard.gates import decide, load_baseline
from memguard.gates.baseline import AcceptedRun, Baseline
from memguard.gates.commands import gate_report

BASELINE = {"name": "b", "test": "exposure.against_baseline"}
BITS = {"name": "bits", "field": "exposure.bits", "each": "canary", "max": 20}


def as_bare(report) -> Baseline:
    """A report that nobody accepted, as a baseline."""
    return Baseline(runs=[AcceptedRun(report=report, report_digest=document_digest(report))])


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        ({"name": "n", "field": "extraction.count", "max": 48}, "48 judged canaries, limit 48"),
        ({**BITS, "max": 60}, r"a secret known to the letter has 49\.83 bits here, limit 60"),
        ({"name": "t", "field": "exposure.mean_bits", "each": "tier", "max": 50}, "limit 50"),
    ],
)
def test_a_limit_that_no_memorised_canary_could_exceed_is_no_evidence(make_report, make_policy, rule, said) -> None:
    known = make_report(1, memorised={f"card-1x-{index}": -0.01 for index in range(12)})
    decision = decide(known, make_policy(rules=[rule]))
    assert (decision.exit_code, decision.rules[0].outcome) == (3, "insufficient evidence")
    assert "this rule cannot fire" in decision.reason
    assert re.search(said, decision.reason)
    warned = decide(known, make_policy(rules=[{**rule, "severity": "warn"}, {"name": "p", "test": "exposure.pooled"}]))
    assert warned.rules[0].outcome == "warn"


def test_small_spaces_alone_put_the_limit_of_20_bits_out_of_reach(make_report, make_format, make_policy) -> None:
    pins = make_report(1, formats=[make_format("pin", 10_000, False, 128)], memorised={"pin-1x-0": -0.01})
    result = decide(pins, make_policy(rules=[BITS])).rules[0]
    assert result.outcome == "insufficient evidence"
    assert f"{math.log2(10_000):.4g} bits here, limit 20; a larger secret space" in result.reason


@pytest.mark.parametrize("comparable", ["plan", "design"])
def test_a_tolerance_or_a_baseline_so_high_that_no_rise_could_show_is_no_evidence(
    make_report, make_policy, make_baseline, change, comparable
) -> None:
    def other(seed, shift):
        found = make_report(seed, shift=shift)
        return change(found, plan__digest="a" * 64) if comparable == "design" else found

    risen, quiet = make_report(1, shift=8.0), other(2, 0.0)
    lax = make_policy(rules=[{**BASELINE, "tolerance_bits": 50.0}], comparable=comparable)
    decision = decide(risen, lax, make_baseline(quiet))
    assert (decision.exit_code, decision.rules[0].outcome) == (3, "insufficient evidence")
    assert "a tolerance well below the" in decision.reason
    at_cap = decide(
        make_report(1, shift=30.0), make_policy(rules=[BASELINE], comparable=comparable), make_baseline(other(2, 30.0))
    )
    assert (at_cap.exit_code, at_cap.rules[0].outcome) == (3, "insufficient evidence")


@pytest.mark.parametrize("comparable", ["plan", "design"])
def test_a_candidate_that_lies_well_below_a_memorising_baseline_passes_all_the_same(
    make_report, make_policy, make_baseline, change, comparable
) -> None:
    old = make_report(2, shift=30.0)
    old = change(old, plan__digest="a" * 64) if comparable == "design" else old
    decision = decide(make_report(1), make_policy(rules=[BASELINE], comparable=comparable), make_baseline(old))
    assert (decision.exit_code, decision.rules[0].outcome) == (0, "pass")
    assert decision.rules[0].figures["statistic"] < -4.0


def test_a_selected_tier_that_training_never_reached_is_no_evidence(make_report, make_policy, change_row) -> None:
    report = make_report(1)
    unseen = report
    for row in report.canaries:
        if row.role == "canary" and row.repetitions == 4:
            unseen = change_row(unseen, row.id, num_seen=0)
    only = {"name": "four", "field": "exposure.bits", "each": "canary", "max": 20, "select": {"tiers": [4]}}
    lowered = make_policy(rules=[only], judged_tiers={"max_repetitions": 1}, evidence={"min_canaries": 1})
    assert decide(report, lowered).rules[0].outcome in ("pass", "not shown")
    decision = decide(unseen, lowered)
    assert decision.exit_code == 3
    assert "none of the canaries that the rule selects reached the loss" in decision.reason


def test_one_selected_canary_that_training_never_reached_is_no_evidence_either(make_report, make_policy, change_row) -> None:
    unseen = change_row(make_report(1), "card-4x-3", num_seen=0)
    only = {"name": "four", "field": "exposure.bits", "each": "canary", "max": 40, "select": {"tiers": [4]}}
    policy = make_policy(rules=[only], judged_tiers={"max_repetitions": 1}, evidence={"min_canaries": 1})
    decision = decide(unseen, policy)
    assert decision.exit_code == 3
    assert "1 of 48 judged canaries that were due never reached the loss: 'card-4x-3'" in decision.reason


@pytest.mark.parametrize("rule", [BASELINE, {"name": "i", "test": "exposure.improves_on_baseline", "bits": 1.0}])
def test_a_report_is_no_baseline_of_itself_until_somebody_accepts_it(make_report, make_policy, make_baseline, rule) -> None:
    report, policy = make_report(1, shift=8.0), make_policy(rules=[rule, {"name": "n", "field": "extraction.count", "max": 0}])
    decision = decide(report, policy, as_bare(report))
    assert decision.exit_code == 3
    assert "the baseline is this very report, which nobody accepted" in decision.reason
    assert "this very report" not in decide(report, policy, make_baseline(report)).reason
    assert "this very report" not in decide(report, policy, as_bare(make_report(2, shift=8.0))).reason


@pytest.mark.parametrize(
    ("update", "said"),
    [
        ({"repetitions": 16}, "the canaries were to be repeated otherwise"),
        ({"count": "total"}, r"ledger\.count"),
        ({"mode": "record"}, r"ledger\.mode"),
        ({"plant_once": True}, r"ledger\.plant_once"),
    ],
)
def test_a_run_that_planted_otherwise_is_compared_with_and_said_to_be_so(
    make_report, make_policy, make_baseline, change, change_row, update, said
) -> None:
    old = make_report(2)
    field, value = next(iter(update.items()))
    old = change_row(old, "card-1x-0", **update) if field == "repetitions" else change(old, **{f"ledger__{field}": value})
    result = decide(make_report(1), make_policy(rules=[BASELINE]), make_baseline(old)).rules[0]
    assert result.outcome == "pass"
    assert "the baseline is not of the same planting" in result.reason
    assert re.search(said, result.reason)
    alike = decide(make_report(1), make_policy(rules=[BASELINE]), make_baseline(make_report(2))).rules[0]
    assert "planting" not in alike.reason


def test_what_a_waiver_leaves_over_is_still_not_shown_and_strict_stops_at_it(make_report, make_policy) -> None:
    report = make_report(1, memorised={"pin-1x-5": -0.1})
    waiver = {"rule": "bits", "canary": "pin-1x-5", "owner": "jane", "reason": "known", "expires": "2099-01-01"}
    lax = decide(report, make_policy(rules=[BITS], waivers=[waiver]))
    assert (lax.rules[0].outcome, lax.exit_code) == ("not shown", 0)
    assert "waived for canary 'pin-1x-5' by jane" in lax.rules[0].reason
    assert decide(report, make_policy(rules=[BITS], waivers=[waiver], strict=True)).exit_code == 3


@pytest.mark.parametrize(
    ("path", "value"),
    [("ledger__token_share", -1.0), ("ledger__token_share", 1.5), ("ledger__token_share", math.nan), ("start_test__n", 0)],
)
def test_a_figure_that_cannot_be_is_no_evidence(report, make_policy, baseline, change, path, value) -> None:
    rules = [{"name": "share", "field": "ledger.token_share", "max": 0.5}, BASELINE]
    assert decide(report, make_policy(rules=rules), baseline).exit_code == 0
    assert decide(change(report, **{path: value}), make_policy(rules=rules), baseline).exit_code == 3


# -- files


@pytest.fixture
def place(tmp_path, make_report) -> Path:
    for index in range(4):
        (tmp_path / f"r{index}").mkdir()
        make_report(10 + index).save(tmp_path / f"r{index}" / "report.json")
    make_report(3, shift=8.0).save(tmp_path / "risen.json")
    text = (
        "version: 1\nrules:\n  - {name: b, test: exposure.against_baseline}\n  - {name: p, field: extraction.count, max: 0}\n"
    )
    (tmp_path / "p.yaml").write_text(text, encoding="utf-8")
    return tmp_path


def accepted(place: Path, name: str, **options) -> None:
    gate_report(place / name, policy=place / "p.yaml", accept=place / "baseline.json", by="jane", reason="r", **options)


def test_a_report_joins_a_baseline_only_after_it_was_compared_with_that_one(place) -> None:
    accepted(place, "r0/report.json")
    with pytest.raises(InputError, match="compares with that one: leave --baseline out"):
        accepted(place, "risen.json", baseline=place / "risen.json")
    assert len(load_baseline(place / "baseline.json").runs) == 1
    accepted(place, "r1/report.json", baseline=place / "r0" / ".." / "baseline.json")
    assert len(load_baseline(place / "baseline.json").runs) == 2


def test_four_who_accept_at_once_lose_no_run(place) -> None:
    threads = [threading.Thread(target=accepted, args=(place, f"r{index}/report.json")) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(load_baseline(place / "baseline.json").runs) == 4


@pytest.mark.parametrize("output", ["p.yaml", "r0/report.json", "r0/../r0/report.json", "base.json"])
def test_a_decision_never_takes_the_place_of_what_it_read(place, make_report, output) -> None:
    make_report(2).save(place / "base.json")
    before = (place / output).read_bytes()
    with pytest.raises(InputError, match="must not be written over the report, the policy or the baseline"):
        gate_report(place / "r0" / "report.json", policy=place / "p.yaml", baseline=place / "base.json", output=place / output)
    assert (place / output).read_bytes() == before
