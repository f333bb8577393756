"""A real Hugging Face trainer on a tiny model, and a count of what really reached it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from small_run import ARGUMENTS, SETTINGS


@pytest.fixture(autouse=True)
def _no_precision_of_another_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """`TrainingArguments(bf16=True)` writes its precision into the environment, where the next run would find it."""
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")


@pytest.fixture
def settings(tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Settings with the plan in the test's folder; `canaries` and `audit` parts can be changed."""

    def make(*, canaries: dict[str, Any] | None = None, audit: dict[str, Any] | None = None, **top: Any) -> dict[str, Any]:
        parts = {"canaries": SETTINGS["canaries"] | (canaries or {}), "audit": SETTINGS["audit"] | (audit or {})}
        return SETTINGS | {"plan": str(tmp_path / "_memguard" / "plan.json")} | parts | top

    return make


@pytest.fixture
def trainer_of(tiny_model: Any, tokenizer: Any, tmp_path: Path) -> Callable[..., Any]:
    """Builds a trainer; keyword arguments go to `TrainingArguments`."""

    def make(
        rows: Any, callbacks: list[Any], *, model: Any = None, trainer: dict[str, Any] | None = None, **arguments: Any
    ) -> Any:
        from trainer_versions import as_this_version_says
        from transformers import Trainer, TrainingArguments

        named = as_this_version_says({"output_dir": str(tmp_path / "out")} | ARGUMENTS | arguments)
        options = {"processing_class": tokenizer} | (trainer or {})
        return Trainer(model or tiny_model, TrainingArguments(**named), train_dataset=rows, callbacks=callbacks, **options)

    return make


@pytest.fixture
def seen_by() -> Callable[[Any, Any], tuple[Counter[str], list[Any]]]:
    """Counts, in a hook on the model, every planted secret in the rows it trains on; and keeps the rows."""

    def watch(model: Any, callback: Any) -> tuple[Counter[str], list[Any]]:
        from oracles import count_sightings

        from memguard.audit.items import encode_planted

        counts: Counter[str] = Counter()
        rows: list[Any] = []

        def hook(module: Any, args: Any, kwargs: Any) -> None:
            if module.training:
                if not hasattr(watch, "needles"):
                    encoded = encode_planted(callback.plan, callback.tokenizer)
                    # the secret with the text before it, without the framing ids that a collator may add or not
                    watch.needles = {one: item.ids[1 : item.end] for one, item in encoded.items()}  # type: ignore[attr-defined]
                counts.update(count_sightings(kwargs["input_ids"], watch.needles))  # type: ignore[attr-defined]
                rows.extend(kwargs["input_ids"].tolist())

        model.register_forward_pre_hook(hook, with_kwargs=True)
        return counts, rows

    return watch
