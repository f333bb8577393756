"""Continuations are those of `generate`, row by row; draws belong to their prompt; nothing of the model is left changed."""

from __future__ import annotations

import copy
import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from rank_processes import count_forwards, sharded, two_processes
from scipy import stats
from tiny_models import tiny_family

from memguard.audit.decoding import DecodingSettings, Generations, Prompt, sample_seed
from memguard.audit.generation import generate_with_model, pad_left, pick_tokens
from memguard.errors import NonFiniteScoreError, ScoringError
from memguard.scoring.audit_mode import audit_mode
from memguard.scoring.sampling import Sampler
from memguard.scoring.scorer import Scorer
from memguard.scoring.team import Team

GREEDY = DecodingSettings(num_samples=0, max_new_tokens=7)


def prompts_of(*lengths: int, seed: int = 1) -> list[Prompt]:
    rng = np.random.default_rng(seed)
    return [
        Prompt("generic", f"line {place}", tuple(rng.integers(1, 500, size=length).tolist()))
        for place, length in enumerate(lengths)
    ]


def written(model: Any, tokenizer: Any, prompts: list[Prompt], decoding: DecodingSettings, **options: Any) -> Generations:
    batch_size = options.pop("batch_size", None)
    with audit_mode(model) as inner:
        return generate_with_model(Scorer(inner, batch_size=batch_size), prompts, tokenizer, decoding, **options)


def alone(model: Any, prompt: Prompt, number: int, ends: tuple[int, ...] = (0,)) -> tuple[int, ...]:
    """Argmax of whole rows without padding or a cache, up to an end token."""
    ids = list(prompt.ids)
    with torch.no_grad():
        for _ in range(number):
            following = int(model.eval()(input_ids=torch.tensor([ids])).logits[0, -1].argmax())
            if following in ends:
                break
            ids.append(following)
    return tuple(ids[len(prompt.ids) :])


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2", "mistral", "bloom", "qwen3", "opt"])
def test_greedy_rows_of_a_padded_batch_are_those_of_each_prompt_alone(name: str, tokenizer: Any) -> None:
    model = tiny_family(name)
    prompts = prompts_of(3, 9, 1, 5, 3)
    found = written(model, tokenizer, prompts, GREEDY, batch_size=3)
    assert [item.ids for item in found.items] == [alone(model, prompt, 7) for prompt in prompts]
    assert [item.prompt for item in found.items] == [0, 1, 2, 3, 4]
    assert found.num_wanted == 5
    assert found.stopped is None


def test_a_continuation_ends_before_the_end_token_of_the_model_or_of_the_tokenizer(tokenizer: Any) -> None:
    model, prompts = tiny_family("llama"), prompts_of(4, 6, 2)
    model.generation_config.eos_token_id = model.config.eos_token_id = None
    whole = [item.ids for item in written(model, tokenizer, prompts, GREEDY).items]
    assert len(set(whole[0])) == 7
    model.generation_config.eos_token_id = [whole[0][4], 511]
    first, *others = written(model, tokenizer, prompts, GREEDY).items
    assert (first.ids, first.is_ended) == (whole[0][:4], True)
    assert [(item.ids, item.is_ended) for item in others] == [(ids, False) for ids in whole[1:]]
    model.generation_config.eos_token_id = None
    other = SimpleNamespace(eos_token_id=whole[0][2], decode=tokenizer.decode)
    first = written(model, other, prompts, GREEDY).items[0]
    assert (first.ids, first.is_ended) == (whole[0][:2], True)


def test_a_model_that_ends_at_once_writes_nothing_and_is_kept(tiny_model: Any, tokenizer: Any) -> None:
    prompts = prompts_of(4, 2)
    first = written(tiny_model, tokenizer, prompts, GREEDY).items[0].ids[0]
    tiny_model.generation_config.eos_token_id = first
    item = written(tiny_model, tokenizer, prompts, GREEDY).items[0]
    assert (item.ids, item.text, item.is_ended) == ((), "", True)


def test_text_is_that_of_what_was_written_and_holds_no_part_of_the_prompt(tiny_model: Any, tokenizer: Any) -> None:
    prompt = Prompt("generic", "a", tuple(tokenizer("a prompt that says something")["input_ids"]))
    (item,) = written(tiny_model, tokenizer, [prompt], GREEDY).items
    assert item.text == tokenizer.decode(item.ids).strip("\ufffd")
    assert len(item.ids) == 7


