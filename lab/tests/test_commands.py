"""The commands that thinwire-lab adds: found when it is installed, asked for by name when it is not."""

from __future__ import annotations

import argparse
import importlib.metadata
import re
from pathlib import Path

import pytest

import thinwire
from thinwire.cli import extras
from thinwire.cli.main import main, parser

ROOT = Path(__file__).parents[2]
OPTIONS = {
    "bench": {"": ["--help", "--json", "--quick", "--save"]},
    "testbed": {
        "": ["--help"],
        "run": ["--cores", "--help", "--memory", "--nodes", "--rate"],
        "schedules": ["--digests", "--help", "--jobs", "--json", "--record", "--seeds", "--strategy"],
        "chaos": [
            "--arenas",
            "--deeds",
            "--help",
            "--json",
            "--kills",
            "--minutes",
            "--out",
            "--placements",
            "--seed",
            "--strategies",
        ],
        "soak": ["--arena", "--every", "--exchange", "--help", "--json", "--minutes", "--out", "--strategy"],
    },
}
"""By command and act."""


def acts_of(command: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    found = [a for a in command._actions if isinstance(a, argparse._SubParsersAction)]
    return {"": command} | (dict(found[0].choices) if found else {})


def options_of(command: argparse.ArgumentParser) -> list[str]:
    return sorted(o for action in command._actions for o in action.option_strings if o.startswith("--"))


@pytest.mark.parametrize("name", extras.EXTRAS)
def test_the_options_of_a_command_are_these_and_the_reference_has_them(name: str) -> None:
    acts = acts_of(acts_of(parser(name))[name])
    assert {act: options_of(command) for act, command in acts.items()} == OPTIONS[name]
    section = (ROOT / "docs" / "reference" / "cli.md").read_text().partition(f"\n## thinwire {name}\n")[2]
    documented = set(re.findall(r"^\| `(--\w+)", section.partition("\n## ")[0], re.MULTILINE))
    assert documented == {option for command in acts.values() for option in options_of(command)} - {"--help"}


def test_the_entry_points_are_the_commands_that_thinwire_expects() -> None:
    found = importlib.metadata.entry_points(group=extras.GROUP)
    assert {entry_point.name for entry_point in found} == set(extras.EXTRAS)


def test_versions_go_together() -> None:
    asked = importlib.metadata.requires("thinwire-lab")
    assert asked == [f"thinwire=={thinwire.__version__}"]
    assert importlib.metadata.version("thinwire-lab") == thinwire.__version__


@pytest.fixture(params=["nothing installed", "only metadata left"])
def absent(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A Python without thinwire-lab."""
    if request.param == "nothing installed":
        monkeypatch.setattr(importlib.metadata, "entry_points", lambda **_: ())
    else:
        monkeypatch.setattr(extras, "find_spec", lambda name: None)


@pytest.mark.usefixtures("absent")
@pytest.mark.parametrize("words", [["bench", "overhead"], ["bench", "--help"], ["testbed", "schedules"]])
def test_a_command_that_is_not_installed_says_what_to_install(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    told = capsys.readouterr().err
    assert f"the command {words[0]!r} is not installed" in told
    assert "comes with the package thinwire-lab" in told
    assert "pip install thinwire-lab" in told


@pytest.mark.usefixtures("absent")
def test_help_says_what_to_install(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    told = " ".join(capsys.readouterr().out.split())
    assert told.count("(not installed: pip install thinwire-lab)") == len(extras.EXTRAS)


@pytest.mark.usefixtures("absent")
def test_a_misspelt_command_is_known_though_it_is_not_installed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["bnech"])
    assert "Did you mean 'bench'?" in capsys.readouterr().err


def test_help_of_an_installed_command_says_nothing_of_installing(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "pip install" not in capsys.readouterr().out
