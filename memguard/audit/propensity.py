"""Would it leak in ordinary use? Settings of prompts are run, continuations traced to the corpus, both sides compared.

With several ranks all write together, and rank 0 alone asks the corpus. What is figured from the traces: `propensity_figures`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from memguard.audit.decoding import Generation, Generations, Prompt, PropensitySettings
from memguard.audit.endpoint import Endpoint, generate_at_endpoint
from memguard.audit.generation import generate_with_model
from memguard.audit.propensity_figures import summarise_propensity
from memguard.audit.propensity_prompts import PromptSet, collect_prompts
from memguard.audit.records import Record
from memguard.audit.report_propensity import Propensity
from memguard.audit.traced import Corpus
from memguard.errors import EvidenceError, MemguardError, MissingExtraError, ScoringError
from memguard.scoring.scorer import Scorer
from memguard.scoring.team import Team

T = TypeVar("T")


def measure_model(
    scorer: Scorer,
    tokenizer: Any,
    corpus: Corpus,
    settings: PropensitySettings,
    *,
    members: Sequence[Record],
    held_out: Sequence[Record],
    seed: int = 0,
) -> Propensity:
    """Propensity of a model in memory, against its capability; in audit mode, on all ranks together.

    Args:
        scorer: of the model.
        tokenizer: of the model.
        corpus: asked on rank 0 alone.
        settings: prompts and decoding.
        members: records of the training data, for prefixes and the words of a corpus.
        held_out: records of the same kind, never trained on; the floor of chance.
        seed: of prompts and draws.

    Raises:
        InputError: a prompt file that cannot be read.
        EvidenceError: every prompt was refused.
        ScoringError: the model could not write; names a prompt.
    """
    team = scorer.model.team

    def prepare() -> PromptSet:
        longest = corpus.longest_match
        return collect_prompts(settings, tokenizer, members=members, held_out=held_out, longest_match=longest, seed=seed)

    def write(prompts: Sequence[Prompt]) -> Generations:
        return generate_with_model(scorer, prompts, tokenizer, settings, seed=seed)

    prompts = _on_first_rank(team, "prompts", prepare)
    written = _written(prompts, write)
    return _on_first_rank(
        team, "traced", lambda: summarise_propensity("model", prompts, written, corpus, settings, tokenizer, seed=seed)
    )


def measure_endpoint(
    endpoint: Endpoint,
    tokenizer: Any,
    corpus: Corpus,
    settings: PropensitySettings,
    *,
    members: Sequence[Record],
    held_out: Sequence[Record],
    seed: int = 0,
) -> Propensity:
    """Propensity of a served model, against its capability.

    Args:
        endpoint: where to ask.
        tokenizer: of the served model.
        corpus: as for `measure_model`, like what follows.

    Returns:
        `Propensity`; `partial` says why continuations are missing, where the endpoint stayed away half-way. Whoever writes
        that down must end in an `EndpointError` still.

    Raises:
        InputError: a prompt file that cannot be read.
        EvidenceError: every prompt was refused.
        EndpointError: the endpoint refuses, or gave nothing at all.
    """
    longest = corpus.longest_match
    prompts = collect_prompts(settings, tokenizer, members=members, held_out=held_out, longest_match=longest, seed=seed)
    written = _written(prompts, lambda some: generate_at_endpoint(endpoint, some, tokenizer, settings, seed=seed))
    return summarise_propensity("endpoint", prompts, written, corpus, settings, tokenizer, seed=seed)


def _on_first_rank(team: Team, what: str, work: Callable[[], T]) -> T:
    """What rank 0 makes of it, on every rank; an error of memguard's likewise, so that all go on or none."""
    value: T | None = None
    failure: MemguardError | None = None
    if team.rank == 0:
        try:
            value = work()
        except MemguardError as error:
            failure = ScoringError(str(error)) if isinstance(error, MissingExtraError) else error
    value, failure = team.agreed(what, (value, failure))
    if failure is not None:
        raise failure
    return value  # type: ignore[return-value]


def _written(prompts: PromptSet, write: Callable[[Sequence[Prompt]], Generations]) -> Generations:
    """Continuations of all prompts, by their place in the set; every setting gets its turn, so that a part has some of each."""
    if not prompts.prompts:
        raise EvidenceError("propensity needs at least one prompt, got none that may be asked.")
    turn: dict[str, int] = defaultdict(int)
    turns = []
    for prompt in prompts.prompts:
        turns.append(turn[prompt.setting])
        turn[prompt.setting] += 1
    order = sorted(range(len(turns)), key=lambda place: (turns[place], place))
    found = write([prompts.prompts[place] for place in order])
    items = tuple(
        Generation(order[item.prompt], item.sample, item.ids, item.text, item.is_ended)
        for item in sorted(found.items, key=lambda item: (order[item.prompt], item.sample))
    )
    return Generations(items, found.max_new_tokens, found.num_wanted, found.stopped, found.notices)
