from __future__ import annotations

import itertools
import json
import os
import pickle
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import fsspec
import pytest
import torch

from thinwire.checkpoint import CheckpointStore, Manifest, Part
from thinwire.errors import CheckpointError

_numbers = itertools.count()


@pytest.fixture(params=["local", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[CheckpointStore]:
    if request.param == "local":
        yield CheckpointStore(str(tmp_path / "checkpoints"))
        return
    folder = f"/store-{next(_numbers)}"
    yield CheckpointStore(f"memory:/{folder}")
    memory = fsspec.filesystem("memory")
    if memory.exists(folder):
        memory.rm(folder, recursive=True)


@pytest.fixture
def local(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path)


def save(store: CheckpointStore, name: str, step: int, parts: tuple[str, ...] = ("w",)) -> Manifest:
    written = tuple(store.write_part(name, part, {"step": step, "part": part}) for part in parts)
    manifest = Manifest(name, step, written, {"loss": 0.5, "betas": (1, 2)})
    store.commit(manifest)
    return manifest


def names(store: CheckpointStore) -> list[str]:
    return [manifest.name for manifest in store.manifests()]


def test_what_was_committed_is_listed_and_read_back(store: CheckpointStore) -> None:
    manifest = save(store, "step-1", 1, ("coordinator", "worker-0"))
    assert store.manifests() == [manifest]
    assert store.latest() == manifest == store.load("step-1")
    assert store.read_part(manifest, "worker-0") == {"step": 1, "part": "worker-0"}


def test_an_empty_store_has_no_checkpoints(store: CheckpointStore) -> None:
    assert store.manifests() == []
    assert store.latest() is None
    store.prune(keep=1)


def test_checkpoints_are_listed_by_step_then_by_name(store: CheckpointStore) -> None:
    for name, step in (("z", 2), ("b", 10), ("a", 10), ("y", 9)):
        save(store, name, step)
    assert names(store) == ["z", "y", "a", "b"]


def test_parts_without_a_manifest_are_not_a_checkpoint(store: CheckpointStore) -> None:
    save(store, "step-1", 1)
    store.write_part("step-2", "w", 2)
    assert names(store) == ["step-1"]
    with pytest.raises(CheckpointError, match=r"no complete checkpoint 'step-2'\. Did you mean 'step-1'\?"):
        store.load("step-2")


def test_a_store_can_be_sent_to_the_workers(store: CheckpointStore) -> None:
    manifest = save(store, "step-1", 1)
    sent: CheckpointStore = pickle.loads(pickle.dumps(store))
    assert sent.read_part(pickle.loads(pickle.dumps(manifest)), "w") == {"step": 1, "part": "w"}


def test_many_writers_write_their_parts_at_the_same_time(store: CheckpointStore) -> None:
    barrier = threading.Barrier(8)

    def work(worker: int) -> Part:
        barrier.wait(timeout=60)
        return CheckpointStore(store.url).write_part("step-1", f"worker-{worker}", torch.full((999,), worker))

    with ThreadPoolExecutor(8) as pool:
        parts = tuple(pool.map(work, range(8)))
    manifest = Manifest("step-1", 1, parts)
    store.commit(manifest)
    for worker in range(8):
        tensor = store.read_part(manifest, f"worker-{worker}")
        assert isinstance(tensor, torch.Tensor)
        assert tensor.tolist() == [worker] * 999


def test_readers_see_only_whole_checkpoints_while_others_are_written_and_pruned(
    store: CheckpointStore,
) -> None:
    save(store, "step-0", 0)

    def write() -> None:
        for step in range(1, 40):
            save(store, f"step-{step}", step, ("a", "b"))
            store.prune(keep=1)

    reader = CheckpointStore(store.url)
    newest = 0
    with ThreadPoolExecutor(1) as pool:
        writer = pool.submit(write)
        while not writer.done():
            latest = reader.latest()
            assert latest is not None
            assert latest.step >= newest
            newest = latest.step
        writer.result()


def test_a_checkpoint_written_again_leaves_the_complete_one_whole_until_committed(
    store: CheckpointStore,
) -> None:
    first = save(store, "step-1", 1)
    part = store.write_part("step-1", "w", "second")
    assert store.latest() == first
    assert store.read_part(first, "w") == {"step": 1, "part": "w"}
    store.commit(Manifest("step-1", 1, (part,)))
    latest = store.latest()
    assert latest is not None
    assert store.read_part(latest, "w") == "second"


def test_a_commit_without_its_parts_is_refused(store: CheckpointStore) -> None:
    with pytest.raises(CheckpointError, match=r"step-1/w\.0{16}\.safetensors is missing"):
        store.commit(Manifest("step-1", 1, (Part("w", 3, "0" * 64),)))
    part = store.write_part("step-1", "w", 1)
    short = Part("w", part.size_bytes - 1, part.digest)
    with pytest.raises(CheckpointError, match=rf"has {part.size_bytes} bytes\. .* with {short.size_bytes} bytes"):
        store.commit(Manifest("step-1", 1, (short,)))
    assert store.manifests() == []


def test_meta_comes_back_as_it_was(store: CheckpointStore) -> None:
    meta: dict[str, object] = {
        "betas": (0.9, 1),
        'q"': {3: None},
        "loss": float("inf"),
        "seed": 2**100,
        "ü": "✓",
    }
    store.commit(Manifest("a", 0, (), meta))
    assert store.load("a").meta == meta


@pytest.mark.parametrize(
    ("meta", "message"),
    [({"a": [torch.ones(1)]}, r"meta\.a\[0\] of checkpoint 'a'"), ({"f": print}, "f is a builtin_function")],
)
def test_meta_of_more_than_plain_values_is_refused(
    store: CheckpointStore, meta: dict[str, object], message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        store.commit(Manifest("a", 0, (), meta))


@pytest.mark.parametrize(
    "name",
    [
        "",
        ".",
        "..",
        "a/b",
        "/a",
        "a\\b",
        "a..b",
        ".hidden",
        "-x",
        "a b",
        "a\n",
        "a\0",
        "ü",
        "x" * 101,
        3,
        None,
    ],
)
def test_names_that_could_leave_the_folder_are_refused(store: CheckpointStore, name: str) -> None:
    for attempt in (
        lambda: store.write_part(name, "w", 1),
        lambda: store.write_part("step-1", name, 1),
        lambda: store.load(name),
        lambda: Manifest(name, 1, ()),
        lambda: Part(name, 1, "0" * 64),
    ):
        with pytest.raises(CheckpointError, match=r"is not a name for a (part|checkpoint)\. Allowed: up to 100"):
            attempt()


@pytest.mark.parametrize(
    "build",
    [
        lambda: Manifest("a", -1, ()),
        lambda: Manifest("a", True, ()),
        lambda: Manifest("a", 1, (Part("w", 1, "0" * 64), Part("w", 1, "1" * 64))),
        lambda: Manifest("a", 1, (), {}, 2),
        lambda: Part("w", -1, "0" * 64),
        lambda: Part("w", 1, "../../etc/passwd"),
        lambda: Part("w", 1, "0" * 63),
    ],
    ids=range(7),
)
def test_a_manifest_that_makes_no_sense_cannot_be_made(build: object) -> None:
    assert callable(build)
    with pytest.raises(CheckpointError):
        build()


@pytest.mark.parametrize("position", [0, 8, 40, -1])
def test_a_damaged_part_is_found_by_its_digest(local: CheckpointStore, tmp_path: Path, position: int) -> None:
    manifest = save(local, "step-1", 1)
    path = tmp_path / "step-1" / manifest.parts[0].file_name
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=rf"{path} is damaged: its digest"):
        local.read_part(manifest, "w")


def test_a_truncated_part_is_found_and_its_checkpoint_not_listed(local: CheckpointStore, tmp_path: Path) -> None:
    save(local, "step-1", 1)
    manifest = save(local, "step-2", 2)
    path = tmp_path / "step-2" / manifest.parts[0].file_name
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=rf"{path} is damaged: it has \d+ bytes, not"):
        local.read_part(manifest, "w")
    path.unlink()
    with pytest.raises(CheckpointError, match=rf"{path} is damaged: it is missing"):
        local.read_part(manifest, "w")
    assert names(local) == ["step-1"]


def test_a_part_that_is_not_there_is_refused_with_the_nearest_that_is(store: CheckpointStore) -> None:
    manifest = save(store, "step-1", 1, ("worker-0", "coordinator"))
    with pytest.raises(CheckpointError, match=r"no part 'worker-9'\. Did you mean 'worker-0'\?"):
        store.read_part(manifest, "worker-9")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"{}",
        b"\xff",
        b"[" * 100_000,
        b'{"version": 1}',
        b'{"version": 1, "name": "step-2", "step": 2, "parts": 3, "meta": {}}',
        b'{"version": 1, "name": "step-2", "step": 2, "parts": [3], "meta": {}}',
        b'{"version": 1, "name": "step-2", "step": 2, "parts": [], "meta": []}',
        b'{"version": 1, "name": "step-2", "step": "2", "parts": [], "meta": {}}',
        b'{"version": 1, "name": "step-3", "step": 2, "parts": [], "meta": {}}',
        b'{"version": 1, "name": "step-2", "step": 2, "parts": [], "meta": {"$": "tensor", "name": "x"}}',
        b'{"version": 1, "name": "step-2", "step": 2, "meta": {}, "parts":'
        b' [{"name": "../../x", "size_bytes": 1, "digest": "00"}]}',
    ],
    ids=range(14),
)
def test_a_damaged_manifest_is_passed_over_and_named_when_asked_for(
    local: CheckpointStore, tmp_path: Path, content: bytes
) -> None:
    save(local, "step-1", 1)
    save(local, "step-2", 2)
    (tmp_path / "step-2" / "manifest.json").write_bytes(content)
    assert names(local) == ["step-1"]
    with pytest.raises(CheckpointError, match=r"step-2/manifest\.json"):
        local.load("step-2")


