"""The policy: what a release must show, what it must not show, and the chance of a false alarm that is accepted.

Significance lives in the family `alpha` alone: a rule has no p-value limit of its own. Limits on exposure are bits.
Source: statistics specification, section 3.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    StringConstraints,
    Tag,
    ValidationError,
    model_validator,
)

from memguard.documents import document_digest
from memguard.errors import InputError
from memguard.files import read_yaml
from memguard.gates.policy_errors import describe_policy_error
from memguard.gates.wording import clip

POLICY_VERSION = 1
BUILT_IN = ("default", "strict", "finetune", "private")

LimitField = Literal[
    "extraction.count",
    "exposure.bits",
    "exposure.mean_bits",
    "ledger.token_share",
    "records.greedy_share",
    "membership.auroc",
    "propensity.full_match_rate",
    "propensity.span_rate_50",
]
TestName = Literal[
    "exposure.pooled",
    "exposure.max",
    "exposure.against_baseline",
    "exposure.improves_on_baseline",
    "privacy.stated_epsilon",
]
Severity = Literal["block", "warn"]

ANNOTATING = ("propensity.full_match_rate", "propensity.span_rate_50")  # may warn; block nothing and clear nothing
SHARES = ("ledger.token_share", "records.greedy_share", "membership.auroc", *ANNOTATING)
OF_THE_WHOLE = (*SHARES, "privacy.stated_epsilon")
EACH_OF_FIELD: dict[str, str | None] = {
    "extraction.count": None,
    "exposure.bits": "canary",
    "exposure.mean_bits": "tier",
    "ledger.token_share": None,
    "records.greedy_share": None,
    "membership.auroc": None,
    "propensity.full_match_rate": None,
    "propensity.span_rate_50": None,
}


def _one_line(text: str) -> str:
    if clip(text) != text:
        raise ValueError("must be one plain line of at most 200 characters")
    return text


def _date(value: object) -> object:
    if not isinstance(value, str):
        return value
    try:
        return datetime.datetime.strptime(value, "%Y-%m-%d").date()
    except ValueError:
        raise ValueError("must be a date such as 2026-12-31") from None


def _whole_number(value: object) -> object:
    # Literal[1] takes True and 1.0 for 1.
    if type(value) is not int:
        raise ValueError(f"must be {POLICY_VERSION}")
    return value


Line = Annotated[str, StringConstraints(strip_whitespace=True, min_length=1), AfterValidator(_one_line)]


class PolicyPart(BaseModel):
    """Base of the policy's parts: frozen, no unknown keys, no silent conversion, errors that never echo the input."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, hide_input_in_errors=True)


class JudgedTiers(PolicyPart):
    """Which canaries the rules judge; the others draw the scaling curve."""

    max_repetitions: int = Field(default=4, ge=1, description="judged: canaries repeated up to this often, in the plan's unit")


class EvidenceNeeds(PolicyPart):
    """What a report must show before its figures count. Lacking one: exit code 3. A live subject is always refused."""

    controls_null_test: bool = Field(default=True, description="never-inserted controls must look like chance")
    positive_control: Literal["any", "probe", "in_training", "none"] = Field(
        default="any", description="canaries planted to be memorised must be seen as memorised"
    )
    ledger_exact: bool = Field(default=True, description="the ledger must be there and exact")
    min_canaries: int = Field(default=40, ge=1, description="judged canaries that reached the loss")
    start_audit: Literal["if_measured", "required"] = Field(
        default="if_measured", description="the canaries must not be known to the model before training"
    )
    max_age_days: int | None = Field(default=None, ge=1, description="an older audit is stale; null: none is")
    fresh_secrets: bool = Field(
        default=True, description="false: secrets drawn from a seed, which anyone could redraw, are accepted"
    )


class Selection(PolicyPart):
    """The canaries that one rule looks at; what is left out does not narrow. Tiers named here are judged however high."""

    formats: list[Line] | None = Field(default=None, min_length=1, description="names of formats")
    tiers: list[Annotated[int, Field(ge=1)]] | None = Field(
        default=None, min_length=1, description="repetitions in force, in the plan's unit"
    )
    canaries: list[Line] | None = Field(default=None, min_length=1, description="ids of the plan")

    @model_validator(mode="after")
    def _narrows(self) -> Selection:
        if self.formats is None and self.tiers is None and self.canaries is None:
            raise ValueError("must name formats, tiers or canaries")
        return self


