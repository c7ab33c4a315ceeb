"""Names that come from outside stay inside: of checkpoints' parts, runs, files to fetch, code of saved models."""

from __future__ import annotations

import contextlib
import json
import os
import stat
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import thinwire as tw
from tests.dashboard.logs import events as told
from tests.dashboard.logs import write
from thinwire import events
from thinwire.checkpoint import CheckpointStore, Manifest
from thinwire.cluster.shipping import packed
from thinwire.data.feeds import Fetched
from thinwire.errors import CheckpointError, ConfigError, DataError, ProtocolError
from thinwire.exchange.spark import box

from .surroundings import Slow

LEAVING = ("../joint", "/etc/passwd", "a/../../b", "..", "a\0b", "a\nb", "~root", "-rf", ".hidden", "a" * 101, "", "ä")


@pytest.mark.parametrize("name", LEAVING)
def test_a_manifest_whose_names_would_leave_its_folder_is_no_checkpoint(tmp_path: Path, name: str) -> None:
    store = CheckpointStore(tmp_path)
    part = store.write_part("step-1", "joint", {"x": torch.zeros(2)})
    store.commit(Manifest("step-1", 1, (part,)))
    file = tmp_path / "step-1" / "manifest.json"
    whole = json.loads(file.read_text())
    for change in ({"parts": [vars(part) | {"name": name}]}, {"name": name}):
        file.write_text(json.dumps(whole | change))
        assert store.manifests() == []
        with pytest.raises(CheckpointError):
            store.load("step-1")
    with pytest.raises(CheckpointError):
        store.load(name)
    with pytest.raises(CheckpointError):
        store.write_part("step-1", name, {})