def test_a_manifest_of_a_newer_thinwire_stops_everything_and_is_kept(local: CheckpointStore, tmp_path: Path) -> None:
    save(local, "step-1", 1)
    save(local, "step-2", 2)
    path = tmp_path / "step-1" / "manifest.json"
    path.write_text(json.dumps({"version": 2, "needs": "0.9.0", "shape": "unheard of"}))
    for attempt in (local.manifests, local.latest, lambda: local.load("step-1"), lambda: local.prune(1)):
        with pytest.raises(CheckpointError, match=r"step-1/manifest\.json: .*Install thinwire 0\.9\.0 or newer"):
            attempt()
    assert path.exists()


def test_pruning_keeps_the_newest_and_the_protected(store: CheckpointStore) -> None:
    for step in range(8, 13):
        save(store, f"step-{step}", step)
    store.prune(keep=2, protect={"step-9"})
    assert names(store) == ["step-9", "step-11", "step-12"]
    store.prune(keep=5)
    assert names(store) == ["step-9", "step-11", "step-12"]
    store.prune(keep=1)
    assert names(store) == ["step-12"]
    filesystem, path = fsspec.core.url_to_fs(store.url)
    assert all("/step-12/" in file for file in filesystem.find(path))


@pytest.mark.parametrize("keep", [0, -1])
def test_pruning_everything_is_refused(store: CheckpointStore, keep: int) -> None:
    with pytest.raises(CheckpointError, match=rf"keep is {keep}\. Allowed: 1 or more"):
        store.prune(keep)