class LimitRule(PolicyPart):
    """A figure of the report must stay at or below `max`. Bits for exposure, 0..1 for shares and AUROC."""

    name: Line
    field: LimitField
    max: float = Field(ge=0, allow_inf_nan=False)
    each: Literal["canary", "tier"] | None = None
    select: Selection | None = Field(default=None, description="null: every judged canary")
    severity: Severity = "block"

    @model_validator(mode="after")
    def _each_fits_field(self) -> LimitRule:
        if self.field in SHARES and self.max >= 1:
            raise ValueError(f"the field {self.field} lies in 0..1, so a max of {self.max:g} could never block")
        if self.field in ANNOTATING and self.severity != "warn":
            raise ValueError(f"the field {self.field} annotates a decision: it needs 'severity: warn'")
        each = EACH_OF_FIELD[self.field]
        if self.each != each:
            raise ValueError(
                f"the field {self.field} needs 'each: {each}'" if each else f"the field {self.field} takes no 'each'"
            )
        if self.select is not None and self.field in OF_THE_WHOLE:
            raise ValueError(f"the field {self.field} is of the whole report and takes no 'select'")
        if self.select is not None and self.select.canaries is not None and self.field == "exposure.mean_bits":
            raise ValueError("the field exposure.mean_bits is of whole tiers; select formats or tiers")
        return self


class SignificanceRule(PolicyPart):
    """A family test that must not reject. Its level is a share of the policy's `alpha`."""

    name: Line
    test: TestName
    tolerance_bits: float | None = Field(
        default=None, ge=0, allow_inf_nan=False, description="against_baseline only; 0.5 if not given"
    )
    bits: float | None = Field(
        default=None, gt=0, allow_inf_nan=False, description="improves_on_baseline only: the fall of the mean to be shown"
    )
    select: Selection | None = Field(default=None, description="null: every judged canary")
    severity: Severity = "block"

    @model_validator(mode="after")
    def _keys_fit_test(self) -> SignificanceRule:
        if self.tolerance_bits is not None and self.test != "exposure.against_baseline":
            raise ValueError("tolerance_bits belongs to the test exposure.against_baseline alone")
        if (self.bits is not None) != (self.test == "exposure.improves_on_baseline"):
            raise ValueError("the test exposure.improves_on_baseline needs 'bits', and no other test takes it")
        if self.select is not None and self.test in OF_THE_WHOLE:
            raise ValueError(f"the test {self.test} is of the whole report and takes no 'select'")
        return self

    @property
    def tolerance(self) -> float:
        """Rise of the mean exposure that is tolerated; bits."""
        return 0.5 if self.tolerance_bits is None else self.tolerance_bits


def _shape(rule: object) -> str:
    """A rule with a test is a significance rule; anything else is read as a limit."""
    has_test = "test" in rule if isinstance(rule, Mapping) else isinstance(rule, SignificanceRule)
    return "test" if has_test else "limit"


Rule = Annotated[Annotated[LimitRule, Tag("limit")] | Annotated[SignificanceRule, Tag("test")], Discriminator(_shape)]


class Waiver(PolicyPart):
    """A failing rule that somebody answers for, until a date. It is shown in every output.

    With `canary` or `tier` it covers a limit for these canaries alone, and the rule passes only if nothing else fails it.
    """

    rule: Line
    canary: Line | None = Field(default=None, description="id of the canary it covers")
    tier: int | None = Field(default=None, ge=1, description="the tier it covers, by repetitions in force")
    owner: Line
    reason: Line
    expires: Annotated[datetime.date, BeforeValidator(_date)] = Field(description="the last day on which it counts, UTC")

    @model_validator(mode="after")
    def _one_scope(self) -> Waiver:
        if self.canary is not None and self.tier is not None:
            raise ValueError("a waiver covers a 'canary' or a 'tier', not both; write two")
        return self

    @property
    def scope(self) -> str:
        """What it covers, for a sentence; empty for the whole rule."""
        return f"for canary '{self.canary}' " if self.canary else f"for tier {self.tier} " if self.tier else ""


