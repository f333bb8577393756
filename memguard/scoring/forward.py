"""Forward passes of a causal language model that end in statistics of chosen positions, never in logits of all of them.

Three roads, the fastest that is right: head lifted out and fused (`heads`), or the model's own logits; prefixes encoded once
and branched from (`branching`), or whole rows. Which one a model gets is checked against the model's own logits on the
first rows it scores, and said in `notices`. Nothing here restores train / eval flags: run inside `audit_mode`.
"""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from memguard.errors import ScoringError
from memguard.scoring.branching import Branch, new_cache
from memguard.scoring.failures import as_scoring_error
from memguard.scoring.heads import Head, Unreadable, is_tensor_parallel, lifted, read_head, text_config
from memguard.scoring.kernels import TokenStatistics, logit_statistics
from memguard.scoring.team import Outcome, Team

T = TypeVar("T")

LOGIT_TOLERANCE = 1e-4  # of the largest logit, float32: a fused head sums in another order
LOW_PRECISION_ROUNDINGS = 2.0  # bf16 and fp16 heads round their logits, caps and scales as well
RMS_ROUNDINGS = 0.75  # rounding has no direction; a scale or cap that was not read has
COUNTED = -100.0  # nats below the likeliest token: what models mask out is lower
CACHE_TOLERANCE = 2e-3  # of the largest logit, float32: keys of the prefix come from another batch shape


