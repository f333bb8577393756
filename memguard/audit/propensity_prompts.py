"""The prompts of every setting as token ids: what forces training text out, ordinary use, and the floor of chance.

prefix: the first tokens of records of the training data. generic, specific: ordinary requests, ours or the user's.
unconditional: the start token alone. minimal_cue: the start token and one frequent word. non_member: first tokens of held-out
records. An ordinary prompt that shares 8 tokens or more with the corpus in one piece would be an attack and is refused.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from memguard.audit.decoding import Prompt, PropensitySettings, Setting, whole_characters
from memguard.audit.written_prompts import (
    WrittenPrompt,
    builtin_prompts,
    load_prompts,
    minimal_cues,
    specific_prompts,
)

if TYPE_CHECKING:
    from memguard.audit.records import Record

OVERLAP_LIMIT = 8  # tokens in one piece: as long a span in the corpus makes a prompt an attack
NUM_SPARE = 2  # specific prompts made for each one wanted, since some are refused

Ids = tuple[int, ...]
LongestMatch = Callable[[Sequence[Ids]], Sequence[int]]


@dataclass(frozen=True)
class RefusedPrompt:
    """A prompt that was left out, and why; one sentence without its text."""

    setting: Setting
    name: str
    reason: str


@dataclass(frozen=True)
class PromptSet:
    """Prompts of all settings, those that were refused, and sentences for the report."""

    prompts: tuple[Prompt, ...]
    refused: tuple[RefusedPrompt, ...]
    notices: tuple[str, ...]

    def of(self, setting: Setting) -> list[Prompt]:
        """The prompts of one setting, in order."""
        return [prompt for prompt in self.prompts if prompt.setting == setting]


def collect_prompts(
    settings: PropensitySettings,
    tokenizer: Any,
    *,
    members: Sequence[Record],
    held_out: Sequence[Record],
    longest_match: LongestMatch,
    seed: int = 0,
) -> PromptSet:
    """Prompts for every setting there is data for.

    Args:
        settings: how many, how long, and the user's file if there is one.
        tokenizer: of the model.
        members: records of the training data.
        held_out: records of the same kind, never trained on; may be empty.
        longest_match: tokens of the longest piece of each prompt that stands in the corpus.
        seed: of what is drawn.

    Returns:
        `PromptSet`; a setting without prompts is said in a notice.

    Raises:
        InputError: the user's file cannot be read, or holds a line that is no prompt.

    Source: Barmina, Schneider-Kamp, Galke Poech, arXiv 2606.06286. Differs: overlap with the corpus is refused, specific
    prompts come from a template and not from a model.
    """
    made = _Maker(settings, tokenizer, longest_match, seed)
    written = builtin_prompts() if settings.prompts == "builtin" else load_prompts(settings.prompts)
    documents = [(f"record {record.line}", made.text_of(record)) for record in members]
    if not any(prompt.setting == "specific" for prompt in written):
        written += specific_prompts(documents, number=NUM_SPARE * settings.num_prompts, seed=seed)
    cues = minimal_cues(documents, number=settings.num_prompts, seed=seed)
    found = [
        made.from_records("prefix", members),
        made.from_texts("generic", written),
        made.from_texts("specific", written),
        made.unconditional(),
        made.from_texts("minimal_cue", cues),
        made.from_records("non_member", held_out),
    ]
    return PromptSet(tuple(prompt for prompts in found for prompt in prompts), tuple(made.refused), tuple(made.notices))


class _Maker:
    """Encodes prompts and leaves out what may not be one."""

    def __init__(self, settings: PropensitySettings, tokenizer: Any, longest_match: LongestMatch, seed: int) -> None:
        self.settings, self.tokenizer, self.longest_match, self.seed = settings, tokenizer, longest_match, seed
        self.refused: list[RefusedPrompt] = []
        self.notices: list[str] = []
        self.ends = {one for one in (tokenizer.eos_token_id, tokenizer.bos_token_id) if one is not None}
        starts = (tokenizer.bos_token_id, tokenizer.eos_token_id)
        self.start: Ids = next(((one,) for one in starts if one is not None), ())

    def text_of(self, record: Record) -> str:
        """What a record says, also where its file held ids alone."""
        if record.text is not None:
            return record.text
        text: str = self.tokenizer.decode(record.ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text

    def from_records(self, setting: Setting, records: Sequence[Record]) -> list[Prompt]:
        """The first tokens of a random sample of records; records that begin alike count once."""
        length, distinct = self.settings.prefix_tokens, dict[Ids, Prompt]()
        for record in records:
            lead, body = self._parted(record.ids)
            if len(body) >= 2 * length:
                ids = (*lead, *body[:length])
                distinct.setdefault(ids, Prompt(setting, f"record {record.line}", ids, self._as_text(body[:length])))
        accepted = list(distinct.values())
        if setting == "non_member":
            accepted = self._accept(accepted, lambda prompt: len(self._parted(prompt.ids)[1]))
        if not accepted:
            said = f"it needs records of at least {2 * length} tokens, got {len(records)} others" if records else "no records"
            self.notices.append(f"setting '{setting}' was not measured: {said}.")
        return self._sample(accepted)

    def from_texts(self, setting: Setting, written: Iterable[WrittenPrompt]) -> list[Prompt]:
        """Texts as ordinary prompts; the start token stands before a cue."""
        seen: dict[Ids, str] = {}
        candidates = []
        for one in written:
            if one.setting != setting:
                continue
            ids = self._encoded(one)
            if not self._parted(ids)[1]:
                self._refuse(setting, one.name, "it holds no token.")
            elif ids in seen:
                self._refuse(setting, one.name, f"it repeats {seen[ids]}.")
            else:
                seen[ids] = one.name
                candidates.append(Prompt(setting, one.name, ids, one.text))
        accepted = self._accept(candidates, lambda _: OVERLAP_LIMIT)
        if not accepted:
            self.notices.append(f"setting '{setting}' was not measured: no prompt of it is left.")
        return self._sample(accepted)

    def unconditional(self) -> list[Prompt]:
        """The start token, once for each draw; greedily it has one continuation."""
        if not self.start:
            self.notices.append("setting 'unconditional' was not measured: the tokenizer has no start and no end token.")
            return []
        number = 1 if self.settings.is_greedy else self.settings.num_prompts
        return [Prompt("unconditional", f"draw {place}", self.start) for place in range(1, number + 1)]

    def _encoded(self, one: WrittenPrompt) -> Ids:
        """Ids as the tokenizer writes a text by default, less an end token that would finish it."""
        if one.setting == "minimal_cue":
            return (*self.start, *self.tokenizer(one.text, add_special_tokens=False)["input_ids"])
        ids = list(self.tokenizer(one.text)["input_ids"])
        while len(ids) > 1 and ids[-1] == self.tokenizer.eos_token_id:
            ids.pop()
        return tuple(ids)

    def _parted(self, ids: Ids) -> tuple[Ids, Ids]:
        """Special tokens that ids begin with, and what stands between those and the ones they end with."""
        start, end = 0, len(ids)
        while start < end and ids[start] in self.ends:
            start += 1
        while end > start and ids[end - 1] in self.ends:
            end -= 1
        return ids[:start], ids[start:end]

    def _as_text(self, ids: Ids) -> str:
        text: str = self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return whole_characters(text)

    def _accept(self, candidates: Sequence[Prompt], limit: Callable[[Prompt], int]) -> list[Prompt]:
        """Those of which no piece as long as the limit stands in the corpus; the others are refused by name."""
        bodies = [self._parted(prompt.ids)[1] for prompt in candidates]
        accepted = []
        for prompt, longest in zip(candidates, self.longest_match(bodies) if bodies else (), strict=True):
            if longest < limit(prompt):
                accepted.append(prompt)
            else:
                rule = f"fewer than {limit(prompt)} may" if prompt.setting != "non_member" else "it is no held-out text"
                self._refuse(prompt.setting, prompt.name, f"{longest} of its tokens stand in the corpus in one piece; {rule}.")
        return accepted

    def _refuse(self, setting: Setting, name: str, reason: str) -> None:
        self.refused.append(RefusedPrompt(setting, name, reason))

    def _sample(self, prompts: Sequence[Prompt]) -> list[Prompt]:
        if len(prompts) <= self.settings.num_prompts:
            return list(prompts)
        stream = random.Random(f"memguard/prompts/{self.seed}/{prompts[0].setting}")
        chosen = stream.sample(range(len(prompts)), self.settings.num_prompts)
        return [prompts[place] for place in sorted(chosen)]
