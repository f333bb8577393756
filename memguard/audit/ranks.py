"""Exact ranks of canaries, where a search of their space can end; certified bounds where its budget ends first.

A canary that some reference beats is not searched: its rank is high, and sampling says so for less. Of the others, those
that stand out from the references are cheap to rank exactly, and those that only happened to beat them all are searched
just long enough to find candidates above them. Which figures of which canaries this decides depends on scores; the
p-values stay valid, since each is one of the exact rank, of a bound of it, or of the sample.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from scipy import stats

from memguard.audit.config import ExposureSettings
from memguard.audit.items import Group
from memguard.audit.rows import GroupScores
from memguard.canaries.automata import iterate_secrets
from memguard.canaries.encoding import SecretEncoder
from memguard.canaries.plan import CanaryPlan
from memguard.canaries.token_tree import TokenTree, Unfactorised, build_token_tree
from memguard.metrics.exposure import KnownRank
from memguard.scoring.scorer import Scorer
from memguard.scoring.search import RankBounds, Standing, count_above
from memguard.scoring.trees import ExplicitTree, is_path
from memguard.scoring.walk import TreeWalk

HOPELESS = 10  # candidates expected above a canary for each node of the budget: no search would end
DIVE_SHARE = 50  # of the budget, for canaries whose search would not end
DIVE_ROWS = 16  # a narrow walk reaches candidates soon
CHECKED_SHARE = 5  # of the nodes: as many candidates are encoded again before they count
NUM_CHECKED = 64  # references of a group that must be paths of its tree


@dataclass
class _Space:
    """How the candidates of a format are walked: through an automaton, a list of them all, or not at all."""

    tree: TokenTree | ExplicitTree | None
    reason: str | None = None
    secrets: dict[tuple[int, ...], str] = field(default_factory=dict)


@dataclass
class RankSearch:
    """Searches the spaces of one plan; trees are built once, on first use.

    Args:
        plan: the canaries.
        tokenizer: the one the plan was drawn for.
        settings: whether to search, and for how many nodes a format.
    """

    plan: CanaryPlan
    tokenizer: Any
    settings: ExposureSettings
    notices: list[str] = field(default_factory=list)
    num_nodes: int = 0
    _spaces: dict[tuple[str, str | None], _Space] = field(default_factory=dict)
    _standing: dict[tuple[str, str | None, tuple[int, ...]], Standing] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._encoder = SecretEncoder(self.tokenizer, self.plan.lead_ids, self.plan.tail_ids)

    def search(self, scored: Sequence[GroupScores], scorer: Scorer, *, tolerance: float) -> list[list[KnownRank | None]]:
        """What is known of the rank of every canary, group by group.

        Args:
            scored: finite scores.
            scorer: of the model.
            tolerance: scores closer than this tie; nats.

        Returns:
            In the order of the groups and their canaries; None where sampling stands alone.
        """
        known: list[list[KnownRank | None]] = [[None] * len(item.group.canaries) for item in scored]
        self.num_nodes = 0
        if self.settings.exact == "off":
            return known
        for one in self.plan.formats:
            mine = [index for index, item in enumerate(scored) if item.group.format.name == one.name]
            mine.sort(key=lambda index: -float(scored[index].canary_log_probs.max()))
            left = self.settings.node_budget
            for index in mine:
                left -= self._search_group(scored[index], scorer, known[index], left, tolerance, num_groups=len(mine))
        return known

    def _search_group(
        self,
        item: GroupScores,
        scorer: Scorer,
        known: list[KnownRank | None],
        budget: int,
        tolerance: float,
        *,
        num_groups: int,
    ) -> int:
        """Fill in what is found; the nodes it took."""
        group = item.group
        whole = group.format.secret_space_size * num_groups <= self.settings.node_budget
        able, hopeless = scorer.model.team.agreed("canaries to search", _worth(item, self.settings.node_budget, tolerance))
        chosen = list(range(len(group.canaries))) if whole else able
        if not chosen and not hopeless:
            return 0
        space = self._space(group, listed=whole)
        if space.tree is None:
            return 0
        limit = scorer.model.max_length
        if limit is not None and len(group.prefix_ids) + space.tree.max_depth > limit:
            self._note(
                f"format '{group.format.name}' is ranked by sampling alone: its longest candidate does not fit the model's "
                f"{limit} positions."
            )
            return 0
        spent = 0
        if whole:  # small enough to be free: were it charged, scores would decide which groups are ranked exactly
            self.num_nodes += self._walk(item, scorer, space, known, chosen, budget, tolerance, whole=True)
            return 0
        if chosen and budget > 0:
            spent += self._walk(item, scorer, space, known, chosen, budget, tolerance)
        if hopeless and budget > spent:
            dive = max(1, self.settings.node_budget // DIVE_SHARE)
            spent += self._walk(item, scorer, space, known, hopeless, dive, tolerance, rows=DIVE_ROWS)
        self.num_nodes += spent
        return spent

    def _walk(
        self,
        item: GroupScores,
        scorer: Scorer,
        space: _Space,
        known: list[KnownRank | None],
        chosen: Sequence[int],
        budget: int,
        tolerance: float,
        *,
        whole: bool = False,
        rows: int | None = None,
    ) -> int:
        """Search one group; the nodes it took. A whole walk ends by itself."""
        group = item.group
        log_probs = [float(item.canary_log_probs[index]) for index in chosen]
        keep = -math.inf if whole else min(log_probs) - 3 * tolerance
        label = f"the space of format '{group.format.name}'"
        assert space.tree is not None
        walk = TreeWalk(scorer.model, scorer.batches, group.prefix_ids, space.tree, keep=keep, label=label, max_rows=rows)
        result = count_above(
            walk,
            [group.canary_spans[index].suffix_ids for index in chosen],
            log_probs,
            left_out=frozenset(span.suffix_ids for span in group.canary_spans),
            tolerance=tolerance,
            node_budget=budget if not whole else group.format.secret_space_size * space.tree.max_depth + 1,
            judge=self._judge(group, space),
            max_checked=max(1000, budget // CHECKED_SHARE) if not whole else group.format.secret_space_size,
            whole=whole,
        )
        if result.num_unsettled:
            self._note(f"{label}: canaries that a walk scores otherwise than whole rows do are ranked by sampling alone.")
        if result.num_refused:
            self._note(f"{label} holds candidates that the tokenizer writes otherwise; ranks behind them are bounds.")
        for index, rank in zip(chosen, result.ranks, strict=True):
            known[index] = _known(rank, group)
        return result.num_nodes

    def _judge(self, group: Group, space: _Space) -> Callable[[Sequence[tuple[int, ...]]], list[Standing]]:
        """Whether a path counts: its secret is nobody's, and the tokenizer writes its text as that path."""
        siblings, name = self.plan.siblings_in_space(group.format), group.canaries[0].name
        tree, listed, known, one = space.tree, space.secrets, self._standing, group.format.name
        if not isinstance(tree, TokenTree):
            return lambda paths: ["left out" if listed[path] in siblings else "counts" for path in paths]

        def judge(paths: Sequence[tuple[int, ...]]) -> list[Standing]:
            new = [path for path in paths if (one, name, path) not in known]
            secrets = [tree.secret_of(path) for path in new]
            encoded = self._encoder.encode(group.format, secrets, [name] * len(new))
            for path, secret, item in zip(new, secrets, encoded, strict=True):
                written = item.ids[: item.end] if item is not None else ()
                is_canonical = written == (*group.prefix_ids, *path)
                known[one, name, path] = "left out" if secret in siblings else "counts" if is_canonical else "refused"
            return [known[one, name, path] for path in paths]

        return judge

    def _space(self, group: Group, *, listed: bool) -> _Space:
        """How the space of a group is walked; not at all where the group's own candidates are no paths of its tree."""
        key = (group.format.name, f"listed behind {group.canaries[0].name}" if listed else None)
        if key not in self._spaces:
            space = self._spaces[key] = self._listed(group) if listed else self._factorised(group)
            if space.reason is not None:
                self._note(f"format '{group.format.name}' is ranked by sampling alone: {space.reason}")
        space = self._spaces[key]
        spans = [*group.canary_spans, *group.reference_spans[:NUM_CHECKED]]
        fits = space.tree is not None and all(is_path(space.tree, span.suffix_ids) for span in spans)
        if space.tree is not None and not fits:
            self._note(f"format '{group.format.name}': canaries whose tokens do not fit its tree are ranked by sampling alone.")
        return space if fits else _Space(None)

    def _note(self, sentence: str) -> None:
        if sentence not in self.notices:
            self.notices.append(sentence)

    def _factorised(self, group: Group) -> _Space:
        built = build_token_tree(group.format, self._encoder, name=group.canaries[0].name)
        if not isinstance(built, Unfactorised):
            return _Space(built)
        if group.format.secret_space_size > self.settings.node_budget:
            return _Space(None, built.reason)
        listed = self._listed(group)
        return listed if listed.tree is not None else _Space(None, built.reason)

    def _listed(self, group: Group) -> _Space:
        """Every candidate of a small space, as the tokenizer writes it; those it cannot carry are no candidates."""
        secrets = list(iterate_secrets(group.format.secret))
        encoded = self._encoder.encode(group.format, secrets, [group.canaries[0].name] * len(secrets))
        start, prefix = group.canary_spans[0].start, group.prefix_ids
        listed = {item.ids[start : item.end]: secret for secret, item in zip(secrets, encoded, strict=True) if item is not None}
        carried = [item for item in encoded if item is not None]
        if len(listed) < len(carried) or any(item.ids[:start] != prefix for item in carried):
            return _Space(None, "its candidates do not stand behind one prefix, each as tokens of its own.")
        try:
            return _Space(ExplicitTree(list(listed)), None, listed)
        except ValueError:
            return _Space(None, "the tokens of one of its candidates begin another's.")


def _worth(item: GroupScores, node_budget: int, tolerance: float) -> tuple[list[int], list[int]]:
    """Canaries that no reference beats: those whose search is likely to end, and the others."""
    references = item.reference_log_probs
    best, mean, sd = float(references.max()), float(references.mean()), float(references.std()) + 1e-9
    size = item.group.format.ranked_space_size
    able: list[int] = []
    hopeless: list[int] = []
    for index, log_prob in enumerate(item.canary_log_probs.tolist()):
        if log_prob - tolerance <= best:
            continue
        expected = math.log(size) + float(stats.norm.logsf((log_prob - mean) / sd))
        (able if expected <= math.log(HOPELESS * node_budget) else hopeless).append(index)
    return able, hopeless


def _known(rank: RankBounds, group: Group) -> KnownRank:
    """Siblings behind other prefixes were refused one by one as they were found; the space is left without them."""
    space = group.format.ranked_space_size - (group.num_planted_in_space - 1)
    return KnownRank(min(rank.rank_low, space), min(rank.rank_high, space), rank.is_exact)
