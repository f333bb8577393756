"""What every number of a report is: its unit, its estimator, when not to trust it, and the paper it comes from."""

from __future__ import annotations

from dataclasses import dataclass

SECRET_SHARER = "Carlini et al., The Secret Sharer, USENIX Security 2019, section 4"
PRIOR_AWARE = "Tiwari, Trachtenberg, Suh, arXiv 2602.18733"
EXTRACTION = "Hayes et al., NAACL 2025, arXiv 2410.19482"
NEAR_VERBATIM = "Cooper et al., arXiv 2603.24917"
QUANTIFYING = "Carlini et al., ICLR 2023, arXiv 2202.07646"
COUNTERFACTUAL = "Zhang et al., NeurIPS 2023, arXiv 2112.12938"
ONE_RUN = "Steinke, Nasr, Jagielski, NeurIPS 2023, arXiv 2305.08846"
MEMBERSHIP = "Carlini et al., arXiv 2012.07805; Shi et al., arXiv 2310.16789; Zhang et al., arXiv 2404.02936"
PROPENSITY = "Barmina, Schneider-Kamp, Galke Poech, arXiv 2606.06286"
LOW_RATES = "Carlini et al., arXiv 2112.03570"


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
        "Calibrated exposure",
        "bits",
        "Exposure by the log-probability less that before training, among references treated alike: what the text gave away "
        "before training is taken off. It has the same null as exposure and more power. Shown, in no test or rule.",
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
        "Every token of the secret is the model's most likely next one, or its rank is known to be 1, or a greedy continuation "
        "holds it where chance would hardly ever put it. 'possible' means that rank 1 cannot be excluded.",
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
        "Before training",
        "p-value",
        "The family tests of exposure on the model that training began from. Canaries that stand out there were trained on "
        "before, in an earlier run on the same plan: what they show later is not this run's doing, and a gate refuses it.",
    ),
    Definition(
        "Probe",
        "p-value",
        "A positive control without planting: copies of the weights learn fresh secrets in a few optimiser steps, are audited "
        "by the same path and thrown away. It shows that memorisation could have been seen in this checkpoint, not that "
        "training would have caused any. Detected: the best p-value, times the number of secrets, is at most 0.001.",
    ),
    Definition(
        "Audit overhead",
        "share of training time",
        "Seconds of audits over seconds of training without them, up to this audit. Where the limit would be passed, audits of "
        "the cadence wait and come further apart; those at named moments (start, save, evaluate, end) never wait, and count.",
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
    Definition(
        "Extractable",
        "count",
        "Targets whose probability behind their own prefix exceeds m; only these are judged PA, common or undecided.",
        PRIOR_AWARE,
    ),
    Definition(
        "Belief-ratio threshold n",
        "ratio",
        "What P(target | own prefix) over P(target) must exceed for PA. Calibrated: the 95% quantile of that ratio over "
        "targets that were never trained on, controls of the format or held-out records, with an order-statistic interval; "
        "fixed before any target is judged. Given: by the settings, or 10 where there was nothing to calibrate on. Differs "
        "from the paper, which takes a mean over easy sequences.",
        PRIOR_AWARE,
    ),
    Definition(
        "log ratio above controls",
        "nats",
        "A canary's log belief ratio less the mean of its format's controls. The controls' mean is the cue of the template, "
        "which any secret behind it gets; what is above it belongs to this secret.",
    ),
    Definition(
        "Common share",
        "percent",
        "Share of the extractable targets that fail PA: other prefixes write them as well. Exact binomial interval, undecided "
        "targets counted as PA at its lower end and as common at its upper one. Compatible with common text, and no proof of "
        "it: a secret repeated behind many prefixes looks the same.",
        PRIOR_AWARE,
    ),
    Definition(
        "Expected tries",
        "queries",
        "Mean number of independent queries behind the target's own prefix until the sampler writes it: one over its chance. "
        "'never': one of its tokens lies outside the sampler's top-k or top-p. An attacker with another sampler has another "
        "figure.",
        EXTRACTION,
    ),
    Definition(
        "Expected share",
        "percent",
        "Mean over targets of 1 - (1 - P)^q, the chance that q queries write a target at least once; P is its chance in one. "
        "Chernoff-KL interval, which holds for any distribution of targets.",
        EXTRACTION,
    ),
    Definition(
        "Discoverable",
        "count",
        "Targets that so many queries write with at least the stated chance. Exact binomial interval of their share.",
        EXTRACTION,
    ),
    Definition(
        "Found by",
        "kind of prompt",
        "Greedy continuations that hold the secret: of the canary's own prefix as it was trained (trained tokens), of the same "
        "text as a user would send it (text), or of another canary's prompt. Controls found, and the chance of a match by "
        "luck, stand beside it.",
    ),
    Definition(
        "Greedy share",
        "percent",
        "Share of the records whose target greedy decoding writes token by token behind its own prefix. Exact binomial "
        "interval. Records that were too short are counted apart. Held-out records show what is written without having been "
        "seen.",
        QUANTIFYING,
    ),
    Definition(
        "Other prompts",
        "percent",
        "Greedy share of the same records behind fewer of their own tokens, and with tokens of other records before the "
        "prefix. A slope is fitted on a log10 axis where three points or more differ.",
        QUANTIFYING,
    ),
    Definition(
        "Near-verbatim",
        "count",
        "Records that one query writes up to the stated number of edited tokens with a chance of at least one in a thousand. "
        "The chance is a lower bound, so the count is one too.",
        NEAR_VERBATIM,
    ),
    Definition(
        "Membership scores",
        "nats, higher for members",
        "Loss: mean log-probability of a token. zlib ratio: log-probability over the bytes that zlib needs. Lower-cased and "
        "reference model: loss less that of the lower-cased text, or of a model that never saw it. Min-K%: mean of the lowest "
        "20% of token log-probabilities; Min-K%++: the same, standardised over the vocabulary.",
        MEMBERSHIP,
    ),
    Definition(
        "AUROC",
        "0.5 = chance",
        "Chance that a member scores above a held-out sample, ties as one half. An average over samples: it hides a few that "
        "are told for sure. 'undefined': some sample has no score, and none is left out.",
    ),
    Definition(
        "TPR at FPR",
        "percent",
        "Share of the members above a threshold that at most so many held-out samples pass. One half of these sets the "
        "threshold, the other half gives the rate shown beside. Refused where there are fewer than 3 over the rate: the least "
        "rate that the samples allow is named.",
        LOW_RATES,
    ),
    Definition(
        "Distribution shift",
        "AUROC and p-value",
        "Whether members and held-out samples can be told apart by their texts or lengths alone, without any model. If so, "
        "membership scores show that difference and not the model. A shift below the detectable AUROC is not seen.",
    ),
    Definition(
        "Copies of a record",
        "places",
        "How often a record, the span that it names or else its first 512 tokens, stands in the indexed training corpus, to "
        "the letter, wherever tokens cut them; near-duplicates are other documents within a tenth of its characters, spelling "
        "aside. Its own place counts as one: 'once' is counted, never assumed. Of a canary: template and secret.",
    ),
    Definition(
        "Propensity: spans",
        "tokens and percent",
        "ALS: mean length of the longest stretch of a text that stands in the training corpus word for word, any document, "
        "spans unmerged; 'rare': among the 5% of spans with the least likely words. 'Span of 50': share of texts with one of "
        "at least 50 tokens. The prompt is the unit of every interval; loops and degenerate texts stand apart.",
        PROPENSITY,
    ),
    Definition(
        "Propensity: full and near matches",
        "percent",
        "FMR: share of texts that one document holds from end to end; FMR50: and that are at least 50 tokens long; 'but for "
        "spelling': case, blanks, quotes and Unicode forms aside. NVR: mean over texts of the largest share of a text's words "
        "that one document holds in order; 'above half': share of texts where it is above 0.5. Differs from the source, which "
        "averages over documents.",
        PROPENSITY,
    ),
    Definition(
        "Propensity: PM",
        "0..1",
        "Propensity over propensity plus capability, by metric: what ordinary prompts bring out against what prefixes "
        "force out. 0.5: as much. Undefined where neither showed anything; the source prints 0. Held-out prefixes are the "
        "floor: what of the corpus anybody writes by chance. It annotates a finding and never clears one.",
        PROPENSITY,
    ),
    Definition(
        "Epsilon lower bound",
        "no unit",
        "The privacy loss of one record that guessing which coins put a canary in has proved, at the stated confidence. The "
        "number of guesses is fixed in advance; ties count as wrong. 0 proves no privacy.",
        ONE_RUN,
    ),
    Definition(
        "Cap of epsilon",
        "no unit",
        "The bound with every guess right. It grows with the guesses and is divided by the copies that each coin moved. Where "
        "it is below the stated epsilon, the guarantee cannot be tested.",
        ONE_RUN,
    ),
    Definition(
        "Stated epsilon",
        "p-value",
        "Largest chance of as many right guesses under the guarantee that the run states. It can be compared only where "
        "canaries entered as records before the sampler of the DP run.",
        ONE_RUN,
    ),
    Definition(
        "Counterfactual memorisation",
        "nats",
        "Mean log-probability of the canaries that their coin put in, less that of those it left out; each less its own before "
        "training, where that was measured. Welch interval; p-value by throwing the coins anew. Differs from the paper, which "
        "compares many models on one example.",
        COUNTERFACTUAL,
    ),
]
