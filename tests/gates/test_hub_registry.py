"""Promotion on the Hub: a fake with the signatures of the library, the library on a local server, and real model cards."""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from local_servers import Answer, failing, serving

from memguard.audit.digest import checkpoint_digest
from memguard.errors import InputError, MissingExtraError, RegistryError
from memguard.gates.registries import hub_registry
from memguard.gates.registries.hub_card import END, START, card_with_verdict, verdict_section
from memguard.gates.registries.hub_registry import HubRegistry
from memguard.gates.registries.protocol import Annotation, ModelVersion

hub = pytest.importorskip("huggingface_hub")
constants = pytest.importorskip("huggingface_hub.constants")
errors = pytest.importorskip("huggingface_hub.errors")
HfApi = hub.HfApi

REPO = "acme/tiny"
CHECKPOINT = {"config.json": b"{}", "model.safetensors": b"weights", "README.md": b"# Tiny\n"}
OLD, NEW, MAIN = "a" * 40, "b" * 40, "c" * 40
PASS = Annotation("pass", "All 5 rules hold.", tags={"report_digest": "d" * 64}, markdown="| rule | margin |")
BLOCK = Annotation("block", "1 rule failed.")


def like_the_library(fake: Callable[..., Any]) -> Callable[..., Any]:
    """A method that takes only the calls that the method of `HfApi` by that name takes."""

    signature = inspect.signature(getattr(HfApi, fake.__name__))

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        signature.bind(self, *args, **kwargs)
        if fake.__name__ in self.fails:
            raise self.fails[fake.__name__]
        self.calls.append(fake.__name__)
        return fake(self, *args, **kwargs)

    return call


class FakeHub:
    """One repository: commits, branches, tags, a card a commit, one pull request."""

    def __init__(self) -> None:
        self.branches = {"main": MAIN, "refs/pr/7": NEW}
        self.tags: dict[str, str] = {}
        self.cards: dict[str, str | None] = {MAIN: "---\nlicense: mit\n---\n# Tiny\n"}
        self.pull_request = SimpleNamespace(status="open", events=[SimpleNamespace(type="status-change")])
        self.calls: list[str] = []
        self.fails: dict[str, Exception] = {}

    @like_the_library
    def repo_info(self, repo_id: str, *, revision: str, timeout: float) -> Any:
        known = {**self.branches, **self.tags, **{commit: commit for commit in (OLD, NEW, MAIN)}}
        if repo_id != REPO or revision not in known:
            raise refused(404, errors.RevisionNotFoundError)
        return SimpleNamespace(sha=known[revision])

    @like_the_library
    def list_repo_refs(self, repo_id: str) -> Any:
        return SimpleNamespace(tags=[SimpleNamespace(name=name, target_commit=sha) for name, sha in self.tags.items()])

    @like_the_library
    def delete_tag(self, repo_id: str, *, tag: str) -> None:
        del self.tags[tag]

    @like_the_library
    def create_tag(self, repo_id: str, *, tag: str, revision: str) -> None:
        assert tag not in self.tags
        if revision in self.fails:
            raise self.fails[revision]
        self.tags[tag] = revision

    @like_the_library
    def get_discussion_details(self, repo_id: str, discussion_num: int) -> Any:
        assert discussion_num == 7
        return self.pull_request

    @like_the_library
    def comment_discussion(self, repo_id: str, discussion_num: int, comment: str) -> None:
        self.pull_request.events.append(SimpleNamespace(type="comment", content=comment))

    @like_the_library
    def merge_pull_request(self, repo_id: str, discussion_num: int) -> None:
        assert self.pull_request.status == "open"
        self.pull_request.status = "merged"

    @like_the_library
    def hf_hub_download(self, repo_id: str, filename: str, *, revision: str, local_dir: str, force_download: bool) -> str:
        assert (filename, force_download) == ("README.md", True)
        card = self.cards[revision]
        if card is None:
            raise refused(404, errors.RemoteEntryNotFoundError)
        path = Path(local_dir) / filename
        path.write_bytes(card.encode())
        return str(path)

    @like_the_library
    def create_commit(self, repo_id: str, operations: Any, *, commit_message: str, revision: str, parent_commit: str) -> None:
        (operation,) = operations
        assert operation.path_in_repo == "README.md"
        assert parent_commit == self.branches[revision]
        self.branches[revision] = hashlib.sha1(operation.path_or_fileobj).hexdigest()
        self.cards[self.branches[revision]] = operation.path_or_fileobj.decode()


