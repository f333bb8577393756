"""Heads are lifted out only where they are read rightly, and everything is put back."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from oracles import span_log_prob
from tiny_models import FAMILIES, tiny_family

from memguard.scoring.audit_mode import audit_mode
from memguard.scoring.forward import CausalModel
from memguard.scoring.heads import Head, Unreadable, lifted, read_head
from memguard.scoring.scorer import Scorer, Span


def spans_of(number: int, *, vocabulary: int = 517, seed: int = 0) -> list[Span]:
    rng = random.Random(seed)
    rows = [tuple(rng.randrange(vocabulary) for _ in range(rng.randrange(4, 24))) for _ in range(number)]
    return [Span(row, rng.randrange(1, len(row) - 1), len(row)) for row in rows]


def scores_match(model: Any, oracle: Any, scorer: Scorer, *, abs_tolerance: float = 2e-4) -> None:
    spans = spans_of(10)
    expected = [span_log_prob(oracle, span.ids, span.start, span.end) for span in spans]
    with audit_mode(model):
        assert scorer.score(spans).log_probs == pytest.approx(expected, abs=abs_tolerance)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_head_of_every_family_is_fused_and_gives_its_own_logits(name: str) -> None:
    model = tiny_family(name)
    scorer = Scorer(model)
    scores_match(model, model, scorer)
    assert scorer.model.is_fused
    assert scorer.notices == []


def test_a_lifted_head_makes_no_logits_and_is_put_back_after_an_exception() -> None:
    model = tiny_family("llama").eval()
    head = read_head(model)
    assert isinstance(head, Head)
    ids = torch.arange(6)[None]
    before = model(ids).logits

    def interrupted() -> None:
        with lifted(head) as caught:
            assert model(ids).logits.shape == (1, 6, 1)
            assert caught.take().shape == (1, 6, 32)
            raise KeyError

    with pytest.raises(KeyError):
        interrupted()
    assert "forward" not in model.lm_head.__dict__
    assert torch.equal(model(ids).logits, before)


def test_a_forward_patched_on_the_head_is_put_back_too() -> None:
    model = tiny_family("llama").eval()
    original = model.lm_head.forward
    model.lm_head.forward = original
    head = read_head(model)
    assert isinstance(head, Head)
    with lifted(head):
        pass
    assert model.lm_head.__dict__["forward"] == original


PEFT_WARNS = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft on this transformers


def adapted(**settings: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    model = tiny_family("phi")  # an untied head with a bias
    torch.nn.init.normal_(model.lm_head.bias)
    wrapped = get_peft_model(model, LoraConfig(r=3, lora_alpha=7, init_lora_weights=False, **settings))
    return wrapped.eval()


@PEFT_WARNS
def test_low_rank_adapters_on_the_head_are_read_as_further_columns() -> None:
    model = adapted(target_modules=["lm_head", "q_proj"])
    scorer = Scorer(model)
    scores_match(model, model, scorer)
    assert scorer.model.is_fused
    with audit_mode(model), model.disable_adapter():
        scores_match(model, model, Scorer(model))


@PEFT_WARNS
def test_a_head_that_is_trained_whole_beside_adapters_is_the_one_read() -> None:
    model = adapted(target_modules=["q_proj"], modules_to_save=["lm_head"])
    with torch.no_grad():
        read = read_head(model)
        assert isinstance(read, Head)
        read.module.weight.mul_(3.0)
    scorer = Scorer(model)
    scores_match(model, model, scorer)
    assert scorer.model.is_fused


@PEFT_WARNS
def test_adapters_that_are_no_plain_product_leave_the_head_to_the_model() -> None:
    model = adapted(target_modules=["lm_head"], use_dora=True)
    scorer = Scorer(model)
    scores_match(model, model, scorer)
    assert not scorer.model.is_fused
    assert "not a plain low-rank product" in scorer.notices[0]


class Odd(torch.nn.Module):
    """A plain module with `get_output_embeddings`, whose logits may be changed after the head."""

    def __init__(self, change: Any = None, *, head: torch.nn.Module | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = torch.nn.Embedding(517, 24)
        self.mix = torch.nn.GRU(24, 24, batch_first=True)
        self.head = head or torch.nn.Linear(24, 517)
        self.change = change

    def get_output_embeddings(self) -> torch.nn.Module:
        return self.head

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> Any:
        hidden, _ = self.mix(self.embed(input_ids))
        logits = self.head(hidden)
        return SimpleNamespace(logits=logits if self.change is None else self.change(logits))


def test_a_plain_module_is_fused() -> None:
    model = Odd()
    scorer = Scorer(model)
    scores_match(model, model, scorer)
    assert scorer.model.is_fused


@pytest.mark.parametrize(
    "change",
    [lambda z: z * 0.5, lambda z: z - z[..., 3:4], lambda z: 4 * torch.tanh(z / 4), lambda z: z.sort(-1).values],
    ids=["scale", "shift", "cap", "order"],
)
def test_logits_changed_after_the_head_are_noticed_and_the_model_runs_its_own(change: Any) -> None:
    model = Odd(change)
    with torch.no_grad():
        model.head.weight.mul_(20)
    scorer = Scorer(model)
    spans = spans_of(6)
    with audit_mode(model):
        got = scorer.score(spans).log_probs
        logits = [model(torch.tensor([span.ids]), None).logits[0].double().log_softmax(-1) for span in spans]
    expected = [
        sum(float(rows[place - 1, span.ids[place]]) for place in range(span.start, span.end))
        for rows, span in zip(logits, spans, strict=True)
    ]
    assert got == pytest.approx(np.array(expected), abs=2e-4)
    assert not scorer.model.is_fused
    assert "the head is run by the model itself" in scorer.notices[0]


@pytest.mark.parametrize(
    ("head", "reason"),
    [
        (torch.nn.Sequential(torch.nn.Linear(24, 517)), "it is a Sequential"),
        (torch.nn.Linear(24, 517, device="meta"), "kept elsewhere"),
    ],
)
def test_heads_that_cannot_be_read_say_why(head: torch.nn.Module, reason: str) -> None:
    read = read_head(Odd(head=head))
    assert isinstance(read, Unreadable)
    assert reason in read.reason


def test_a_head_with_hooks_of_its_own_is_left_alone() -> None:
    model = tiny_family("llama")
    model.lm_head.register_forward_hook(lambda *_: None)
    read = read_head(model)
    assert isinstance(read, Unreadable)
    assert "hooks" in read.reason


def test_sharded_models_and_models_without_output_embeddings_are_left_alone() -> None:
    class FullyShardedDataParallel(torch.nn.Module):
        pass

    sharded = torch.nn.Sequential(FullyShardedDataParallel())
    assert isinstance(read_head(sharded), Unreadable)
    assert isinstance(read_head(torch.nn.Linear(2, 2)), Unreadable)


def test_real_ddp_is_fused_and_real_fsdp_runs_its_own_head(tmp_path: Path) -> None:
    program = Path(__file__).with_name("wrapped_models.py")
    done = subprocess.run([sys.executable, str(program), str(tmp_path / "rendezvous")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.strip().splitlines()[-1])
    assert all(one["difference"] < 1e-4 for one in found.values())
    assert found["ddp"] == {"difference": found["ddp"]["difference"], "is_fused": True, "notices": []}
    assert not found["fsdp2"]["is_fused"]
    assert "the model is sharded" in found["fsdp2"]["notices"][0]


def test_a_forward_that_swallows_logits_while_it_trains_is_scored_in_eval_mode() -> None:
    model = tiny_family("llama").train()
    plain = model.forward

    def fused_loss(*args: Any, **options: Any) -> Any:
        out = plain(*args, **options)
        if model.training:
            out.logits = None
        return out

    model.forward = fused_loss
    with audit_mode(model) as inner:
        scorer = Scorer(inner)
        scorer.score(spans_of(4))
    assert scorer.model.is_fused
    assert model.training


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of the patched forward's own argument names
def test_a_liger_patched_model_is_fused_and_scored_rightly() -> None:
    liger = pytest.importorskip("liger_kernel.transformers", exc_type=ImportError)
    model = tiny_family("llama")
    expected_model = tiny_family("llama")
    liger.apply_liger_kernel_to_llama(
        rope=False, rms_norm=False, swiglu=False, cross_entropy=False, fused_linear_cross_entropy=True, model=model
    )
    scorer = Scorer(model)
    scores_match(model, expected_model, scorer)


def test_a_model_under_bf16_autocast_stays_fused() -> None:
    model = tiny_family("llama")
    plain = model.forward

    def autocast(*args: Any, **options: Any) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = plain(*args, **options)
        out.logits = out.logits.float()
        return out

    model.forward = autocast
    with audit_mode(model) as inner:
        causal = CausalModel(inner)
        causal.check([span.ids for span in spans_of(3)])
    assert causal.is_fused
    assert causal.can_branch()


def test_one_row_of_nan_behind_a_cache_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    differences = iter([0.0, float("nan"), 0.0])
    monkeypatch.setattr(CausalModel, "_branch_difference", lambda *_: next(differences))
    with audit_mode(tiny_family("llama")) as inner:
        causal = CausalModel(inner)
        causal.check([(1, 2, 3, 4)] * 3)
    assert not causal.can_branch()
    assert "prefixes are not shared" in causal.notices[0]


def test_roads_that_cannot_be_checked_are_not_taken_and_say_so() -> None:
    with audit_mode(tiny_family("llama")) as inner:
        causal = CausalModel(inner)
        causal.check([(1, 2)])
    assert not causal.can_branch()
    assert "fewer than 3 tokens" in causal.notices[0]
    with audit_mode(Odd()) as inner:
        plain = CausalModel(inner)
        plain.check([(1, 2, 3, 4)])
    assert not plain.can_branch()
    assert "knows no cache" in plain.notices[0]


def test_columns_that_a_model_masks_out_do_not_widen_what_passes() -> None:
    def change(logits: torch.Tensor) -> torch.Tensor:
        return torch.where(torch.arange(logits.shape[-1]) == 3, torch.finfo(torch.float32).min, logits * 0.9)

    model = Odd(change)
    with torch.no_grad():
        model.head.weight.mul_(20)
    with audit_mode(model):
        causal = CausalModel(model)
        causal.check([span.ids for span in spans_of(3)])
    assert not causal.is_fused


def test_a_model_compiled_in_place_is_scored_uncompiled_and_stays_compiled() -> None:
    model = tiny_family("llama")
    model.compile(backend="eager")
    call = model._compiled_call_impl
    with audit_mode(model) as inner:
        assert inner._compiled_call_impl is None
        Scorer(inner).score(spans_of(3))
    assert model._compiled_call_impl is call
