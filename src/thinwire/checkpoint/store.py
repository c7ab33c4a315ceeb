"""Checkpoints in a folder, local or anywhere that fsspec reaches.

::

    <url>/step-00000100/manifest.json                        written last: its presence commits the checkpoint
    <url>/step-00000100/worker-0.<digest>.safetensors        one tree each, written by its own process
    <url>/step-00000100/.worker-1.<digest>….<random>.tmp     being written, or left by a killed writer

A kill at any moment leaves only whole checkpoints in the list:

1. A part gets its name only when all of it is on disk (write, fsync, rename, fsync of the folder).
2. The manifest is written only after all parts, in the same way.
3. Removal deletes the manifest first, and syncs, before any part is deleted.
4. A part's file name contains its digest, so no write replaces content to which a manifest refers.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Collection
from typing import final

from thinwire.checkpoint.files import TEMPORARY
from thinwire.checkpoint.folder import Folder
from thinwire.checkpoint.format import NewerFormatError, decode, encode
from thinwire.checkpoint.manifest import NAME, Manifest, Part, check_name
from thinwire.errors import CheckpointError, nearest

_MANIFEST = "manifest.json"
_MOST_MANIFEST_BYTES = 64 << 20
_PART_FILE = re.compile(r".+\.[0-9a-f]{16}\.safetensors")


@final
class CheckpointStore:
    """Checkpoints under one address, such as `runs/a/checkpoints`, `s3://bucket/run` or `memory://test`.

    Any number of processes may write parts and read at the same time; only one process commits and prunes. Checkpoint
    names must sort like their steps, with numbers compared as numbers (`step-9` before `step-10`): `prune` tells a
    checkpoint that is being written from an abandoned one by its name.

    Args:
        url: A local path, or an address that an installed fsspec package handles. It need not exist yet.
    """

    def __init__(self, url: str | os.PathLike[str]) -> None:
        self.url = os.fspath(url)
        if "://" not in self.url:  # workers on other machines have other working folders
            self.url = os.path.abspath(self.url)
        self._folder = Folder(self.url)

    def write_part(self, checkpoint: str, part: str, tree: object) -> Part:
        """Writes one tree of a future checkpoint, and returns the part for its manifest.

        Raises:
            CheckpointError: The tree has a value that a checkpoint cannot store, or the file could not be written.
        """
        check_name(checkpoint, "checkpoint")
        check_name(part, "part")
        data = encode(tree)
        written = Part(part, len(data), _digest(data))
        self._folder.put(self._folder.path(checkpoint, written.file_name), data)
        return written

    def commit(self, manifest: Manifest) -> None:
        """Turns the parts written so far into a checkpoint.

        Raises:
            CheckpointError: A part is missing or of another size, or the manifest could not be written.
        """
        for part in manifest.parts:
            path = self._folder.path(manifest.name, part.file_name)
            size_bytes = self._folder.size_bytes(path)
            if size_bytes != part.size_bytes:
                state = "is missing" if size_bytes is None else f"has {size_bytes:,} bytes"
                raise CheckpointError(
                    f"checkpoint {manifest.name!r} cannot be committed: {self._folder.shown(path)} {state}. Every "
                    f"part must be there, this with {part.size_bytes:,} bytes. Write it first, then commit."
                )
        if manifest.parts:
            with self._folder.explained("sync", self._folder.path()):
                self._folder.sync()  # another process may have created the folder
        self._folder.put(self._folder.path(manifest.name, _MANIFEST), manifest.to_json())

    def manifests(self) -> list[Manifest]:
        """The complete checkpoints, oldest first (by step, then name).

        Folders without a manifest, with a damaged manifest or with missing parts are skipped.

        Raises:
            CheckpointError: The folder cannot be read, or a newer thinwire wrote to it. Starting from scratch because
                no checkpoint was found would be wrong in both cases.
        """
        # A reader can be slower than the writer: 1. it lists a and b, 2. c and d are committed, a and b removed, 3. it
        # finds neither a nor b whole, and would report no checkpoint. So it looks again if folders came or went. It
        # reads old folders first: b is committed before a is removed, so it sees one of them whole.
        names = self._names()
        while True:
            found = [manifest for name in names if (manifest := self._complete(name))]
            before, names = names, self._names()
            if names == before:
                break
        return sorted(found, key=lambda manifest: (manifest.step, manifest.name))

    def latest(self) -> Manifest | None:
        """The complete checkpoint of the highest step, or None."""
        return next(reversed(self.manifests()), None)

    def newest_whole(
        self, why_not: Callable[[Manifest], str] = lambda manifest: ""
    ) -> tuple[Manifest | None, dict[str, str]]:
        """The newest checkpoint whose files are undamaged, and by name the reasons why newer ones are not usable.

        `why_not` may reject an undamaged checkpoint: it returns the reason, or an empty text.

        Every part is read, unlike in `latest`. Folders that sort before the checkpoint are not reported.

        Raises:
            CheckpointError: As `manifests`.
        """
        complete = {manifest.name: manifest for manifest in self.manifests()}
        order = sorted(complete, key=lambda name: (complete[name].step, name))
        begun = (name for name in self._names() if name not in complete and any(map(_is_own, self._folder.list(name))))
        passed = {name: self._why_incomplete(name) for name in begun}
        while order:
            manifest = complete[order.pop()]
            damages = [found for part in manifest.parts if (found := self._damage(manifest.name, part))]
            if not damages and (why := why_not(manifest)):
                damages = [why]
            if not damages:
                return manifest, {name: why for name, why in passed.items() if _natural(name) > _natural(manifest.name)}
            passed[manifest.name] = damages[0]
        return None, passed

    def load(self, name: str) -> Manifest:
        """The manifest of one checkpoint.

        Raises:
            CheckpointError: The checkpoint does not exist, or its manifest is damaged.
        """
        check_name(name, "checkpoint")
        manifest = self._manifest(name)
        if manifest is None:
            names = [manifest.name for manifest in self.manifests()]
            hint = nearest(name, names) if names else "There is none yet."
            raise CheckpointError(f"{self.url} has no complete checkpoint {name!r}. {hint} Choose one of those.")
        return manifest

    def read_part(self, manifest: Manifest, part: str) -> object:
        """One tree of a checkpoint.

        Raises:
            CheckpointError: The part does not exist, or its file is damaged; the message names the file.
        """
        parts = {listed.name: listed for listed in manifest.parts}
        if part not in parts:
            raise CheckpointError(f"checkpoint {manifest.name!r} has no part {part!r}. {nearest(part, parts)}")
        expected = parts[part]
        path = self._folder.path(manifest.name, expected.file_name)
        size_bytes = self._folder.size_bytes(path)
        if size_bytes not in (None, expected.size_bytes):  # checked before the file is read into memory
            raise self._damaged(path, _unlike(expected, size_bytes, ""))
        data = None if size_bytes is None else self._folder.read(path)
        damage = _unlike(expected, None if data is None else len(data), "" if data is None else _digest(data))
        if data is None or damage:
            raise self._damaged(path, damage)
        try:
            return decode(data)
        except CheckpointError as error:
            raise type(error)(f"{self._folder.shown(path)}: {error}") from error

    def prune(self, keep: int, protect: Collection[str] = (), unfit: Collection[str] = ()) -> None:
        """Removes all but the newest `keep` complete checkpoints, and the files of abandoned ones.

        Checkpoints in `unfit` do not count towards `keep`, and are removed.

        A folder is abandoned if it is incomplete and its name sorts before that of the newest complete checkpoint.
        Files that the store did not write stay.

        Args:
            keep: Number of complete checkpoints that remain, at least one.
            protect: Names of checkpoints, complete or being written, that also remain.
            unfit: Names of complete checkpoints that a run cannot resume from.

        Raises:
            CheckpointError: `keep` is less than one, or a file cannot be removed.
        """
        if keep < 1:
            raise CheckpointError(f"keep is {keep}. Allowed: 1 or more. Set it to 1 to keep only the newest.")
        complete = self.manifests()
        if not complete:
            return
        names = [manifest.name for manifest in complete]
        fit = [name for name in names if name not in unfit]
        if not fit:
            return
        for name in [*fit[:-keep], *(name for name in names if name in unfit)]:
            if name not in protect:
                self._remove(name)
        newest = _natural(fit[-1])
        for name in self._names():
            if name not in names and name not in protect and _natural(name) < newest:
                self._remove_abandoned(name)

    def discard(self, name: str) -> None:
        """Removes the files of a checkpoint that will never be complete; a complete checkpoint stays.

        Raises:
            CheckpointError: A file cannot be removed.
        """
        check_name(name, "checkpoint")
        if self._complete(name) is None:
            self._remove_abandoned(name)

    def _remove(self, name: str) -> None:
        # 1. The manifest is deleted, 2. the deletion is synced to disk, 3. the parts are deleted. After a power failure
        # between any two steps the folder is either complete or not listed.
        with self._folder.explained("remove", self._folder.path(name)):
            self._folder.delete(self._folder.path(name, _MANIFEST))
            self._folder.sync(name)
            for file in self._folder.list(name):
                if _is_own(file):
                    self._folder.delete(self._folder.path(name, file))
            self._folder.remove(name)

    def _remove_abandoned(self, name: str) -> None:
        with self._folder.explained("remove", self._folder.path(name)):
            own = self._folder.holds(name) and all(map(_is_own, self._folder.list(name)))
        if own:
            self._remove(name)

    def _manifest(self, name: str) -> Manifest | None:
        path = self._folder.path(name, _MANIFEST)
        size_bytes = self._folder.size_bytes(path)
        if size_bytes is not None and size_bytes > _MOST_MANIFEST_BYTES:
            raise _DamagedManifestError(
                f"{self._folder.shown(path)} has {size_bytes:,} bytes. A manifest has at most "
                f"{_MOST_MANIFEST_BYTES:,}. Resume from another checkpoint."
            )
        data = None if size_bytes is None else self._folder.read(path)
        if data is None:
            return None
        try:
            manifest = Manifest.from_json(data)
        except NewerFormatError as error:
            raise NewerFormatError(f"{self._folder.shown(path)}: {error}") from error
        except CheckpointError as error:
            raise _DamagedManifestError(f"{self._folder.shown(path)}: {error}") from error
        if manifest.name != name:
            raise _DamagedManifestError(
                f"{self._folder.shown(path)} is the manifest of {manifest.name!r}. A manifest must lie in the "
                "folder of its name. Rename the folder back."
            )
        return manifest

    def _complete(self, name: str) -> Manifest | None:
        try:
            manifest = self._manifest(name)
        except _DamagedManifestError:
            return None
        for part in manifest.parts if manifest else ():
            if self._folder.size_bytes(self._folder.path(name, part.file_name)) != part.size_bytes:
                return None
        return manifest

    def _why_incomplete(self, name: str) -> str:
        """Why a folder that `_complete` has skipped is incomplete, in a few words."""
        try:
            manifest = self._manifest(name)
        except _DamagedManifestError:
            return f"its {_MANIFEST} is damaged"
        if manifest is None:
            return f"it has no {_MANIFEST}: its writer did not finish"
        damages = (self._damage(name, part) for part in manifest.parts)
        return next(filter(None, damages), "it was not complete when first looked at")

    def _damage(self, name: str, part: Part) -> str:
        """How a part's file differs from what was written; empty where it does not. The file is read in pieces."""
        path = self._folder.path(name, part.file_name)
        seen = hashlib.blake2b(digest_size=32)
        size_bytes = self._folder.size_bytes(path)
        if size_bytes == part.size_bytes:
            try:
                for piece in self._folder.pieces(path):
                    seen.update(piece)
            except FileNotFoundError:
                size_bytes = None
        why = _unlike(part, size_bytes, seen.hexdigest())
        return why and f"{part.file_name}: {why}"

    def _names(self) -> list[str]:
        with self._folder.explained("list", self._folder.path()):
            return sorted(filter(NAME.fullmatch, self._folder.list()), key=_natural)

    def _damaged(self, path: str, damage: str) -> CheckpointError:
        return CheckpointError(
            f"{self._folder.shown(path)} is damaged: {damage}. Its content must be unchanged. "
            "Resume from another checkpoint, or copy the file again from its source."
        )


class _DamagedManifestError(CheckpointError):
    """A manifest without the content that it must have."""


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=32).hexdigest()


def _unlike(part: Part, size_bytes: int | None, digest: str) -> str:
    """How a file of this size and digest differs from its part; empty where it does not."""
    if size_bytes is None:
        return "it is missing"
    if size_bytes != part.size_bytes:
        return f"it has {size_bytes:,} bytes, not {part.size_bytes:,}"
    return "" if digest == part.digest else f"its digest is {digest[:16]}…, not {part.digest[:16]}…"


def _is_own(file: str) -> bool:
    return file == _MANIFEST or bool(_PART_FILE.fullmatch(file) or TEMPORARY.fullmatch(file))


def _natural(name: str) -> list[tuple[str, int]]:
    """A sort key that compares the numbers in names as numbers.

    >>> sorted(["step-10", "step-9"], key=_natural)
    ['step-9', 'step-10']
    """
    words = re.split(r"([0-9]+)", name)
    return [(text, int(number)) for text, number in zip(words[::2], [*words[1::2], "-1"], strict=True)]
