"""Output heads at random, and how statistics of them are held to the float64 reference; for the kernel tests of every path."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from memguard.scoring.kernels import TokenStatistics, token_statistics

FIGURES = ("log_prob", "logsumexp", "entropy", "mean_log_prob", "variance_log_prob")
COUNTS = ("is_greedy", "argmax", "num_top_ties")


@dataclass(frozen=True)
class Case:
    """A head, its hidden states and targets, and the options of one call."""

    hidden: Tensor
    weight: Tensor
    targets: Tensor
    options: dict[str, Any]

    def run(self, path: str = "torch", **changes: Any) -> TokenStatistics:
        return token_statistics(self.hidden, self.weight, self.targets, path=path, **(self.options | changes))


def draw_case(
    num_rows: int,
    width: int,
    vocabulary: int,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    num_targets: int | None = None,
    padding: int = 0,
    with_bias: bool = False,
    device: str = "cpu",
    **options: Any,
) -> Case:
    """A case whose logits have unit variance or so; `num_targets` None gives one target a row, in order."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    hidden, weight = normal(num_rows, width), normal(vocabulary + padding, width) / width**0.5
    owned = num_rows if num_targets is None else num_targets
    targets = torch.randint(vocabulary, (owned,), generator=generator)
    if num_targets is not None:
        options["rows"] = torch.randint(max(1, num_rows), (owned,), generator=generator).to(device)
    if with_bias:
        bias = normal(vocabulary + padding)
        bias[torch.rand(len(bias), generator=generator) < 0.1] = -torch.inf
        options["bias"] = bias.to(device)
    if padding:
        options["vocabulary_size"] = vocabulary
    return Case(hidden.to(device, dtype), weight.to(device, dtype), targets.to(device), options)


def assert_agree(found: TokenStatistics, exact: TokenStatistics, *, tolerance: float = 2e-5) -> None:
    """Figures within the tolerance (nats), ranks around the true ones, argmax equal wherever rounding cannot decide it."""
    for name in FIGURES:
        one, other = getattr(found, name), getattr(exact, name)
        assert (one is None) == (other is None), name
        if one is not None:
            torch.testing.assert_close(one.double(), other.double(), rtol=tolerance, atol=tolerance, equal_nan=True, msg=name)
    for name in COUNTS:
        assert torch.equal(getattr(found, name), getattr(exact, name)), name
    if exact.rank_low is not None:
        assert (found.rank_low <= exact.rank_low).all()
        assert (found.rank_high >= exact.rank_high).all()
    assert_ranks_agree_with_greedy(found)


def assert_ranks_agree_with_greedy(found: TokenStatistics) -> None:
    """Both identities, with no tolerance."""
    if found.rank_low is not None:
        assert (found.rank_low[found.is_greedy] == 1).all()
        assert found.is_greedy[found.rank_high == 1].all()
        assert (found.rank_low <= found.rank_high).all()


def largest_error(log_prob: Tensor, exact: Tensor) -> float:
    """The largest absolute difference; nats."""
    return float((log_prob.double() - exact.double()).abs().max())


def plain_log_prob(case: Case) -> Tensor:
    """What a model does: a product in its own dtype, log-softmax in float32."""
    logits = (case.hidden @ case.weight.T).float()
    return torch.log_softmax(logits, dim=-1).gather(1, case.targets[:, None]).squeeze(1)
