from __future__ import annotations

import os
import pickle
import subprocess
from collections.abc import Callable
from pathlib import Path

import fsspec
import pytest
import torch

from thinwire.checkpoint import CheckpointStore, Manifest, write_file
from thinwire.errors import CheckpointError


@pytest.fixture
def tiny_disk(small_disk: Callable[[int], Path]) -> Path:
    """A disk of 256 KiB."""
    return small_disk(256 << 10)


def test_a_file_is_written_with_the_folders_on_the_way(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "summary.json"
    write_file(str(path), b"{}")
    assert path.read_bytes() == b"{}"
    assert os.listdir(path.parent) == ["summary.json"]


@pytest.mark.parametrize("scheme", ["", "file://", "local://"])
def test_an_address_of_a_local_file_may_be_written_as_path_or_url(scheme: str, tmp_path: Path) -> None:
    path = tmp_path / "with space [x]*?.json"
    write_file(f"{scheme}{path}", b"1")
    assert path.read_bytes() == b"1"


def test_a_relative_path_is_taken_from_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_file("runs/x.json", b"1")
    assert (tmp_path / "runs" / "x.json").read_bytes() == b"1"


def test_an_existing_file_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"a much longer content than the new one")
    write_file(path, b"new")
    assert path.read_bytes() == b"new"


def test_other_filesystems_are_written_through_fsspec() -> None:
    write_file("memory://test-files/a/x.json", b"1")
    assert fsspec.filesystem("memory").cat_file("/test-files/a/x.json") == b"1"


def test_the_data_are_on_disk_before_the_name_and_the_name_before_returning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    fsync, replace = os.fsync, os.replace

    def watched_fsync(descriptor: int) -> None:
        calls.append(f"fsync {os.path.basename(os.readlink(f'/proc/self/fd/{descriptor}'))[:2]}")
        fsync(descriptor)

    def watched_replace(source: str, target: str) -> None:
        calls.append("rename")
        assert Path(source).read_bytes() == b"data"
        replace(source, target)

    monkeypatch.setattr(os, "fsync", watched_fsync)
    monkeypatch.setattr(os, "replace", watched_replace)
    (tmp_path / "folder").mkdir()
    write_file(tmp_path / "folder" / "x", b"data")
    assert calls == ["fsync .x", "rename", "fsync fo"]


def test_a_write_that_fails_leaves_the_old_file_and_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_descriptor: int) -> None:
        raise OSError(5, "Input/output error")

    path = tmp_path / "x"
    write_file(path, b"old")
    monkeypatch.setattr(os, "fsync", broken)
    with pytest.raises(CheckpointError, match=r"could not write file://.*/x: OSError.*Input/output error"):
        write_file(path, b"new")
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["x"]


def test_a_folder_that_is_a_file_is_named_in_the_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"mine")
    for target in ("file/x", "file/y/x"):
        with pytest.raises(CheckpointError, match=r"could not write .*/file/.*NotADirectoryError"):
            write_file(tmp_path / target, b"")
    assert (tmp_path / "file").read_bytes() == b"mine"


def test_a_folder_in_place_of_the_file_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "x" / "y").mkdir(parents=True)
    with pytest.raises(CheckpointError, match="IsADirectoryError"):
        write_file(tmp_path / "x", b"")
    assert os.listdir(tmp_path) == ["x"]


@pytest.mark.parametrize("url", ["nosuch://bucket/x", "oss://bucket/x"])
def test_an_address_no_package_handles_is_refused(url: str) -> None:
    with pytest.raises(CheckpointError, match=rf"'{url}' cannot be opened .* install the package"):
        write_file(url, b"")


def test_a_full_disk_is_reported_and_harms_nothing(tiny_disk: Path) -> None:
    store = CheckpointStore(tiny_disk / "checkpoints")
    part = store.write_part("step-1", "w", torch.ones(10_000))
    store.commit(Manifest("step-1", 1, (part,)))
    before = sorted(str(path) for path in tiny_disk.rglob("*"))
    with pytest.raises(CheckpointError, match=r"step-1/w\.\S*: the disk is full .* room for 400,\d+ bytes"):
        store.write_part("step-1", "w", torch.ones(100_000))
    with pytest.raises(CheckpointError, match="the disk is full"):
        write_file(tiny_disk / "summary.json", bytes(300_000))
    assert sorted(str(path) for path in tiny_disk.rglob("*")) == before
    (manifest,) = store.manifests()
    assert torch.equal(store.read_part(manifest, "w"), torch.ones(10_000))  # type: ignore[arg-type]


def test_pruning_makes_room_on_a_full_disk(tiny_disk: Path) -> None:
    store = CheckpointStore(tiny_disk)
    for step in range(2):
        part = store.write_part(f"step-{step}", "w", torch.ones(25_000))
        store.commit(Manifest(f"step-{step}", step, (part,)))
    with pytest.raises(CheckpointError, match="the disk is full"):
        store.write_part("step-2", "w", torch.ones(25_000))
    store.prune(keep=1)
    store.write_part("step-2", "w", torch.ones(25_000))


def test_a_disk_that_cannot_be_written_is_reported_and_still_read(tiny_disk: Path) -> None:
    store = CheckpointStore(tiny_disk)
    for step in range(2):
        part = store.write_part(f"step-{step}", "w", step)
        store.commit(Manifest(f"step-{step}", step, (part,)))
    subprocess.run(["mount", "-o", "remount,ro", str(tiny_disk)], check=True)
    with pytest.raises(CheckpointError, match=r"could not write .*/step-2.*Read-only file system"):
        store.write_part("step-2", "w", 2)
    with pytest.raises(CheckpointError, match=r"could not remove .*/step-0.*Read-only file system"):
        store.prune(keep=1)
    assert [store.read_part(manifest, "w") for manifest in store.manifests()] == [0, 1]


def test_the_errors_can_be_sent_between_processes() -> None:
    with pytest.raises(CheckpointError) as caught:
        write_file("nosuch://x", b"")
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
