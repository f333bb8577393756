"""Words for what a report holds as names and settings: sampler, membership scores, thresholds, limits of a privacy bound."""

from __future__ import annotations

from memguard.audit.report_extraction import SamplerSettings
from memguard.audit.report_membership import ScoreName
from memguard.audit.report_privacy import Privacy
from memguard.audit.report_propensity import Metric, Propensity
from memguard.audit.report_records import Threshold
from memguard.reporting.formatting import show_count, show_number, show_percent

SCORE_NAMES: dict[ScoreName, str] = {
    "loss": "loss",
    "zlib": "zlib ratio",
    "lowercase": "lower-cased",
    "reference": "reference model",
    "min_k": "Min-K%",
    "min_k_plus_plus": "Min-K%++",
}

IN_TOKENS: tuple[Metric, ...] = ("average_longest_span", "average_longest_rare_span")


def describe_sampler(sampler: SamplerSettings) -> str:
    """What one query does, as a sentence.

    Example:
        >>> describe_sampler(SamplerSettings(temperature=0.7, top_k=None, top_p=0.95))
        'One query draws every token at temperature 0.700, from the likeliest tokens that hold 95.0% of the mass.'
    """
    likeliest = f"the {show_count(sampler.top_k)} likeliest tokens"
    mass = f"that hold {show_percent(sampler.top_p)} of the mass"
    if sampler.top_k is None:
        kept = "all tokens" if sampler.top_p == 1 else f"the likeliest tokens {mass}"
    else:
        kept = likeliest if sampler.top_p == 1 else f"those of {likeliest} {mass}"
    return f"One query draws every token at temperature {show_number(sampler.temperature)}, from {kept}."


def describe_decoding(found: Propensity) -> str:
    """How texts were written, as a sentence."""
    limit = f"At most {show_count(found.max_new_tokens)} tokens each"
    if found.sampler is None:
        return f"One text a prompt, the likeliest token each time. {limit}."
    texts = "One text" if found.num_samples == 1 else f"{show_count(found.num_samples)} texts"
    return f"{texts} a prompt, drawn. {describe_sampler(found.sampler)} {limit}."


def describe_threshold(threshold: Threshold) -> str:
    """Where a belief-ratio threshold comes from.

    Example:
        >>> describe_threshold(Threshold(targets="card", n=12.0, method="quantile", quantile=0.95, num_targets=64))
        '95% quantile'
    """
    if threshold.method == "given" or threshold.quantile is None:
        return "given"
    return f"{100 * threshold.quantile:g}% quantile"


def describe_copies(found: Privacy) -> str | None:
    """What it costs that a coin moves several copies of a canary, without a full stop; None: it moves one."""
    if found.repetitions == 1:
        return None
    copies = show_count(found.repetitions)
    return f"each coin moved {copies} copies, which divides what can be shown by {copies}; canaries of tier 1 would show more"


def describe_not_testable(found: Privacy) -> str:
    """Why the stated epsilon is out of reach, without a full stop: copies, the delta, or too few guesses."""
    if found.repetitions > 1:
        return f"because each coin moved {show_count(found.repetitions)} copies"
    if found.num_guesses_needed is None:
        return "no number of guesses would do at this delta"
    return f"too few guesses: {show_count(found.num_guesses_needed)}, all right, would do"
