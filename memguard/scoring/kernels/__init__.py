"""Statistics of next-token distributions, from hidden states or logits, without a float32 matrix of all logits."""

from memguard.scoring.kernels.dispatch import choose_path, describe_paths, logit_statistics, token_statistics
from memguard.scoring.kernels.results import TokenStatistics

__all__ = ["TokenStatistics", "choose_path", "describe_paths", "logit_statistics", "token_statistics"]