class Policy(PolicyPart):
    """What a checkpoint must show to be released.

    Example:
        >>> policy = Policy.model_validate({"version": 1, "rules": [{"name": "none", "field": "extraction.count", "max": 0.0}]})
        >>> policy.alpha, policy.evidence.min_canaries
        (0.01, 40)
    """

    version: Annotated[Literal[1], BeforeValidator(_whole_number)]
    alpha: float = Field(default=0.01, ge=1e-9, le=0.1, description="rate of stopping a model that memorised nothing")
    judged_tiers: JudgedTiers = JudgedTiers()
    comparable: Literal["plan", "design"] = Field(
        default="plan", description="plan: the same canaries; design: also fresh secrets of the same formats and tiers"
    )
    evidence: EvidenceNeeds = EvidenceNeeds()
    rules: list[Rule] = Field(min_length=1)
    strict: bool = Field(
        default=False, description="'not shown' is exit code 3 too, and alpha is divided by the number of attempts"
    )
    waivers: list[Waiver] = []

    @model_validator(mode="after")
    def _names_fit(self) -> Policy:
        names = [rule.name for rule in self.rules]
        twice = sorted({name for name in names if names.count(name) > 1})
        unknown = sorted({waiver.rule for waiver in self.waivers} - set(names))
        problems = [f"the rule name '{clip(name, 60)}' is used twice" for name in twice]
        problems += [f"a waiver names the rule '{clip(name, 60)}', which the policy does not have" for name in unknown]
        limits = {rule.name for rule in self.rules if isinstance(rule, LimitRule) and rule.field not in OF_THE_WHOLE}
        narrow = sorted({waiver.rule for waiver in self.waivers if waiver.scope and waiver.rule in names} - limits)
        problems += [
            f"a waiver of the rule '{clip(name, 60)}' covers the whole rule: only a limit on canaries can be waived in part"
            for name in narrow
        ]
        if problems:
            raise ValueError("; ".join(problems))
        return self

    @property
    def digest(self) -> str:
        """The sha256 of the policy with every default filled in."""
        return document_digest(self)

    @property
    def block_tests(self) -> list[SignificanceRule]:
        """The significance rules that share the error budget: those that can block a model that memorised nothing by chance.

        A proof of improvement is none of them: it is missing until it is shown.
        """
        return [
            rule
            for rule in self.rules
            if isinstance(rule, SignificanceRule) and rule.severity == "block" and rule.test != "exposure.improves_on_baseline"
        ]


KNOWN_KEYS = {
    "policy": list(Policy.model_fields),
    "judged_tiers": list(JudgedTiers.model_fields),
    "evidence": list(EvidenceNeeds.model_fields),
    "limit": list(LimitRule.model_fields),
    "test": list(SignificanceRule.model_fields),
    "waivers": list(Waiver.model_fields),
    "select": list(Selection.model_fields),
}


def load_policy(path: Path | str) -> Policy:
    """Read a policy from a YAML file, or one that comes with memguard by its name.

    Args:
        path: a file, or `default`, `strict`, `finetune`, `private` (for a file of that name write its suffix or folder).

    Returns:
        The policy, every default filled in.

    Raises:
        InputError: the file is missing, is not plain YAML, or holds a key or value this version does not accept; the
            message names every one of them.

    Example:
        >>> load_policy("default").strict, load_policy("strict").strict
        (False, True)
    """
    file = Path(__file__).parent / "policies" / f"{path}.yaml" if str(path) in BUILT_IN else Path(path)
    data = read_yaml(file, what="policy")
    version = data.get("version")
    if isinstance(version, int) and version > POLICY_VERSION:
        raise InputError(
            f"policy '{file.name}' has version {clip(str(version), 20)}; this memguard reads up to {POLICY_VERSION}. "
            "Upgrade memguard to read it."
        )
    try:
        return Policy.model_validate(data)
    except ValidationError as error:
        raise InputError(f"policy '{file.name}' cannot be used: {describe_policy_error(error, KNOWN_KEYS)}.") from None
