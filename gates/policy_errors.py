"""What is wrong with a policy, in plain words: every wrong key with the nearest right one, and never a value."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence

from pydantic import ValidationError

from memguard.gates.wording import clip

MAX_FINDINGS = 8

SPECIAL = {
    ("test", "min"): "'min' is not accepted on a test: significance lives in the family 'alpha' alone",
    ("test", "max"): "'max' is not accepted on a test: significance lives in the family 'alpha' alone",
    ("test", "field"): "a rule has a 'field' or a 'test', not both",
    ("limit", "min"): "'min' is not accepted: a limit is a 'max', and significance lives in the family 'alpha' alone",
    ("limit", "tolerance_bits"): "'tolerance_bits' belongs to the test exposure.against_baseline alone",
}


def describe_policy_error(error: ValidationError, known_keys: Mapping[str, Sequence[str]]) -> str:
    """All findings of a validation, joined by semicolons.

    Args:
        error: raised by the policy's model.
        known_keys: the keys each part of the policy accepts, by the part's name.

    Returns:
        At most eight findings and a count of the rest. Keys are shown, values are not.
    """
    items = error.errors(include_input=False, include_url=False, include_context=False)
    findings = list(dict.fromkeys(_finding(item["type"], item["loc"], item["msg"], known_keys) for item in items))
    more = [f"and {len(findings) - MAX_FINDINGS} more"] if len(findings) > MAX_FINDINGS else []
    return "; ".join(findings[:MAX_FINDINGS] + more)


def _finding(kind: str, loc: tuple[int | str, ...], message: str, known_keys: Mapping[str, Sequence[str]]) -> str:
    if kind == "extra_forbidden":
        part = next((str(step) for step in reversed(loc[:-1]) if step in known_keys), "policy")
        return _where(loc[:-1]) + _unknown_key(part, str(loc[-1]), known_keys[part])
    if kind == "missing":
        if loc[-2:] == ("limit", "field"):
            return _where(loc[:-1]) + "a rule needs a 'field' or a 'test'"
        return _where(loc[:-1]) + f"the key '{loc[-1]}' is missing"
    return _where(loc) + _plain(message)


def _unknown_key(part: str, key: str, known: Sequence[str]) -> str:
    if (part, key) in SPECIAL:
        return SPECIAL[part, key]
    close = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    cure = f"did you mean '{close[0]}'?" if close else f"known keys are {', '.join(known)}"
    return f"the key '{clip(key, 40)}' is unknown ({cure})"


def _where(loc: tuple[int | str, ...]) -> str:
    """`rule 3: max: ` from ('rules', 2, 'limit', 'max'); the shape of the rule is no key of the file."""
    steps = loc[:2] + loc[3:] if loc[:1] == ("rules",) else loc
    names: list[str] = []
    for step in steps:
        if isinstance(step, int) and names:
            names[-1] = f"{names[-1].removesuffix('s')} {step + 1}"
        else:
            names.append(clip(str(step), 40))
    return "".join(f"{name}: " for name in names)


def _plain(message: str) -> str:
    text = message.removeprefix("Value error, ").replace("Input should be", "must be").replace("List should", "must")
    text = text.partition(" or instance of")[0].replace("a valid dictionary", "keys and values")
    return clip(text[:1].lower() + text[1:], 300)