def test_a_digest_is_no_path_either(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    part = store.write_part("step-1", "joint", {"x": torch.zeros(2)})
    store.commit(Manifest("step-1", 1, (part,)))
    file = tmp_path / "step-1" / "manifest.json"
    whole = json.loads(file.read_text())
    file.write_text(json.dumps(whole | {"parts": [vars(part) | {"digest": "/../../../../../../etc/passwd"}]}))
    assert store.manifests() == []


def test_clearing_away_touches_nobody_else_s_files(tmp_path: Path) -> None:
    """Where a folder of checkpoints holds links that lead out of it."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_text("kept")
    store = CheckpointStore(tmp_path / "run")
    for step in range(1, 4):
        part = store.write_part(f"step-{step}", "joint", {"x": torch.zeros(2)})
        store.commit(Manifest(f"step-{step}", step, (part,)))
    os.symlink(outside, tmp_path / "run" / "step-0")
    os.symlink(outside / "precious", tmp_path / "run" / "step-1" / f"x.{'0' * 16}.safetensors")
    store.prune(1)
    assert (outside / "precious").read_text() == "kept"


@pytest.mark.parametrize(
    "code",
    [
        {"kind": "name", "module": "os", "name": "abort"},
        {"kind": "name", "module": "posix", "name": "abort"},
        {"kind": "name", "module": "subprocess", "name": "Popen"},
        {"kind": "name", "module": "builtins", "name": "exec"},
        {"kind": "name", "module": "torch", "name": "os.abort"},
        {"kind": "name", "module": "torch.hub", "name": "sys.exit"},
        {"kind": "name", "module": "thinwire.cluster.fork_server", "name": "subprocess.Popen"},
        {"kind": "pickle", "data": "gASVHgAAAAAAAACMBXBvc2l4lIwGc3lzdGVtlJOUjAR0cnVllIWUUpQu"},
    ],
    ids=lambda code: code.get("name", "pickle"),
)
def test_a_saved_model_names_nothing_of_python_s_own_and_runs_nothing_unasked(code: dict[str, Any]) -> None:
    pytest.importorskip("pyspark", reason="pyspark is not installed: pip install 'thinwire[spark]'")
    from thinwire.spark.objects import SLOTS, Source, made_of

    for slot in SLOTS:
        with pytest.raises(CheckpointError):
            made_of(code, slot, Source("saved"))


def test_a_module_of_python_s_own_is_not_even_imported() -> None:
    pytest.importorskip("pyspark", reason="pyspark is not installed: pip install 'thinwire[spark]'")
    from thinwire.spark.objects import SLOTS, Source, made_of

    sys.modules.pop("this", None)
    for slot in SLOTS:
        with pytest.raises(CheckpointError):
            made_of({"kind": "name", "module": "this", "name": "s"}, slot, Source("saved"))
    assert "this" not in sys.modules


@pytest.mark.parametrize("kind", ["source", "mean_file"])
def test_a_prototxt_that_names_another_file_learns_nothing_of_it(tmp_path: Path, kind: str) -> None:
    """Caffe's paths lead anywhere that the user may read; what lies there is not told."""
    from thinwire.caffe.blobs import read_mean
    from thinwire.caffe.sources import DatumSource

    secret = tmp_path / "secret"
    secret.write_bytes(b"root:x:0:0:hidden words:/root:/bin/sh\n" * 200)
    with pytest.raises(DataError) as said:
        DatumSource(secret) if kind == "source" else read_mean(str(secret))
    assert "hidden" not in str(said.value)


@pytest.mark.parametrize("field", ["net", "train_net"])
@pytest.mark.parametrize(
    "secret",
    [
        b"hidden:x:0:0:words:/root:/bin/sh\n",
        b"name: 'a'\nhidden = words\n",
        b"layer { name: 'a' type: 'ReLU' hidden: 1 }",
        b"name: hidden",
        b"input_dim: 0x" + b"f" * 5000,
        b"layer {" * 3000 + b"hidden",
    ],
    ids=lambda secret: secret[:12].decode(),
)
def test_a_solver_s_net_that_is_none_is_not_told(tmp_path: Path, field: str, secret: bytes) -> None:
    """Neither in the error nor in the errors that it came from, which a traceback shows."""
    from thinwire.caffe.training import input_names, training

    (tmp_path / "secret").write_bytes(secret)
    solver = tmp_path / "solver.prototxt"
    solver.write_text(f"{field}: '{tmp_path}/secret'\nbase_lr: 0.1\n")
    for use in (training, input_names):
        with pytest.raises(ConfigError, match=r"secret.* is not the text of a NetParameter") as said:
            use(None, str(solver))
        shown = "".join(traceback.format_exception(said.value))
        assert "hidden" not in shown
        assert said.value.__context__ is None


FILES_OF_CAFFE = {
    "a mean file": "layer { name: 'd' type: 'Data' top: 'x' top: 'y' transform_param { mean_file: 'FILE' }"
    " data_param { source: 'ROWS' batch_size: 1 } }",
    "rows": "layer { name: 'd' type: 'Data' top: 'x' top: 'y' data_param { source: 'FILE' batch_size: 1 } }",
    "an infogain matrix": "input: 'x' input_shape { dim: 1 dim: 2 } input: 'y' input_shape { dim: 1 }"
    " layer { name: 'l' type: 'InfogainLoss' bottom: 'x' bottom: 'y' infogain_loss_param { source: 'FILE' } }",
    "HDF5": "layer { name: 'd' type: 'HDF5Data' top: 'x' top: 'y' hdf5_data_param { source: 'FILE' batch_size: 1 } }",
    "pictures": "layer { name: 'd' type: 'ImageData' top: 'x' top: 'y'"
    " image_data_param { source: 'FILE' batch_size: 1 } }",
    "windows": "layer { name: 'd' type: 'WindowData' top: 'x' top: 'y'"
    " window_data_param { source: 'FILE' batch_size: 1 } }",
}


@pytest.mark.parametrize("what", FILES_OF_CAFFE)
@pytest.mark.parametrize("kind", ["text", "pipe", "device", "folder"])
def test_no_field_of_a_prototxt_that_names_a_file_tells_what_is_in_it_or_waits(
    tmp_path: Path, what: str, kind: str
) -> None:
    """A pipe without a writer would hold the reader up for ever, and a device may have no end."""
    from thinwire.caffe.sources import write_lmdb
    from thinwire.caffe.training import training

    file = tmp_path / "secret"
    if kind == "text":
        file.write_bytes(b"root:x:0:0:hidden words:/root:/bin/sh\n" * 200)
    elif kind == "pipe":
        os.mkfifo(file)
    elif kind == "device":
        file.symlink_to("/dev/zero")
    else:
        file.mkdir()
        (file / "hidden words").write_text("hidden words")
    if what == "a mean file":
        write_lmdb(tmp_path / "rows", [(np.zeros((1, 2, 2), np.uint8), 1)])
    net = tmp_path / "net.prototxt"
    net.write_text(FILES_OF_CAFFE[what].replace("FILE", str(file)).replace("ROWS", str(tmp_path / "rows")))
    reads = what in ("a mean file", "rows", "an infogain matrix")
    with pytest.raises((ConfigError, DataError)) if reads else contextlib.nullcontext() as said:
        training(str(net), shapes={"x": (1, 2, 2), "y": ()}).model()
    if reads:
        assert "hidden" not in "".join(traceback.format_exception(said.value))


def test_where_a_solver_says_that_snapshots_go_nothing_is_written(tmp_path: Path) -> None:
    from thinwire.caffe.training import training

    net, solver, elsewhere = tmp_path / "net.prototxt", tmp_path / "solver.prototxt", tmp_path / "elsewhere"
    elsewhere.mkdir()
    net.write_text(
        "input: 'x' input_shape { dim: 2 dim: 3 } layer { name: 'i' type: 'InnerProduct' bottom: 'x' top: 'o'"
        " inner_product_param { num_output: 2 } } layer { name: 'l' type: 'EuclideanLoss' bottom: 'o' bottom: 'o' }"
    )
    solver.write_text(
        f"net: '{net}'\nbase_lr: 0.1\nlr_policy: 'fixed'\nsnapshot: 1\nsnapshot_prefix: '{elsewhere}/x'\nmax_iter: 2\n"
    )
    found = training(None, str(solver))
    module = found.model()
    optimizer = found.optimizer(module.parameters())
    for _ in range(2):
        module(torch.zeros(2, 3)).loss.backward()
        optimizer.step()
    assert list(elsewhere.iterdir()) == []


def test_an_lmdb_of_something_else_is_not_told(tmp_path: Path) -> None:
    lmdb = pytest.importorskip("lmdb")
    from thinwire.caffe.sources import DatumSource

    with lmdb.open(str(tmp_path / "other")) as opened, opened.begin(write=True) as writing:
        writing.put(b"hidden key", b"\xff hidden value")
    with pytest.raises(DataError, match="entry 0: this is no Datum") as said:
        DatumSource(tmp_path / "other")
    assert "hidden" not in "".join(traceback.format_exception(said.value))


def test_an_lmdb_folder_is_opened_for_reading_alone(tmp_path: Path) -> None:
    import numpy as np

    from thinwire.caffe.sources import DatumSource, write_lmdb

    write_lmdb(tmp_path / "rows", [(np.zeros((1, 2, 2), np.uint8), 1)])
    (tmp_path / "rows" / "lock.mdb").unlink()
    before = (tmp_path / "rows" / "data.mdb").read_bytes()
    assert sum(batch.num_rows for batch in DatumSource(tmp_path / "rows").batches()) == 1
    assert os.listdir(tmp_path / "rows") == ["data.mdb"]
    assert (tmp_path / "rows" / "data.mdb").read_bytes() == before


def test_a_run_s_name_on_the_page_is_a_number_and_no_path(tmp_path: Path) -> None:
    from tests.security.test_page import ask
    from thinwire.dashboard import serve

    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "events.jsonl").write_text('{"kind": "run_ended", "time": 1, "reason": "hidden words"}\n')
    server = serve([str(write(tmp_path / "a", told(1, 3)))])
    try:
        for run in ("../secret", "/etc/passwd", "-1", "99", "%2e%2e/secret", "0/../secret"):
            status, _, body = ask(server, f"/stream?run={run}")
            assert status == 200
            assert b"hidden" not in body
        for path in ("/../secret/events.jsonl", "/..%2fsecret/events.jsonl", "/assets/../server.py", "//etc/passwd"):
            assert ask(server, path)[0] in (403, 404)
    finally:
        server.close()


