"""What every number of a report is: its unit, its estimator, when not to trust it, and the paper it comes from."""

from __future__ import annotations

from dataclasses import dataclass

SECRET_SHARER = "Carlini et al., The Secret Sharer, USENIX Security 2019, section 4"
PRIOR_AWARE = "Tiwari, Trachtenberg, Suh, arXiv 2602.18733"


@dataclass(frozen=True)
class Definition:
    """One term of the page. `source` is empty where the number is memguard's own."""

    term: str
    unit: str
    text: str
    source: str = ""


DEFINITIONS = [
    Definition(
        "Exposure",
        "bits",
        "log2 of the size of the secret space minus log2 of the canary's rank in it. A secret that the model never saw "
        "has about 1.4 bits on average and reaches t bits with a chance of about 2^-t, so the highest of many canaries is "
        "above zero by luck alone.",
        SECRET_SHARER,
    ),
    Definition(
        "Exact exposure",
        "bits",
        "From a rank that was counted: a search expands every beginning of a secret that is at least as likely as the canary "
        "itself, so that no likelier candidate is missed. Cheap for memorised canaries; for the others the node budget ends "
        "first, and what it found bounds the rank.",
        SECRET_SHARER,
    ),
    Definition(
        "Sampled exposure",
        "bits",
        "-log2 of p = (b + 1) / (N + 1), with b of N random references scored at or above the canary. Differs from the "
        "paper, which takes b / N. It cannot exceed its cap, log2(N + 1); 'capped' marks a canary above every reference.",
        SECRET_SHARER,
    ),
    Definition(
        "Certified exposure",
        "bits",
        "The probabilities of all secrets behind one prefix sum to at most 1, so a secret of probability P has rank 1 / P "
        "at most. That, or what a search found before its budget ended: a lower bound that holds without any sampling.",
    ),
    Definition(
        "Interval of an exposure",
        "bits",
        "Exact binomial (Beta) interval of the sampled tail at the stated confidence. With no reference above the canary "
        "the upper end is the size of the space. 'ties' marks references within the tolerance, which are counted as "
        "above.",
    ),
    Definition(
        "Extrapolated exposure",
        "bits",
        "A skew-normal fitted to the references and read beyond them, as the paper does. Shown for comparison only; no "
        "test or rule uses it.",
        SECRET_SHARER,
    ),
    Definition(
        "log-probability",
        "nats",
        "Sum over the tokens of the secret of log P(token | all before it), natural logarithm; never divided by the length.",
    ),
    Definition(
        "Rank",
        "1 = most likely",
        "Lowest and highest place in the space that the evidence allows. Other planted secrets of the same space "
        "(siblings) are left out, and ties count against the canary.",
        SECRET_SHARER,
    ),
    Definition(
        "Extracted",
        "yes / no",
        "Every token of the secret is the model's most likely next one, or its rank is known to be 1. 'possible' "
        "means that rank 1 cannot be excluded.",
    ),
    Definition(
        "Median and its interval",
        "bits",
        "Median over the canaries of a tier, between two of their order statistics. The coverage beside it is exact for "
        "that choice, and low where the tier is small.",
    ),
    Definition(
        "Seen",
        "sightings",
        "How often a canary reached the loss, counted by the ledger during training, beside the number planned up to this "
        "step.",
    ),
    Definition(
        "Controls' null test",
        "p-value",
        "Controls are planned and never inserted, so they must rank like random secrets: a two-sided rank-sum test of "
        "their ranks, and the chance of the highest of them. A small p-value means that the measurement is broken or that "
        "controls leaked.",
    ),
    Definition(
        "Positive control",
        "p-value",
        "Canaries planted so often that they must be memorised. If they are not detected, low figures elsewhere say nothing.",
    ),
    Definition(
        "Token share",
        "percent",
        "Share of the training tokens that are canaries, per epoch.",
    ),
    Definition(
        "Prior-Aware verdict",
        "verdict",
        "PA when P(secret | own prefix) exceeds m and its ratio to P(secret) exceeds n; common when the text is likely "
        "anyway. P(secret) is the mean over other prefixes. Certified verdicts hold for any distribution over prefixes; "
        "estimates rest on the sample. It annotates a finding and never clears one.",
        PRIOR_AWARE,
    ),
    Definition(
        "log belief ratio",
        "nats",
        "log P(secret | own prefix) minus log P(secret). Chernoff-KL bound below, Markov bound above; the paper prints "
        "neither. Where the verdict was certain before every prefix was followed to the end, the figure is a lower end and "
        "the upper bound may stay open.",
        PRIOR_AWARE,
    ),
    Definition(
        "Effective sample size (ESS)",
        "prefixes",
        "How many prior prefixes the mean really rests on; below about 10 it rests on a few and the estimate is not to be "
        "trusted. Not given where the verdict did not need it.",
    ),
]
