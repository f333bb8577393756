"""Promotion over a registry double: what moves an alias, what never does, and what is left after every failure."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from memguard.audit.digest import checkpoint_digest
from memguard.audit.report import load_decision
from memguard.errors import EvidenceError, InputError, RegistryError
from memguard.gates import promotion_inputs
from memguard.gates.binding import LAST, SERVED
from memguard.gates.promotion import promote
from memguard.gates.promotion_log import PromotionLog, open_log
from memguard.gates.registries.protocol import Annotation, ModelVersion, Registry

MEMORISED = {"card-1x-3": -0.1}
TAMPERED = b"other weights"


class Double:
    """A registry in memory; `then` does or raises something when a method is called for the n-th time."""

    kind, model, alias = "double", "tiny", "champion"

    def __init__(self, folders: dict[str, Path], named: str | None) -> None:
        self.folders, self.named = folders, named
        self.moves: list[str | None] = []
        self.notes: list[tuple[str, Annotation]] = []
        self.calls: list[str] = []
        self.trouble: dict[tuple[str, int], BaseException | Callable[[], None]] = {}

    def then(self, method: str, number: int, what: BaseException | Callable[[], None]) -> None:
        self.trouble[method, number] = what

    def _called(self, method: str) -> None:
        self.calls.append(method)
        what = self.trouble.get((method, self.calls.count(method)))
        if isinstance(what, BaseException):
            raise what
        if what is not None:
            what()

    def resolve(self, version: str) -> ModelVersion:
        self._called("resolve")
        return ModelVersion(self.model, version)

    @contextlib.contextmanager
    def served_files(self, version: ModelVersion) -> Iterator[Path]:
        self._called("served_files")
        yield self.folders[version.version]

    def current(self) -> ModelVersion | None:
        self._called("current")
        return ModelVersion(self.model, self.named) if self.named is not None else None

    def move_alias(self, to: ModelVersion | None) -> None:
        self._called("move_alias")
        self.named = to.version if to is not None else None
        self.moves.append(self.named)

    def annotate(self, version: ModelVersion, note: Annotation) -> None:
        self._called("annotate")
        self.notes.append((version.version, note))


class Place:
    """A folder with three checkpoints, a baseline, a registry whose alias names version 1, and a report where asked for."""

    def __init__(self, folder: Path, make_report: Callable[..., Any], change: Callable[..., Any]) -> None:
        self.folder, self._make_report, self._change = folder, make_report, change
        self.log, self.baseline = folder / "promotions.jsonl", folder / "baseline.json"
        self.folders = {version: folder / f"checkpoint-{version}" for version in "123"}
        for version, checkpoint in self.folders.items():
            checkpoint.mkdir()
            (checkpoint / "config.json").write_text("{}")
            (checkpoint / "model.safetensors").write_bytes(version.encode())
        make_report(2).save(self.baseline)
        self.registry: Double = Double(self.folders, "1")

    def report(self, version: str = "2", *, seed: int = 3, name: str = "report", memorised: Any = None, **changes: Any) -> Path:
        report = self._make_report(seed, memorised=memorised)
        digest = checkpoint_digest(self.folders[version])
        path = self.folder / name / "report.json"
        path.parent.mkdir(exist_ok=True)
        self._change(report, **{"subject__digest": digest, **changes}).save(path)
        return path

    def promote(self, report: Path, version: str = "2", **given: Any) -> Any:
        registry: Registry = self.registry  # the double keeps to the protocol
        given = {"policy": "default", "baseline": self.baseline, "log": self.log, **given}
        return promote(registry, report, version=version, **given)

    def logged(self) -> list[Any]:
        with open_log(self.log) as log:
            return log.entries

    def actions(self) -> list[str]:
        return [entry.action for entry in self.logged()]


@pytest.fixture
def place(tmp_path, make_report, change):
    return Place(tmp_path, make_report, change)


def _row(decision, name):
    return next(row for row in decision.evidence if row.name == name)


def test_a_pass_moves_the_alias_and_leaves_verdict_decision_and_log(place):
    path = place.report()
    done = place.promote(path)
    assert (done.action, done.decision.exit_code, done.attempt) == ("moved", 0, 1)
    assert (done.previous, done.version) == (ModelVersion("tiny", "1"), ModelVersion("tiny", "2"))
    assert place.registry.moves == ["2"]
    assert load_decision(path.with_name("decision.json")) == done.decision
    assert [_row(done.decision, name).outcome for name in (SERVED, LAST)] == ["pass", "pass"]
    [(version, note)] = place.registry.notes
    assert (version, note.outcome, note.reason) == ("2", "pass", done.decision.reason)
    assert note.tags["subject_digest"] == checkpoint_digest(place.folders["2"])
    assert set(note.tags) == {"subject_digest", "report_digest", "policy_digest", "baseline_digest"}
    assert note.markdown.startswith("## memguard gate: pass")
    moving, moved = place.logged()
    assert (moving.action, moved.action, moved.exit_code) == ("moving", "moved", 0)
    assert (moved.alias_before, moved.alias_after, moved.report_digest) == ("1", "2", done.decision.report_digest)


def test_the_verdict_is_left_before_the_alias_moves_and_all_is_read_back_after(place):
    place.promote(place.report())
    calls = place.registry.calls
    assert calls.index("annotate") < calls.index("move_alias")
    assert calls[calls.index("move_alias") + 1 :] == ["current", "served_files"]


def test_the_first_promotion_of_an_alias_has_no_old_one(place):
    place.registry.named = None
    assert place.promote(place.report()).previous is None
    assert [entry.alias_before for entry in place.logged()] == [None, None]


REFUSED = {
    "blocked": ({"memorised": MEMORISED}, {}, 1, "block", "Blocked: "),
    "the report of another version": ({"version": "3"}, {}, 3, "invalid", "served for tiny version 2 has the digest "),
    "blocked and of another version": ({"version": "3", "memorised": MEMORISED}, {}, 3, "invalid", "besides: Blocked: "),
    "a live model": ({"subject__kind": "live", "subject__digest": None}, {}, 3, "invalid", "in memory, which no registry"),
    "a live model with a digest": ({"subject__kind": "live"}, {}, 3, "invalid", "live"),
    "no baseline": ({}, {"baseline": None}, 3, "invalid", "No comparable baseline"),
    "a blocked one without baseline": ({"memorised": MEMORISED}, {"baseline": None}, 1, "block", "Blocked: "),
    "no evidence": ({"ledger__exact": False}, {}, 3, "invalid", "Not evidence: "),
    "no evidence and blocked": ({"ledger__exact": False, "memorised": MEMORISED}, {}, 3, "invalid", "Not evidence: "),
}


@pytest.mark.parametrize("name", REFUSED)
def test_nothing_but_a_pass_moves_the_alias(place, name):
    made, given, code, outcome, words = REFUSED[name]
    done = place.promote(place.report(**made), **given)
    assert (done.action, done.decision.exit_code, done.decision.outcome) == ("refused", code, outcome)
    assert words in done.decision.reason
    assert (place.registry.moves, place.registry.named) == ([], "1")
    [entry] = place.logged()
    assert (entry.action, entry.exit_code, entry.outcome, entry.alias_after) == ("refused", code, outcome, "1")


def test_a_mismatch_shows_both_digests_shortened(place):
    reason = _row(place.promote(place.report("3")).decision, SERVED).reason
    digests = [checkpoint_digest(place.folders[version]) for version in "23"]
    assert (
        reason
        == f"What is served for tiny version 2 has the digest {digests[0][:12]}, the audited checkpoint {digests[1][:12]}."
    )


def test_a_file_changed_after_the_audit_is_a_mismatch(place):
    path = place.report()
    (place.folders["2"] / "config.json").write_text('{"a": 1}')
    assert place.promote(path).decision.exit_code == 3


def test_what_cannot_be_hashed_as_a_checkpoint_is_no_evidence_and_no_folder_is_named(place):
    path = place.report()
    (place.folders["2"] / "model.safetensors").unlink()
    done = place.promote(path)
    assert done.decision.exit_code == 3
    assert "checkpoint 'tiny version 2' holds no weights" in done.decision.reason
    assert str(place.folder) not in place.log.read_text() + done.decision.model_dump_json()


def test_a_verdict_is_left_on_the_version_it_is_of_and_on_no_other(place):
    place.promote(place.report(memorised=MEMORISED))
    assert [(version, note.outcome) for version, note in place.registry.notes] == [("2", "block")]
    place.promote(place.report("3"))
    place.promote(place.report("3", ledger__exact=False))  # no evidence by itself, and not of this version either
    assert len(place.registry.notes) == 1


@pytest.mark.parametrize("trouble", [RegistryError("the registry is away."), RuntimeError("http://user:key@host")])
def test_a_refusal_that_cannot_be_left_on_the_version_stays_a_refusal(place, caplog, trouble):
    place.registry.then("annotate", 1, trouble)
    assert place.promote(place.report(memorised=MEMORISED)).decision.exit_code == 1
    assert "verdict could not be left on tiny version 2" in caplog.text
    assert "key" not in caplog.text


@pytest.mark.parametrize(("method", "number"), [("resolve", 1), ("current", 1), ("served_files", 1), ("current", 2)])
def test_a_registry_that_fails_before_the_move_moves_nothing(place, method, number):
    place.registry.then(method, number, RegistryError("the registry is away."))
    with pytest.raises(RegistryError, match="the registry is away"):
        place.promote(place.report())
    assert (place.registry.moves, place.logged()) == ([], [])


def test_a_verdict_that_cannot_be_left_moves_nothing_stands_in_the_log_and_takes_the_pass_back(place):
    place.registry.then("annotate", 1, RegistryError("the registry is away."))
    told = []
    with pytest.raises(RegistryError, match="the registry is away"):
        place.promote(place.report(), on_decision=lambda decision: told.append((decision.outcome, decision.exit_code)))
    assert (place.registry.moves, place.actions()) == ([], ["refused"])
    assert place.logged()[0].exit_code == 4
    assert place.logged()[0].reason == "The registry is away. Nothing was moved."
    assert told == [("pass", 0), ("invalid", 3)]


def test_a_move_that_fails_takes_the_pass_back_where_it_was_told(place):
    place.registry.then("move_alias", 1, RegistryError("moving was refused."))
    told = []
    with pytest.raises(RegistryError, match="Moving was refused"):
        place.promote(place.report(), on_decision=told.append)
    assert [decision.outcome for decision in told] == ["pass", "invalid"]
    assert "moving was refused" in told[1].reason


@pytest.mark.parametrize("method", ["annotate", "move_alias", "served_files"])
def test_a_promotion_that_is_interrupted_takes_the_pass_back_in_every_output(place, method):
    place.registry.then(method, 2 if method == "served_files" else 1, KeyboardInterrupt())
    path, told = place.report(), []
    with pytest.raises(KeyboardInterrupt):
        place.promote(path, on_decision=told.append)
    assert [decision.outcome for decision in told] == ["pass", "invalid"]
    assert "'the registry moved the alias' does not hold (it was interrupted)" in told[1].reason
    assert load_decision(path.with_name("decision.json")) == told[1]
    assert (place.registry.named, place.actions()[-1]) == ("1", "refused" if method == "annotate" else "rolled back")


def test_a_log_that_cannot_be_written_before_the_move_takes_the_pass_back(place, monkeypatch):
    told = []

    def full(*_, **fields):
        raise OSError(28, "no space")

    monkeypatch.setattr(PromotionLog, "append", full)
    with pytest.raises(OSError, match="no space"):
        place.promote(place.report(), on_decision=told.append)
    assert [decision.outcome for decision in told] == ["pass", "invalid"]
    assert place.registry.moves == []


def test_a_pass_that_cannot_be_taken_back_is_told_beside_the_failure_itself(place, caplog):
    place.registry.then("move_alias", 1, RegistryError("moving was refused."))

    def full_later(decision):
        if decision.outcome != "pass":
            raise OSError(28, "no space")

    with pytest.raises(RegistryError, match="Moving was refused"):
        place.promote(place.report(), on_decision=full_later)
    assert "may say that it passed, and nothing was promoted: An unexpected OSError" in caplog.text


def test_a_verdict_that_cannot_be_left_forgets_no_promotion_that_was_cut_off(place):
    place.registry.then("served_files", 2, RegistryError("it is away."))
    place.registry.then("move_alias", 2, RegistryError("it is away."))
    with pytest.raises(RegistryError, match="could not be put back"):
        place.promote(place.report())
    assert place.registry.named == "2"  # never checked
    place.registry.trouble.clear()
    place.registry.calls.clear()
    place.registry.then("annotate", 1, RegistryError("it is away."))
    path = place.report("3", seed=4)
    with pytest.raises(RegistryError, match="it is away"):
        place.promote(path, "3")
    done = place.promote(path, "3")
    assert (done.action, done.previous) == ("moved", ModelVersion("tiny", "1"))


def test_a_refusal_is_in_the_log_though_its_outputs_cannot_be_written(place):
    def full(_):
        raise OSError(28, "no space")

    blocked = place.report(memorised=MEMORISED, created_at="2026-02-01T00:00:00+00:00")
    with pytest.raises(OSError, match="no space"):
        place.promote(blocked, on_decision=full)
    assert place.actions() == ["refused"]
    older = place.promote(place.report(seed=4, name="older"))
    assert (older.action, place.registry.moves) == ("refused", [])


@pytest.mark.parametrize("memorised", [None, MEMORISED])
def test_a_promotion_cut_off_between_two_steps_is_told_and_its_old_alias_known(place, caplog, memorised):
    # As where a tag is deleted before it is set anew, and the process is killed in between.
    place.registry.then("move_alias", 1, KeyboardInterrupt())
    place.registry.then("move_alias", 2, RegistryError("still away."))
    with pytest.raises(KeyboardInterrupt):
        place.promote(place.report())
    assert place.actions() == ["moving", "not rolled back"]
    place.registry.named = None
    place.registry.trouble.clear()
    with caplog.at_level(logging.WARNING):
        done = place.promote(place.report(seed=5, name="again", memorised=memorised), version="2")
    said = "was cut off while it moved the alias 'champion' of tiny from version 1 to version 2; it names nothing"
    assert said in caplog.text
    if memorised is None:
        assert done.previous == ModelVersion("tiny", "1")


def test_one_log_under_two_names_has_one_lock(place):
    alias = place.folder / "other.jsonl"
    place.log.touch()
    alias.symlink_to(place.log)
    with (
        open_log(place.log),
        pytest.raises(RegistryError, match="another promotion has held"),
        open_log(alias, lock_seconds=0.1),
    ):
        pytest.fail("both hold the log")


def test_the_decision_is_never_written_over_what_was_read_whatever_the_path(place):
    path = place.report(name="decisions")
    place.baseline.rename(path.with_name("decision.json"))
    odd = path.parent / ".." / path.parent.name / "decision.json"
    with pytest.raises(InputError, match="beside the report is where the decision goes"):
        place.promote(path, baseline=odd)


def _tamper(place) -> None:
    (place.folders["2"] / "model.safetensors").write_bytes(TAMPERED)


def _move_by_hand(place, version) -> None:
    place.registry.named = version


AFTER = {
    "the move": ("move_alias", 1, lambda place: RegistryError("moving was refused."), "Moving was refused"),
    "the move, in a library": ("move_alias", 1, lambda place: RuntimeError("key"), "An unexpected RuntimeError"),
    "the read back": ("current", 3, lambda place: RegistryError("it is away."), "It is away"),
    "another version": ("current", 3, lambda place: lambda: _move_by_hand(place, "3"), "names tiny version 3 after it was"),
    "no version": ("current", 3, lambda place: lambda: _move_by_hand(place, None), "names nothing after it was moved"),
    "the fetch": ("served_files", 2, lambda place: RegistryError("half of a file."), "Half of a file"),
    "swapped files": ("served_files", 2, lambda place: lambda: _tamper(place), "after the move, and had "),
}


@pytest.mark.parametrize("old", ["1", None])
@pytest.mark.parametrize("name", AFTER)
def test_a_failure_after_the_move_began_puts_the_old_alias_back(place, name, old):
    method, number, make, words = AFTER[name]
    place.registry.named = old
    place.registry.then(method, number, make(place))
    what = "tiny version 1" if old else "nothing"
    with pytest.raises(RegistryError, match=rf"{words}.*'champion' of tiny names {what} as before"):
        place.promote(place.report())
    assert place.registry.named == old
    moving, back = place.logged()
    assert (moving.action, back.action, back.exit_code, back.outcome) == ("moving", "rolled back", 4, "pass")
    assert (back.alias_before, back.alias_after) == (old, old)
    assert words in back.reason


def test_an_alias_that_cannot_be_put_back_is_said_and_the_next_promotion_knows_the_old_one(place, caplog):
    path = place.report()
    place.registry.then("served_files", 2, RegistryError("it is away."))
    place.registry.then("move_alias", 2, RegistryError("it is away still."))
    with pytest.raises(RegistryError, match="could not be put back to tiny version 1 and may name tiny version 2: look"):
        place.promote(path)
    assert (place.registry.named, place.actions()) == ("2", ["moving", "not rolled back"])
    # Version 3 fails as well: what it goes back to is what was checked last, not version 2.
    place.registry.then("served_files", 4, RegistryError("it is away."))
    with pytest.raises(RegistryError, match="names tiny version 1 as before"):
        place.promote(place.report("3", seed=4), "3")
    assert "was cut off while it moved the alias 'champion' of tiny from version 1 to version 2" in caplog.text
    assert place.registry.named == "1"


def test_a_roll_back_that_does_not_take_is_no_roll_back(place):
    place.registry.then("served_files", 2, RegistryError("it is away."))
    place.registry.then("current", 4, lambda: _move_by_hand(place, "2"))
    with pytest.raises(RegistryError, match="could not be put back"):
        place.promote(place.report())


def test_an_interruption_puts_the_old_alias_back_and_goes_on(place):
    place.registry.then("served_files", 2, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        place.promote(place.report())
    assert (place.registry.named, place.actions()) == ("1", ["moving", "rolled back"])


def test_a_move_that_cannot_be_logged_is_taken_back(place, monkeypatch):
    from memguard.gates.promotion_log import PromotionLog

    append = PromotionLog.append

    def full(log, **fields):
        if fields["action"] != "moving":
            raise OSError(28, "No space left on device")
        return append(log, **fields)

    monkeypatch.setattr(PromotionLog, "append", full)
    with pytest.raises(RegistryError, match=r"version 1 as before\. The log could not be written: No space left"):
        place.promote(place.report())
    assert (place.registry.named, place.actions()) == ("1", ["moving"])


def test_the_same_decision_again_touches_no_alias(place):
    path = place.report()
    place.promote(path)
    done = place.promote(path)
    assert (done.action, done.decision.exit_code, done.attempt) == ("already promoted", 0, 1)
    assert place.registry.moves == ["2"]
    assert place.actions() == ["moving", "moved", "already promoted"]


def test_another_decision_on_the_same_version_is_a_promotion_of_its_own(place, tmp_path):
    path, policy = place.report(), tmp_path / "policy.yaml"
    place.promote(path)
    policy.write_text("version: 1\nrules: [{name: none, field: extraction.count, max: 0}]\n")
    assert place.promote(path, policy=policy).action == "moved"
    assert place.promote(path, policy="default").action == "moved"


def test_a_version_that_lost_the_alias_is_promoted_again_and_the_hand_that_moved_it_is_told(place, caplog):
    path = place.report()
    place.promote(path)
    place.registry.named = "1"
    assert place.promote(path).action == "moved"
    assert "names tiny version 1, and the log last set it to version 2: it was moved without the gate" in caplog.text


def test_an_alias_set_by_hand_is_not_taken_for_a_promotion(place):
    place.registry.named = "2"
    assert place.promote(place.report()).action == "moved"


def test_an_alias_that_moves_meanwhile_is_told_and_is_what_a_roll_back_goes_to(place, caplog):
    place.registry.then("current", 2, lambda: _move_by_hand(place, "3"))
    place.registry.then("served_files", 2, RegistryError("it is away."))
    with pytest.raises(RegistryError, match="names tiny version 3 as before"):
        place.promote(place.report())
    assert "was moved by somebody else just now, from tiny version 1 to tiny version 3" in caplog.text


def test_a_quiet_promotion_warns_of_nothing(place, caplog):
    caplog.set_level(logging.WARNING)
    place.promote(place.report())
    place.promote(place.report("3", seed=4), "3")
    assert not caplog.records


def test_a_strict_policy_divides_alpha_by_the_distinct_reports_of_the_plan(place):
    first, second = place.report(name="first", seed=3), place.report(name="second", seed=4)
    attempts = [place.promote(path, policy="strict") for path in (first, first, second, first)]
    assert [done.attempt for done in attempts] == [1, 1, 2, 2]
    # The built-in strict policy: alpha 0.01.
    assert [done.decision.alpha for done in attempts] == [0.01, 0.01, 0.005, 0.005]


LATER = "2026-01-02T00:00:00+00:00"


def test_an_older_pass_does_not_outlive_a_later_audit_that_was_blocked(place):
    older, later = place.report(name="older"), place.report(name="later", seed=4, memorised=MEMORISED, created_at=LATER)
    assert place.promote(later).decision.exit_code == 1
    done = place.promote(older)
    assert (done.action, done.decision.exit_code) == ("refused", 3)
    assert f"a later audit of this checkpoint, of {LATER}, ended in block" in done.decision.reason
    assert (place.registry.moves, len(place.registry.notes)) == ([], 1)


def test_a_later_audit_that_was_offered_for_the_wrong_version_stops_nothing(place):
    older, later = place.report(name="older"), place.report(name="later", seed=4, created_at=LATER)
    assert place.promote(later, "3").decision.exit_code == 3
    assert place.promote(older).action == "moved"


def test_a_report_swapped_while_the_promotion_reads_changes_nothing(place, monkeypatch):
    # Between the look at its signature and the decision, too: both are of one copy.
    path = place.report()
    swapped = place.report(name="swapped", seed=4, memorised=MEMORISED).read_bytes()
    load_policy = promotion_inputs.load_policy

    def swap(policy):
        path.write_bytes(swapped)
        return load_policy(policy)

    monkeypatch.setattr(promotion_inputs, "load_policy", swap)
    assert place.promote(path).action == "moved"


def _edited(path: Path) -> Path:
    data = json.loads(path.read_text())
    data["canaries"][0]["log_prob"] -= 1.0
    path.write_text(json.dumps(data))
    return path


def test_a_file_that_cannot_be_read_comes_before_one_that_was_changed(place, tmp_path):
    report = _edited(place.report())
    with pytest.raises(EvidenceError, match=r"report 'report\.json' was changed after it was written"):
        place.promote(report)
    with pytest.raises(InputError, match=r"policy '.*none\.yaml' does not exist"):
        place.promote(report, policy=tmp_path / "none.yaml")
    with pytest.raises(InputError, match=r"baseline '.*none\.json' does not exist"):
        place.promote(report, baseline=tmp_path / "none.json")
    with pytest.raises(InputError, match=r"report '.*none\.json' does not exist"):
        place.promote(tmp_path / "none.json")
    assert (place.registry.calls, place.log.exists()) == ([], False)


def test_a_log_that_was_changed_moves_nothing(place):
    path = place.report()
    place.promote(path)
    place.log.write_bytes(place.log.read_bytes().replace(b'"exit_code":0', b'"exit_code":1'))
    with pytest.raises(EvidenceError, match="line 1 is not the one"):
        place.promote(path)
    assert place.registry.moves == ["2"]


def test_the_decision_is_not_written_over_another_file(place, tmp_path):
    path = place.report()
    for given in ({"baseline": path.with_name("decision.json")}, {"log": path.with_name("decision.json")}):
        with pytest.raises(InputError, match="is where the decision goes"):
            place.promote(path, **given)


def test_who_is_told_the_decision_may_stop_the_promotion(place):
    def refuse(decision):
        raise InputError(f"no place for a {decision.outcome}.")

    with pytest.raises(InputError, match="no place for a pass"):
        place.promote(place.report(), on_decision=refuse)
    assert (place.registry.moves, place.logged()) == ([], [])


@pytest.fixture
def adapter(place):
    """Version 2 as an adapter on the base in checkpoint-1; its report's changes."""
    (place.folders["2"] / "adapter_config.json").write_text('{"base_model_name_or_path": "acme/base"}')
    return {"subject__base_digest": checkpoint_digest(place.folders["1"])}


def test_an_adapter_is_promoted_with_the_base_it_was_audited_on_alone(place, adapter):
    path = place.report(**adapter)
    assert place.promote(path, base=place.folders["1"]).action == "moved"
    other = place.promote(path, base=place.folders["3"])
    assert other.decision.exit_code == 3
    assert "the base has the digest " in other.decision.reason
    without = place.promote(path)
    assert without.decision.exit_code == 3
    assert "give the folder of its base (--base)" in without.decision.reason


def test_an_adapter_whose_report_binds_no_base_is_no_evidence(place, adapter):
    done = place.promote(place.report())
    assert done.decision.exit_code == 3
    assert "does not bind the base" in done.decision.reason


def test_a_base_belongs_to_an_adapter(place):
    with pytest.raises(InputError, match="base must be given for the report of an adapter only"):
        place.promote(place.report(), base=place.folders["1"])
    assert place.registry.calls == []
