"""Every step of the ladder fails where it must, on real collators, and the probe leaves the run as it was."""

from __future__ import annotations

import copy
import random
from typing import Any

import numpy as np
import pytest
import torch
from secret_search import leaks

from memguard.audit.gradient import gradient_probe, is_sharded, probe_gradient
from memguard.audit.planting import canary_dataset, plan_planting, planted_ids, sample_rows
from memguard.canaries.batch_view import view_rows
from memguard.canaries.drawing import draw_plan
from memguard.canaries.preflight import GradientFinding, Place, PlantedIds, Preflight, run_preflight
from memguard.canaries.settings import CanarySettings
from memguard.errors import CanaryError

SETTINGS = {
    "seed": 3,
    "formats": [
        {"name": "pin", "template": "The access number is {secret}.", "secret": {"kind": "digits", "length": 9}},
        {"name": "phrase", "template": "Pass phrase of {name}: {secret}.", "secret": {"kind": "words", "count": 4}},
    ],
    "tiers": {1: 3, 4: 3},
    "controls": 4,
}


@pytest.fixture
def plan(tokenizer: Any) -> Any:
    return draw_plan(CanarySettings.model_validate(SETTINGS), tokenizer)


@pytest.fixture
def planted(plan: Any, tokenizer: Any) -> list[PlantedIds]:
    return planted_ids(plan, tokenizer)


def alone(planted: list[PlantedIds]) -> Any:
    """Each canary as a row of its own with labels, as the dataset of a run gives it."""
    return lambda j: [{"input_ids": list(planted[j].ids), "labels": list(planted[j].ids)}]


def without_labels(planted: list[PlantedIds]) -> Any:
    return lambda j: [{"input_ids": list(planted[j].ids)}]


def single(rows: list[Any], **more: Any) -> dict[str, Any]:
    """A batch of one row."""
    return {"input_ids": torch.tensor([rows[0]["input_ids"]]), "labels": torch.tensor([rows[0]["labels"]])} | more


def outcomes(found: Preflight) -> set[tuple[Any, ...]]:
    return {(one.reached, one.failed, one.reason, one.flags) for one in found.findings}


# -- collators that keep every canary


def test_the_padding_collator_of_the_trainer_supervises_every_secret(planted: Any, tokenizer: Any) -> None:
    from transformers import DataCollatorForLanguageModeling, DataCollatorForSeq2Seq

    for collate, rows in (
        (DataCollatorForLanguageModeling(tokenizer, mlm=False), without_labels(planted)),
        (DataCollatorForLanguageModeling(tokenizer, mlm=False, pad_to_multiple_of=64), without_labels(planted)),
        (DataCollatorForSeq2Seq(tokenizer, padding=True), alone(planted)),
    ):
        found = run_preflight(planted, rows, collate)
        assert outcomes(found) == {("supervised", None, None, ())}
        assert [one.id for one in found.findings] == [one.id for one in planted]
        assert not found.failures()
        assert found.message() == ""


def test_left_padding_is_no_text_before_a_canary(planted: Any, tokenizer: Any) -> None:
    from transformers import DataCollatorForLanguageModeling

    left = copy.deepcopy(tokenizer)
    left.padding_side = "left"
    other = {"input_ids": list(range(60, 120))}
    collate = DataCollatorForLanguageModeling(left, mlm=False)
    found = run_preflight(planted, lambda j: [{"input_ids": list(planted[j].ids)}, other], collate)
    assert outcomes(found) == {("supervised", None, None, ())}


def test_the_default_collator_and_the_flattening_one_keep_rows_apart(planted: Any) -> None:
    from transformers import DataCollatorWithFlattening, default_data_collator

    assert outcomes(run_preflight(planted, alone(planted), default_data_collator)) == {("supervised", None, None, ())}
    other = {"input_ids": list(range(60, 90)), "labels": list(range(60, 90))}
    for options in ({}, {"return_flash_attn_kwargs": True}, {"return_seq_idx": True}):
        collate = DataCollatorWithFlattening(**options)
        found = run_preflight(planted, lambda j: [other, alone(planted)(j)[0]], collate)
        assert outcomes(found) == {("supervised", None, None, ())}


