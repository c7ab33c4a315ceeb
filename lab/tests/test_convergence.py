"""The grid of Relay against free communication: which cells, how they are judged, and one of them for real."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from typing import Any

import pytest

from thinwire_lab.bench import convergence
from thinwire_lab.bench.convergence import Cell, compared, parsed, spread, trials


def run(cell: Cell, rate: float, seed: int, loss: float, accuracy: float = 0.5) -> dict[str, Any]:
    return {**cell._asdict(), "rate": rate, "seed": seed, "val_loss": loss, "val_accuracy": accuracy}


@pytest.mark.parametrize("shift", range(3))
def test_forty_cells_lie_evenly_over_the_grid(shift: int) -> None:
    cells = spread(shift)
    assert len(set(cells)) == 40
    for field in ("task", "workers"):
        assert set(Counter(getattr(cell, field) for cell in cells).values()) == {8}, field
    assert set(Counter(cell.ratio for cell in cells).values()) == {10}
    assert set(Counter(cell.batch for cell in cells).values()) == {20}


def test_free_communication_is_run_once_for_all_ratios_of_a_cell() -> None:
    cells = [parsed("table:4:small:16"), parsed("table:4:small:64")]
    wanted = list(trials(cells, [0, 1]))
    assert len(wanted) == len(set(wanted)) == 3 * 2 * 2


def test_the_better_rate_counts_on_either_side_and_a_cell_with_a_run_missing_is_left_out() -> None:
    cell = parsed("table:4:small:16")
    free, (low, high) = cell._replace(ratio=0.0), convergence.TASKS["table"].rates
    runs = [run(free, low, 0, 1.0), run(free, high, 0, 2.0), run(cell, low, 0, 9.0)]
    assert compared(runs, [cell], [0]) == []
    (found,) = compared([*runs, run(cell, high, 0, 1.02)], [cell], [0])
    assert (found["relay"]["rate"], found["free"]["rate"]) == (high, low)
    assert found["loss"] == pytest.approx(1.02)
    assert not found["equal"]


def test_pictures_are_judged_by_points_of_accuracy() -> None:
    cell = parsed("resnet20:4:small:16")
    rates = convergence.TASKS["resnet20"].rates
    runs = [run(cell._replace(ratio=0.0), rate, 0, 1.0, 0.60) for rate in rates]
    for accuracy, equal in ((0.595, True), (0.58, False)):
        (found,) = compared([*runs, *(run(cell, rate, 0, 1.5, accuracy) for rate in rates)], [cell], [0])
        assert found["equal"] is equal


def test_what_is_no_cell_is_refused() -> None:
    with pytest.raises(SystemExit, match="is no cell"):
        parsed("tables:4:small:16")


@pytest.mark.processes
def test_a_run_that_is_in_the_file_is_not_repeated(tmp_path: Any) -> None:
    out = tmp_path / "out.json"
    argv = [sys.executable, "-m", "thinwire_lab.bench.convergence", "--out", str(out), "--seeds", "0", "--steps", "3"]
    for _ in range(2):
        done = subprocess.run(
            [*argv, "--device", "cpu", "--cells", "table:4:small:16"], capture_output=True, text=True, timeout=280
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines()[-1].endswith("of 1 cells equal, 1 wanted")
    assert len(done.stdout.splitlines()) == 2, "nothing is run the second time"
    assert len(json.loads(out.read_text())["runs"]) == 4