def refused(status: int, kind: type[Any] = errors.HfHubHTTPError) -> Exception:
    """An error of the library as it raises them, with words that must not be repeated."""
    error = kind.__new__(kind)
    Exception.__init__(error, "user:hunter2")
    error.response = SimpleNamespace(status_code=status)
    return error


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    fake = FakeHub()
    monkeypatch.setattr(hub, "HfApi", lambda: fake)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    return fake


def version(commit: str) -> ModelVersion:
    return ModelVersion(REPO, commit)


@pytest.mark.parametrize("repo", ["", "a/b/c", "https://huggingface.co/a", "a b"])
def test_a_repository_is_owner_and_name(repo):
    with pytest.raises(InputError, match="repo must be 'OWNER/NAME', got "):
        HubRegistry(repo, "champion")


@pytest.mark.parametrize("alias", ["", "main", "a/b", "-a", "a b", "refs/tags/a"])
def test_the_alias_is_a_tag_and_never_the_branch(alias):
    with pytest.raises(InputError, match="alias must be a tag other than 'main', of letters, digits"):
        HubRegistry(REPO, alias)


def test_a_pull_request_has_a_number():
    with pytest.raises(InputError, match="pull_request must be the number of a pull request, got 0"):
        HubRegistry(REPO, "champion", pull_request=0)


def test_branches_tags_and_pull_requests_become_a_commit(fake):
    fake.tags["rc1"] = OLD
    registry = HubRegistry(REPO, "champion")
    assert registry.resolve("main") == version(MAIN)
    assert registry.resolve("rc1") == version(OLD)
    assert registry.resolve("refs/pr/7") == version(NEW)
    assert registry.resolve(OLD) == version(OLD)
    with pytest.raises(InputError, match="version must be a commit, a branch, a tag or 'refs/pr/N', got ''"):
        registry.resolve("")
    with pytest.raises(
        RegistryError, match=r"the Hub could not find revision 'nowhere' of 'acme/tiny': it is not there \(404\)\."
    ):
        registry.resolve("nowhere")


def test_with_a_pull_request_only_its_head_is_judged(fake):
    registry = HubRegistry(REPO, "champion", pull_request=7)
    assert registry.resolve(NEW) == registry.resolve("refs/pr/7") == version(NEW)
    with pytest.raises(InputError, match="version must be the head of pull request 7, got 'main'"):
        registry.resolve("main")


def test_the_tag_moves_back_and_away(fake):
    registry = HubRegistry(REPO, "champion")
    assert registry.current() is None
    for commit in (OLD, NEW, OLD):
        registry.move_alias(version(commit))
        assert registry.current() == version(commit)
    fake.tags["champion"] = NEW  # another writer
    assert registry.current() == version(NEW)
    registry.move_alias(None)
    registry.move_alias(None)
    assert registry.current() is None


def test_a_move_that_changes_nothing_touches_no_tag(fake):
    fake.tags["champion"] = NEW
    HubRegistry(REPO, "champion").move_alias(version(NEW))
    assert fake.calls == ["list_repo_refs"]


def test_a_tag_that_cannot_be_taken_away_stays(fake):
    fake.tags["champion"] = OLD
    fake.fails["delete_tag"] = refused(403)
    with pytest.raises(RegistryError, match=rf"could not take tag 'champion' from {OLD}: this login is not allowed to do that"):
        HubRegistry(REPO, "champion").move_alias(version(NEW))
    assert fake.tags == {"champion": OLD}


def test_a_tag_that_cannot_be_set_leaves_the_old_one(fake):
    fake.tags["champion"] = OLD
    fake.fails[NEW] = refused(500)
    sentence = rf"could not set tag 'champion' on {NEW}: it answered with status 500\. The old tag is back on {OLD}\."
    with pytest.raises(RegistryError, match=sentence):
        HubRegistry(REPO, "champion").move_alias(version(NEW))
    assert fake.tags == {"champion": OLD}


def test_a_tag_that_is_lost_is_named_for_setting_it_by_hand(fake):
    fake.tags["champion"] = OLD
    fake.fails["create_tag"] = refused(500)
    with pytest.raises(RegistryError, match=rf"The old tag could not be set again: set 'champion' on {OLD} by hand\."):
        HubRegistry(REPO, "champion").move_alias(version(NEW))


