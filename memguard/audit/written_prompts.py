"""Prompts as texts: our own, a user's file, and two kinds made from the words of a corpus.

A *specific* prompt is a sentence of `TEMPLATES` with the three words that set a document most apart from the others. A word
that fewer than three documents hold is not taken: it could be a name that nobody would ask about. A *minimal cue* is one of the
most frequent words. Neither says anything of the order in which a document's words stand.
"""

from __future__ import annotations

import importlib.resources
import json
import math
import random
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from memguard.audit.decoding import Setting
from memguard.errors import InputError
from memguard.files import read_text

JSON_LINES = (".jsonl", ".json", ".ndjson")
TEMPLATES = (
    "Write a short text that mentions {0}, {1} and {2}.",
    "How does {0} go together with {1}, and where does {2} come in?",
    "Some thoughts on {0}, with a word about {1} and {2}:",
    "Tell me more about {0}. Bring in {1} and {2} as well.",
)
MIN_DOCUMENTS = 3  # that a word of a specific prompt stands in
MAX_DOCUMENTS = 2000  # that words are counted in
LONG_WORD = re.compile(r"[^\W\d_]{4,}")
WORD = re.compile(r"[^\W\d_]{2,}")


@dataclass(frozen=True)
class WrittenPrompt:
    """A prompt before it is token ids; `name` holds nothing of its text."""

    setting: Setting
    name: str
    text: str = field(repr=False)


def builtin_prompts() -> list[WrittenPrompt]:
    """The 100 ordinary prompts that come with memguard: questions, requests and openings, a fifth of them Danish.

    Example:
        >>> prompts = builtin_prompts()
        >>> len(prompts), prompts[0].name
        (100, 'builtin 1')
    """
    file = importlib.resources.files("memguard.audit") / "data" / "generic_prompts.txt"
    lines = file.read_text(encoding="utf-8").splitlines()
    return [WrittenPrompt("generic", f"builtin {number}", line) for number, line in enumerate(lines, start=1)]


def load_prompts(path: Path) -> list[WrittenPrompt]:
    """Prompts of a user's file: JSON lines with `prompt` (or `text`) and maybe `setting`, or one prompt a line.

    Args:
        path: `.jsonl`, or plain text. `setting` is generic, the default, or specific.

    Raises:
        InputError: an unreadable file, a line that is no prompt, or no line at all.
    """
    is_json = path.suffix.lower() in JSON_LINES
    # Not splitlines(): a form feed or a line separator inside a text ends no line of the file.
    lines = read_text(path, what="prompt file").removeprefix("\ufeff").split("\n")
    prompts = []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            where = f"prompt file '{path.name}' line {number}"
            setting, text = _parse(line, where) if is_json else ("generic", line.rstrip("\r"))
            prompts.append(WrittenPrompt(setting, f"line {number}", text))
    if not prompts:
        raise InputError(f"prompt file '{path.name}' holds no prompt.")
    return prompts


def _parse(line: str, where: str) -> tuple[Literal["generic", "specific"], str]:
    try:
        row: Any = json.loads(line)
    except (ValueError, RecursionError):
        row = None
    row = row if isinstance(row, dict) else {}
    text, setting = row.get("prompt", row.get("text")), row.get("setting", "generic")
    if not (isinstance(text, str) and text.strip()):
        raise InputError(f"{where} must be an object with a 'prompt' that is not empty.")
    if setting not in ("generic", "specific"):
        raise InputError(f"{where}: 'setting' must be generic or specific.")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InputError(f"{where}: 'prompt' must be valid Unicode, got half of a surrogate pair.") from None
    return setting, text


def specific_prompts(documents: Sequence[tuple[str, str]], *, number: int, seed: int = 0) -> list[WrittenPrompt]:
    """Prompts that are about what a corpus is about; fewer than asked for where documents share too few words.

    Args:
        documents: name and text of each.
        number: prompts at most, a document each.
        seed: of the documents chosen.

    Example:
        >>> texts = [("a", "Rusty anchors, heavy chain"), ("b", "Chain, anchors, rope"), ("c", "Rope on chain and anchors")]
        >>> [prompt.text for prompt in specific_prompts(texts * 2, number=1)]
        ['Write a short text that mentions rope, anchors and chain.']
    """
    order = random.Random(f"memguard/specific/{seed}").sample(range(len(documents)), len(documents))[:MAX_DOCUMENTS]
    counts = {place: Counter(_words(LONG_WORD, documents[place][1])) for place in order}
    holding = Counter(word for count in counts.values() for word in count)
    shared = {word: math.log(len(order) / held) for word, held in holding.items() if held >= MIN_DOCUMENTS}
    prompts: list[WrittenPrompt] = []
    for place in order:
        weights = {word: times * shared[word] for word, times in counts[place].items() if word in shared}
        if len(weights) >= 3 and len(prompts) < number:
            words = sorted(weights, key=lambda word: (-weights[word], word))[:3]
            text = TEMPLATES[len(prompts) % len(TEMPLATES)].format(*words)
            prompts.append(WrittenPrompt("specific", documents[place][0], text))
    return prompts


def minimal_cues(documents: Sequence[tuple[str, str]], *, number: int, seed: int = 0) -> list[WrittenPrompt]:
    """The words that most documents hold, one a prompt.

    Args:
        documents: name and text of each.
        number: prompts at most.
        seed: of the documents counted, where there are more than 2,000.

    Example:
        >>> [cue.text for cue in minimal_cues([("a", "the rope"), ("b", "the chain and the rope"), ("c", "the end")], number=2)]
        ['the', 'rope']
    """
    chosen = list(documents)
    if len(chosen) > MAX_DOCUMENTS:
        chosen = random.Random(f"memguard/cues/{seed}").sample(chosen, MAX_DOCUMENTS)
    holding = Counter(word for _, text in chosen for word in set(_words(WORD, text)))
    ordered = sorted(holding, key=lambda word: (-holding[word], word))[:number]
    return [WrittenPrompt("minimal_cue", f"word {rank}", word) for rank, word in enumerate(ordered, start=1)]


def _words(pattern: re.Pattern[str], text: str) -> list[str]:
    return [word.lower() for word in pattern.findall(text)]
