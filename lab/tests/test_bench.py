import json
import subprocess
import sys

import pytest

from thinwire_lab.bench import BENCHES


def bench(*words: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "thinwire.cli.main", "bench", *words]
    return subprocess.run(argv, capture_output=True, text=True, timeout=280)


@pytest.mark.long
@pytest.mark.timeout(300)
def test_overhead_gives_a_ratio_for_every_model_and_saves_it(tmp_path):
    done = bench("overhead", "--quick", "--json", "--save", str(tmp_path))
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert {row["name"].split(",")[0] for row in result["rows"]} == {"mlp", "cnn"}
    for row in result["rows"]:
        assert row["value"] > 0
        assert row["target"] == 0.97
        assert row["met"] in (True, False)
    assert {"cpu", "cores", "memory_gb", "kernel", "python", "torch", "pyzmq"} <= set(result["machine"])
    assert result["command"] == "thinwire bench overhead --quick"
    assert json.loads((tmp_path / "overhead.json").read_text()) == result


def test_a_name_that_is_none_is_refused_with_the_nearest():
    done = bench("overheat")
    assert done.returncode == 2
    assert "Did you mean 'overhead'?" in done.stderr


def test_the_help_names_them_all() -> None:
    told = bench("--help").stdout
    assert [name for name in (*BENCHES, "suite") if name not in told] == []