def test_a_move_that_is_interrupted_between_its_two_steps_puts_the_old_tag_back(fake, monkeypatch):
    fake.tags["champion"] = OLD
    registry, set_tag = HubRegistry(REPO, "champion"), HubRegistry._set_tag

    def interrupted(self: HubRegistry, commit: str) -> None:
        if commit == NEW:
            raise KeyboardInterrupt
        set_tag(self, commit)

    monkeypatch.setattr(HubRegistry, "_set_tag", interrupted)
    with pytest.raises(KeyboardInterrupt):
        registry.move_alias(version(NEW))
    assert fake.tags == {"champion": OLD}


def test_a_first_tag_that_cannot_be_set_leaves_none(fake):
    fake.fails["create_tag"] = refused(500)
    with pytest.raises(RegistryError, match="There was no such tag before, and there is none now"):
        HubRegistry(REPO, "champion").move_alias(version(NEW))


def test_a_pass_merges_the_pull_request_before_the_tag_moves(fake):
    registry = HubRegistry(REPO, "champion", pull_request=7)
    registry.move_alias(version(NEW))
    assert fake.pull_request.status == "merged"
    assert fake.tags == {"champion": NEW}
    assert fake.calls.index("merge_pull_request") < fake.calls.index("create_tag")


def test_what_was_merged_is_not_merged_again_and_the_tag_can_go_back(fake):
    fake.pull_request.status = "merged"
    registry = HubRegistry(REPO, "champion", pull_request=7)
    registry.move_alias(version(NEW))
    registry.move_alias(version(OLD))
    assert fake.tags == {"champion": OLD}
    assert "merge_pull_request" not in fake.calls


@pytest.mark.parametrize(
    ("break_it", "sentence"),
    [
        (lambda fake: fake.branches.update({"refs/pr/7": MAIN}), "pull request 7 of 'acme/tiny' was changed after its files"),
        (
            lambda fake: fake.fails.update(merge_pull_request=refused(409)),
            r"could not merge pull request 7 .* changed meanwhile",
        ),
    ],
)
def test_a_pull_request_that_does_not_merge_moves_no_tag(fake, break_it, sentence):
    fake.tags["champion"] = OLD
    break_it(fake)
    with pytest.raises(RegistryError, match=sentence):
        HubRegistry(REPO, "champion", pull_request=7).move_alias(version(NEW))
    assert fake.tags == {"champion": OLD}
    assert fake.pull_request.status == "open"


def test_the_verdict_on_a_pull_request_is_one_comment_and_leaves_its_commit_alone(fake):
    registry = HubRegistry(REPO, "champion", pull_request=7)
    for note in (BLOCK, BLOCK, PASS, PASS):
        registry.annotate(version(NEW), note)
    comments = [event.content for event in fake.pull_request.events if event.type == "comment"]
    assert comments == [verdict_section(BLOCK, NEW), verdict_section(PASS, NEW)]
    assert fake.branches["refs/pr/7"] == NEW
    assert "create_commit" not in fake.calls


def test_the_verdict_on_the_card_is_a_commit_of_its_own_and_moves_no_tag(fake):
    fake.tags["champion"] = OLD
    registry = HubRegistry(REPO, "champion")
    registry.annotate(version(MAIN), PASS)
    registry.annotate(version(MAIN), PASS)
    assert fake.calls.count("create_commit") == 1
    card = hub.ModelCard(fake.cards[fake.branches["main"]])
    assert card.data.to_dict() == {
        "license": "mit",
        "memguard": {"outcome": "pass", "revision": MAIN, "report_digest": "d" * 64},
    }
    assert fake.tags == {"champion": OLD}


def test_a_repository_without_a_card_gets_one(fake):
    fake.cards[MAIN] = None
    HubRegistry(REPO, "champion").annotate(version(NEW), BLOCK)
    card = hub.ModelCard(fake.cards[fake.branches["main"]])
    assert card.data["memguard"] == {"outcome": "block", "revision": NEW}
    assert card.text.strip() == verdict_section(BLOCK, NEW)


def test_a_card_that_cannot_be_fetched_is_not_written_over(fake):
    fake.fails["hf_hub_download"] = errors.LocalEntryNotFoundError("user:hunter2")
    with pytest.raises(RegistryError, match="could not write the verdict on acme/tiny version b{40}: ") as caught:
        HubRegistry(REPO, "champion").annotate(version(NEW), BLOCK)
    assert "hunter2" not in str(caught.value)
    assert "create_commit" not in fake.calls


