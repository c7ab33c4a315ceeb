"""The page of a live run on Spark, in a real browser: it follows the run, and shows a death and a rebirth."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest

import thinwire as tw
from thinwire import events
from thinwire.dashboard import Dashboard

from ..conftest import until
from .test_executors_die import Killer, fit

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]
PICTURE = Path(__file__).parents[2] / "docs" / "images" / "dashboard-live.png"


def test_a_killed_worker_and_its_rebirth_on_the_page(spark: Any, digits: Any, page: Any) -> None:
    killer, found = Killer((1,)), {}
    board = Dashboard(title="digits on Spark")

    def train() -> None:
        found["result"] = fit(digits.select("pixels", "label"), tw.Relay(), killer, callbacks=[killer, board])

    thread = threading.Thread(target=train)
    thread.start()
    try:
        page.goto(board.url)
        page.wait_for_selector("#state[data-state=running]", timeout=600_000)
        until(page, "document.querySelectorAll('#rows tr').length === 3", 600)
        page.wait_for_selector("#marks li[data-kind=lost]", timeout=600_000)
        page.wait_for_selector("#marks li[data-kind=reborn]", timeout=600_000)
        first = int(page.evaluate("document.body.dataset.events"))
        until(page, f"Number(document.body.dataset.events) > {first}", 600)
        page.wait_for_selector("#state[data-state=ended]", timeout=600_000)
        if os.environ.get("THINWIRE_PICTURES"):
            page.screenshot(path=str(PICTURE), full_page=True)
        assert page.locator("#rows td[data-state=done]").count() == 3
        lost = {event.worker for event in killer.of(events.WorkerLost)}
        for worker in lost:
            assert page.locator(f"#rows tr[data-worker='{worker}'] td:nth-child(12)").inner_text() == "1"
        received = page.locator("#rows tr:first-child td:nth-child(11)").inner_text()
        assert received not in ("0B", "–")
        assert page.locator(".chart:visible").count() == 6
    finally:
        thread.join(900)
        board.close()
    assert found["result"].summary["workers_lost"] == 1