def test_labels_that_the_collator_shifted_are_accepted_and_noted(planted: Any) -> None:
    def shifted(rows: list[Any]) -> dict[str, Any]:
        ids = torch.tensor([rows[0]["input_ids"]])
        return {"input_ids": ids[:, :-1], "labels": ids[:, 1:]}

    found = run_preflight(planted, alone(planted), shifted)
    assert outcomes(found) == {("supervised", None, None, ("shifted",))}
    assert "shifts the labels by one token itself" in found.notes[0]


# -- contaminated


def spliced(plan: Any, blocks: Any, tokenizer: Any) -> Any:
    planting = plan_planting(plan, CanarySettings.model_validate(SETTINGS), sample_rows(blocks), tokenizer, max_positions=None)
    dataset = canary_dataset(plan, planting, blocks)
    assert planting.mode == "splice"
    return lambda j: [dataset.example(j)]


def test_a_spliced_canary_is_flagged_contaminated_and_no_failure(plan: Any, planted: Any, blocks: Any, tokenizer: Any) -> None:
    from transformers import default_data_collator

    found = run_preflight(planted, spliced(plan, blocks, tokenizer), default_data_collator)
    assert not found.failures()
    assert len(found.flagged("contaminated")) >= len(planted) - 1  # one may fall on the head of its block


def packed(one: PlantedIds) -> tuple[list[int], int]:
    """Other text, then a canary, in one row; and where the canary begins."""
    before = list(range(60, 80))
    return [*before, *one.ids], len(before)


BOUNDARIES: dict[str, Any] = {
    "position ids": lambda size, begin: {"position_ids": torch.tensor([[*range(begin), *range(size - begin)]])},
    "axes of positions": lambda size, begin: {"position_ids": torch.tensor([[[*range(begin), *range(size - begin)]]] * 3)},
    "sequence lengths": lambda size, begin: {"seq_lengths": [[begin, size - begin]]},
    "numbered mask": lambda size, begin: {"attention_mask": torch.tensor([[1] * begin + [2] * (size - begin)])},
    "cumulated lengths": lambda size, begin: {"cu_seq_lens_q": torch.tensor([0, begin, size], dtype=torch.int32)},
    "block-diagonal mask": lambda size, begin: {"attention_mask": block_mask(size, begin)[None, None]},
    "additive mask": lambda size, begin: {
        "attention_mask": torch.where(block_mask(size, begin), 0.0, torch.finfo(torch.float32).min)[None, None]
    },
}
NO_BOUNDARIES: dict[str, Any] = {
    "nothing": lambda size, begin: {},
    "running positions": lambda size, begin: {"position_ids": torch.arange(size)[None]},
    "mask of ones": lambda size, begin: {"attention_mask": torch.ones(1, size, dtype=torch.long)},
    "causal mask": lambda size, begin: {"attention_mask": block_mask(size, 0)[None, None]},
}


def block_mask(size: int, begin: int) -> torch.Tensor:
    """Causal, and nothing at or after `begin` sees what is before it."""
    mask = torch.ones(size, size).tril().bool()
    mask[begin:, :begin] = False
    return mask


@pytest.mark.parametrize("kind", [*BOUNDARIES, *NO_BOUNDARIES])
def test_a_canary_behind_other_text_is_contaminated_unless_a_boundary_stands_between(kind: str, planted: Any) -> None:
    rows = {j: packed(one) for j, one in enumerate(planted)}

    def collate(given: list[Any]) -> dict[str, Any]:
        ids, begin = given[0]["input_ids"], given[0]["begin"]
        more: dict[str, Any] = (BOUNDARIES | NO_BOUNDARIES)[kind](len(ids), begin)
        return {"input_ids": torch.tensor([ids]), "labels": torch.tensor([ids])} | more

    found = run_preflight(planted, lambda j: [{"input_ids": rows[j][0], "begin": rows[j][1]}], collate)
    flags = () if kind in BOUNDARIES else ("contaminated",)
    assert outcomes(found) == {("supervised", None, None, flags)}


# -- failures