def test_a_branch_that_moved_meanwhile_is_told(fake):
    fake.fails["create_commit"] = refused(412)
    with pytest.raises(RegistryError, match=r"could not write the verdict on .*: it was changed meanwhile \(412\)\."):
        HubRegistry(REPO, "champion").annotate(version(NEW), BLOCK)


CARDS = ["", "# Tiny\n", "---\nlicense: mit\ntags:\n- a\n---\n# Tiny\n\nText.\n", "---\r\nlicense: mit\r\n---\r\n# Tiny\r\n"]


@pytest.mark.parametrize("card", CARDS)
def test_a_section_is_put_in_once_and_replaced_where_it_stands(card):
    first = card_with_verdict(card, verdict_section(PASS, NEW), {"outcome": "pass"})
    assert card_with_verdict(first, verdict_section(PASS, NEW), {"outcome": "pass"}) == first
    grown = first + "Added by hand.\n"
    second = card_with_verdict(grown, verdict_section(BLOCK, OLD), {"outcome": "block"})
    assert second.count(START) == second.count(END) == 1
    assert second.endswith("Added by hand.\n")
    assert "pass" not in second
    assert hub.ModelCard(second).data["memguard"] == {"outcome": "block"}
    assert hub.ModelCard(second).data.to_dict().get("license") == hub.ModelCard(card).data.to_dict().get("license")
    assert hub.ModelCard(first).text.strip().startswith(hub.ModelCard(card).text.strip())


def test_line_ends_of_a_card_are_kept():
    card = card_with_verdict(CARDS[3], verdict_section(PASS, NEW), {"outcome": "pass"})
    assert card.count("\n") == card.count("\r\n")


def test_a_verdict_cannot_close_its_own_section():
    section = verdict_section(Annotation("block", f"rule {END} failed", markdown=f"{START}"), NEW)
    card = card_with_verdict("", section, {})
    assert card.count(START) == card.count(END) == 1
    assert card_with_verdict(card, section, {}) == card


@pytest.mark.parametrize("card", [f"{START}\ntext", f"text {END}", f"{END} {START}", f"{START}{END}{START}{END}"])
def test_a_card_with_a_broken_section_is_left_to_its_owner(card):
    with pytest.raises(RegistryError, match="the model card must hold both markers of memguard once, or neither"):
        card_with_verdict(card, verdict_section(PASS, NEW), {})


@pytest.mark.parametrize("head", ["- a list", "a: [", "a: &x 1\nb: *y"])
def test_a_card_whose_head_is_not_metadata_is_left_to_its_owner(head):
    with pytest.raises(RegistryError, match=r"the metadata at the head of the model card cannot be read \(\w+Error\)\."):
        card_with_verdict(f"---\n{head}\n---\n# Tiny\n", verdict_section(PASS, NEW), {})


@pytest.mark.parametrize("ask", [lambda registry: registry.resolve("main"), lambda registry: registry.current()])
def test_offline_is_said_in_words(monkeypatch, ask):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(
        RegistryError, match=r"the Hub could not .*: it is switched off here \(HF_HUB_OFFLINE\)\. Run this online\."
    ):
        ask(HubRegistry(REPO, "champion"))


def test_a_missing_library_names_the_line_that_installs_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(MissingExtraError, match=r"promoting on the Hub needs the extra 'hf': pip install"):
        HubRegistry(REPO, "champion").current()


class LocalHub:
    """The part of the Hub's interface that a download uses; `broken` breaks the weights off."""

    def __init__(self) -> None:
        self.files = dict(CHECKPOINT)
        self.broken = False

    def answer(self, method: str, path: str, _: bytes) -> Answer:
        path = path.partition("?")[0]
        if path == f"/api/models/{REPO}/revision/{NEW}" or path == f"/api/models/{REPO}":
            siblings = [{"rfilename": name} for name in self.files]
            return self._json({"id": REPO, "sha": NEW, "siblings": siblings, "private": False, "tags": [], "downloads": 0})
        if path.startswith(f"/api/models/{REPO}/tree/{NEW}"):
            entry = {"type": "file", "oid": "0" * 40}
            return self._json([{**entry, "path": name, "size": len(data)} for name, data in self.files.items()])
        if path.startswith(f"/api/models/{REPO}/refs"):
            ref = {"name": "champion", "ref": "refs/tags/champion", "targetCommit": NEW}
            return self._json({"branches": [], "converts": [], "tags": [ref]})
        name = path.rpartition("/")[2]
        if path == f"/{REPO}/resolve/{NEW}/{name}" and name in self.files:
            data = self.files[name]
            headers = {"ETag": f'"{hashlib.sha1(data).hexdigest()}"', "X-Repo-Commit": NEW}
            sent = data[:3] if self.broken and method == "GET" and name == "model.safetensors" else data
            return Answer(sent, headers=headers, promised=len(data))
        return Answer(b"{}", 404)

    def _json(self, value: Any) -> Answer:
        return Answer(json.dumps(value).encode())