class CausalModel:
    """One causal language model, ready to be asked for statistics.

    Args:
        model: its forward takes `input_ids` and `attention_mask` and returns `.logits` (batch, length, vocabulary).
        team: ranks that run the same audit; alone when None.

    Attributes:
        notices: sentences on slower roads taken, for the report.
        num_token_forwards: tokens sent through the model so far, padding included.
        num_forwards: forward calls that came back so far.
        is_split: whether every rank may be given rows of its own; a tensor-parallel model needs the same on all.
    """

    def __init__(self, model: Any, *, team: Team | None = None) -> None:
        parameter = next(model.parameters(), None)
        if parameter is None:
            raise ScoringError("the model must have parameters, got none.")
        self.model, self.team = model, team or Team.alone()
        self.is_split = not (self.team.is_alone or is_tensor_parallel(model))
        self.device, self.dtype = parameter.device, parameter.dtype
        self.notices: list[str] = []
        self.num_token_forwards = self.num_forwards = 0
        self._takes_cache = hasattr(getattr(model, "config", None), "use_cache")
        self._cache_name = _cache_name(model)
        self._head: Head | None = None
        self._is_checked = False
        self._can_branch: bool | None = None if self._takes_cache else False

    @property
    def is_fused(self) -> bool:
        """Whether the head is lifted out; known once `check` has run."""
        return self._head is not None

    @property
    def max_length(self) -> int | None:
        """Positions the model has, None when it names no limit."""
        limit = getattr(text_config(self.model), "max_position_embeddings", None)
        return limit if isinstance(limit, int) and limit > 0 else None

    @property
    def vocabulary_size(self) -> int:
        """Columns of the logits, as the configuration says."""
        return self._size("vocab_size", default=32_000)

    def check(self, rows: Sequence[Sequence[int]], *, label: str = "") -> None:
        """Find out, once, which roads give what the model itself gives on all ranks, on a few rows of token ids."""
        if self._is_checked:
            return
        self._is_checked = True
        few = [list(row) for row in rows[:3]]
        ids, mask = pad_right(few, self.device)
        found: list[tuple[Tensor, float]] = []
        self.together(
            "own logits", lambda: found.append(self._own_logits(ids, mask)), num_forwards=1, label=label, num_rows=len(few)
        )
        ((own, step),) = found
        self._check_head(ids, mask, own, step)
        if self._can_branch is None:
            self._can_branch = self._check_branching(few, own, step)
        else:
            self.notices.append("prefixes are not shared: the model's configuration knows no cache.")

    def in_step(
        self, what: str, work: Callable[[], T] | None, *, num_forwards: int, label: str = "", num_rows: int = 1
    ) -> list[Outcome[T]]:
        """Do the work of this rank in as many forward passes as every other rank; the outcomes of all, in their order.

        Args:
            what: names the work, alike on all ranks.
            work: of this rank; None when there is none for it.
            num_forwards: passes of the ranks that have work; what is missing here is made up with a row of one token.
            label: of the first row, for an error.
            num_rows: rows of the work, for an error.
        """
        before, outcome = self.num_forwards, Outcome[T]()
        try:
            outcome = Outcome(work() if work is not None else None)
        except Exception as error:
            failure = as_scoring_error(error, label, num_rows).with_traceback(None)  # whose frames hold tensors
            failure.__context__ = None
            outcome = Outcome(error=failure)
        if self.team.is_alone:
            return [outcome]
        ids = torch.zeros((1, 1), dtype=torch.long, device=self.device)
        for _ in range(num_forwards - (self.num_forwards - before)):
            with contextlib.suppress(Exception):  # of a model that fails, the work has said so
                self._run(ids, torch.ones_like(ids), None)
        return self.team.gather(what, outcome)

    def together(self, what: str, work: Callable[[], T], *, num_forwards: int, label: str = "", num_rows: int = 1) -> T:
        """Do the same work on every rank; what it gave on rank 0, or the first error of any.

        Ranks may differ in the last bit of a score: one that differs across a limit would send them different ways.
        """

        def mine() -> T:
            value = work()
            return value if self.team.rank == 0 else None  # type: ignore[return-value]

        outcomes = self.in_step(what, mine, num_forwards=num_forwards, label=label, num_rows=num_rows)
        for outcome in outcomes:
            if outcome.error is not None:
                raise outcome.error from None
        return outcomes[0].value  # type: ignore[return-value]

    def can_branch(self) -> bool:
        """Whether prefixes may be encoded once; `check` has run."""
        return bool(self._can_branch)

    def whole(self, rows: Sequence[Sequence[int]]) -> Tensor:
        """What stands before the head (or the logits), for rows of ids padded on the right: (rows, longest, width)."""
        ids, mask = pad_right(rows, self.device)
        return self._run(ids, mask, None)

    def encode(self, prefixes: Sequence[Sequence[int]]) -> tuple[Tensor, Branch]:
        """Encode prefixes of one length; what stands at their last place, (prefixes, width), and where to go on from."""
        ids = torch.tensor([list(prefix) for prefix in prefixes], device=self.device)
        cache = new_cache()
        last = self._run(ids, torch.ones_like(ids), cache)[:, -1]
        return last, Branch(cache, ids.shape[1])

    def extend(self, branch: Branch, parents: Tensor, rows: Sequence[Sequence[int]] | Tensor) -> tuple[Tensor, Branch]:
        """Go on from some rows of a branch with new tokens.

        Args:
            branch: where to go on from.
            parents: row of the branch each new row continues, (rows,) int64.
            rows: new tokens, padded on the right here when lengths differ.

        Returns:
            What stands at the new tokens, (rows, longest, width), and the branch of the new rows. Rows with padding must
            not be gone on from.
        """
        if isinstance(rows, Tensor):
            ids, mask = rows.to(self.device), torch.ones_like(rows, device=self.device)
        else:
            ids, mask = pad_right(rows, self.device)
        cache = branch.grown(parents.to(self.device))
        past = mask.new_ones((mask.shape[0], branch.length))
        out = self._run(ids, torch.cat([past, mask], dim=1), cache)
        return out, Branch(cache, branch.length + ids.shape[1])

    def statistics(self, states: Tensor, targets: Tensor, rows: Tensor | None = None, **options: Any) -> TokenStatistics:
        """Statistics of rows of what `whole`, `encode` or `extend` gave, shape (N, width)."""
        if self._head is not None:
            return self._head.statistics(states, targets, rows, **options)
        rows = rows.to(states.device) if rows is not None else None
        return logit_statistics(states, targets.to(states.device), rows=rows, **options)

    def bytes_per_token(self) -> int:
        """A rough, generous size of what one token of a batch takes during a forward pass; bytes."""
        logits = 0 if self._head is not None else 8 * self.vocabulary_size
        activations = 24 * self._size("hidden_size", "n_embd", default=1024) * int(self.dtype.itemsize)
        return activations + self.cache_bytes_per_token() + logits

    def cache_bytes_per_token(self) -> int:
        """At most what the keys and values of one token take; bytes."""
        layers = self._size("num_hidden_layers", "n_layer", default=16)
        return 2 * layers * self._size("hidden_size", "n_embd", default=1024) * int(self.dtype.itemsize)

    def _size(self, *names: str, default: int) -> int:
        config = text_config(self.model)
        return next((int(size) for name in names if (size := getattr(config, name, None))), default)

    def _run(self, ids: Tensor, mask: Tensor, cache: Any) -> Tensor:
        with self._whole() if self._head is None else lifted(self._head) as caught:
            logits = self._call(ids, mask, cache)
            states = logits if caught is None else caught.take()
        return states[:, -ids.shape[1] :]  # virtual tokens of a prompt adapter stand before

    def _call(self, ids: Tensor, mask: Tensor, cache: Any) -> Tensor:
        self.num_token_forwards += ids.numel()
        options: dict[str, Any] = {"use_cache": cache is not None} if self._takes_cache else {}
        if cache is not None:
            options[self._cache_name] = cache
        logits = self.model(input_ids=ids, attention_mask=mask, **options).logits
        self.num_forwards += 1
        if logits is None:
            raise ScoringError("the model returned no logits; switch off a fused loss that swallows them.")
        if not isinstance(logits, Tensor):
            raise ScoringError(f"the model must return logits as a tensor, got {type(logits).__name__}.")
        return logits

    @contextlib.contextmanager
    def _whole(self) -> Any:
        yield None

    def _own_logits(self, ids: Tensor, mask: Tensor) -> tuple[Tensor, float]:
        """The model's own logits, and the rounding step of its head's output, relative."""
        steps: list[float] = []

        def note(_: Any, __: Any, out: Any) -> None:
            if isinstance(out, Tensor) and out.is_floating_point():
                steps.append(float(torch.finfo(out.dtype).eps))

        getter = getattr(self.model, "get_output_embeddings", None)
        module = getter() if callable(getter) else None
        handle = module.register_forward_hook(note) if isinstance(module, torch.nn.Module) else None
        try:
            own = self._call(ids, mask, None)
        finally:
            if handle is not None:
                handle.remove()
        return own[:, -ids.shape[1] :].float(), max([float(torch.finfo(own.dtype).eps), *steps])

    def _check_head(self, ids: Tensor, mask: Tensor, own: Tensor, step: float) -> None:
        head = read_head(self.model)
        if isinstance(head, Unreadable):
            self.notices.append(f"the head is run by the model itself: {head.reason}")
            return
        self._head = head
        doubt = self._doubt("head", lambda: self._doubt_of_head(ids, mask, own, step), num_forwards=1)
        if doubt is not None:
            self._head = None
            self.notices.append(f"the head is run by the model itself: {doubt}")

    def _doubt(self, what: str, check: Callable[[], str | None], *, num_forwards: int) -> str | None:
        """Why some rank may not take a road, so that none does; None where every check passed."""
        outcomes = self.in_step(what, check, num_forwards=num_forwards)
        return next((outcome.value for outcome in outcomes if outcome.value is not None), None)

    def _doubt_of_head(self, ids: Tensor, mask: Tensor, own: Tensor, step: float) -> str | None:
        allowed = max(LOGIT_TOLERANCE, LOW_PRECISION_ROUNDINGS * step)
        try:
            difference, rms = _relative_difference(self.logits(self._run(ids, mask, None)), own, mask)
        except Exception as error:
            return f"lifted out, it raised {type(error).__name__}."
        if difference <= allowed and rms <= max(LOGIT_TOLERANCE, RMS_ROUNDINGS * step):
            return None
        return f"read from its weights, its logits differ by {difference:.1e} of the largest, more than {allowed:.1e}."

    def logits(self, states: Tensor) -> Tensor:
        """All logits of a few rows of what `whole`, `encode` or `extend` gave, float32, (..., V)."""
        return self._head.logits(states) if self._head is not None else states.float()

    def _check_branching(self, rows: list[list[int]], own: Tensor, step: float) -> bool:
        """Encode one token less than half of each row, go on with the rest, compare with the whole row."""
        long = [index for index, row in enumerate(rows) if len(row) >= 3]
        if not long:
            self.notices.append("prefixes are not shared: rows of fewer than 3 tokens cannot show that a cache is honoured.")
            return False
        pairs = [(rows[index], own[index]) for index in long]
        doubt = self._doubt("branching", lambda: self._doubt_of_branching(pairs, step), num_forwards=3 * len(pairs))
        if doubt is not None:
            self.notices.append(f"prefixes are not shared: {doubt}")
        return doubt is None

    def _doubt_of_branching(self, rows: Sequence[tuple[list[int], Tensor]], step: float) -> str | None:
        allowed = max(CACHE_TOLERANCE, 8 * LOW_PRECISION_ROUNDINGS * step)
        try:
            differences = [self._branch_difference(row, own) for row, own in rows]
        except Exception as error:
            return f"branching from a cache raised {type(error).__name__}."
        wrong = [difference for difference in differences if not difference <= allowed]
        return f"logits behind a cache differ by {wrong[0]:.1e} of the largest, more than {allowed:.1e}." if wrong else None

    def _branch_difference(self, row: list[int], own: Tensor) -> float:
        half = max(1, len(row) // 2)
        _, branch = self.encode([row[:half], row[:half][::-1]])
        # Two steps, with padding beside: as the search and the grid go on.
        first, branch = self.extend(branch, torch.tensor([0, 1, 0]), [row[half : half + 1]] * 3)
        rest = row[half + 1 :]
        got = [first[0]]
        if rest:
            more, _ = self.extend(branch, torch.tensor([2, 0]), [rest, rest[:1]])
            got.append(more[0])
        logits = self.logits(torch.cat(got))
        expected = own[half : len(row)]
        return _relative_difference(logits[None], expected[None], None)[0]


def pad_right(rows: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Ids and attention mask, (rows, longest) int64; padding is id 0 and is attended by nothing."""
    width = max(len(row) for row in rows)
    ids = torch.tensor([[*row, *([0] * (width - len(row)))] for row in rows], dtype=torch.long, device=device)
    lengths = torch.tensor([len(row) for row in rows], device=device)
    mask = (torch.arange(width, device=device)[None] < lengths[:, None]).long()
    return ids, mask


def _cache_name(model: Any) -> str:
    """What the model's forward calls its cache; transformers renamed it, and adapters hide the signature."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    return "cache" if "cache" in inspect.signature(type(base).forward).parameters else "past_key_values"


def _relative_difference(got: Tensor, expected: Tensor, mask: Tensor | None) -> tuple[float, float]:
    """Largest and root-mean-square difference of logits, each as a share of the same of the logits; nan for one nan alone.

    Tokens that the model masks out, or that are hopeless, do not count: the others tell whether a head was read rightly.
    """
    if got.shape != expected.shape:
        return math.inf, math.inf
    expected = expected.to(got.device)
    if mask is not None:
        kept = mask.bool().to(got.device)
        got, expected = got[kept], expected[kept]
    if bool(expected.isnan().all()):  # nothing to compare with: scores will be nan on either road, and say so
        return 0.0, 0.0
    counts = ~(expected - expected.amax(-1, keepdim=True) < COUNTED)
    got, expected = got[counts], expected[counts]
    difference = (got - expected).abs()
    largest, typical = float(expected.abs().max()), float(expected.square().mean().sqrt())
    return float(difference.max()) / max(1.0, largest), float(difference.square().mean().sqrt()) / max(1.0, typical)
