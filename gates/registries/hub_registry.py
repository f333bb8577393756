"""A repository of the Hugging Face Hub behind the gate: a tag that marks the released commit, or a pull request to merge.

Whoever loads `revision=<alias>` gets exactly the commit that was hashed. A verdict in the model card is a commit of its own, on
top of the branch; the tag stays where it was, and README.md is not part of a digest. Nothing served is executed. Needs `hf`.
"""

from __future__ import annotations

import contextlib
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from memguard.errors import InputError, MemguardError, MissingExtraError, RegistryError
from memguard.gates.registries.failures import describe_failure
from memguard.gates.registries.hub_card import card_with_verdict, verdict_section
from memguard.gates.registries.protocol import Annotation, ModelVersion
from memguard.gates.registries.served import holds_checkpoint

TIMEOUT_S = 20.0
CARD = "README.md"
BRANCH = "main"


class HubRegistry:
    """One tag of one model repository of the Hub; a `Registry`.

    With a pull request, its head is what is judged: a pass merges it and then sets the tag, every verdict is a comment on it,
    and the card is left alone. A merge cannot be taken back; the tag can.

    Args:
        repo: `OWNER/NAME`.
        alias: the tag that the gate guards.
        pull_request: its number.

    Raises:
        InputError: a name that the Hub cannot have.

    Example:
        >>> HubRegistry("acme/tiny", "main")
        Traceback (most recent call last):
        ...
        memguard.errors.InputError: alias must be a tag other than 'main', of letters, digits, '.', '_' and '-', got 'main'.
    """

    kind = "hub"

    def __init__(self, repo: str, alias: str, *, pull_request: int | None = None) -> None:
        if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", repo):
            raise InputError(f"repo must be 'OWNER/NAME', got '{repo}'.")
        if not re.fullmatch(r"\w[\w.-]*", alias) or alias == BRANCH:
            raise InputError(f"alias must be a tag other than '{BRANCH}', of letters, digits, '.', '_' and '-', got '{alias}'.")
        if pull_request is not None and pull_request < 1:
            raise InputError(f"pull_request must be the number of a pull request, got {pull_request}.")
        self.model = repo
        self.alias = alias
        self.pull_request = pull_request

    def resolve(self, version: str) -> ModelVersion:
        """The commit behind a commit, a branch, a tag or `refs/pr/N`. See `Registry.resolve`."""
        if not version:
            raise InputError("version must be a commit, a branch, a tag or 'refs/pr/N', got ''.")
        with self._asked(f"find revision '{version}' of '{self.model}'") as api:
            commit = self._commit(api, version)
            if self.pull_request is not None and commit != self._commit(api, f"refs/pr/{self.pull_request}"):
                raise InputError(f"version must be the head of pull request {self.pull_request}, got '{version}'.")
        return ModelVersion(self.model, commit)

    @contextlib.contextmanager
    def served_files(self, version: ModelVersion) -> Iterator[Path]:
        """The root of the repository at a commit, downloaded past the cache. See `Registry.served_files`."""
        with tempfile.TemporaryDirectory(prefix="memguard-") as folder:
            served = Path(folder) / "served"  # the library hands back a folder that is not empty when the Hub is away
            with self._asked(f"serve the files of {version}") as api:
                api.snapshot_download(
                    version.model, revision=version.version, local_dir=served, force_download=True, max_workers=4
                )
            if not (served.is_dir() and holds_checkpoint(served)):
                raise RegistryError(f"{version} holds no weights beside a configuration at the root of the repository.")
            yield served

    def current(self) -> ModelVersion | None:
        """The commit that the tag names now. See `Registry.current`."""
        with self._asked(f"read the tags of '{self.model}'") as api:
            commit = self._tagged(api)
        return None if commit is None else ModelVersion(self.model, commit)

    def move_alias(self, to: ModelVersion | None) -> None:
        """Move the tag, after merging the pull request if there is one. See `Registry.move_alias`.

        The Hub cannot move a tag in one step: for a moment there is none, and where setting the new one fails the old one is
        set again. Where that fails too the message names the commit to tag by hand.
        """
        with self._asked(f"read the tags of '{self.model}'") as api:
            before = self._tagged(api)
        target = None if to is None else to.version
        if target == before:
            return
        if target is not None and self.pull_request is not None:
            self._merge(self.pull_request, target)
        try:
            if before is not None:
                with self._asked(f"take tag '{self.alias}' from {before}") as api:
                    api.delete_tag(self.model, tag=self.alias)
            if target is not None:
                self._set_or_put_back(target, before)
        except (KeyboardInterrupt, SystemExit):  # between the two steps
            self._put_back(before)
            raise

    def annotate(self, version: ModelVersion, note: Annotation) -> None:
        """Leave the verdict on the card of the branch, or as a comment on the pull request. See `Registry.annotate`."""
        section = verdict_section(note, version.version)
        with self._asked(f"write the verdict on {version}") as api:
            if self.pull_request is None:
                self._commit_card(api, section, note, version.version)
                return
            events = api.get_discussion_details(self.model, self.pull_request).events
            if section not in [getattr(event, "content", None) for event in events]:
                api.comment_discussion(self.model, self.pull_request, section)

    def _commit(self, api: Any, revision: str) -> str:
        return str(api.repo_info(self.model, revision=revision, timeout=TIMEOUT_S).sha)

    def _tagged(self, api: Any) -> str | None:
        tags = api.list_repo_refs(self.model).tags
        return next((str(tag.target_commit) for tag in tags if tag.name == self.alias), None)

    def _merge(self, number: int, commit: str) -> None:
        with self._asked(f"merge pull request {number} of '{self.model}'") as api:
            if api.get_discussion_details(self.model, number).status == "merged":
                return
            if self._commit(api, f"refs/pr/{number}") != commit:
                raise RegistryError(f"pull request {number} of '{self.model}' was changed after its files were hashed.")
            api.merge_pull_request(self.model, number)

    def _set_tag(self, commit: str) -> None:
        with self._asked(f"set tag '{self.alias}' on {commit}") as api:
            api.create_tag(self.model, tag=self.alias, revision=commit)

    def _set_or_put_back(self, commit: str, before: str | None) -> None:
        try:
            self._set_tag(commit)
        except RegistryError as error:
            raise RegistryError(f"{error} {self._put_back(before)}") from None

    def _put_back(self, before: str | None) -> str:
        if before is None:
            return "There was no such tag before, and there is none now."
        try:
            self._set_tag(before)
        except RegistryError:
            return f"The old tag could not be set again: set '{self.alias}' on {before} by hand."
        return f"The old tag is back on {before}."

    def _commit_card(self, api: Any, section: str, note: Annotation, commit: str) -> None:
        head = self._commit(api, BRANCH)
        old = self._card(api, head)
        new = card_with_verdict(old, section, {"outcome": note.outcome, "revision": commit, **note.tags})
        if new == old:
            return
        from huggingface_hub import CommitOperationAdd

        api.create_commit(
            self.model,
            [CommitOperationAdd(CARD, new.encode())],
            commit_message=f"memguard: {note.outcome}",
            revision=BRANCH,
            parent_commit=head,
        )

    def _card(self, api: Any, commit: str) -> str:
        """The card at a commit; empty where there is none."""
        from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

        with tempfile.TemporaryDirectory(prefix="memguard-") as folder:
            try:
                path = api.hf_hub_download(self.model, CARD, revision=commit, local_dir=folder, force_download=True)
            except LocalEntryNotFoundError:  # the Hub is away; the other one means that there is no card
                raise
            except EntryNotFoundError:
                return ""
            return Path(path).read_bytes().decode()

    @contextlib.contextmanager
    def _asked(self, what: str) -> Iterator[Any]:
        """The Hub's client, with bounded waiting; any failure becomes one sentence without the library's own words."""
        try:
            from huggingface_hub import HfApi, constants, get_session
        except ModuleNotFoundError:
            raise MissingExtraError("promoting on the Hub", "hf") from None
        if constants.HF_HUB_OFFLINE:
            raise RegistryError(f"the Hub could not {what}: it is switched off here (HF_HUB_OFFLINE). Run this online.")
        session: Any = get_session()
        before = getattr(session, "timeout", None)
        session.timeout = TIMEOUT_S  # most calls of the library wait for ever
        try:
            yield HfApi()
        except MemguardError:
            raise
        except Exception as error:
            raise RegistryError(f"the Hub could not {what}: {describe_failure(error)}.") from None
        finally:
            session.timeout = before
