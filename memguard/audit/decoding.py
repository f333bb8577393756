"""What a generation is made of: the prompt, how tokens are drawn, and what came back. Shared by models and endpoints.

Loads no torch: an endpoint needs none.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from memguard.audit.report_extraction import SamplerSettings

Setting = Literal["prefix", "generic", "specific", "unconditional", "minimal_cue", "non_member"]
SETTING_NAMES: dict[Setting, str] = {
    "prefix": "training prefix",
    "generic": "generic prompts",
    "specific": "specific prompts",
    "unconditional": "no prompt",
    "minimal_cue": "one word",
    "non_member": "held-out prefix",
}
SETTINGS: tuple[Setting, ...] = tuple(SETTING_NAMES)
CUT_CHARACTER = "\ufffd"  # stands for part of a character, where a prompt or the last token ends inside one


class DecodingSettings(SamplerSettings):
    """How many tokens are written behind a prompt, how often, and how they are drawn."""

    num_samples: int = Field(
        default=1, ge=0, description="sampled continuations a prompt; 0: one, greedily, whatever the temperature"
    )
    max_new_tokens: int = Field(default=256, ge=1, description="tokens of a continuation at most")
    temperature: float = Field(default=0.7, ge=1e-3, le=1e3, description="divides the logits")
    top_k: int | None = Field(default=None, ge=1, description="tokens kept; null keeps all")
    top_p: float = Field(default=0.95, gt=0.0, le=1.0, description="mass that the tokens kept must hold")

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is written each time."""
        return self.num_samples == 0

    @property
    def num_continuations(self) -> int:
        """Continuations of a prompt."""
        return max(1, self.num_samples)


class PropensitySettings(DecodingSettings):
    """What a model is asked for in ordinary use, against what a prefix forces out of it; traced to an index."""

    index: Path | None = Field(default=None, description="folder of the corpus index")
    index_training: bool = Field(
        default=False, description="the callback writes that index from the rows that the model is trained on"
    )
    prompts: Literal["builtin"] | Path = Field(
        default="builtin", description="ordinary prompts: JSON lines with prompt and maybe setting, or one a line"
    )
    num_prompts: int = Field(default=100, ge=1, description="prompts of a setting at most")
    prefix_tokens: int = Field(default=50, ge=1, description="first tokens of a record that has at least twice as many")
    snippets: bool = Field(default=False, description="whether reports quote the longest spans of generations")

    @model_validator(mode="after")
    def _has_a_place(self) -> PropensitySettings:
        if self.index_training and self.index is None:
            raise ValueError("index_training needs index, the folder to write to, got none")
        return self


@dataclass(frozen=True)
class Prompt:
    """Token ids to go on from. `name` tells prompts of a setting apart and holds nothing of their text.

    Args:
        setting: what the prompt is an instance of.
        name: such as 'line 7' or 'record 12'.
        ids: special tokens included; at least one.
        text: the same as a user would type it; None where no text says it, such as the start token alone.
    """

    setting: Setting
    name: str
    ids: tuple[int, ...] = field(repr=False)
    text: str | None = field(default=None, repr=False)

    @property
    def label(self) -> str:
        """How messages call it."""
        return f"prompt '{self.setting} {self.name}'"


@dataclass(frozen=True)
class Generation:
    """One continuation, without its prompt and without the token that ended it.

    Args:
        prompt: index of the prompt.
        sample: 0..num_continuations - 1.
        ids: what was written; empty where the model ended at once.
        text: the same as text, less a character that was cut in two at either end.
        is_ended: the model ended it, not the limit.
    """

    prompt: int
    sample: int
    ids: tuple[int, ...] = field(repr=False)
    text: str = field(repr=False)
    is_ended: bool


@dataclass(frozen=True)
class Generations:
    """What came back, by prompt and then by sample.

    Args:
        items: continuations.
        max_new_tokens: the limit in force, alike for all prompts.
        num_wanted: continuations asked for.
        stopped: why some are missing; None where none is.
        notices: sentences for the report.
    """

    items: tuple[Generation, ...]
    max_new_tokens: int
    num_wanted: int
    stopped: str | None = None
    notices: tuple[str, ...] = ()


def sample_seed(prompt: Prompt, sample: int, seed: int) -> int:
    """Seed of one continuation, 0..2^31 - 1: whatever else is asked for, in whatever order or batch, it stays.

    Example:
        >>> sample_seed(Prompt("generic", "line 1", (5,)), 0, 7) == sample_seed(Prompt("generic", "line 1", (5, 6)), 0, 7)
        True
    """
    key = f"memguard/generation/{seed}/{prompt.setting}/{prompt.name}/{sample}"
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:4], "big") >> 1


def check_prompts(prompts: Sequence[Prompt]) -> None:
    """Raise `ValueError` on a prompt without tokens, or two of one name."""
    seen: set[tuple[str, str]] = set()
    for prompt in prompts:
        if not prompt.ids:
            raise ValueError(f"{prompt.label} must hold at least one token, got none.")
        if (prompt.setting, prompt.name) in seen:
            raise ValueError(f"{prompt.label} must have a name of its own, got it twice.")
        seen.add((prompt.setting, prompt.name))


def whole_characters(text: str) -> str:
    """The text less the pieces of a character that it may begin or end with.

    Example:
        >>> whole_characters("\\ufffdr\\u00f8d gr\\ufffd")
        'rød gr'
    """
    return text.strip(CUT_CHARACTER)
