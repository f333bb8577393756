"""What a model writes greedily behind prompts of token ids, by the same forward passes that score."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

from memguard.scoring.scorer import Scorer

Ids = tuple[int, ...]


def continue_greedily(scorer: Scorer, prompts: Sequence[Ids], *, num_tokens: int) -> list[Ids]:
    """The most likely next token, again and again; an end token does not end it, since text may follow.

    Args:
        scorer: of the model.
        prompts: token ids, each at least one; lengths may differ.
        num_tokens: tokens to write, fewer where the model has no more positions.

    Returns:
        In order, the ids written. Where logits tie or a model rounds them to bf16, `generate` may write another token.

    Raises:
        ValueError: an empty prompt.
        ScoringError: the model fails; names the prompt's number.
    """
    if any(len(prompt) == 0 for prompt in prompts):
        raise ValueError("prompts must hold at least one token each, got an empty one.")
    written: list[Ids] = [()] * len(prompts)
    if not prompts:
        return written
    scorer.model.check([(*prompt, *prompt[:2]) for prompt in prompts[:3]])
    limit = scorer.model.max_length
    alike: dict[int, list[int]] = defaultdict(list)
    for index, prompt in enumerate(prompts):
        alike[len(prompt)].append(index)

    def store(batch: Sequence[int], found: list[Ids]) -> None:
        for index, ids in zip(batch, found, strict=True):
            written[index] = ids

    for length, members in alike.items():
        number = num_tokens if limit is None else min(num_tokens, limit - length)

        def work(batch: Sequence[int], number: int = number) -> list[Ids]:
            return _continue([prompts[index] for index in batch], scorer, number)

        if number > 0:
            scorer.batches.run(
                members,
                work,
                store,
                width=lambda _: length + number,  # noqa: B023
                label=lambda index: f"prompt {index}",
                num_forwards=number,
            )
    return written


def _continue(prompts: Sequence[Ids], scorer: Scorer, number: int) -> list[Ids]:
    """Prompts of one length, token by token."""
    model, rows = scorer.model, [list(prompt) for prompt in prompts]
    branch = None
    if model.can_branch():
        states, branch = model.encode(prompts)
    else:
        states = model.whole(rows)[:, -1]
    every = torch.arange(len(rows))
    for place in range(number):
        following = _likeliest(scorer, states)
        for row, token in zip(rows, following.tolist(), strict=True):
            row.append(token)
        if place == number - 1:
            break
        if branch is not None:
            last, branch = model.extend(branch, every, following[:, None])
            states = last[:, -1]
        else:
            states = model.whole(rows)[:, -1]
    return [tuple(row[len(prompt) :]) for row, prompt in zip(rows, prompts, strict=True)]


def _likeliest(scorer: Scorer, states: Tensor) -> Tensor:
    found = scorer.model.statistics(states, torch.zeros(len(states), dtype=torch.long))
    return found.argmax.clamp(min=0).cpu()
