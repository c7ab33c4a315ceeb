"""A folder anywhere that fsspec reaches, whose errors say what could not be done with which file."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import final

from thinwire.checkpoint.files import locate, put, sync_folder
from thinwire.errors import CheckpointError

PIECE_BYTES = 16 << 20
GONE = (FileNotFoundError, NotADirectoryError)


@final
class Folder:
    """Files under one address. Paths are those of `path`; a file that is not there is no error.

    Args:
        url: A local path, or an address that an installed fsspec package handles. It need not exist yet.
    """

    def __init__(self, url: str) -> None:
        self._filesystem, root = locate(url)
        self._root = root.rstrip("/")

    def path(self, *names: str) -> str:
        """The path of a file or folder in here."""
        return "/".join((self._root, *names))

    def shown(self, path: str) -> str:
        """A path as a person writes it, with its protocol."""
        return str(self._filesystem.unstrip_protocol(path))

    def put(self, path: str, data: bytes) -> None:
        """Writes a file whole or not at all."""
        put(self._filesystem, path, data)

    def list(self, *names: str) -> list[str]:
        """The names of the files and folders in a folder."""
        self._filesystem.invalidate_cache()  # other processes write here too
        try:
            paths = self._filesystem.ls(self.path(*names), detail=False)
        except GONE:
            return []
        return [path.rstrip("/").rpartition("/")[2] for path in paths]

    def read(self, path: str) -> bytes | None:
        """A file's content; None where there is none."""
        with self.explained("read", path):
            try:
                return bytes(self._filesystem.cat_file(path))
            except GONE:
                return None

    def pieces(self, path: str) -> Iterator[bytes]:
        """A file's content in pieces, for a file that may be large.

        Raises:
            FileNotFoundError: There is no such file any more.
        """
        gone = False
        with self.explained("read", path):
            try:
                with self._filesystem.open(path, "rb") as file:
                    while piece := file.read(PIECE_BYTES):
                        yield piece
            except GONE:
                gone = True
        if gone:
            raise FileNotFoundError(path)

    def size_bytes(self, path: str) -> int | None:
        """A file's length; None where there is none, or a pipe or device in its place, which may be read for ever."""
        with self.explained("read", path):
            try:
                info = self._filesystem.info(path)
            except GONE:
                return None
        return None if info.get("type") == "other" else int(info["size"])

    def delete(self, path: str) -> None:
        """Removes a file."""
        with contextlib.suppress(*GONE):
            self._filesystem.rm_file(path)

    def holds(self, name: str) -> bool:
        """Whether there is a folder of this name in here."""
        return bool(self._filesystem.isdir(self.path(name)))

    def remove(self, name: str) -> None:
        """Removes a folder in here that is empty; one that is not stays, and object stores have none."""
        with contextlib.suppress(OSError):
            self._filesystem.rmdir(self.path(name))

    def sync(self, *names: str) -> None:
        """Makes what was written to and removed from a folder outlast a power cut."""
        sync_folder(self._filesystem, self.path(*names))

    @contextlib.contextmanager
    def explained(self, action: str, path: str) -> Iterator[None]:
        """Turns an error of the filesystem into one that says what could not be done."""
        try:
            yield
        except OSError as error:
            raise CheckpointError(
                f"could not {action} {self.shown(path)}: {type(error).__name__}: {error}. The folder and "
                "all in it must be readable and writable. Check its permissions and the connection to it."
            ) from error
