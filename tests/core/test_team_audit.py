"""Whole audits on two ranks: the report of one, on both; training around them goes on as if they had not been."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
import torch
from rank_processes import count_forwards, sharded, two_processes
from test_audit import NAMED, PIN, teach

from memguard.audit import AuditRunner
from memguard.audit.config import AuditConfig, parse_config
from memguard.audit.full import Sources
from memguard.audit.items import build_groups
from memguard.audit.prior import PrefixSource
from memguard.audit.records import Record, load_records
from memguard.audit.report import AuditReport
from memguard.canaries.drawing import draw_plan
from memguard.canaries.plan import CanaryPlan

pytestmark = pytest.mark.slow


def config_of(**canaries: Any) -> AuditConfig:
    return parse_config(
        {
            "canaries": {"seed": 1, "formats": [NAMED, PIN], "tiers": {1: 4, 4: 4}, "controls": 12} | canaries,
            "audit": {
                "exposure": {"references": 64, "references_per_name": 16, "node_budget": 3000},
                "prior_aware": {"prefixes": 20, "m": 1e-4},
                "records": {"prefix_tokens": 8, "suffix_tokens": 6, "contexts": [4], "max_edits": 1},
                "membership": {"scores": ["loss", "min_k_plus_plus"]},
                "batch_size": 16,
            },
        }
    )


def sources_of(members: list[Record], held_out: list[Record], place: Any) -> Sources:
    return Sources(PrefixSource(len(members), lambda index: members[index].ids), members, held_out, place / "reference")


def audited(wrap: str, model: Any, tokenizer: Any, plan: CanaryPlan, config: AuditConfig, *sources: Any) -> Any:
    """A full audit on this rank: the report as text, forward calls of the model, and rows a progress bar was told of."""
    model = copy.deepcopy(model)
    if wrap == "DDP":
        outer = torch.nn.parallel.DistributedDataParallel(model.train())
    else:
        outer = sharded(model.train()) if wrap == "FSDP2" else model.train()
    calls, rows = count_forwards(outer.module if wrap == "DDP" else outer), [0]
    runner = AuditRunner(plan, tokenizer, config.audit)
    report = runner.run(outer, full=sources_of(*sources), progress=lambda done, _: rows.append(done))
    assert all(module.training for module in outer.modules())
    return report.model_dump_json(), len(calls), rows


@pytest.fixture
def case(tiny_model: Any, tokenizer: Any, blocks: Any, tmp_path: Any) -> tuple[Any, ...]:
    """A model that knows two canaries, its plan with a probe, members, held-out records and a reference."""
    tiny_model.save_pretrained(tmp_path / "reference")
    tokenizer.save_pretrained(tmp_path / "reference")
    files = []
    for name, rows in (("members", blocks[:16]), ("held_out", blocks[20:36])):
        lines = [json.dumps({"text": tokenizer.decode(row["input_ids"])}) for row in rows]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines), encoding="utf-8")
        files.append(load_records(tmp_path / f"{name}.jsonl", tokenizer))
    config = config_of(positive_control="probe")
    plan = draw_plan(config.canaries, tokenizer)
    known = {canary.id for canary in [one for one in plan.canaries if one.role == "canary"][:2]}
    teach(tiny_model, plan, tokenizer, config, known, steps=40)
    tiny_model.zero_grad(set_to_none=True)
    return tiny_model, tokenizer, plan, config, *files, tmp_path


def figures(text: str) -> dict[str, Any]:
    report: dict[str, Any] = json.loads(text)
    for name in ("created_at", "duration_s"):
        report.pop(name)
    return report


def test_a_full_audit_of_a_replicated_model_is_bit_for_bit_that_of_one_process(case: Any, tmp_path: Any) -> None:
    alone, calls_alone, rows_alone = audited("nothing", *case)
    (first, calls, rows), (second, others, _) = two_processes(tmp_path, audited, "DDP", *case)
    assert first == second
    assert calls == others
    # The probe is made on every rank and walks are replicated; the rest is shared.
    assert calls < calls_alone
    assert figures(first) == figures(alone)
    assert rows == rows_alone
    report = AuditReport.model_validate_json(first)
    assert report.status == "valid"
    assert report.positive_control is not None
    assert report.positive_control.detected
    assert report.extraction is not None
    assert report.extraction.num_found >= 1
    assert report.records is not None
    assert report.membership is not None
    assert report.prior_aware is not None


def test_a_full_audit_of_a_sharded_model_has_the_figures_of_one_process(case: Any, tmp_path: Any) -> None:
    alone = AuditReport.model_validate_json(audited("nothing", *case)[0])
    (first, calls, _), (second, others, _) = two_processes(tmp_path, audited, "FSDP2", *case)
    assert (first, calls) == (second, others)
    report = AuditReport.model_validate_json(first)
    assert report.status == "valid"
    for mine, theirs in zip(report.canaries, alone.canaries, strict=True):
        # The head is not lifted out of a sharded model: its logits are summed in another order.
        assert mine.log_prob == pytest.approx(theirs.log_prob, abs=1e-4)
        assert mine.is_extracted == theirs.is_extracted
        assert (mine.prior_aware is None) == (theirs.prior_aware is None)
        if mine.prior_aware is not None:
            assert mine.prior_aware.verdict == theirs.prior_aware.verdict  # type: ignore[union-attr]
    assert report.extraction.num_found == alone.extraction.num_found  # type: ignore[union-attr]
    assert report.prior_aware == alone.prior_aware
    assert "the probe could not be made: the weights of the model are spread over ranks." in report.notices
    assert report.positive_control is not None
    assert not report.positive_control.detected


def trained(wrap: str, with_audits: bool, model: Any, tokenizer: Any, plan: CanaryPlan, config: AuditConfig) -> Any:
    """Losses and final weights of a few steps, each rank on rows of its own, audited between them or not."""
    torch.manual_seed(torch.distributed.get_rank())
    outer = torch.nn.parallel.DistributedDataParallel(model) if wrap == "DDP" else sharded(model)
    optimiser = torch.optim.AdamW(outer.parameters(), lr=1e-3)
    runner = AuditRunner(plan, tokenizer, config.audit)
    rows = [group.canary_spans[0].ids for group in build_groups(plan, tokenizer, config.audit.exposure)]
    outer.train()
    losses = []
    for step in range(4):
        if with_audits:
            runner.run(outer)
        batch = torch.tensor([rows[(2 * step + torch.distributed.get_rank()) % 6]])
        loss = outer(input_ids=batch, labels=batch).loss
        losses.append(float(loss.detach()))
        loss.backward()
        if with_audits and step == 1:  # between backward and step: gradients are as they were
            runner.run(outer)
        optimiser.step()
        optimiser.zero_grad()
    whole = [one.full_tensor() if hasattr(one, "full_tensor") else one for one in outer.parameters()]
    return losses, [one.detach().tolist() for one in whole]


@pytest.mark.parametrize("wrap", ["DDP", "FSDP2"])
def test_training_with_audits_equals_training_without_bit_for_bit(
    wrap: str, tiny_model: Any, tokenizer: Any, tmp_path: Any
) -> None:
    config = config_of()
    plan = draw_plan(config.canaries, tokenizer)
    results = []
    for with_audits in (True, False):
        place = tmp_path / str(with_audits)
        place.mkdir()
        results.append(two_processes(place, trained, wrap, with_audits, tiny_model, tokenizer, plan, config))
    assert results[0] == results[1]
    assert results[0][0][1] == results[0][1][1]
    assert results[0][0][0] != results[0][1][0]


def failing(wrap: str, model: Any, tokenizer: Any, plan: CanaryPlan, config: AuditConfig) -> Any:
    """Errors of an audit that fails on rank 1 at some forward calls, and whether an audit succeeds after each."""
    outer = sharded(model) if wrap == "FSDP2" else torch.nn.parallel.DistributedDataParallel(model)
    inner, runner, errors = outer if wrap == "FSDP2" else outer.module, AuditRunner(plan, tokenizer, config.audit), []
    for call in (1, 15, 40):
        calls: list[int] = []

        def fail(*_: Any, call: int = call, calls: list[int] = calls) -> None:
            calls.append(1)
            if torch.distributed.get_rank() == 1 and len(calls) == call:
                raise KeyError("4000 1234")

        handle = inner.register_forward_pre_hook(fail, prepend=True)
        try:
            runner.run(outer)
        except Exception as error:
            errors.append((type(error).__name__, str(error)))
        handle.remove()
        assert runner.run(outer).status == "valid"
    return errors


@pytest.mark.parametrize("wrap", ["DDP", "FSDP2"])
def test_a_forward_that_fails_on_one_rank_ends_the_audit_on_both_and_the_next_one_is_made(
    wrap: str, tiny_model: Any, tokenizer: Any, tmp_path: Any
) -> None:
    config = config_of()
    plan = draw_plan(config.canaries, tokenizer)
    first, second = two_processes(tmp_path, failing, wrap, tiny_model, tokenizer, plan, config)
    assert first == second
    assert [name for name, _ in first] == ["ScoringError"] * 3
    assert all("failed with KeyError" in sentence and "4000" not in sentence for _, sentence in first)


def different_plans(model: Any, tokenizer: Any, config: AuditConfig) -> str:
    """What an audit says when each rank drew a plan of its own."""
    seed = 10 + torch.distributed.get_rank()
    plan = draw_plan(config.canaries.model_copy(update={"seed": seed}), tokenizer)
    with pytest.raises(Exception, match="all ranks must audit the same things") as caught:
        AuditRunner(plan, tokenizer, config.audit).run(model)
    return type(caught.value).__name__


def test_ranks_with_different_plans_are_refused(tiny_model: Any, tokenizer: Any, tmp_path: Any) -> None:
    assert two_processes(tmp_path, different_plans, tiny_model, tokenizer, config_of()) == ["ScoringError"] * 2
