"""What a user of a release gets: wheel and sdist, installed into an environment of their own, outside the tree."""

from __future__ import annotations

import email
import os
import re
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

import thinwire
from thinwire import recipe
from thinwire.errors import ConfigError

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.timeout(1800)
NEEDED = (
    "thinwire/py.typed",
    "thinwire/caffe/fields.txt",
    "thinwire/data/digits.npz",
    *(f"thinwire/dashboard/assets/{name}" for name in ("index.html", "page.css", "page.js", "charts.js", "icon.svg")),
    *(f"thinwire/recipes/{name}.toml" for name in recipe.SHIPPED),
)

pytest.importorskip("build", reason="build is not installed: pip install 'thinwire[dev]'")
pytest.importorskip("hatchling", reason="hatchling is not installed: pip install 'thinwire[dev]'")


def call(*command: str, folder: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sdist, and the wheel that is built from it."""
    folder = tmp_path_factory.mktemp("dist")
    call(sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT), folder=folder)
    return folder


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of the laboratory, from its sdist."""
    if not (ROOT / "lab").exists():
        pytest.skip("this tree has no lab/: it is an sdist of thinwire alone")
    folder = tmp_path_factory.mktemp("lab")
    call(sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT / "lab"), folder=folder)
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def wheel(dist: Path) -> Path:
    (path,) = dist.glob("*.whl")
    return path


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def test_the_wheel_holds_the_package_and_what_it_reads_and_nothing_else(wheel: Path) -> None:
    held = contents(wheel)
    tracked = subprocess.run(["git", "ls-files", "src"], cwd=ROOT, capture_output=True, text=True).stdout.split()
    sources = tracked or [str(p.relative_to(ROOT)) for p in (ROOT / "src").rglob("*.py")]
    assert {name.removeprefix("src/") for name in sources} <= set(held)
    assert set(NEEDED) <= set(held)
    assert {name.split("/")[0] for name in held} == {"thinwire", f"thinwire-{thinwire.__version__}.dist-info"}
    kinds = {Path(name).suffix for name in held if name.startswith("thinwire/")}
    assert kinds == {".py", ".typed", ".txt", ".npz", ".html", ".css", ".js", ".svg", ".toml"}
    assert not [name for name in held if re.search(r"(^|/)(tests?|conftest.*|__pycache__)(/|$)", name)]
    assert not [name for name in held if re.match(r"thinwire/(bench|testing)/", name)], "that is thinwire-lab's"
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in held)


def test_the_laboratory_has_a_wheel_of_its_own(lab: Path) -> None:
    held = contents(lab)
    tops = {name.split("/")[0] for name in held}
    assert tops == {"thinwire_lab", f"thinwire_lab-{thinwire.__version__}.dist-info"}
    assert {f"thinwire_lab/{name}" for name in ("py.typed", "testbed.py", "bench/__init__.py")} <= set(held)
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in held)
    (name,) = (name for name in held if name.endswith("/METADATA"))
    assert email.message_from_bytes(held[name]).get_all("Requires-Dist") == [f"thinwire=={thinwire.__version__}"]


def test_the_tree_builds_the_same_wheel_as_the_sdist(wheel: Path, tmp_path: Path) -> None:
    call(sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", ".", str(ROOT), folder=tmp_path)
    (direct,) = tmp_path.glob("*.whl")
    assert contents(direct) == contents(wheel)


def test_the_sdist_can_be_tested_and_holds_no_results(dist: Path) -> None:
    (path,) = dist.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        top = {name.split("/")[1] for name in archive.getnames()}
    assert {"src", "tests", "recipes", "pyproject.toml", "constraints.txt", "LICENSE", "README.md", "PKG-INFO"} <= top
    assert not top & {"benchmarks", "docs", "runs", ".venv", ".ci"}


def test_the_metadata_are_those_of_pyproject(wheel: Path) -> None:
    held = contents(wheel)
    (name,) = (name for name in held if name.endswith("/METADATA"))
    metadata = email.message_from_bytes(held[name])
    (entry,) = (name for name in held if name.endswith("/entry_points.txt"))
    assert metadata["Name"] == "thinwire"
    assert metadata["Version"] == thinwire.__version__
    assert metadata["Requires-Python"] == ">=3.10"
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert metadata.get_payload().strip().startswith("# thinwire")
    assert {"spark", "caffe", "dev"} <= set(metadata.get_all("Provides-Extra") or [])
    assert "torch>=2.4" in (metadata.get_all("Requires-Dist") or [])
    assert b"thinwire = thinwire.cli.main:main" in held[entry]


@pytest.mark.long
def test_installed_wheels_work_outside_the_tree(wheel: Path, lab: Path, tmp_path: Path) -> None:
    """The environment is new and holds thinwire alone, then thinwire-lab too; the rest comes from here, after these."""
    place = tmp_path / "environment"
    venv.create(place, with_pip=False)
    python = str(place / "bin" / "python")
    pip = (sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-deps", "--no-index")
    call(*pip, str(wheel), folder=tmp_path)
    (packages,) = place.glob("lib/python*/site-packages")
    outer = [path for path in sys.path if path.endswith("-packages")]
    (packages / "outer.pth").write_text("\n".join(outer) + "\n")  # their own .pth files, an editable's, do not count
    call(python, str(ROOT / ".ci" / "installed.py"), str(tmp_path / "outside"), folder=tmp_path)
    call(*pip, str(lab), folder=tmp_path)
    call(python, str(ROOT / ".ci" / "installed.py"), "--lab", str(tmp_path / "with lab"), folder=tmp_path)


def test_the_citation_names_the_version_and_the_licence() -> None:
    told = dict(line.split(": ", 1) for line in (ROOT / "CITATION.cff").read_text().splitlines() if ": " in line)
    stated = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert stated is not None
    assert told["version"] == stated[1]
    assert told["license"] == "Apache-2.0"


def test_a_recipe_is_found_by_name_and_a_file_of_that_name_comes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert set(recipe.shipped()) == set(recipe.SHIPPED)
    assert recipe.load("digits", ["train.epochs=3"]).train.epochs == 3
    (tmp_path / "digits").write_text("[train]\nepochs = 7\n")
    assert recipe.load("digits").train.epochs == 7
    with pytest.raises(
        ConfigError, match="'digit' is not a file and not the name of a recipe that comes with thinwire"
    ):
        recipe.load("digit")
