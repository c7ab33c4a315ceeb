"""A small disk and a browser, for tests that need them."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[int], Path]]:
    """Mounts a disk of the given size; tests that need it are skipped where mounting is not allowed."""
    if os.geteuid() != 0:
        pytest.skip("mounting a tmpfs needs root")
    folder = tmp_path / "disk"

    def mount(size_bytes: int) -> Path:
        folder.mkdir()
        words = ["mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "tmpfs", str(folder)]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            pytest.skip(f"a tmpfs cannot be mounted here: {done.stderr.strip()}")
        return folder

    yield mount
    if folder.is_mount():
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    """A real Chromium without a window; tests that need it are skipped where Chromium is missing."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: see the extra dev")
    path = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if path is None:
        pytest.skip("there is no Chromium here: apt-get install chromium")
    flags = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"]
    flags += ["--disable-background-networking", "--disable-component-update"]
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=flags)
        yield browser
        browser.close()


@pytest.fixture
def page(chromium: Any) -> Iterator[Any]:
    """A tab of its own; the test fails if the page reports an error."""
    context = chromium.new_context(viewport={"width": 1280, "height": 1000})
    context.set_default_timeout(600_000)  # long enough for slow machines
    tab = context.new_page()
    wrong: list[str] = []
    tab.on("pageerror", lambda error: wrong.append(str(error)))
    tab.on("console", lambda told: wrong.append(told.text) if "Content Security Policy" in told.text else None)
    yield tab
    context.close()
    assert not wrong


def until(page: Any, expression: str, timeout_s: float = 600.0) -> None:
    """Waits for an expression that Playwright cannot wait for, because the page's policy forbids `eval`."""
    deadline = time.monotonic() + timeout_s
    while not page.evaluate(expression):
        assert time.monotonic() < deadline, f"the page never came to: {expression}"
        page.wait_for_timeout(100)
