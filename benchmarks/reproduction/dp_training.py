"""DP-Adam by Opacus, and plain Adam on the same model, for the studies that compare the two. A row is the unit of privacy.

Opacus takes a Hugging Face Llama as it is, once its head is not tied to the embedding: a parameter that is used twice would
be clipped by half of its gradient. Needs the extra `dp`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tiny_runs import Row, padded


@dataclass(frozen=True)
class Privacy:
    """Standard deviation of the noise in units of the clipping norm, that norm, and delta of what is stated."""

    noise: float
    clip: float
    delta: float


def row_losses(model: Any, rows: Sequence[Row]) -> torch.Tensor:
    """Mean loss a token of each row, shape (rows,); nats. Padding counts for nothing."""
    ids, labels = padded(rows)
    mask = (labels != -100).long()
    logits = model(input_ids=ids, attention_mask=mask).logits[:, :-1]
    losses = torch.nn.functional.cross_entropy(logits.transpose(1, 2), labels[:, 1:], reduction="none")
    return losses.sum(dim=1) / mask[:, 1:].sum(dim=1)


def train_adam(
    model: Any,
    rows: Sequence[Row],
    *,
    epochs: int,
    batch: int,
    learning_rate: float,
    seed: int,
    privacy: Privacy | None = None,
    on_epoch: Callable[[], None] | None = None,
) -> float | None:
    """Train with Adam on the rows, sampled by Poisson where privacy is asked for; the model is left in eval mode.

    Args:
        model: its head not tied to its embedding.
        rows: token ids; each is a record.
        epochs: passes, or as many expected passes.
        batch: rows a step, or as many expected.
        learning_rate: of Adam.
        seed: of order, sampling and noise.
        privacy: None for plain training.
        on_epoch: called after each epoch, with the model in eval mode.

    Returns:
        The epsilon that was spent, by Opacus' own accountant; None without privacy.
    """
    torch.manual_seed(seed)
    model.train()
    optimizer = torch.optim.Adam(model.parameters(), lr=learning_rate)
    numbers = torch.utils.data.TensorDataset(torch.arange(len(rows)))
    loader: Any = torch.utils.data.DataLoader(numbers, batch_size=batch, shuffle=True)
    engine: Any = None
    if privacy is not None:
        from opacus import PrivacyEngine  # type: ignore[import-untyped]

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # says that its noise is not from a secure source
            engine = PrivacyEngine()
            module, optimizer, loader = engine.make_private(
                module=model,
                optimizer=optimizer,
                data_loader=loader,
                noise_multiplier=privacy.noise,
                max_grad_norm=privacy.clip,
                noise_generator=torch.Generator().manual_seed(seed),
            )
    else:
        module = model
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # full backward hooks on modules whose inputs need no gradient
        for _ in range(epochs):
            for (indices,) in loader:
                loss = row_losses(module, [rows[index] for index in indices.tolist()]).mean()
                loss.backward()  # type: ignore[no-untyped-call]
                if privacy is None:
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            if on_epoch is not None:
                model.eval()
                on_epoch()
                model.train()
    spent = None
    if privacy is not None:
        module.remove_hooks()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            spent = float(engine.get_epsilon(delta=privacy.delta))
    model.eval()
    return spent
