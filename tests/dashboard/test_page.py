"""The page in a real Chromium: what it shows, how it goes on, and that everyone can use it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from thinwire.dashboard import serve

from ..conftest import until
from .logs import BEGAN, events, write

pytestmark = pytest.mark.timeout(900)
PICTURES = Path(__file__).parents[2] / "docs" / "images"


def shown(page: Any, selector: str) -> str:
    return str(page.locator(selector).inner_text())


def picture(page: Any, name: str) -> None:
    """Pictures of the page for the docs are made by hand: THINWIRE_PICTURES=1."""
    if os.environ.get("THINWIRE_PICTURES"):
        page.screenshot(path=str(PICTURES / f"{name}.png"), full_page=True)


LOOKS = (("light", 390), ("light", 1280), ("dark", 1280))


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return write(Path("runs") / "a", events(8, 300, lost=3))


def test_a_finished_run(page: Any, run: Path) -> None:
    server = serve([str(run)])
    try:
        page.goto(server.url)
        page.wait_for_selector("#state[data-state=ended]")
        assert page.locator("#rows tr").count() == 8
        assert shown(page, "#rows tr[data-worker='3'] td:nth-child(2)") == "node-new"
        assert shown(page, "#rows tr[data-worker='3'] td:nth-child(12)") == "1"
        assert "killed" in shown(page, "#marks li[data-kind=lost]")
        assert "all rows done" in shown(page, "#about")
        assert page.locator(".chart:visible").count() == 6
        assert page.locator(".chart path").count() >= 8
        assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    finally:
        server.close()


def test_a_page_that_is_open_sees_what_is_new_and_survives_a_restart(page: Any, tmp_path: Path) -> None:
    every = list(events(4, 60, lost=1))
    run = write(tmp_path / "a", iter(every[:100]))
    server = serve([str(run)])
    port = server.server_address[1]
    page.goto(server.url)
    page.wait_for_selector("#state[data-state=running]")
    before = int(page.evaluate("document.body.dataset.events"))

    def more(part: list[dict[str, Any]]) -> None:
        with open(run / "events.jsonl", "a", encoding="utf-8") as file:
            file.writelines(json.dumps(event) + "\n" for event in part)

    more(every[100:160])
    until(page, f"Number(document.body.dataset.events) > {before}")
    server.close()
    page.wait_for_selector("#state[data-state=away]")
    assert page.locator("#rows tr").count() == 4, "what was shown stays"
    more(every[160:])
    server = serve([str(run)], port=port)
    try:
        page.wait_for_selector("#state[data-state=ended]")
        until(page, f"document.body.dataset.events === '{len(every)}'")
        assert page.locator("#marks li[data-kind=reborn]").count() == 1
    finally:
        server.close()


def test_several_runs_side_by_side(page: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folders = [write(Path("runs") / name, events(workers, 120)) for name, workers in (("slow", 2), ("fast", 8))]
    server = serve([str(folder) for folder in folders])
    try:
        page.goto(server.url)
        page.get_by_role("button", name="Compare").click()
        until(page, "document.querySelectorAll('.chart:nth-child(3) .key span').length === 2")
        assert "fast" in shown(page, ".chart:nth-child(3) .key")
        assert page.locator("#workers").is_hidden()
        picture(page, "dashboard-compare")
        page.get_by_role("button", name="fast").click()
        until(page, "document.querySelectorAll('#rows tr').length === 8")
    finally:
        server.close()


def test_by_keyboard_alone(page: Any, run: Path) -> None:
    server = serve([str(run)])
    try:
        page.goto(server.url)
        page.wait_for_selector("#state[data-state=ended]")
        page.locator(".chart svg").first.focus()
        page.keyboard.press("Home")
        start = shown(page, ".chart .key >> nth=0")
        page.keyboard.press("ArrowRight")
        page.keyboard.press("ArrowRight")
        assert shown(page, ".chart .key >> nth=0") != start
        assert "Loss" in page.locator("#told").inner_text()
        page.locator("#lanes canvas").focus()
        for key in ("+", "+", "ArrowLeft", "-", "0"):
            page.keyboard.press(key)
        assert "Timeline of 8 workers" in page.locator("#told").inner_text()
        page.select_option("#across", "steps")
        until(page, "[...document.querySelectorAll('.chart text')].some(t => t.textContent.includes('steps'))")
    finally:
        server.close()


@pytest.mark.parametrize(
    ("scheme", "width"),
    [("dark", 390), *(pytest.param(*other, marks=pytest.mark.long) for other in LOOKS)],
)
def test_nothing_serious_for_axe(chromium: Any, run: Path, scheme: str, width: int) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe is not installed: see the extra dev")
    context = chromium.new_context(viewport={"width": width, "height": 844}, color_scheme=scheme, bypass_csp=True)
    context.set_default_timeout(600_000)
    server = serve([str(run), str(run)])
    try:
        page = context.new_page()
        page.goto(server.url)
        page.wait_for_selector("#state[data-state=ended]")
        found = axe.Axe().run(page)
        bad = [v for v in found.response["violations"] if v["impact"] in ("serious", "critical")]
        assert not bad, [(v["id"], [n["html"] for n in v["nodes"]][:3]) for v in bad]
        assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth"), "it scrolls sideways"
        if (scheme, width) == ("dark", 390):
            picture(page, "dashboard-phone")
    finally:
        server.close()
        context.close()


def test_sixty_four_workers(page: Any, tmp_path: Path) -> None:
    server = serve([str(write(tmp_path / "a", events(64, 200, lost=9)))])
    try:
        page.goto(server.url)
        page.wait_for_selector("#state[data-state=ended]")
        assert page.locator("#rows tr").count() == 64
        drawn = page.evaluate(
            "(() => { const c = document.querySelector('#lanes canvas'); const d = c.getContext('2d')"
            ".getImageData(0, 0, c.width, c.height).data; const s = new Set();"
            "for (let i = 0; i < d.length; i += 4) s.add(d[i] * 65536 + d[i + 1] * 256 + d[i + 2]); return s.size; })()"
        )
        assert drawn > 4, "the timeline has colours"
        assert "Timeline of 64 workers" in page.locator("#lanes canvas").get_attribute("aria-label")
    finally:
        server.close()


def test_times_start_where_the_run_did(page: Any, run: Path) -> None:
    assert BEGAN > 1e9
    server = serve([str(run)])
    try:
        page.goto(server.url)
        page.wait_for_selector("#state[data-state=ended]")
        assert "5 min 1 s" in shown(page, "#tiles")
    finally:
        server.close()