def test_pruning_removes_abandoned_folders_but_none_being_written(local: CheckpointStore, tmp_path: Path) -> None:
    for name in ("step-9", "step-11", "step-8"):
        local.write_part(name, "w", 1)
        (tmp_path / name / f".x.{'0' * 32}.tmp").write_bytes(b"half")
    save(local, "step-10", 10)
    local.prune(keep=1, protect=["step-8"])
    assert sorted(os.listdir(tmp_path)) == ["step-10", "step-11", "step-8"]
    assert f".x.{'0' * 32}.tmp" in os.listdir(tmp_path / "step-11")


def test_pruning_leaves_alone_what_is_not_its_own(local: CheckpointStore, tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "manifest.json").write_text("{}")
    (tmp_path / "notes" / "mine.txt").write_text("mine")
    (tmp_path / "a.safetensors").write_text("mine")
    save(local, "step-1", 1)
    (tmp_path / "step-1" / "mine.txt").write_text("mine")
    save(local, "step-2", 2)
    local.prune(keep=1)
    assert sorted(os.listdir(tmp_path)) == ["a.safetensors", "notes", "step-1", "step-2"]
    assert sorted(os.listdir(tmp_path / "notes")) == ["manifest.json", "mine.txt"]
    assert os.listdir(tmp_path / "step-1") == ["mine.txt"]


