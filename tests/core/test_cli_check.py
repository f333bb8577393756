"""`memguard check`: rows as a trainer makes them, one table, one exit code, and nothing written or given away."""

from __future__ import annotations

import copy
import io
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console
from secret_search import leaks
from test_cli import memguard, sentence

from memguard.audit.check import CheckResult, check_plan, padding_collator
from memguard.audit.config import load_config, parse_config
from memguard.audit.planting import planted_ids
from memguard.audit.training_rows import load_training_rows, pack_rows, parse_packing
from memguard.canaries.batch_view import view_rows
from memguard.canaries.drawing import draw_plan
from memguard.canaries.plan import load_plan
from memguard.canaries.preflight import run_preflight
from memguard.errors import CanaryError, InputError
from memguard.reporting.check import check_lines, check_table

CONFIG: dict[str, Any] = {
    "canaries": {
        "formats": [
            {"name": "pin", "template": "The access number is {secret}.", "secret": {"kind": "digits", "length": 9}},
            {"name": "phrase", "template": "Pass phrase of {name}: {secret}.", "secret": {"kind": "words", "count": 4}},
        ],
        "tiers": {1: 4, 4: 4},
        "controls": 8,
        "max_share": 0.2,
    }
}
CHAT = (
    "{% for one in messages %}<{{ one.role }}>{{ one.content }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture
def place(tmp_path: Path, tokenizer: Any, corpus_text: str) -> Path:
    """A folder with a config, a tokenizer, and the same data in every form."""
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    (tmp_path / "memguard.yaml").write_text(yaml.safe_dump(CONFIG), encoding="utf-8")
    lines = [line for line in corpus_text.split("\n") if len(line) > 40]
    forms: dict[str, list[Any]] = {
        "text.jsonl": [{"text": line} for line in lines],
        "ids.jsonl": [{"input_ids": tokenizer(line)["input_ids"]} for line in lines],
        "pairs.jsonl": [{"prompt": line[:20], "completion": line[20:]} for line in lines],
        "chat.jsonl": [
            {"messages": [{"role": "user", "content": line[:20]}, {"role": "assistant", "content": line[20:]}]}
            for line in lines
        ],
    }
    for name, rows in forms.items():
        (tmp_path / name).write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
    (tmp_path / "text.txt").write_text("\n".join(lines), encoding="utf-8")
    return tmp_path


def checked(
    place: Path, tokenizer: Any, data: str = "text.txt", *, canaries: dict[str, Any] | None = None, **options: Any
) -> Any:
    config = parse_config(
        {"plan": str(place / "_memguard" / "plan.json"), "canaries": CONFIG["canaries"] | (canaries or {})},
    )
    return check_plan(config, place / data, tokenizer, **options)


def shown(result: CheckResult) -> str:
    console = Console(file=io.StringIO(), width=160)
    console.print(check_table(result))
    return console.file.getvalue() + "\n".join(check_lines(result))  # type: ignore[attr-defined,no-any-return]


# -- the command


def test_check_says_that_all_is_well_and_writes_nothing(place: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in place.rglob("*")}
    done = memguard("check", "memguard.yaml", "--data", "text.txt", "--tokenizer", "tokenizer", cwd=place)
    assert "every canary that was checked reaches the loss" in done.stdout
    assert "drawn in memory" in done.stdout
    assert {path: path.stat().st_mtime_ns for path in place.rglob("*")} == before


def test_check_exits_one_with_steps_and_cures_and_gives_no_secret_away(place: Path, tokenizer: Any) -> None:
    plan = draw_plan(load_config(place / "memguard.yaml").canaries, tokenizer)
    plan.save(place / "_memguard" / "plan.json")
    arguments = ["check", "memguard.yaml", "--data", "text.jsonl", "--tokenizer", "tokenizer", "--packing", "fixed"]
    done = memguard(*arguments, "--max-length", "30", "--json", cwd=place, code=1)
    result = CheckResult.model_validate_json(done.stdout)
    phrases = [one for one in result.canaries if one.format == "phrase"]
    assert len(phrases) == 8
    assert {(one.reached, one.failed, one.reason) for one in phrases if one.num_tokens > 30} == {("stream", "tokens", "cut")}
    assert {one.failed for one in result.canaries if one.format == "pin"} == {None}
    assert "Raise the maximum length of a row to at least" in result.failures[0]
    assert not result.is_plan_drawn
    assert not leaks((done.stdout + done.stderr).encode(), plan, tokenizer)
    assert load_plan(place / "_memguard" / "plan.json") == plan


def test_a_mistake_exits_two_with_one_sentence(place: Path) -> None:
    arguments = ["--data", "text.txt", "--packing", "bdf", "--max-length", "64"]
    done = memguard("check", "memguard.yaml", "--tokenizer", "tokenizer", *arguments, cwd=place, code=2)
    assert sentence(done) == "memguard: --packing must name a known packing. Did you mean 'bfd'?"


@pytest.mark.slow
def test_check_proves_the_gradient_on_a_checkpoint_and_quietly_says_why_it_fails(
    place: Path, tiny_model: Any, tokenizer: Any
) -> None:
    quiet = memguard(
        "-q", "check", "memguard.yaml", "--data", "text.txt", "--tokenizer", "tokenizer", "--max-length", "8", cwd=place, code=1
    )  # fmt: skip
    assert quiet.stdout == ""
    assert "16 at step 'tokens'" in sentence(quiet)
    tiny_model.save_pretrained(place / "model")
    tokenizer.save_pretrained(place / "model")
    done = memguard(
        "check", "memguard.yaml", "--data", "text.txt", "--tokenizer", "tokenizer", "--model", "model", "--json", cwd=place
    )  # fmt: skip
    result = json.loads(done.stdout)
    assert {one["reached"] for one in result["canaries"]} == {"gradient"}
    assert result["max_length"] == 128  # positions of the model


# -- data and packing


@pytest.mark.parametrize("packing", ["none", "fixed", "bfd", "wrapped"])
@pytest.mark.parametrize("data", ["text.jsonl", "text.txt", "ids.jsonl", "pairs.jsonl", "chat.jsonl"])
def test_every_kind_of_data_and_packing_is_checked(data: str, packing: Any, place: Path, tokenizer: Any) -> None:
    spoken = copy.deepcopy(tokenizer)
    spoken.chat_template = CHAT
    for completion_only in (False, True) if data in ("pairs.jsonl", "chat.jsonl") else (False,):
        result = checked(place, spoken, data, packing=packing, max_length=64, completion_only=completion_only)
        assert result.reaches_loss
        assert [(row.num_canaries, row.num_checked, row.num_reached) for row in result.formats] == [(8, 8, 8), (8, 8, 8)]
        contaminated = sum(row.num_contaminated for row in result.formats)
        assert contaminated >= 13 if packing == "fixed" else contaminated == 0
        assert result.mode == ("splice" if packing == "fixed" else "append")


def test_shares_of_the_formats_add_up_to_that_of_the_tokens(place: Path, tokenizer: Any) -> None:
    result = checked(place, tokenizer)
    rows = load_training_rows(place / "text.txt", tokenizer)
    user = sum(len(row["input_ids"]) for row in rows)
    plan = draw_plan(parse_config(CONFIG | {"canaries": CONFIG["canaries"] | {"seed": 1}}).canaries, tokenizer)
    seeded = checked(place, tokenizer, canaries={"seed": 1})
    tiers = {one.id: one.tier for one in plan.planted()}
    planted = sum(len(one.ids) * tiers[one.id] for one in planted_ids(plan, tokenizer))
    assert seeded.token_share == pytest.approx(planted / (user + planted))
    assert sum(row.token_share for row in result.formats) == pytest.approx(result.token_share)
    assert result.num_rows == len(rows)


def test_more_canaries_than_max_share_fail_with_a_plan_that_fits(place: Path, tokenizer: Any) -> None:
    result = checked(place, tokenizer, canaries={"max_share": 0.005})
    assert not result.reaches_loss
    assert "must be at most 0.50% of the training tokens" in result.failures[0]
    assert "A plan that fits" in result.failures[0]
    assert result.failures[0] in shown(result)


def test_nothing_fits_a_row_that_is_shorter_than_every_canary(place: Path, tokenizer: Any) -> None:
    result = checked(place, tokenizer, max_length=8)
    assert result.mode is None
    assert [row.failed_at for row in result.formats] == [{"tokens": 8}, {"tokens": 8}]
    assert len(result.failures) == 1
    assert "nothing planted" in shown(result)


def test_a_model_without_trainable_parameters_fails_the_check(place: Path, tokenizer: Any, tiny_model: Any) -> None:
    assert checked(place, tokenizer, model=tiny_model).formats[0].num_reached == 8
    result = checked(place, tokenizer, model=tiny_model.requires_grad_(False))
    assert [row.failed_at for row in result.formats] == [{"gradient": 8}, {"gradient": 8}]


def test_a_total_is_said_to_be_judged_over_one_epoch(place: Path, tokenizer: Any) -> None:
    result = checked(place, tokenizer, canaries={"count": "total"})
    assert result.mode == "replace"
    assert any("a run of one epoch" in note for note in result.notes)
    assert "note: count is 'total'" in shown(result)


def test_a_plan_whose_coins_all_fell_on_out_cannot_be_checked(place: Path, tokenizer: Any) -> None:
    settings = {"inclusion": "coin", "seed": 0, "tiers": {1: 1}, "formats": CONFIG["canaries"]["formats"][:1], "controls": 0}
    for seed in range(20):
        config = settings | {"seed": seed}
        plan = draw_plan(parse_config({"canaries": CONFIG["canaries"] | config}).canaries, tokenizer)
        if not plan.planted():
            break
    with pytest.raises(CanaryError, match="must hold at least one canary that is planted, got none"):
        checked(place, tokenizer, canaries=config)


def test_best_fit_packing_keeps_texts_whole_and_rows_full() -> None:
    rows = [{"input_ids": [n] * n, "labels": [n] * n} for n in (3, 9, 5, 5, 2, 7, 1)]
    packed = pack_rows(rows, "bfd", 10)
    # by hand: 9 | 7 | 5+5 | 3 goes to the 7 (room 3) | 2 opens a row | 1 goes to the 9 (room 1)
    assert sorted(row["seq_lengths"] for row in packed) == [[2], [5, 5], [7, 3], [9, 1]]
    assert all(row["input_ids"] == row["labels"] for row in packed)
    cut = pack_rows([{"input_ids": list(range(12))}], "bfd", 10)
    assert cut == [{"input_ids": list(range(10)), "seq_lengths": [10]}]


@pytest.mark.slow
@pytest.mark.parametrize("packing", ["bfd", "wrapped"])
def test_packing_equals_that_of_trl(packing: Any, place: Path, tokenizer: Any) -> None:
    trl = pytest.importorskip("trl")
    datasets = pytest.importorskip("datasets")
    rows = load_training_rows(place / "text.txt", tokenizer)
    theirs = trl.pack_dataset(datasets.Dataset.from_list(rows), 64, packing, map_kwargs={"batch_size": len(rows)})
    ours = pack_rows(rows, packing, 64)
    assert len(ours) == len(theirs)
    assert sorted(map(len, theirs["input_ids"])) == sorted(len(row["input_ids"]) for row in ours)
    if packing == "wrapped":
        assert [row["input_ids"] for row in ours] == list(theirs["input_ids"])


def test_prompts_are_out_of_the_labels_and_packed_texts_are_apart(place: Path, tokenizer: Any) -> None:
    rows = load_training_rows(place / "pairs.jsonl", tokenizer, completion_only=True)
    assert all(row["labels"][0] == -100 and row["labels"][-1] == row["input_ids"][-1] for row in rows)
    packed = load_training_rows(place / "pairs.jsonl", tokenizer, packing="bfd", max_length=96, completion_only=True)
    batch = padding_collator(tokenizer)(packed[:2])
    segments = view_rows(batch)
    assert [len(one.ids) for one in segments] == [length for row in packed[:2] for length in row["seq_lengths"]]
    assert all(one.labels is not None and one.labels[0] == -100 for one in segments)
    padded = padding_collator(tokenizer)(rows[:2])
    assert (padded["labels"][padded["attention_mask"] == 0] == -100).all()


def test_a_canary_that_is_a_prompt_would_be_found(tokenizer: Any) -> None:
    plan = draw_plan(parse_config(CONFIG).canaries, tokenizer)
    planted = planted_ids(plan, tokenizer)
    masked = [{"input_ids": list(one.ids), "labels": [-100] * len(one.ids)} for one in planted]
    found = run_preflight(planted, lambda j: [masked[j]], padding_collator(tokenizer))
    assert {one.reason for one in found.findings} == {"masked"}


BROKEN: dict[str, tuple[str, str]] = {
    "not json": ("text.jsonl", "{"),
    "a list": ("text.jsonl", "[1]"),
    "no column": ("text.jsonl", '{"body": "a"}'),
    "foreign ids": ("text.jsonl", '{"input_ids": [99999]}'),
    "empty": ("text.jsonl", "\n\n"),
}
WORDS = {
    "not json": "line 1 must be a JSON object",
    "a list": "line 1 must be a JSON object",
    "no column": "must hold 'text', 'input_ids' of the tokenizer",
    "foreign ids": "must hold 'text', 'input_ids' of the tokenizer",
    "empty": "holds no row",
}


@pytest.mark.parametrize("case", sorted(BROKEN))
def test_data_that_is_no_data_is_named_by_its_line(case: str, tmp_path: Path, tokenizer: Any) -> None:
    name, text = BROKEN[case]
    (tmp_path / name).write_text(text, encoding="utf-8")
    with pytest.raises(InputError, match=WORDS[case]):
        load_training_rows(tmp_path / name, tokenizer)


def test_data_that_do_not_fit_the_options_are_refused(place: Path, tokenizer: Any) -> None:
    with pytest.raises(InputError, match="must hold 'prompt' and 'completion', or 'messages', for completion-only loss"):
        load_training_rows(place / "text.txt", tokenizer, completion_only=True)
    with pytest.raises(InputError, match="the tokenizer has no chat template"):
        load_training_rows(place / "chat.jsonl", tokenizer)
    broken = copy.deepcopy(tokenizer)
    broken.chat_template = "{{ raise_exception('281265017') }}"
    with pytest.raises(InputError, match=r"line 1: the chat template does not take these messages \(TemplateError\)"):
        load_training_rows(place / "chat.jsonl", broken)
    with pytest.raises(InputError, match="data '.*none.jsonl' does not exist"):
        load_training_rows(place / "none.jsonl", tokenizer)
    with pytest.raises(InputError, match="--packing wrapped must have --max-length, the number of tokens a row"):
        load_training_rows(place / "text.txt", tokenizer, packing="wrapped")
    (place / "short.txt").write_text("a few words", encoding="utf-8")
    with pytest.raises(InputError, match="holds fewer than the 64 tokens of one row"):
        load_training_rows(place / "short.txt", tokenizer, packing="fixed", max_length=64)
    with pytest.raises(InputError, match="--packing must name a known packing. Did you mean 'wrapped'"):
        parse_packing("wraped")


def test_what_happens_on_a_failure_is_a_setting() -> None:
    assert parse_config(CONFIG).canaries.on_preflight_failure == "stop"
    warned = CONFIG | {"canaries": CONFIG["canaries"] | {"on_preflight_failure": "warn"}}
    assert parse_config(warned).canaries.on_preflight_failure == "warn"
    with pytest.raises(InputError, match="canaries.on_preflight_failure"):
        parse_config(CONFIG | {"canaries": CONFIG["canaries"] | {"on_preflight_failure": "ignore"}})
