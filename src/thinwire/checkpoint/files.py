"""Writes files whole or not at all, wherever fsspec can write."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import uuid
from typing import Any

from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from thinwire.errors import CheckpointError

TEMPORARY = re.compile(r"\..+\.[0-9a-f]{32}\.tmp")
"""Names of files that are being written, or that a killed writer left."""


def write_file(url: str | os.PathLike[str], data: bytes) -> None:
    """Makes the file hold `data`; a reader, even after a crash, sees the old content or the new, never a mix.

    A local file is written under a temporary name in the same folder, fsynced and renamed; then the folder is fsynced.
    Missing folders are created. Elsewhere the file is one put, which object stores do whole or not at all.

    Raises:
        CheckpointError: The file could not be written; its old content is unchanged.
    """
    filesystem, path = locate(url)
    put(filesystem, path, data)


def locate(url: str | os.PathLike[str]) -> tuple[Any, str]:
    """The fsspec file system of an address, and the path in it.

    Raises:
        CheckpointError: No installed package handles the address.
    """
    try:
        filesystem, path = url_to_fs(os.fspath(url))
    except (ImportError, ValueError) as error:
        raise CheckpointError(
            f"{os.fspath(url)!r} cannot be opened ({error}). Allowed is a local path, or an address that an "
            "installed fsspec package handles. Check its spelling, or install the package (s3fs for s3://)."
        ) from error
    return filesystem, str(path)


def put(filesystem: Any, path: str, data: bytes) -> None:
    """`write_file` for an address that is already located."""
    try:
        if isinstance(filesystem, LocalFileSystem):
            _put_local(path, data)
        else:
            filesystem.makedirs(path.rpartition("/")[0], exist_ok=True)
            filesystem.pipe_file(path, data)
    except Exception as error:  # each fsspec package raises errors of its own client
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            reason = f"the disk is full ({error.strerror})"
        else:
            reason = f"{type(error).__name__}: {error}"
        raise CheckpointError(
            f"could not write {filesystem.unstrip_protocol(path)}: {reason}. Its folder must be writable, "
            f"with room for {len(data):,} bytes. Free some space, fix the permissions or choose another; "
            "what was there before is unchanged."
        ) from error


def sync_folder(filesystem: Any, path: str) -> None:
    """Makes the names in a local folder survive a power failure; does nothing on other file systems."""
    if isinstance(filesystem, LocalFileSystem):
        _sync_local_folder(path)


def _put_local(path: str, data: bytes) -> None:
    folder, name = os.path.split(path)
    _make_local_folder(folder)
    temporary = os.path.join(folder, f".{name}.{uuid.uuid4().hex}.tmp")
    try:
        with open(temporary, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    _sync_local_folder(folder)


def _make_local_folder(folder: str) -> None:
    if os.path.isdir(folder):
        return
    parent = os.path.dirname(folder)
    _make_local_folder(parent)
    with contextlib.suppress(FileExistsError):  # another process made it first
        os.mkdir(folder)
    _sync_local_folder(parent)


def _sync_local_folder(folder: str) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some FUSE mounts cannot sync folders and need not
            raise
    finally:
        os.close(descriptor)
