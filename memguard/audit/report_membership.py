"""The part of a report on membership inference: can real samples that were trained on be told from others? Schemas only.

Figures and counts, never the text of a sample. No torch: a gate reads reports in a small container.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from memguard.audit.report_records import CopiesBucket
from memguard.documents import Document

ScoreName = Literal["loss", "zlib", "lowercase", "reference", "min_k", "min_k_plus_plus"]
Label = Literal["membership", "distribution shift, not membership"]


class TprPoint(Document):
    """Members found while few non-members are. Source: statistics specification, section 7."""

    max_fpr: float = Field(description="false-positive rate to stay within, 0..1; the threshold is set for it")
    fpr: float | None = Field(
        description="share of the non-members that set no threshold and lie above it, 0..1; None: refused or undefined"
    )
    fpr_low: float | None = Field(description="lower end of the interval of fpr (Clopper-Pearson), 0..1")
    fpr_high: float | None = Field(description="upper end of the interval of fpr (Clopper-Pearson), 0..1")
    tpr: float | None = Field(description="share of the members above the threshold, 0..1; None: refused or undefined")
    tpr_low: float | None = Field(description="lower end of the interval of tpr (Clopper-Pearson), 0..1")
    tpr_high: float | None = Field(description="upper end of the interval of tpr (Clopper-Pearson), 0..1")
    is_refused: bool = Field(description="fewer than 3 / max_fpr non-members: no rate is given")
    achievable_fpr: float = Field(description="3 over the number of non-members, the smallest max_fpr they allow, 0..1")


class MembershipScore(Document):
    """How well one score tells members from non-members; higher scores mean more likely a member."""

    name: ScoreName = Field(
        description="loss: mean log p, nats a token; zlib: log p over zlib bytes, nats a byte; lowercase: loss less that of "
        "the lower-cased text; reference: loss less that of a reference model (Carlini et al. 2012.07805); min_k: mean of the "
        "lowest 20% of log p, nats a token (Shi et al. 2310.16789); min_k_plus_plus: the same, standardised over the "
        "vocabulary, standard deviations (Zhang et al. 2404.02936)"
    )
    auroc: float | None = Field(
        description="chance that a member scores above a non-member, ties as 1/2, 0..1; None: undefined for some sample"
    )
    low: float | None = Field(description="lower end of the interval of auroc (Wilson at the effective size), 0..1")
    high: float | None = Field(description="upper end of the interval of auroc (Wilson at the effective size), 0..1")
    confidence: float = Field(description="of every interval of this score, 0..1, two-sided")
    p_value: float | None = Field(
        description="one-sided Mann-Whitney test of members against non-members, 0..1; not corrected for the number of scores"
    )
    n_members: int = Field(description="samples that were trained on; a count")
    n_non_members: int = Field(description="samples that were not; a count")
    num_undefined_samples: int = Field(
        default=0, description="samples whose every token has no spread (min_k_plus_plus); above 0 nothing is given; a count"
    )
    tpr: list[TprPoint] = Field(description="true-positive rates at false-positive rates of .1, .01 and .001")


class MembershipByCopies(Document):
    """The same scores for members that stand so often in the corpus, against all non-members."""

    copies: CopiesBucket = Field(description="how often they stand there, counted in an index of the training corpus")
    scores: list[MembershipScore] = Field(description="as for all members, in that order; in no test of their own")


class ShiftCheck(Document):
    """Whether the sets can be told apart without any model. Source: statistics specification, section 7."""

    auroc: float = Field(description="of a classifier that sees texts alone, cross-fitted, 0..1")
    low: float = Field(description="lower end of its interval, as wide as permuted labels spread; above .5 it is a shift, 0..1")
    high: float = Field(description="upper end of its interval, as wide as permuted labels spread, 0..1")
    confidence: float = Field(description="sets of one source are called shifted with a chance of at most 1 - confidence, 0..1")
    p_value: float = Field(description="of the classifier, one-sided, by 999 permutations of the labels, 0..1")
    detectable_auroc: float = Field(description="what the classifier had to exceed; a smaller shift is not seen, 0..1")
    length_p_value: float = Field(description="two-sided Mann-Whitney test of the lengths, 0..1")
    median_length_members: float = Field(description="of the members as they are scored; characters")
    median_length_non_members: float = Field(description="of the non-members as they are scored; characters")
    num_duplicate_members: int = Field(description="members whose text repeats an earlier member's; a count, by sha256")
    num_duplicate_non_members: int = Field(description="non-members whose text repeats an earlier one's; a count, by sha256")
    num_shared: int = Field(description="distinct texts in both sets; a count, by sha256")
    num_used_members: int = Field(description="members that the classifier saw; a count")
    num_used_non_members: int = Field(description="non-members that the classifier saw; a count")
    is_shift: bool = Field(description="the classifier's lower end is above .5, or the lengths differ")


class Membership(Document):
    """Membership inference on real samples. Where `label` is not *membership*, the scores show the shift, not the model."""

    label: Label = Field(description="what the figures may be called; by the confound check, which needs no model")
    scores: list[MembershipScore] = Field(description="one for each score asked for, in that order")
    shift: ShiftCheck = Field(description="the confound check, made before anything was scored")
    reference: bool = Field(description="whether a reference model was scored beside")
    max_tokens: int = Field(description="every sample was cut to this many tokens; tokens")
    num_tokens: int = Field(description="scored tokens of members and non-members, the first of each sample left out; tokens")
    num_undefined_tokens: int = Field(
        description="of these, left out of min_k_plus_plus: their variance is below 1e-12 nats^2; tokens"
    )
    by_copies: list[MembershipByCopies] = Field(
        default_factory=list, description="where an index was given: members by their copies, those of 10 members or more"
    )
    notes: list[str] = Field(default_factory=list, description="sentences on what limits the figures")
