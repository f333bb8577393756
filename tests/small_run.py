"""Settings and trainer arguments of a run that ends in seconds, for fixtures and for processes that have none."""

from __future__ import annotations

from typing import Any

SETTINGS: dict[str, Any] = {
    "canaries": {
        "seed": 3,
        "formats": [{"name": "pin", "template": "The access number is {secret}.", "secret": {"kind": "digits", "length": 9}}],
        "tiers": {1: 2, 3: 2},
        "controls": 6,
        "positive_control": {"in_training": {"count": 1, "repetitions": 5}},
        "max_share": 0.5,
    },
    "audit": {
        "every": None,
        "on": [],
        "max_overhead": None,
        "exposure": {"references": 16, "node_budget": 200},
        "prior_aware": {"prefixes": 16},
    },
    "tracking": {"wandb": "off"},
}
ARGUMENTS: dict[str, Any] = {
    "per_device_train_batch_size": 8,
    "num_train_epochs": 2,
    "learning_rate": 1e-3,
    "save_strategy": "no",
    "report_to": [],
    "use_cpu": True,
    "disable_tqdm": True,
    "logging_steps": 1,
    "seed": 0,
}