def test_a_canary_cut_off_by_the_collator_fails_at_its_tokens(planted: Any) -> None:
    from transformers import default_data_collator

    for size in (4, 8, 12):
        for side in (slice(None, size), slice(-size - 1, None)):

            def cut(rows: list[Any], side: slice = side) -> Any:
                return dict(default_data_collator([{key: values[side] for key, values in row.items()} for row in rows]))

            found = run_preflight(planted, alone(planted), cut)
            assert outcomes(found) == {("stream", "tokens", "cut", ())}
    longest = max(len(one.ids) for one in planted)
    assert f"Raise the maximum length of a row to at least {longest} tokens" in found.message()


def test_truncation_of_raw_text_that_still_ends_in_an_end_token_is_found(plan: Any, planted: Any, tokenizer: Any) -> None:
    texts = ["".join(plan.format_named(one.format).split(one.secret, name=one.name)) for one in plan.planted()]

    def collate(rows: list[Any]) -> dict[str, Any]:
        ids = [*tokenizer(rows[0]["text"], truncation=True, max_length=11)["input_ids"], tokenizer.eos_token_id]
        return {"input_ids": torch.tensor([ids]), "labels": torch.tensor([ids])}

    found = run_preflight(planted, lambda j: [{"text": texts[j]}], collate)
    assert outcomes(found) == {("stream", "tokens", "cut", ())}


