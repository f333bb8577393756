"""The probe sees what copies of the weights learnt, and leaves the model, its gradients and its hooks alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_audit import NAMED, PIN, config_of
from tiny_models import tiny_family

from memguard.audit import probe as probe_module
from memguard.audit import run_audit
from memguard.audit.full import Sources
from memguard.audit.probe import run_probe
from memguard.canaries.drawing import draw_plan
from memguard.scoring.audit_mode import audit_mode


@pytest.fixture(scope="module")
def plan(tokenizer: Any) -> Any:
    return draw_plan(config_of(PIN, NAMED, positive_control="probe").canaries, tokenizer)


def probed(model: Any, plan: Any, tokenizer: Any) -> Any:
    with audit_mode(model) as inner:
        return run_probe(inner, plan, tokenizer, batch_size=None, tolerance=1e-5)


def test_an_untrained_model_shows_that_it_could_memorise(tiny_model: Any, plan: Any, tokenizer: Any) -> None:
    control, notice = probed(tiny_model, plan, tokenizer)
    assert notice is None
    assert (control.kind, control.n, control.detected) == ("probe", 4, True)
    assert control.best_p_value is not None
    assert control.best_p_value * 4 <= 1e-3


def test_weights_gradients_and_flags_are_as_before_and_no_hook_fires(tiny_model: Any, plan: Any, tokenizer: Any) -> None:
    fired: list[str] = []
    for name, one in tiny_model.named_parameters():
        one.grad = torch.ones_like(one)
        one.register_post_accumulate_grad_hook(lambda _, name=name: fired.append(name))
    frozen = tiny_model.model.layers[0].mlp.up_proj.weight
    frozen.requires_grad_(False)
    before = {name: (one.data_ptr(), one.detach().clone(), one.grad) for name, one in tiny_model.named_parameters()}
    state = torch.get_rng_state()
    probed(tiny_model.train(), plan, tokenizer)
    for name, one in tiny_model.named_parameters():
        pointer, value, gradient = before[name]
        assert one.data_ptr() == pointer
        assert torch.equal(one.detach(), value)
        assert one.grad is gradient
        assert torch.equal(gradient, torch.ones_like(gradient))
    assert fired == []
    assert tiny_model.training
    assert not frozen.requires_grad
    assert torch.equal(state, torch.get_rng_state())


def test_weights_come_back_when_the_probe_fails(
    tiny_model: Any, plan: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {name: one.detach().clone() for name, one in tiny_model.named_parameters()}

    def fail(model: Any, *_: Any) -> float:
        assert any(not torch.equal(one.detach(), before[name]) for name, one in model.named_parameters())
        raise RuntimeError("the secret 123456789")

    monkeypatch.setattr(probe_module, "_best_p_value", fail)
    control, notice = probed(tiny_model, plan, tokenizer)
    assert (control.n, control.best_p_value, control.detected) == (0, None, False)
    assert notice == "the probe could not be made: it raised RuntimeError."
    assert all(torch.equal(one.detach(), before[name]) for name, one in tiny_model.named_parameters())


def test_a_probe_that_fails_half_way_says_so(
    tiny_model: Any, plan: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = iter([0.5])
    monkeypatch.setattr(probe_module, "_best_p_value", lambda *_: next(looks))  # the second look raises
    control, notice = probed(tiny_model, plan, tokenizer)
    assert (control.n, control.best_p_value, control.detected) == (4, 0.5, False)
    assert notice == "the probe ended before its secrets were learnt: it raised StopIteration."


def test_what_nothing_was_learnt_from_is_not_detected(
    tiny_model: Any, plan: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe_module, "RATES", (1e-12,))
    control, notice = probed(tiny_model, plan, tokenizer)
    assert (control.n, control.detected, notice) == (4, False, None)
    assert control.best_p_value is not None


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")  # peft reads a name that was renamed
def test_an_adapter_alone_learns_where_the_rest_is_frozen(plan: Any, tokenizer: Any) -> None:
    import peft

    model = peft.get_peft_model(tiny_family("llama"), peft.LoraConfig(r=8, target_modules=["q_proj", "v_proj", "up_proj"]))
    learnt: list[set[str]] = []
    original = probe_module._learn

    def note(model: Any, weights: Any, *rest: Any) -> None:
        learnt.append(set(weights))
        original(model, weights, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(probe_module, "_learn", note)
        control, _ = probed(model, plan, tokenizer)
    assert (control.n, control.detected) == (4, True)
    assert all("lora_" in name for name in learnt[0])  # tried first; where it is too small, the base weights learn
    assert any("lora_" not in name for name in learnt[-1]) or len(learnt) <= len(probe_module.RATES)


def test_what_does_not_fit_is_left_out_and_nothing_at_all_is_said(
    tiny_model: Any, plan: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {name: one.numel() for name, one in tiny_model.named_parameters()}
    largest = max(sizes, key=lambda name: sizes[name])
    monkeypatch.setattr(probe_module, "MAX_WEIGHTS", sizes[largest] - 1)
    copied = probe_module._copies(tiny_model, only_trained=True)
    assert copied
    assert largest not in copied
    assert sum(one.numel() for one in copied.values()) < sizes[largest]
    monkeypatch.setattr(probe_module, "MAX_WEIGHTS", 0)
    control, notice = probed(tiny_model, plan, tokenizer)
    assert (control.n, control.detected) == (0, False)
    assert notice == "the probe could not be made: no weight of the model is small enough to be copied."


def test_within_an_outer_autocast_the_copies_are_seen(tiny_model: Any, plan: Any, tokenizer: Any) -> None:
    """Autocast keeps casts by tensor: without clearing them the old weights would be scored."""
    found = []
    for cache_enabled in (True, False):
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=cache_enabled):
            found.append(probed(tiny_model, plan, tokenizer))
    assert found[0] == found[1]
    assert found[0][0].best_p_value <= 1 / 257  # above every reference


def test_only_a_full_audit_of_a_plan_that_asks_for_it_probes(tiny_model: Any, tokenizer: Any) -> None:
    config = config_of(PIN, positive_control="probe")
    drawn = draw_plan(config.canaries, tokenizer)
    assert drawn.probe
    short = run_audit(tiny_model, tokenizer, plan=drawn, config=config)
    assert (short.positive_control.kind, short.is_full) == ("none", False)
    full = run_audit(tiny_model, tokenizer, plan=drawn, config=config, full=Sources())
    assert (full.positive_control.kind, full.positive_control.detected, full.is_full) == ("probe", True, True)
    planted = config_of(PIN, positive_control={"in_training": {"count": 1, "repetitions": 3}})
    assert not draw_plan(planted.canaries, tokenizer).probe
    assert not draw_plan(config_of(PIN, positive_control=None).canaries, tokenizer).probe
