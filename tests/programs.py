"""Programs of the documentation and of examples/, run in this process as `python program.py` would run them."""

from __future__ import annotations

import contextlib
import io
import os
import re
import runpy
import sys
import warnings
from pathlib import Path
from typing import NamedTuple

import pytest

from thinwire import logs
from thinwire.cli.main import main

ROOT = Path(__file__).parents[1]


class Done(NamedTuple):
    """What `subprocess.run` would say of a command."""

    returncode: int
    stdout: str
    stderr: str


def command_here(capture: pytest.CaptureFixture[str], *arguments: str, folder: Path = ROOT) -> Done:
    """Runs the command `thinwire` in a folder and gives back its exit code and output."""
    here, path, modules = os.getcwd(), list(sys.path), set(sys.modules)
    capture.readouterr()
    os.chdir(folder)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("default")
            code = main(arguments)
    except SystemExit as ended:
        code = int(ended.code or 0)
    finally:
        os.chdir(here)
        sys.path[:] = path
        logs.start(None)
        for name in set(sys.modules) - modules:  # other tests have modules of the same name
            if folder != ROOT and str(getattr(sys.modules[name], "__file__", "")).startswith(str(folder)):
                del sys.modules[name]
    return Done(code, *capture.readouterr())


def run_here(script: Path, *arguments: str, folder: Path) -> str:
    """Runs a program in a folder and gives back what it prints."""
    printed, here, argv, path = io.StringIO(), os.getcwd(), sys.argv, list(sys.path)
    os.chdir(folder)
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.parent))
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(printed):
            warnings.simplefilter("default")
            runpy.run_path(str(script), run_name="__main__")
    except SystemExit as ended:
        if ended.code:
            raise AssertionError(f"{script.name} ended with {ended.code}") from ended
    finally:
        os.chdir(here)
        sys.argv, sys.path[:] = argv, path
    return printed.getvalue()


def code_blocks(path: Path, language: str = "python") -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", path.read_text(), re.DOTALL | re.MULTILINE)


def shortened(code: str) -> str:
    return re.sub(r"epochs=\d+|(?<=\"epochs\": )\d+", lambda found: re.sub(r"\d+", "2", found[0]), code)


def page_here(page: Path, folder: Path) -> str:
    """Runs the code of a page as one program and gives back what it prints."""
    script = folder / "page.py"
    script.write_text("\n\n".join(code_blocks(page)))
    return run_here(script, folder=folder)


def example_here(name: str, *arguments: str, folder: Path) -> str:
    """Runs an example with two epochs and gives back what it prints."""
    script = folder / name
    script.write_text(shortened((ROOT / "examples" / name).read_text()))
    return run_here(script, *arguments, folder=folder)