def test_pruning_takes_the_manifest_first_and_syncs_before_any_part(
    local: CheckpointStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(local, "step-1", 1, ("a", "b"))
    save(local, "step-2", 2)
    calls: list[str] = []
    remove, fsync = os.remove, os.fsync

    def watched_remove(path: str) -> None:
        calls.append(os.path.basename(path).split(".")[0])
        remove(path)

    def watched_fsync(descriptor: int) -> None:
        calls.append("sync " + os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")))
        fsync(descriptor)

    monkeypatch.setattr(os, "remove", watched_remove)
    monkeypatch.setattr(os, "fsync", watched_fsync)
    local.prune(keep=1)
    assert calls[:2] == ["manifest", "sync step-1"]
    assert sorted(calls[2:]) == ["a", "b"]
    assert os.listdir(tmp_path) == ["step-2"]


def test_a_folder_that_cannot_be_read_is_not_taken_for_an_empty_one(
    local: CheckpointStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(local, "step-1", 1)

    def denied(*_arguments: object, **_options: object) -> bytes:
        raise PermissionError(13, "Permission denied")

    for operation in ("ls", "cat_file", "info"):
        with monkeypatch.context() as patch:
            patch.setattr(type(fsspec.filesystem("file")), operation, denied)
            with pytest.raises(CheckpointError, match=r"could not (list|read) file://.*Permission denied"):
                local.latest()


# -- the newest that is whole ------------------------------------------------------------------------------------------


def flip(path: Path, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


def test_the_newest_whole_checkpoint_is_the_newest_where_nothing_is_damaged(store: CheckpointStore) -> None:
    assert store.newest_whole() == (None, {})
    save(store, "step-9", 9)
    newest = save(store, "step-10", 10, ("a", "b"))
    store.write_part("step-8", "w", 1)
    assert store.newest_whole() == (newest, {}), "an abandoned one before it is nobody's concern"


def test_a_checkpoint_being_written_is_passed_over_by_name(store: CheckpointStore) -> None:
    first = save(store, "step-1", 1)
    store.write_part("step-2", "w", 2)
    found, passed = store.newest_whole()
    assert found == first
    assert passed == {"step-2": "it has no manifest.json: its writer did not finish"}


def test_a_bit_flipped_anywhere_in_a_part_is_found(local: CheckpointStore, tmp_path: Path) -> None:
    first, second = save(local, "step-1", 1), save(local, "step-2", 2, ("a", "b"))
    path = tmp_path / "step-2" / second.parts[1].file_name
    whole = path.read_bytes()
    for bit in range(0, 8 * len(whole), 7):
        flip(path, bit)
        found, passed = local.newest_whole()
        assert found == first, bit
        assert "its digest is" in passed["step-2"]
        path.write_bytes(whole)
    assert local.newest_whole() == (second, {})


def test_a_bit_flipped_anywhere_in_a_manifest_is_found_or_changes_nothing(
    local: CheckpointStore, tmp_path: Path
) -> None:
    """Its version among them: a damaged manifest is not one of a newer thinwire."""
    first, second = save(local, "step-1", 1), save(local, "step-2", 2)
    path = tmp_path / "step-2" / "manifest.json"
    whole = path.read_bytes()
    harmless = 0
    for bit in range(8 * len(whole)):
        flip(path, bit)
        found, passed = local.newest_whole()
        if found == second:
            harmless += 1
        else:
            assert found == first, bit
            assert passed == {"step-2": "its manifest.json is damaged"}
        path.write_bytes(whole)
    assert harmless < len(whole), "white space, and the name of the digest itself"


@pytest.mark.parametrize("harm", ["cut", "removed", "empty"])
def test_a_part_that_is_cut_short_or_gone_is_found(local: CheckpointStore, tmp_path: Path, harm: str) -> None:
    first, second = save(local, "step-1", 1), save(local, "step-2", 2)
    path = tmp_path / "step-2" / second.parts[0].file_name
    if harm == "removed":
        path.unlink()
    else:
        os.truncate(path, 0 if harm == "empty" else path.stat().st_size - 1)
    found, passed = local.newest_whole()
    assert found == first
    assert second.parts[0].file_name in passed["step-2"]
    assert ("it is missing" if harm == "removed" else "bytes, not") in passed["step-2"]


def test_several_in_a_row_may_be_damaged_and_none_may_be_left(local: CheckpointStore, tmp_path: Path) -> None:
    saved = [save(local, f"step-{step}", step) for step in (1, 2, 3)]
    for manifest, left in ((saved[2], saved[1]), (saved[1], saved[0]), (saved[0], None)):
        flip(tmp_path / manifest.name / manifest.parts[0].file_name, 99)
        assert local.newest_whole()[0] == left
    assert set(local.newest_whole()[1]) == {"step-1", "step-2", "step-3"}


def test_one_that_is_whole_may_be_passed_over_for_another_reason(local: CheckpointStore) -> None:
    first, _ = save(local, "step-1", 1), save(local, "step-2", 2)
    found, passed = local.newest_whole(lambda manifest: "it is not finite" if manifest.step == 2 else "")
    assert found == first
    assert passed == {"step-2": "it is not finite"}


def test_what_nobody_can_go_on_from_counts_for_nothing_and_is_removed(local: CheckpointStore) -> None:
    good = [save(local, f"step-{step}", step).name for step in (1, 2)]
    bad = [save(local, f"step-{step}", step).name for step in (3, 4)]
    local.prune(keep=2, unfit=bad)
    assert [manifest.name for manifest in local.manifests()] == good
    again = save(local, "step-3", 3).name
    local.prune(keep=1, unfit=good[:1])
    assert [manifest.name for manifest in local.manifests()] == [again]


def test_the_last_one_is_not_removed_though_nobody_can_go_on_from_it(local: CheckpointStore) -> None:
    only = save(local, "step-1", 1).name
    local.prune(keep=1, unfit=[only])
    assert [manifest.name for manifest in local.manifests()] == [only]


def test_a_manifest_without_a_digest_is_one_of_the_first_versions(local: CheckpointStore, tmp_path: Path) -> None:
    manifest = save(local, "step-1", 1)
    path = tmp_path / "step-1" / "manifest.json"
    content = json.loads(path.read_text())
    del content["digest"]
    path.write_text(json.dumps(content, indent=2))
    assert local.latest() == manifest