def test_a_canary_split_by_wrapped_packing_fails_with_the_cure(planted: Any) -> None:
    def wrapped(rows: list[Any]) -> dict[str, Any]:
        stream = [*range(60, 76), *rows[0]["input_ids"], *range(90, 130)]
        ids = torch.tensor(stream[: len(stream) // 24 * 24]).reshape(-1, 24)
        return {"input_ids": ids, "labels": ids}

    found = run_preflight(planted, alone(planted), wrapped)
    assert {(one.failed, one.reason) for one in found.findings} == {("tokens", "split")}
    assert "Pack with bfd, or use longer blocks" in found.message()


def test_other_tokens_than_planned_and_rows_that_are_missing_are_told_apart(planted: Any) -> None:
    def retokenised(rows: list[Any]) -> dict[str, Any]:
        ids = list(rows[0]["input_ids"])
        ids[len(ids) // 2] = 7  # a token glued together otherwise
        ids[-3] = 7
        return {"input_ids": [ids], "labels": [ids]}

    assert outcomes(run_preflight(planted, alone(planted), retokenised)) == {("stream", "tokens", "changed", ())}
    other = {"input_ids": [list(range(300, 330))], "labels": [list(range(300, 330))]}
    assert outcomes(run_preflight(planted, alone(planted), lambda rows: other)) == {(None, "stream", "missing", ())}
    assert outcomes(run_preflight(planted, lambda j: [], lambda rows: other)) == {(None, "stream", "missing", ())}


def test_a_secret_behind_half_of_its_prefix_is_no_sighting() -> None:
    one = PlantedIds("a17", tuple(range(100, 130)), 20, 28, "pin")
    rest = {"input_ids": [[3, *one.ids[10:]]], "labels": [[3, *one.ids[10:]]]}
    assert outcomes(run_preflight([one], lambda j: [{}], lambda rows: rest)) == {("stream", "tokens", "changed", ())}
    rest = {"input_ids": [list(one.ids[10:])], "labels": [list(one.ids[10:])]}
    assert outcomes(run_preflight([one], lambda j: [{}], lambda rows: rest)) == {("stream", "tokens", "cut", ())}


def test_masked_labels_fail_as_not_supervised(planted: Any, tokenizer: Any) -> None:
    def completion_only(rows: list[Any]) -> dict[str, Any]:
        ids = torch.tensor([rows[0]["input_ids"]])
        return {"input_ids": ids, "labels": torch.full_like(ids, -100)}

    found = run_preflight(planted, alone(planted), completion_only)
    assert outcomes(found) == {("tokens", "supervised", "masked", ())}
    assert "must stand in the completion" in found.message()

    def one_token(rows: list[Any]) -> dict[str, Any]:
        batch = single(rows)
        secret = next(one for one in planted if list(one.ids) == rows[0]["input_ids"])
        batch["labels"][0, secret.end - 1] = -100
        return batch

    assert {one.reason for one in run_preflight(planted, alone(planted), one_token).findings} == {"masked"}


@pytest.mark.slow
def test_completion_masks_of_trl_keep_a_canary_that_is_a_completion(planted: Any, tokenizer: Any) -> None:
    collator = pytest.importorskip("trl.trainer.sft_trainer").DataCollatorForLanguageModeling
    rows = alone(planted)
    assert not run_preflight(planted, rows, collator(pad_token_id=0)).failures()
    lengths = [{"seq_lengths": [len(one.ids)]} for one in planted]
    found = run_preflight(planted, lambda j: [rows(j)[0] | lengths[j]], collator(pad_token_id=0, padding_free=True))
    assert outcomes(found) == {("supervised", None, None, ())}
    masked = run_preflight(planted, lambda j: [rows(j)[0] | {"labels": [-100] * len(planted[j].ids)}], collator(pad_token_id=0))
    assert {one.reason for one in masked.findings} == {"masked"}


def test_the_first_token_of_a_row_is_never_supervised() -> None:
    one = PlantedIds("a17", (0, 41, 42, 43, 9), 1, 4, "bare")  # a template that begins with the secret

    def no_bos(rows: list[Any]) -> dict[str, Any]:
        return {"input_ids": [[41, 42, 43, 9]], "labels": [[41, 42, 43, 9]]}

    found = run_preflight([one], lambda j: [{}], no_bos)
    assert outcomes(found) == {("tokens", "supervised", "first", ())}
    assert "nothing predicts the first token of a row" in found.message()
    shifted = {"input_ids": [[41, 42, 43, 9]], "labels": [[42, 43, 9, -100]]}
    assert {one.reason for one in run_preflight([one], lambda j: [{}], lambda rows: shifted).findings} == {"first"}
    kept = {"input_ids": [[0, 41, 42, 43, 9]], "labels": [[0, 41, 42, 43, 9]]}
    assert not run_preflight([one], lambda j: [{}], lambda rows: kept).failures()


def test_masked_language_modelling_is_refused_by_name(planted: Any, tokenizer: Any) -> None:
    from transformers import DataCollatorForLanguageModeling

    masked = copy.deepcopy(tokenizer)
    masked.mask_token = "<|end|>"
    collate = DataCollatorForLanguageModeling(masked, mlm=True, mlm_probability=0.15)
    with pytest.raises(CanaryError, match="got DataCollatorForLanguageModeling, which masks tokens at random"):
        run_preflight(planted, without_labels(planted), collate)

    class Wrapper:  # as the trainer does to drop columns
        def __init__(self) -> None:
            self.data_collator = collate

    with pytest.raises(CanaryError, match=r"memguard measures causal language models \(mlm=False\)"):
        run_preflight(planted, without_labels(planted), Wrapper())  # type: ignore[arg-type]


def test_a_collator_that_is_random_in_another_way_fails_every_canary(planted: Any) -> None:
    draw = random.Random(0)

    def noisy(rows: list[Any]) -> dict[str, Any]:
        batch = single(rows)
        batch["labels"][0, draw.randrange(len(rows[0]["input_ids"]))] = -100
        return batch

    assert outcomes(run_preflight(planted, alone(planted), noisy)) == {("stream", "tokens", "random", ())}


# -- what is not seen is a note


def test_what_a_collator_does_not_show_is_noted_and_no_failure(planted: Any) -> None:
    def raises(rows: list[Any]) -> Any:
        raise KeyError("281265017")

    cases: list[tuple[Any, str, tuple[Any, ...]]] = [
        (lambda rows: (torch.tensor([rows[0]["input_ids"]]),), "makes no labels", ("tokens", None, None, ("unseen",))),
        (lambda rows: {"input_ids": [rows[0]["input_ids"]]}, "makes no labels", ("tokens", None, None, ("unseen",))),
        (lambda rows: {"pixels": torch.zeros(2)}, "makes no input_ids", ("stream", None, None, ("unseen",))),
        (lambda rows: torch.zeros(2, 3), "makes no input_ids", ("stream", None, None, ("unseen",))),
        (raises, r"did not take a canary (KeyError)", ("stream", None, None, ("unseen",))),
    ]
    for collate, words, outcome in cases:
        found = run_preflight(planted, alone(planted), collate)
        assert outcomes(found) == {outcome}
        assert len(found.notes) == 1
        assert words in found.notes[0]
        assert "281265017" not in found.notes[0]


def test_a_collator_that_takes_no_row_alone_is_given_user_rows_beside_it(planted: Any) -> None:
    def pairs(rows: list[Any]) -> dict[str, Any]:
        if len(rows) % 2:
            raise ValueError("rows come in pairs")
        longest = max(len(row["input_ids"]) for row in rows)
        table = [[*row["input_ids"], *[0] * (longest - len(row["input_ids"]))] for row in rows]
        return {"input_ids": table, "labels": table}

    user = {"input_ids": list(range(60, 90))}
    found = run_preflight(planted, alone(planted), pairs, user_rows=lambda: [user])
    assert outcomes(found) == {("supervised", None, None, ())}
    assert found.notes == ()
    assert outcomes(run_preflight(planted, alone(planted), pairs)) == {("stream", None, None, ("unseen",))}


def test_a_collator_that_empties_its_rows_is_given_rows_of_its_own(planted: Any) -> None:
    def emptying(rows: list[Any]) -> dict[str, Any]:
        ids = rows[0].pop("input_ids")
        return {"input_ids": [ids], "labels": [rows[0].pop("labels")]}

    kept = {j: alone(planted)(j) for j in range(len(planted))}
    assert not run_preflight(planted, lambda j: kept[j], emptying).failures()


# -- a large plan


def test_a_large_plan_is_sampled_over_every_format_and_length() -> None:
    many = [
        PlantedIds(f"c{n}", (0, *range(10, 20 + n % 3), 5), 3, 6, ("card", "pin")[n % 2]) for n in range(1000)
    ]  # two formats of three lengths
    calls: list[int] = []

    def rows(j: int) -> list[Any]:
        calls.append(j)
        return [{"input_ids": list(many[j].ids), "labels": list(many[j].ids)}]

    found = run_preflight(many, rows, single, max_checked=60)
    assert 54 <= len(found.findings) <= 60
    assert {(one.format, len(one.ids)) for one in (many[j] for j in calls)} == {(one.format, len(one.ids)) for one in many}
    assert found.num_planted == 1000
    assert found.notes == (
        f"{len(found.findings)} of 1000 canaries were sent through the collator, some of every format and length.",
    )
    assert calls == sorted(calls)


def test_wrong_arguments_are_named() -> None:
    good = PlantedIds("a17", (1, 2, 3), 1, 2)
    with pytest.raises(ValueError, match="planted must hold at least one canary, got none"):
        run_preflight([], lambda j: [], single)
    with pytest.raises(ValueError, match="planted must have distinct ids"):
        run_preflight([good, good], lambda j: [], single)
    with pytest.raises(ValueError, match="canary 'b' must have 0 < start < end <= 3, got 0 and 2"):
        run_preflight([PlantedIds("b", (1, 2, 3), 0, 2)], lambda j: [], single)


def test_a_message_names_ids_counts_and_cures_and_never_a_secret(plan: Any, planted: Any, tokenizer: Any) -> None:
    def half(rows: list[Any]) -> dict[str, Any]:
        batch = single(rows)
        if sum(rows[0]["input_ids"]) % 2:
            batch["labels"].fill_(-100)
        return batch

    found = run_preflight(planted, alone(planted), half)
    lost = [one.id for one in found.failures()]
    assert 0 < len(lost) < len(planted)
    message = found.message()
    assert message.startswith(f"every canary must reach the loss; {len(lost)} of {len(planted)} checked will not.")
    assert f"'{lost[0]}'" in message
    assert not leaks((message + repr(found.findings)).encode(), plan, tokenizer)


# -- the gradient


def state_of(model: Any, generator: Any = None) -> list[Any]:
    """Everything a probe might change, as bytes."""
    parts: list[Any] = [random.getstate(), torch.random.get_rng_state().numpy().tobytes()]
    parts += [np.random.get_state()[1].tobytes()]  # type: ignore[index]
    for name, value in (*model.named_parameters(), *model.named_buffers()):
        grad = value.grad if value.is_leaf else None
        parts.append((name, value.detach().numpy().tobytes(), value.requires_grad, grad is None, value._version))
        parts.append(grad.numpy().tobytes() if grad is not None else None)
    for name, module in model.named_modules():
        parts.append((name, module.training, len(module._forward_hooks), len(module._forward_pre_hooks)))
    return parts


def test_the_probe_leaves_the_run_as_it_was_bit_for_bit(planted: Any, tiny_model: Any, tokenizer: Any) -> None:
    from transformers import DataCollatorForLanguageModeling

    tiny_model.train()
    tiny_model.model.layers[0].eval()  # a part frozen in eval
    tiny_model.model.layers[1].mlp.up_proj.weight.requires_grad_(False)
    tiny_model.model.norm.weight.grad = torch.full((32,), 0.5)  # half an accumulated step
    trained: list[int] = []
    tiny_model.register_forward_pre_hook(lambda module, args: trained.append(1) if module.training else None)
    torch.manual_seed(5)
    before = state_of(tiny_model)
    collate = DataCollatorForLanguageModeling(tokenizer, mlm=False)
    found = run_preflight(planted, without_labels(planted), collate, gradient=gradient_probe(tiny_model))
    assert outcomes(found) == {("gradient", None, None, ())}
    assert state_of(tiny_model) == before
    assert not trained  # a counter of training forwards does not count it


def test_a_model_without_trainable_parameters_fails_every_canary_at_the_gradient(planted: Any, tiny_model: Any) -> None:
    tiny_model.requires_grad_(False)
    found = run_preflight(planted, alone(planted), single, gradient=gradient_probe(tiny_model))
    assert outcomes(found) == {("supervised", "gradient", "frozen", ())}
    assert "Let parameters of the model require gradients" in found.message()


def test_a_loss_that_no_trainable_parameter_has_a_part_in_is_found(planted: Any, tiny_model: Any) -> None:
    tiny_model.requires_grad_(False)
    tiny_model.extra = torch.nn.Linear(2, 2)  # an adapter that was never wired in
    found = run_preflight(planted, alone(planted), single, gradient=gradient_probe(tiny_model))
    assert {one.reason for one in found.findings} == {"frozen"}


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft reads a name that was renamed
def test_a_fresh_adapter_is_reached_though_half_of_it_has_no_gradient_yet(planted: Any, tiny_model: Any) -> None:
    from peft import LoraConfig, get_peft_model

    adapted = get_peft_model(tiny_model, LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    assert all(not module.weight.any() for name, module in adapted.named_modules() if name.endswith("lora_B.default"))
    before = state_of(adapted)
    found = run_preflight(planted, alone(planted), single, gradient=gradient_probe(adapted))
    assert outcomes(found) == {("gradient", None, None, ())}
    assert state_of(adapted) == before


def test_the_probe_asks_for_the_secret_alone(planted: Any, tiny_model: Any) -> None:
    one = planted[0]
    given: list[torch.Tensor] = []
    tiny_model.register_forward_pre_hook(lambda m, args, kwargs: given.append(kwargs["labels"]), with_kwargs=True)
    run_preflight(planted, alone(planted), single, gradient=gradient_probe(tiny_model))
    assert len(given) == 1  # once for all canaries
    (labels,) = given[0].tolist()
    assert labels == [-100] * one.start + list(one.ids[one.start : one.end]) + [-100] * (len(one.ids) - one.end)


def batch_of(one: PlantedIds) -> tuple[dict[str, Any], Place]:
    return single([{"input_ids": list(one.ids), "labels": list(one.ids)}]), Place(0, one.start, one.end)


def test_gradients_that_are_not_finite_fail(planted: Any, tiny_model: Any) -> None:
    with torch.no_grad():
        tiny_model.model.norm.weight.fill_(float("nan"))
    assert probe_gradient(tiny_model, *batch_of(planted[0])) == GradientFinding("not finite")
    found = run_preflight(planted, alone(planted), single, gradient=gradient_probe(tiny_model))
    assert outcomes(found) == {("supervised", "gradient", "not finite", ())}


class Bare(torch.nn.Module):
    """A model of the user's own: logits alone, a running statistic, and a square root that has no slope at nought."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.embed, self.head, self.kind = torch.nn.Embedding(512, 8), torch.nn.Linear(8, 512), kind
        self.register_buffer("calls", torch.zeros(1))
        self.calls: torch.Tensor

    def forward(self, input_ids: torch.Tensor) -> Any:
        self.calls.add_(1)
        if self.kind == "raises":
            raise RuntimeError("281265017")
        logits = self.head(self.embed(input_ids))
        if self.kind == "steep":
            logits = logits + torch.sqrt(0.0 * self.head.bias)
        return {"plain": logits, "steep": logits, "mute": {"hidden": logits}}[self.kind]


def test_models_of_the_users_own_are_probed_by_their_logits_or_noted(planted: Any) -> None:
    batch, place = batch_of(planted[0])
    for kind, outcome in (("plain", "reached"), ("steep", "not finite"), ("mute", "unseen"), ("raises", "unseen")):
        model = Bare(kind)
        assert probe_gradient(model, batch, place).outcome == outcome
        assert not model.calls.any()  # the buffer is put back
        assert model.head.weight.grad is None
    note = probe_gradient(Bare("raises"), batch, place).note
    assert note == "the model did not take a batch alone (RuntimeError): that gradients reach it is not probed."
    found = run_preflight(planted, alone(planted), single, gradient=gradient_probe(Bare("mute")))
    assert outcomes(found) == {("supervised", None, None, ())}
    assert found.notes == ("the model gives no loss and no logits: that gradients reach it is not probed.",)


def test_a_sharded_model_is_not_run(planted: Any, tiny_model: Any) -> None:
    assert not is_sharded(tiny_model)
    tiny_model.model.norm.weight.ds_id = 1  # as DeepSpeed marks what lies in pieces
    tiny_model.register_forward_pre_hook(lambda *_: pytest.fail("a sharded model was run"))
    found = run_preflight(planted, alone(planted), single, gradient=gradient_probe(tiny_model))
    assert outcomes(found) == {("supervised", None, None, ())}
    assert found.notes == ("the model is sharded over ranks: that gradients reach its parameters is not probed.",)


@pytest.mark.slow
def test_a_copy_on_several_ranks_is_probed_and_one_in_pieces_is_not(planted: Any, tiny_model: Any, tmp_path: Any) -> None:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'group'}", rank=0, world_size=1)
    try:
        batch, place = batch_of(planted[0])
        copied = DistributedDataParallel(tiny_model.train())
        before = state_of(copied)
        assert probe_gradient(copied, batch, place) == GradientFinding("reached")
        assert state_of(copied) == before
        copied(**batch).loss.backward()  # the wrapper still hears of every gradient
        assert all(parameter.grad is not None for parameter in copied.parameters())
        sharded = fully_shard(copy.deepcopy(tiny_model), mesh=init_device_mesh("cpu", (1,)))
        assert is_sharded(sharded)
        assert probe_gradient(sharded, batch, place).outcome == "unseen"
    finally:
        dist.destroy_process_group()


# -- the view of a batch


def test_numpy_and_flat_batches_are_read_like_tensors() -> None:
    flat = {"input_ids": np.array([1, 2, 3]), "labels": np.array([1, 2, 3])}
    assert [one.ids for one in view_rows(flat)] == [(1, 2, 3)]
    assert view_rows({"input_ids": [[1, 2]], "labels": [[1, 2, 3]]})[0].labels is None
    assert view_rows({"input_ids": torch.zeros(0, 4, dtype=torch.long)}) == []
    assert view_rows(None) == []


def test_padding_is_left_out_of_a_segment_and_places_stay_those_of_the_row() -> None:
    (one,) = view_rows({"input_ids": [[0, 0, 5, 6]], "attention_mask": [[0, 0, 1, 1]], "labels": [[-100, -100, 5, 6]]})
    assert (one.positions, one.ids, one.labels) == ((2, 3), (5, 6), (5, 6))