def test_draws_stay_whatever_the_batch_the_order_and_the_other_prompts_are(tiny_model: Any, tokenizer: Any) -> None:
    decoding = DecodingSettings(num_samples=3, max_new_tokens=6, temperature=1.5)
    prompts = prompts_of(3, 8, 5, 3)
    found = written(tiny_model, tokenizer, prompts, decoding, seed=4)
    by_name = {(prompts[item.prompt].name, item.sample): item.ids for item in found.items}
    assert len(set(by_name.values())) == 12
    assert [(item.prompt, item.sample) for item in found.items] == [(p, s) for p in range(4) for s in range(3)]
    turned = prompts[::-1][:3]
    for item in written(tiny_model, tokenizer, turned, decoding, seed=4, batch_size=2).items:
        assert item.ids == by_name[turned[item.prompt].name, item.sample]
    other = written(tiny_model, tokenizer, prompts, decoding, seed=5)
    assert all(item.ids != by_name[prompts[item.prompt].name, item.sample] for item in other.items)


def test_every_token_has_a_random_number_of_its_own(tiny_model: Any, tokenizer: Any) -> None:
    """Nearly flat distributions: one number for all tokens would pick one id throughout."""
    flat = DecodingSettings(num_samples=20, max_new_tokens=6, temperature=1e3, top_p=1.0)
    assert min(len(set(item.ids)) for item in written(tiny_model, tokenizer, prompts_of(3), flat).items) >= 3


def test_draws_follow_the_stated_sampler(tokenizer: Any) -> None:
    """2,000 first tokens behind one prompt against the sampler's distribution: chi-square, p above 1e-3 at a fixed seed."""
    model = tiny_family("llama", max_position_embeddings=64)
    decoding = DecodingSettings(num_samples=2000, max_new_tokens=1, temperature=0.8, top_k=6, top_p=0.9)
    (prompt,) = prompts_of(5)
    found = written(model, tokenizer, [prompt], decoding)
    with torch.no_grad():
        logits = model.eval()(input_ids=torch.tensor([prompt.ids])).logits[:, -1]
    chances = Sampler(0.8, 6, 0.9).log_probs(logits)[0].exp().double().numpy()
    chances /= chances.sum()
    counts = np.bincount([(*item.ids, 0)[0] for item in found.items], minlength=len(chances))
    kept = chances > 0
    assert counts[~kept].sum() == 0
    assert kept.sum() >= 3
    assert stats.chisquare(counts[kept], 2000 * chances[kept]).pvalue > 1e-3
    # The check has teeth: without the temperature the same counts are refused.
    cold = Sampler(1.0, 6, 1.0).log_probs(logits)[0].exp().double().numpy()[kept]
    assert stats.chisquare(counts[kept], 2000 * cold / cold.sum()).pvalue < 1e-3


def test_a_token_that_is_never_drawn_is_not_picked_at_any_random_number() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(4096, 40, generator=generator) * 3
    log_probs = Sampler(1.0, 5, 0.8).log_probs(logits)
    uniforms = torch.cat([torch.rand(4000, generator=generator), torch.zeros(48), torch.full((48,), 1 - 2.0**-22)])
    picked = pick_tokens(log_probs, uniforms)
    assert log_probs.gather(1, picked[:, None]).isfinite().all()


def test_what_a_model_brings_for_generate_is_set_aside_and_put_back(tiny_model: Any, tokenizer: Any) -> None:
    prompts = prompts_of(3, 6)
    wanted = [item.ids for item in written(tiny_model, tokenizer, prompts, GREEDY).items]
    theirs = tiny_model.generation_config
    theirs.repetition_penalty, theirs.min_new_tokens, theirs.no_repeat_ngram_size = 50.0, 9, 1
    theirs.suppress_tokens = [wanted[0][0]]
    assert [item.ids for item in written(tiny_model, tokenizer, prompts, GREEDY).items] == wanted
    assert tiny_model.generation_config is theirs
    assert theirs.repetition_penalty == 50.0