@pytest.fixture
def real(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[HubRegistry]:
    """The library itself, with an empty cache and no token."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.setattr(hub_registry, "TIMEOUT_S", 0.5)
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    hub.close_session()
    yield HubRegistry(REPO, "champion")
    hub.close_session()


def test_the_library_itself_reads_commits_and_tags(real, monkeypatch):
    with serving(LocalHub().answer) as address:
        monkeypatch.setattr(hub, "HfApi", functools.partial(HfApi, endpoint=address))
        assert real.resolve(NEW) == version(NEW)
        assert real.current() == version(NEW)
        with pytest.raises(RegistryError, match="could not find revision 'nowhere' of 'acme/tiny': it is not there"):
            real.resolve("nowhere")


def test_what_the_library_serves_is_what_the_hub_holds_and_the_card_changes_no_digest(real, monkeypatch, tmp_path):
    for name, data in CHECKPOINT.items():
        (tmp_path / name).write_bytes(data)
    server = LocalHub()
    with serving(server.answer) as address:
        monkeypatch.setattr(hub, "HfApi", functools.partial(HfApi, endpoint=address))
        with real.served_files(version(NEW)) as folder:
            assert checkpoint_digest(folder) == checkpoint_digest(tmp_path)
        assert not folder.exists()
        server.files["README.md"] = b"# Tiny, judged\n"
        with real.served_files(version(NEW)) as folder:
            assert (folder / "README.md").read_bytes() == b"# Tiny, judged\n"
            assert checkpoint_digest(folder) == checkpoint_digest(tmp_path)
        server.files["model.safetensors"] = b"weightz"
        with real.served_files(version(NEW)) as folder:
            assert checkpoint_digest(folder) != checkpoint_digest(tmp_path)


def test_a_local_cache_is_not_taken_for_what_the_hub_serves(real, monkeypatch, tmp_path):
    cached = tmp_path / "cache" / "models--acme--tiny" / "snapshots" / NEW
    cached.mkdir(parents=True)
    (cached / "model.safetensors").write_bytes(b"cached!")
    with serving(LocalHub().answer) as address:
        monkeypatch.setattr(hub, "HfApi", functools.partial(HfApi, endpoint=address))
        with real.served_files(version(NEW)) as folder:
            assert (folder / "model.safetensors").read_bytes() == b"weights"


@pytest.mark.parametrize("break_it", [lambda server: setattr(server, "broken", True), lambda server: server.files.clear()])
def test_files_that_break_off_or_are_gone_are_not_served(real, monkeypatch, break_it):
    server = LocalHub()
    with serving(server.answer) as address:
        monkeypatch.setattr(hub, "HfApi", functools.partial(HfApi, endpoint=address))
        with real.served_files(version(NEW)):
            pass
        break_it(server)
        with pytest.raises(RegistryError, match="acme/tiny version b{40}"), real.served_files(version(NEW)):
            pytest.fail("nothing is served")


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("refusing", r"it cannot be reached"),
        ("silent", r"it did not answer in time"),
        ("forbidding", r"this login is not allowed to do that \(403\)"),
        ("half", r"its answer cannot be read"),
    ],
)
def test_a_failing_server_is_named_without_its_address_or_words(real, monkeypatch, kind, why):
    with failing(kind) as address:
        monkeypatch.setattr(hub, "HfApi", functools.partial(HfApi, endpoint=address))
        for ask in (real.current, lambda: real.resolve("main"), lambda: real.move_alias(None)):
            with pytest.raises(RegistryError, match=rf"the Hub could not .*: {why}\.$") as caught:
                ask()
            assert "hunter2" not in str(caught.value)
            assert "127.0.0.1" not in str(caught.value)


def test_waiting_is_bounded_for_the_call_alone(fake, monkeypatch):
    before = hub.get_session().timeout
    seen: list[Any] = []
    monkeypatch.setattr(fake, "list_repo_refs", lambda _: seen.append(hub.get_session().timeout) or SimpleNamespace(tags=[]))
    HubRegistry(REPO, "champion").current()
    assert [timeout.read for timeout in seen] == [20.0]
    assert hub.get_session().timeout == before
