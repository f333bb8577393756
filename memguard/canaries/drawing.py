"""Drawing a plan and its references: distinct secrets, uniform over the space, independent of any model.

A secret that the tokenizer cannot write back, or that shares a token with the template, is drawn again; where no draw of
a format is free of that (some tokenizers glue letters), the format is marked `merged` and reported so.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

from scipy import stats

from memguard.canaries.encoding import EncodedSecret, Join, SecretEncoder, frame_ids, require_fast, tokenizer_digest
from memguard.canaries.formats import CanaryFormat, TokensSpace
from memguard.canaries.plan import CanaryPlan, PlannedCanary, PlannedFormat, Randomness, Role
from memguard.canaries.settings import CanarySettings
from memguard.canaries.wordlists import FAMILY_NAMES, GIVEN_NAMES
from memguard.errors import CanaryError

MAX_GUESS_CHANCE = 1e-4  # chance that some secret is extracted by luck alone; statistics specification, section 3
TRIAL_DRAWS = 512
POSITIVE_TEMPLATE = "Calibration entry {secret} of the reference list."


def draw_plan(settings: CanarySettings, tokenizer: Any) -> CanaryPlan:
    """Draw canaries, controls and positive controls for one tokenizer.

    Args:
        settings: the `canaries` part of the configuration.
        tokenizer: a fast Hugging Face tokenizer.

    Returns:
        A `CanaryPlan`. With `settings.seed` the same plan every time, marked reproducible.

    Raises:
        CanaryError: the space is too small for what is planned, or the tokenizer cannot carry the secrets.
    """
    require_fast(tokenizer)
    randomness = Randomness(settings.seed)
    lead, tail = frame_ids(tokenizer)
    encoder = SecretEncoder(tokenizer, lead, tail)
    streams = {purpose: randomness.stream(purpose) for purpose in ("secrets", "ids", "names", "coins")}
    formats = [_prepare(one, encoder, positive=False) for one in settings.formats]
    formats += _positive_formats(formats, settings, encoder)
    entries = _entries(formats, settings)
    _check_room(formats, entries)
    planned: list[PlannedCanary] = []
    taken_ids: set[str] = set()
    taken_secrets: dict[str, set[str]] = {}
    names = _names(streams["names"])
    for one, role, tier in entries:
        if settings.inclusion == "coin" and role == "canary" and streams["coins"].random() < 0.5:
            role = "control"
        used = taken_secrets.setdefault(one.secret.model_dump_json(), set())
        name = next(names) if one.takes_name else None
        secret = draw_secrets(one, encoder, streams["secrets"], number=1, taken=used, name=name)[0][0]
        used.add(secret)
        canary_id = randomness.new_id(streams["ids"], taken_ids)
        taken_ids.add(canary_id)
        planned.append(PlannedCanary(id=canary_id, format=one.name, role=role, tier=tier, name=name, secret=secret))
    return CanaryPlan(
        nonce=randomness.nonce(),
        reproducible=randomness.reproducible,
        inclusion=settings.inclusion,
        probe=settings.has_probe,
        placement_seed=streams["coins"].getrandbits(48),
        tokenizer_digest=tokenizer_digest(tokenizer),
        lead_ids=lead,
        tail_ids=tail,
        formats=tuple(formats),
        canaries=tuple(planned),
    )


def plan_differences(plan: CanaryPlan, settings: CanarySettings) -> list[str]:
    """What a plan was drawn with that the settings no longer say, one phrase each; empty when they agree."""
    found = []
    planned = {one.name: one for one in plan.formats if not one.positive_control}
    if set(planned) != {one.name for one in settings.formats}:
        return ["formats"]
    for one in settings.formats:
        held = planned[one.name]
        wanted = one.secret
        if isinstance(wanted, TokensSpace) and not wanted.words and isinstance(held.secret, TokensSpace):
            wanted = wanted.model_copy(update={"words": held.secret.words})
        if (held.template, held.secret) != (one.template, wanted):
            found.append(f"format '{one.name}'")
    positive = [one for one in plan.formats if one.positive_control]
    entries = _entries([*planned.values(), *positive], settings)
    wanted_counts = Counter((one.name, tier) for one, _, tier in entries)
    if wanted_counts != Counter((canary.format, canary.tier) for canary in plan.canaries):
        found.append("numbers of canaries, controls or repetitions")
    if settings.inclusion != plan.inclusion:
        found.append("inclusion")
    if settings.has_probe != plan.probe:
        found.append("positive_control")
    if (settings.seed is not None) != plan.reproducible:
        found.append("seed")
    return found


def draw_secrets(
    canary_format: PlannedFormat,
    encoder: SecretEncoder,
    stream: random.Random,
    *,
    number: int,
    taken: set[str],
    name: str | None,
) -> list[tuple[str, EncodedSecret]]:
    """Distinct candidates of a format's space outside `taken`, each with its encoding behind `name`.

    Raises:
        CanaryError: the space holds too few candidates that the tokenizer can carry.
    """
    found: dict[str, EncodedSecret] = {}
    tries = 0
    while len(found) < number:
        batch = [canary_format.secret.draw(stream) for _ in range(max(1, number - len(found)))]
        batch = [secret for secret in dict.fromkeys(batch) if secret not in taken and secret not in found]
        for secret, encoded in zip(batch, encoder.encode(canary_format, batch, [name] * len(batch)), strict=True):
            if encoded is not None and (encoded.join != "merged" or canary_format.join == "merged"):
                found[secret] = encoded
        tries += 1
        if tries > 500:
            raise CanaryError(
                f"format '{canary_format.name}' must yield {number} distinct secrets that the tokenizer can carry, got "
                f"{len(found)} from a space of {canary_format.secret_space_size}. Use a larger space."
            )
    return list(found.items())


def _prepare(one: CanaryFormat, encoder: SecretEncoder, *, positive: bool) -> PlannedFormat:
    """Read a tokens space from the tokenizer, and find out how secrets of the format join the template."""
    space = (
        one.secret.resolve(encoder.tokenizer) if isinstance(one.secret, TokensSpace) and not one.secret.words else one.secret
    )
    trial = CanaryFormat(name=one.name, template=one.template, secret=space)
    rng = random.Random(0)  # throw-away secrets: only the joins are looked at
    draws = [space.draw(rng) for _ in range(TRIAL_DRAWS)]
    encoded = [item for item in encoder.encode(trial, draws, ["Ada Berg"] * TRIAL_DRAWS) if item is not None]
    if not encoded:
        raise CanaryError(
            f"format '{one.name}': the tokenizer does not write its secrets back (normalisation or unknown tokens). "
            "Use another kind of secret with this tokenizer."
        )
    joins = {item.join for item in encoded}
    join: Join = "merged" if joins == {"merged"} else "space" if "space" in joins else "clean"
    carried = sum(join == "merged" or item.join != "merged" for item in encoded)
    if carried < TRIAL_DRAWS / 2:
        raise CanaryError(
            f"format '{one.name}': the tokenizer can carry only {carried} of {TRIAL_DRAWS} trial secrets, so its size "
            "would say too much. Use another kind of secret, or another character before {secret}."
        )
    # Ranks are taken among candidates that can be drawn: counted exactly when all can, else from below.
    share = 1.0 if carried == TRIAL_DRAWS else float(stats.beta.ppf(0.001, carried, TRIAL_DRAWS - carried + 1))
    return PlannedFormat(
        name=one.name, template=one.template, secret=space, join=join, carried_share=share, positive_control=positive
    )


def _positive_formats(formats: list[PlannedFormat], settings: CanarySettings, encoder: SecretEncoder) -> list[PlannedFormat]:
    """One format of its own for the positive controls of each space."""
    if settings.planted_control is None:
        return []
    spaces = {one.secret.model_dump_json(): one for one in formats}
    taken = {one.name for one in formats}
    prepared = []
    for one in spaces.values():
        name = _free_name(f"positive-{one.name}"[:64], taken)
        taken.add(name)
        prepared.append(
            _prepare(CanaryFormat(name=name, template=POSITIVE_TEMPLATE, secret=one.secret), encoder, positive=True)
        )
    return prepared


def _free_name(name: str, taken: set[str]) -> str:
    """`name`, numbered where a format is called so already."""
    numbered = (f"{name[:60]}-{number}" for number in range(2, 1000))
    return next(one for one in (name, *numbered) if one not in taken)


def _entries(formats: list[PlannedFormat], settings: CanarySettings) -> list[tuple[PlannedFormat, Role, int]]:
    """What is to be drawn: format, role and repetitions of each."""
    plain = [one for one in formats if not one.positive_control]
    entries: list[tuple[PlannedFormat, Role, int]] = []
    for index, one in enumerate(plain):
        entries += [(one, "canary", tier) for tier, number in settings.tiers.items() for _ in range(number)]
        share = settings.controls // len(plain) + (index < settings.controls % len(plain))
        entries += [(one, "control", 0)] * share
    control = settings.planted_control
    if control is not None:
        for one in formats:
            if one.positive_control:
                entries += [(one, "positive_control", control.repetitions)] * control.count
    return entries


def _check_room(formats: list[PlannedFormat], entries: list[tuple[PlannedFormat, Role, int]]) -> None:
    """Refuse spaces so small that a canary could be extracted by luck, or that hold fewer secrets than planned."""
    chance = sum(1.0 / one.secret_space_size for one, role, _ in entries if role == "canary")
    if chance > MAX_GUESS_CHANCE:
        smallest = min((one for one in formats if not one.positive_control), key=lambda one: one.secret_space_size)
        raise CanaryError(
            f"the expected number of secrets guessed by luck must be at most {MAX_GUESS_CHANCE:g}, got {chance:.2g}: format "
            f"'{smallest.name}' has only {smallest.secret_space_size} candidates. Use a larger space or fewer canaries."
        )
    for one in formats:
        planned = sum(other.secret == one.secret for other, _, _ in entries)
        if planned * 2 > one.secret_space_size:
            raise CanaryError(
                f"format '{one.name}' must have at least twice as many candidates as planned secrets, got "
                f"{one.secret_space_size} for {planned}."
            )


def _names(stream: random.Random) -> Any:
    """Distinct public names without end: plain pairs first, then with a middle initial."""
    for round_number in range(27**2):
        initials = "" if round_number == 0 else f" {chr(64 + (round_number - 1) % 26 + 1)}." * (1 + (round_number - 1) // 26)
        pairs = [(given, family) for given in GIVEN_NAMES for family in FAMILY_NAMES]
        stream.shuffle(pairs)
        yield from (f"{given}{initials} {family}" for given, family in pairs)