def test_training_goes_on_as_if_nothing_had_been_written(tiny_model: Any, tokenizer: Any) -> None:
    sampled = DecodingSettings(num_samples=2, max_new_tokens=5)
    ids = torch.tensor([prompts_of(12)[0].ids])

    def losses(with_generation: bool) -> list[float]:
        torch.manual_seed(3)
        np.random.seed(3)
        random.seed(3)
        model = tiny_family("llama", attention_dropout=0.2).train()
        found = []
        for _ in range(3):
            if with_generation:
                written(model, tokenizer, prompts_of(3, 5), sampled)
                assert model.training
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            found.append(float(loss.detach()) + random.random() + np.random.random() + float(torch.rand(())))
        return found

    assert losses(True) == losses(False)


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft asks for the old name
def test_a_model_of_adapters_writes_with_them_and_keeps_its_defaults(tiny_model: Any, tokenizer: Any) -> None:
    peft = pytest.importorskip("peft")
    adapter = peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM", init_lora_weights=False)
    model = peft.get_peft_model(tiny_model, adapter)
    theirs = model.get_base_model().generation_config
    theirs.repetition_penalty = 50.0
    prompts = prompts_of(3, 6)
    found = written(model, tokenizer, prompts, GREEDY)
    assert [item.ids for item in found.items] == [alone(model, prompt, 7) for prompt in prompts]
    assert model.get_base_model().generation_config is theirs
    with audit_mode(model) as inner:
        scorer = Scorer(inner)
        generate_with_model(scorer, prompts, tokenizer, GREEDY)
        assert scorer.model.num_forwards == 7


def test_continuations_are_shorter_alike_where_a_model_lacks_positions(tiny_model: Any, tokenizer: Any) -> None:
    found = written(tiny_model, tokenizer, prompts_of(125, 4), GREEDY)
    assert found.max_new_tokens == 3
    assert [len(item.ids) for item in found.items] == [3, 3]
    (sentence,) = found.notices
    assert sentence == "continuations end at 3 of 7 tokens: prompt 'generic line 0' leaves no more of the model's 128."
    with pytest.raises(ScoringError, match="prompt 'generic line 0' must leave room in the model's 128 positions, got 128"):
        written(tiny_model, tokenizer, prompts_of(128), GREEDY)


def test_no_prompt_gives_nothing_and_no_forward(tiny_model: Any, tokenizer: Any) -> None:
    calls = count_forwards(tiny_model)
    assert written(tiny_model, tokenizer, [], GREEDY).items == ()
    assert not calls


def test_a_prompt_without_tokens_or_with_the_name_of_another_is_refused(tiny_model: Any, tokenizer: Any) -> None:
    with pytest.raises(ValueError, match="prompt 'generic a' must hold at least one token, got none"):
        written(tiny_model, tokenizer, [Prompt("generic", "a", ())], GREEDY)
    with pytest.raises(ValueError, match="prompt 'generic a' must have a name of its own, got it twice"):
        written(tiny_model, tokenizer, [Prompt("generic", "a", (1,)), Prompt("generic", "a", (2,))], GREEDY)


def test_logits_that_are_nan_are_no_text(tiny_model: Any, tokenizer: Any) -> None:
    tiny_model.get_output_embeddings().weight.data[3] = float("nan")
    for decoding in (GREEDY, DecodingSettings(max_new_tokens=2)):
        with pytest.raises(NonFiniteScoreError, match="logits of a continuation must be numbers, got NaN"):
            written(tiny_model, tokenizer, prompts_of(4), decoding)


def test_a_failure_names_a_prompt_and_nothing_of_its_tokens(tiny_model: Any, tokenizer: Any) -> None:
    def fail(*_: Any) -> None:
        raise KeyError("4000 1234")

    handle = tiny_model.register_forward_pre_hook(fail)
    with pytest.raises(ScoringError, match="prompt 'generic line 0' and 1 rows beside it failed with KeyError") as caught:
        written(tiny_model, tokenizer, prompts_of(3, 5), GREEDY)
    handle.remove()
    assert "4000" not in str(caught.value)
    assert tiny_model.generation_config.max_new_tokens is None


