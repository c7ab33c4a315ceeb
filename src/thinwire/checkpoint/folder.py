"""A folder anywhere that fsspec reaches, with errors that say which operation failed on which file."""

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
    """Files under one address. Methods take paths that `path` returns; a missing file is not an error.

    Args:
        url: A local path, or an address that an installed fsspec package handles. It need not exist yet.
    """

    def __init__(self, url: str) -> None:
        self._filesystem, root = locate(url)
        self._root = root.rstrip("/")

    def path(self, *names: str) -> str:
        """The path of a file or folder in this folder."""
        return "/".join((self._root, *names))

    def shown(self, path: str) -> str:
        """A path with its protocol, as people write it."""
        return str(self._filesystem.unstrip_protocol(path))

    def put(self, path: str, data: bytes) -> None:
        """Writes a file whole or not at all."""
        put(self._filesystem, path, data)

    def list(self, *names: str) -> list[str]:
        """The names of the files and folders in a folder."""
        self._filesystem.invalidate_cache()  # other processes write to this folder too
        try:
            paths = self._filesystem.ls(self.path(*names), detail=False)
        except GONE:
            return []
        return [path.rstrip("/").rpartition("/")[2] for path in paths]

    def read(self, path: str) -> bytes | None:
        """A file's content; None where the file does not exist."""
        with self.explained("read", path):
            try:
                return bytes(self._filesystem.cat_file(path))
            except GONE:
                return None

    def pieces(self, path: str) -> Iterator[bytes]:
        """A file's content in pieces, for large files.

        Raises:
            FileNotFoundError: The file does not exist any more.
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
        """A file's length; None where there is no file, or a pipe or device, whose content may never end."""
        with self.explained("read", path):
            try:
                info = self._filesystem.info(path)
            except GONE:
                return None
        return None if info.get("type") == "other" else int(info["size"])

    def delete(self, path: str) -> None:
        """Removes a file, if it exists."""
        with contextlib.suppress(*GONE):
            self._filesystem.rm_file(path)

    def holds(self, name: str) -> bool:
        """Whether this folder has a subfolder of this name."""
        return bool(self._filesystem.isdir(self.path(name)))

    def remove(self, name: str) -> None:
        """Removes an empty subfolder; others stay, and object stores have none."""
        with contextlib.suppress(OSError):
            self._filesystem.rmdir(self.path(name))

    def sync(self, *names: str) -> None:
        """Makes writes to a folder and removals from it survive a power failure."""
        sync_folder(self._filesystem, self.path(*names))

    @contextlib.contextmanager
    def explained(self, action: str, path: str) -> Iterator[None]:
        """Turns an error of the file system into a CheckpointError that says what could not be done."""
        try:
            yield
        except OSError as error:
            raise CheckpointError(
                f"could not {action} {self.shown(path)}: {type(error).__name__}: {error}. The folder and "
                "its files must be readable and writable. Check its permissions and the connection to it."
            ) from error
