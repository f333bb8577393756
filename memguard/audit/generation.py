"""Continuations of prompts by a model's own `generate`: greedy or sampled, in batches, alike on any number of ranks.

The prompt is taken off by its tokens. Each continuation is drawn by random numbers of its own, so that neither its batch nor
the number of ranks decides what is written, up to the last bits of a logit. Defaults that a model brings for `generate`, such
as a penalty on repeats, are set aside: both sides of a comparison are drawn by one stated sampler. Run inside `audit_mode`.
Ranks of a sharded model make as many forward calls as the one that writes longest (`Team`); `synced_gpus` is not used, since
a rank without a batch, or with a failure, would keep the others waiting in it.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from memguard.audit.decoding import DecodingSettings, Generation, Generations, Prompt, check_prompts, sample_seed
from memguard.audit.decoding import whole_characters as whole
from memguard.errors import NonFiniteScoreError, ScoringError
from memguard.scoring.sampling import Sampler
from memguard.scoring.scorer import Scorer

Ids = tuple[int, ...]
Row = tuple[int, int]  # a prompt, and the number of its continuation
LARGEST_UNIFORM = 1.0 - 2.0**-22  # float32 rounds what is nearer to 1 times a sum up to the sum


def generate_with_model(
    scorer: Scorer, prompts: Sequence[Prompt], tokenizer: Any, decoding: DecodingSettings, *, seed: int = 0
) -> Generations:
    """What a model writes behind prompts, up to `max_new_tokens` tokens each.

    Args:
        scorer: of the model, in audit mode; with several ranks, all call this together.
        prompts: lengths may differ.
        tokenizer: turns what was written into text; its end token ends a continuation, as do those of the model.
        decoding: how many continuations, how long, and how they are drawn.
        seed: of the draws.

    Returns:
        `Generations`, whole. Where a model lacks positions, all continuations are shorter alike, and a notice says so.

    Raises:
        ValueError: a prompt without tokens, or two of one name.
        ScoringError: a model without `generate`, a prompt that fills its positions, or a failure; names a prompt.
        NonFiniteScoreError: logits that are NaN.
    """
    check_prompts(prompts)
    number, notices = _num_new_tokens(scorer, prompts, decoding)
    rows = [(prompt, sample) for prompt in range(len(prompts)) for sample in range(decoding.num_continuations)]
    written: dict[Row, tuple[Ids, bool]] = {}
    if rows:
        writer = _Writer(scorer, prompts, decoding, ends=_end_ids(scorer.model.model, tokenizer), number=number, seed=seed)
        scorer.batches.run(
            sorted(rows, key=lambda row: len(prompts[row[0]].ids)),
            writer.write,
            lambda batch, found: written.update(zip(batch, found, strict=True)),
            width=lambda row: len(prompts[row[0]].ids) + number,
            label=lambda row: prompts[row[0]].label,
            num_forwards=number,
        )
    items = tuple(
        Generation(prompt, sample, ids, _text(tokenizer, ids), is_ended)
        for (prompt, sample), (ids, is_ended) in ((row, written[row]) for row in rows)
    )
    return Generations(items, number, len(rows), notices=notices)


def _num_new_tokens(scorer: Scorer, prompts: Sequence[Prompt], decoding: DecodingSettings) -> tuple[int, tuple[str, ...]]:
    """The limit that every prompt allows: continuations of different limits do not compare."""
    limit, wanted = scorer.model.max_length, decoding.max_new_tokens
    if limit is None or not prompts:
        return wanted, ()
    longest = max(prompts, key=lambda prompt: len(prompt.ids))
    number = min(wanted, limit - len(longest.ids))
    if number < 1:
        raise ScoringError(f"{longest.label} must leave room in the model's {limit} positions, got {len(longest.ids)} tokens.")
    if number == wanted:
        return number, ()
    sentence = f"continuations end at {number} of {wanted} tokens: {longest.label} leaves no more of the model's {limit}."
    return number, (sentence,)


def _end_ids(model: Any, tokenizer: Any) -> tuple[int, ...]:
    """Tokens that end a continuation: those the model brings, and the tokenizer's."""
    found: set[int] = set()
    for one in (getattr(model, "generation_config", None), getattr(model, "config", None), tokenizer):
        ids = getattr(one, "eos_token_id", None)
        found.update([ids] if isinstance(ids, int) else ids or ())
    return tuple(sorted(found))


def _text(tokenizer: Any, ids: Ids) -> str:
    text: str = tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return whole(text)