def test_a_model_without_generate_is_refused(tiny_model: Any, tokenizer: Any) -> None:
    class Bare(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = tiny_model

    with pytest.raises(ScoringError, match="the model must have `generate` to write continuations, got Bare"):
        generate_with_model(Scorer(Bare()), prompts_of(3), tokenizer, GREEDY)


def test_padding_stands_before_a_row_and_is_attended_by_nothing() -> None:
    ids, mask = pad_left([(1, 2, 3), (4,)], torch.device("cpu"))
    assert ids.tolist() == [[1, 2, 3], [0, 0, 4]]
    assert mask.tolist() == [[1, 1, 1], [0, 0, 1]]


def test_seeds_of_continuations_are_apart() -> None:
    prompts = prompts_of(*[2] * 50)
    seeds = {sample_seed(prompt, sample, seed) for prompt in prompts for sample in range(20) for seed in range(2)}
    assert len(seeds) == 2000
    assert all(0 <= seed < 2**31 for seed in seeds)


def on_two_ranks(wrap: str, model: Any, tokenizer: Any) -> Any:
    """Greedy and sampled continuations, and how many forward calls this rank made of the model."""
    if wrap == "DDP":
        outer: Any = torch.nn.parallel.DistributedDataParallel(model)
        calls = count_forwards(outer.module)
    else:
        outer = sharded(model) if wrap == "FSDP2" else model
        calls = count_forwards(outer)
    team, found = Team.current() if wrap != "nothing" else Team.alone(), []
    for decoding in (GREEDY, DecodingSettings(num_samples=2, max_new_tokens=6, temperature=1.2)):
        with team.guarded(), audit_mode(outer) as inner:
            scorer = Scorer(inner, batch_size=2, team=team)
            items = generate_with_model(scorer, prompts_of(3, 9, 1, 5, 3), tokenizer, decoding, seed=2).items
        found.append([(item.prompt, item.sample, item.ids, item.is_ended) for item in items])
    return found, len(calls)


@pytest.mark.slow
@pytest.mark.parametrize("wrap", ["DDP", "FSDP2"])
def test_two_ranks_write_what_one_writes_in_as_many_forwards(wrap: str, tokenizer: Any, tmp_path: Any) -> None:
    tiny_model = tiny_family("llama")
    # An end token in the middle of some rows: the rank that writes them has fewer forwards of its own.
    (prompt, *_) = prompts_of(3, 9, 1, 5, 3)
    end = written(tiny_model, tokenizer, [prompt], GREEDY).items[0].ids[2]
    tiny_model.generation_config.eos_token_id = end
    single, _ = on_two_ranks("nothing", copy.deepcopy(tiny_model), tokenizer)
    (first, calls), (second, others) = two_processes(tmp_path, on_two_ranks, wrap, tiny_model, tokenizer)
    assert first == second == single
    assert calls == others
    assert any(is_ended for *_, is_ended in single[0])


def failing_on_one_rank(wrap: str, model: Any, tokenizer: Any) -> Any:
    """What each rank says when rank 1 fails in its third forward, and whether both go on after it."""
    outer = sharded(model) if wrap == "FSDP2" else torch.nn.parallel.DistributedDataParallel(model)
    inner_model, calls, team = outer if wrap == "FSDP2" else outer.module, [0], Team.current()

    def fail(*_: Any) -> None:
        calls[0] += 1
        if torch.distributed.get_rank() == 1 and calls[0] == 3:
            raise KeyError("4000 1234")

    handle = inner_model.register_forward_pre_hook(fail, prepend=True)
    said = ""
    try:
        with team.guarded(), audit_mode(outer) as inner:
            generate_with_model(Scorer(inner, batch_size=2, team=team), prompts_of(3, 4, 5), tokenizer, GREEDY)
    except ScoringError as error:
        said = str(error)
    handle.remove()
    with team.guarded(), audit_mode(outer) as inner:
        after = generate_with_model(Scorer(inner, batch_size=2, team=team), prompts_of(3, 4, 5), tokenizer, GREEDY)
    return said, [item.ids for item in after.items]


@pytest.mark.slow
@pytest.mark.parametrize("wrap", ["DDP", "FSDP2"])
def test_a_failure_of_one_rank_ends_the_writing_on_both(wrap: str, tiny_model: Any, tokenizer: Any, tmp_path: Any) -> None:
    first, second = two_processes(tmp_path, failing_on_one_rank, wrap, tiny_model, tokenizer)
    assert first == second
    assert "failed with KeyError" in first[0]
    assert "4000" not in first[0]
    assert len(first[1]) == 3
