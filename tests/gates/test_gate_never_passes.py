"""Whatever single figure is lost from a report, the gate does not pass it."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memguard.gates import decide

FLOATS = ["log_prob", "exposure__bits", "exposure__low_bits", "exposure__high_bits", "exposure__p_value"]
RANKS = ["rank_low", "rank_high"]
LOST = st.one_of(
    st.tuples(st.sampled_from(FLOATS), st.sampled_from([None, math.nan, math.inf, -math.inf])),
    st.tuples(st.sampled_from(RANKS), st.none()),
)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(index=st.integers(0, 89), lost=LOST)
def test_a_row_without_one_of_its_figures_never_passes(report, policy, baseline, change_row, index, lost):
    decision = decide(change_row(report, report.canaries[index].id, **{lost[0]: lost[1]}), policy, baseline)
    assert decision.outcome == "invalid"
    assert decision.exit_code == 3


@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    fields=st.dictionaries(
        st.sampled_from(["subject__digest", "ledger__num_seen", "positive_control__best_p_value"]),
        st.none(),
        min_size=1,
    ),
    live=st.booleans(),
)
def test_a_report_without_its_bindings_never_passes(report, policy, baseline, change, fields, live):
    broken = change(report, **fields, **({"subject__kind": "live"} if live else {}))
    assert decide(broken, policy, baseline).exit_code == 3


@settings(max_examples=30, deadline=None, derandomize=True)
@given(data=st.data())
def test_a_report_that_lost_rows_never_passes(report, policy, baseline, change, data):
    kept = data.draw(st.lists(st.sampled_from(report.canaries), max_size=89, unique_by=lambda row: row.id))
    assert decide(change(report, canaries=kept), policy, baseline).exit_code == 3


@pytest.mark.parametrize("field", ["formats", "canaries", "controls"])
def test_an_emptied_report_never_passes(report, policy, baseline, change, field):
    assert decide(change(report, **{field: []}), policy, baseline).exit_code == 3


@pytest.mark.parametrize("field", ["log_prob", "exposure__p_value"])
def test_a_baseline_without_a_score_does_not_compare(report, policy, make_baseline, change_row, make_report, field):
    broken = make_baseline(change_row(make_report(2), "card-4x-0", **{field: math.nan}))
    decision = decide(report, policy, broken)
    assert decision.exit_code == 3
    assert "no usable score for 'card-4x-0'" in decision.rules[-1].reason