class _Writer:
    """Writes one batch at a time with `generate`."""

    def __init__(
        self,
        scorer: Scorer,
        prompts: Sequence[Prompt],
        decoding: DecodingSettings,
        *,
        ends: tuple[int, ...],
        number: int,
        seed: int,
    ) -> None:
        self.model, self.prompts, self.decoding = scorer.model, prompts, decoding
        self.ends, self.number, self.seed = ends, number, seed
        outer = scorer.model.model
        self.base = outer.get_base_model() if hasattr(outer, "get_base_model") else outer  # what an adapter generates with
        if not callable(getattr(outer, "generate", None)):
            raise ScoringError(
                f"the model must have `generate` to write continuations, got {type(outer).__name__}. "
                "Unwrap it, or ask for its text through an endpoint."
            )

    def write(self, batch: Sequence[Row]) -> list[tuple[Ids, bool]]:
        """Ids written in each row, and whether the model ended it."""
        import transformers

        ids, mask = pad_left([self.prompts[prompt].ids for prompt, _ in batch], self.model.device)
        lasts = set(ids[:, -1].tolist())
        settings = transformers.GenerationConfig(
            do_sample=False,  # the draws are made by `_Draw`, which leaves one token a row
            max_new_tokens=self.number,
            eos_token_id=list(self.ends) or None,
            pad_token_id=next(one for one in itertools.count() if one not in lasts),
            use_cache=True,
        )
        draw = _Draw(self.decoding, self._uniforms(batch))
        with _defaults_set_aside((self.model.model, self.base)), self._counted():
            out = self.model.model.generate(
                input_ids=ids,
                attention_mask=mask,
                generation_config=settings,
                logits_processor=transformers.LogitsProcessorList([draw]),
                synced_gpus=False,
            )
        return [self._cut(row) for row in out[:, ids.shape[1] :].tolist()]

    def _cut(self, row: list[int]) -> tuple[Ids, bool]:
        """What stands before the first end token; behind it is padding."""
        end = next((place for place, one in enumerate(row) if one in self.ends), None)
        return tuple(row[:end]), end is not None

    def _uniforms(self, batch: Sequence[Row]) -> Tensor | None:
        if self.decoding.is_greedy:
            return None
        draws = [
            np.random.default_rng(sample_seed(self.prompts[prompt], sample, self.seed)).random(self.number)
            for prompt, sample in batch
        ]
        return torch.tensor(np.array(draws), dtype=torch.float32, device=self.model.device).clamp(max=LARGEST_UNIFORM)

    @contextlib.contextmanager
    def _counted(self) -> Iterator[None]:
        """Let the forward calls of `generate` count among the model's, by which ranks keep in step."""

        def count(*_: Any) -> None:
            self.model.num_forwards += 1

        handle = self.base.register_forward_hook(count)
        try:
            yield
        finally:
            handle.remove()


class _Draw:
    """Leaves, of each row's logits, the token that its own random number picks under the sampler; all of them if greedy."""

    def __init__(self, decoding: DecodingSettings, uniforms: Tensor | None) -> None:
        self.sampler = Sampler(decoding.temperature, decoding.top_k, decoding.top_p)
        self.uniforms, self.step = uniforms, 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if bool(scores.isnan().any()):
            raise NonFiniteScoreError("logits of a continuation must be numbers, got NaN.")
        if self.uniforms is None:
            return scores
        picked = pick_tokens(self.sampler.log_probs(scores), self.uniforms[:, self.step])
        self.step += 1
        return torch.full_like(scores, -torch.inf).scatter_(1, picked[:, None], 0.0)


def pick_tokens(log_probs: Tensor, uniforms: Tensor) -> Tensor:
    """The token at which the cumulated probability of each row passes its random number; int64, shape (N,).

    Args:
        log_probs: nats, -inf for a token that is never drawn, (N, V).
        uniforms: 0 or more, below 1, (N,).

    Example:
        >>> pick_tokens(torch.tensor([[0.5, 0.0, 0.5]] * 3).log(), torch.tensor([0.0, 0.49, 0.5])).tolist()
        [0, 0, 2]
    """
    cumulated = log_probs.exp().cumsum(dim=-1)
    # Summed in parallel, as on a GPU, neighbours of equal value may differ in the last bit: hence the second condition.
    passed = (cumulated > (uniforms * cumulated[:, -1])[:, None]) & log_probs.isfinite()
    return passed.long().argmax(dim=-1)


def pad_left(rows: Sequence[Ids], device: torch.device) -> tuple[Tensor, Tensor]:
    """Ids and attention mask, (rows, longest) int64; padding is id 0, before the row, and is attended by nothing.

    Example:
        >>> ids, mask = pad_left([(5, 6), (7,)], torch.device("cpu"))
        >>> ids.tolist(), mask.tolist()
        ([[5, 6], [0, 7]], [[1, 1], [0, 1]])
    """
    width = max(len(row) for row in rows)
    ids = torch.tensor([[*[0] * (width - len(row)), *row] for row in rows], dtype=torch.long, device=device)
    starts = torch.tensor([width - len(row) for row in rows], device=device)
    mask = (torch.arange(width, device=device)[None] >= starts[:, None]).long()
    return ids, mask


@contextlib.contextmanager
def _defaults_set_aside(models: Sequence[Any]) -> Iterator[None]:
    """Take away, for the block, the settings that a model fills up a call of `generate` with."""
    import transformers

    held = [(one, vars(one)["generation_config"]) for one in models if "generation_config" in vars(one)]
    for one, _ in held:
        one.generation_config = transformers.GenerationConfig()
    try:
        yield
    finally:
        for one, settings in held:
            one.generation_config = settings
