"""How often each planned canary stands in an index of what was trained: counted in the data, beside the ledger's sightings.

A control that stands there is no control, and a planted canary that does not was not trained on, or the index is of other data.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from memguard.audit.report import CanaryRow
from memguard.canaries.plan import CanaryPlan
from memguard.tracing.copies import count_copies
from memguard.tracing.corpus_index import CorpusIndex
from memguard.tracing.simpletrace import Tracer, TraceSettings
from memguard.tracing.token_text import TokenText


def count_canary_copies(plan: CanaryPlan, index: CorpusIndex, tokenizer: Any) -> dict[str, int]:
    """Places of each canary's filled template in the corpus, by canary id; a lower end above some 262,144.

    Near-duplicates are not looked for: canaries of one format differ by their secrets alone.

    Args:
        plan: with the secrets.
        index: of the training data with the canaries in it.
        tokenizer: the one the index was built with.

    Raises:
        InputError: the tokenizer has more entries than the index.
    """
    formats = {one.name: one for one in plan.formats}
    texts = ["".join(formats[one.format].split(one.secret, name=one.name)) for one in plan.canaries]
    tracer = Tracer(index, TokenText(tokenizer), TraceSettings(near_verbatim=False))
    found = count_copies(tracer, texts, near=False)
    return {one.id: copies.num_occurrences for one, copies in zip(plan.canaries, found, strict=True)}


def canary_notices(rows: Sequence[CanaryRow], counted: dict[str, int]) -> list[str]:
    """What the counts say against the plan and the ledger, a sentence each; none where nothing was planted in the index.

    An index of the plain corpus holds no canary at all, which is no finding.
    """
    if not any(counted[row.id] for row in rows):
        return []
    notices = []
    controls = [row.id for row in rows if row.role == "control" and counted[row.id]]
    if controls:
        notices.append(f"{len(controls)} never-inserted controls stand in the indexed corpus, such as '{controls[0]}'.")
    lost = [row.id for row in rows if row.role == "canary" and row.num_seen and not counted[row.id]]
    if lost:
        notices.append(
            f"{len(lost)} canaries that the ledger saw do not stand in the index, such as '{lost[0]}'. Is it of other data?"
        )
    return notices