def test_only_the_user_s_own_modules_travel_by_value() -> None:
    assert b"test_only_the_user_s_own" not in packed(torch.nn.Linear)
    named = len(packed(torch.nn.functional.relu)) - len(packed(None))
    assert named < 200, "an installed package's function goes by its name"
    assert b"time" in packed(Slow), "a class of one's own goes whole, with what it uses"


def test_folders_and_files_of_a_run_are_its_owner_s_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the user's mask: shards, workers' logs, what lies in the system's folder for temporary files."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    seen: dict[str, int] = {}

    def look(event: events.Event) -> None:
        if isinstance(event, events.GenerationFormed):
            for path in tmp_path.glob("thinwire-*"):
                seen[path.name] = stat.S_IMODE(path.stat().st_mode)
            for path in tmp_path.glob("thinwire-logs-*/*"):
                seen[path.name] = stat.S_IMODE(path.stat().st_mode)

    before = os.umask(0)
    try:
        tw.fit(Slow(), "digits", epochs=1, cluster=tw.Local(workers=2), callbacks=[look], progress=False)
    finally:
        os.umask(before)
    assert sum(name.startswith("thinwire-") for name in seen) >= 2, "shards, and logs"
    assert {"0.0", "1.0"} <= set(seen)
    assert all(mode & 0o077 == 0 for mode in seen.values()), {name: oct(mode) for name, mode in seen.items()}
    assert list(tmp_path.glob("thinwire-*")) == []


