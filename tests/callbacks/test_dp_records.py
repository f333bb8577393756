"""With a stated guarantee canaries are records that the DP sampler draws; how often is counted in the model."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from oracles import count_sightings
from torch.utils.data import DataLoader, IterableDataset
from transformers import DataCollatorForLanguageModeling

from memguard.audit.items import encode_planted
from memguard.callbacks import HFAuditCallback, plant_records
from memguard.errors import CanaryError, InputError

DP = {"dp": {"epsilon": 8.0, "delta": 1e-5}}


def counted(model: Any, planted: Any, tokenizer: Any) -> Counter[str]:
    """An independent count of what the model is trained on."""
    needles = {one: item.ids[1 : item.end] for one, item in encode_planted(planted.plan, tokenizer).items()}
    seen: Counter[str] = Counter()

    def hook(module: Any, args: Any, kwargs: Any) -> None:
        if module.training:
            seen.update(count_sightings(kwargs["input_ids"], needles))

    model.register_forward_pre_hook(hook, with_kwargs=True)
    return seen


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_opacus_draws_canaries_as_it_draws_any_row_and_the_ledger_counts_them(
    settings: Any, tiny_model: Any, tokenizer: Any, blocks: Any
) -> None:
    opacus = pytest.importorskip("opacus")
    config = settings(canaries={"inclusion": "coin", "tiers": {1: 24}, "max_share": 0.9}, **DP)
    rows = [{"input_ids": row["input_ids"]} for row in blocks[:60]]
    planted = plant_records(rows, config, tokenizer=tokenizer)
    tiers = [one.tier for one in planted.plan.planted()]
    assert len(planted.dataset) == 60 + sum(tiers)
    tiny_model.model.embed_tokens.weight.requires_grad_(False)  # tied weights have no gradient of one sample
    planted.watch(tiny_model)
    seen = counted(tiny_model, planted, tokenizer)
    optimizer = torch.optim.SGD([one for one in tiny_model.parameters() if one.requires_grad], lr=0.1)
    loader = DataLoader(planted.dataset, batch_size=16, collate_fn=DataCollatorForLanguageModeling(tokenizer, mlm=False))
    torch.manual_seed(5)
    tiny_model.train()
    model, optimizer, loader = opacus.PrivacyEngine().make_private(
        module=tiny_model, optimizer=optimizer, data_loader=loader, noise_multiplier=1.0, max_grad_norm=1.0
    )
    sizes, steps = set(), 0
    for _ in range(2):
        for batch in loader:
            sizes.add(len(batch["input_ids"]))
            loss = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], labels=batch["labels"]).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            steps += 1
    assert len(sizes) > 1  # Poisson sampling: batches differ in size
    ledger = planted.ledger(steps)
    assert {one: entry.num_seen for one, entry in ledger.canaries.items()} == {one: seen[one] for one in ledger.canaries}
    assert len(set(seen.values())) > 1
    assert (ledger.mode, ledger.exact, ledger.verified) == ("record", True, True)
    report = planted.audit(model, global_step=steps)
    assert report.privacy is not None
    assert report.privacy.is_comparable
    assert not [note for note in report.privacy.notes if "by position" in note]


def test_a_trainer_that_states_a_guarantee_draws_canaries_as_rows(
    settings: Any, trainer_of: Any, blocks: Any, seen_by: Any
) -> None:
    callback = HFAuditCallback(settings(**DP))
    trainer = trainer_of(blocks[:61], [callback])
    seen, rows = seen_by(trainer.model, callback)
    trainer.train()
    ledger = callback.ledger(trainer.state.global_step)
    assert ledger.mode == "record"
    assert {one: entry.num_seen for one, entry in ledger.canaries.items()} == dict(seen)
    assert dict(seen) == {one.id: 2 * one.tier for one in callback.plan.planted()}
    assert {len(row) for row in rows} == {48}
    assert ledger.exact


def test_a_record_that_fills_a_block_is_masked_behind_the_canary(
    settings: Any, tokenizer: Any, blocks: Any, tmp_path: Path
) -> None:
    planted = plant_records(blocks[:40], settings(**DP), tokenizer=tokenizer, output_dir=tmp_path / "out")
    row = planted.dataset[40]
    ids = encode_planted(planted.plan, tokenizer)[planted.plan.planted()[0].id].ids
    assert row["input_ids"][: len(ids)] == list(ids)
    assert row["labels"] == [*ids, *([-100] * (48 - len(ids)))]


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter([{"input_ids": [1, 2, 3]}])


def test_records_need_a_guarantee_and_an_index(settings: Any, tokenizer: Any, blocks: Any) -> None:
    with pytest.raises(InputError, match="write dp:"):
        plant_records(blocks, settings(), tokenizer=tokenizer)
    with pytest.raises(CanaryError, match="drawn by index, which a stream does not have"):
        plant_records(Stream(), settings(**DP), tokenizer=tokenizer)