def test_rows_that_are_fetched_lie_in_a_folder_of_one_s_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARK_LOCAL_DIRS", str(tmp_path))
    before = os.umask(0)
    try:
        with Fetched(False).shard(0, None, lambda name: iter([b"rows"])) as files:
            folder = Path(files.train).parent
            assert stat.S_IMODE(folder.stat().st_mode) == 0o700
            assert folder.parent == tmp_path
    finally:
        os.umask(before)
    assert list(tmp_path.iterdir()) == []


def test_a_box_is_in_a_folder_that_others_cannot_enter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(box, "path_of", lambda run: str(tmp_path / f"b{run}"))
    before = os.umask(0)
    try:
        mine = box.Box("1", "token", "0.0", lambda header, frames: iter([({"heard": header["t"]}, [])]))
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "b1").stat().st_mode) == 0o700
    with box.knock("1", "token", "0.0", {"t": "post"}, []) as door:
        assert box.receive(door)[0] == {"heard": "post"}
    with box.knock("1", "another", "0.0", {"t": "post"}, []) as door, pytest.raises(ProtocolError, match="gone"):
        box.receive(door)
    mine.close()
    (tmp_path / "b2").mkdir(mode=0o755)
    with pytest.raises(ProtocolError, match="not a private folder"):
        box.Box("2", "token", "0.0", lambda header, frames: iter([]))
    os.symlink(tmp_path / "b2", tmp_path / "b3")
    with pytest.raises(ProtocolError, match="not a private folder"):
        box.Box("3", "token", "0.0", lambda header, frames: iter([]))


def test_a_recipe_s_own_words_for_code_are_imported_and_never_evaluated(tmp_path: Path) -> None:
    from thinwire.models import imported

    for text in ("__import__('os').system('true')", "os.system('true')", "/etc/passwd:x", "../x:make", ":x"):
        with pytest.raises(ConfigError):
            imported("model.factory", text)
