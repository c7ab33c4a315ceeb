import os
import subprocess
import sys
import time

import pytest

from thinwire.errors import ConfigError, TimedOutError
from thinwire.units import rate_bits
from thinwire_lab.bench.processes import Processes
from thinwire_lab.testbed import Testbed, remove_leftovers

why_not = Testbed.why_not()
pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.root,
    pytest.mark.skipif(why_not is not None, reason=f"no testbed here: {why_not}"),
]

SERVE = """
import socket, sys
server = socket.create_server((sys.argv[1], 5000))
print("ready", flush=True)
peer, _ = server.accept()
total = 0
while data := peer.recv(1 << 16):
    total += len(data)
peer.sendall(b"%d" % total)
"""
SEND = """
import socket, sys, time
peer = socket.create_connection((sys.argv[1], 5000), timeout=600)
size = int(sys.argv[2])
began = time.perf_counter()
peer.sendall(bytes(size))
peer.shutdown(socket.SHUT_WR)
assert int(peer.recv(100)) == size
print(time.perf_counter() - began)
"""
REACH = "import socket, sys; socket.create_connection((sys.argv[1], 5000), timeout=float(sys.argv[2]))"


def transfer(bed: Testbed, to: int, source: int, size_bytes: int) -> float:
    server = bed.popen(to, [sys.executable, "-c", SERVE, bed.address(to)], stdout=subprocess.PIPE, text=True)
    assert server.stdout.readline() == "ready\n"
    done = bed.run(source, [sys.executable, "-c", SEND, bed.address(to), str(size_bytes)], 600.0)
    assert done.returncode == 0, done.stderr
    server.wait(600)
    server.stdout.close()
    return size_bytes * 8 / float(done.stdout)


def listening(bed: Testbed, node: int) -> subprocess.Popen:
    code = (
        "import socket, sys, time; s = socket.create_server((sys.argv[1], 5000)); print(1, flush=True); time.sleep(600)"
    )
    server = bed.popen(node, [sys.executable, "-c", code, bed.address(node)], stdout=subprocess.PIPE, text=True)
    assert server.stdout.readline() == "1\n"
    return server


def reaches(bed: Testbed, source: int, to: int, patience_s: float = 300.0) -> bool:
    return bed.run(source, [sys.executable, "-c", REACH, bed.address(to), str(patience_s)], 600.0).returncode == 0


def test_every_node_reaches_every_other_and_the_machine_knows_none_of_their_addresses():
    with Testbed(3) as bed:
        for node in range(3):
            listening(bed, node)
        assert all(reaches(bed, a, b) for a in range(3) for b in range(3) if a != b)
        own = subprocess.run(["ip", "address"], capture_output=True, text=True, check=True).stdout
        assert bed.address(0) not in own


def test_a_transfer_keeps_to_the_rate_and_to_a_new_one():
    with Testbed(2, "100mbit") as bed:
        assert transfer(bed, 0, 1, 20_000_000) < 150e6
        bed.throttle(0, "20mbit")  # what it receives is held back as well
        assert transfer(bed, 0, 1, 4_000_000) < 40e6
        bed.throttle(0, None)
        bed.throttle(1, None)
        assert any(transfer(bed, 0, 1, 20_000_000) > 150e6 for _ in range(50)), "no faster than when it was held back"


def test_a_cut_node_is_out_of_reach_until_healed():
    with Testbed(2) as bed:
        listening(bed, 0)
        assert reaches(bed, 1, 0)
        bed.cut(0)
        assert not reaches(bed, 1, 0, patience_s=1.0)
        bed.heal(0)
        assert reaches(bed, 1, 0)


def test_a_killed_node_loses_its_processes_and_their_children_only():
    with Testbed(2) as bed:
        spared = bed.popen(1, ["sleep", "600"])
        shell = bed.popen(0, ["sh", "-c", "setsid sleep 600 & echo $!; wait"], stdout=subprocess.PIPE, text=True)
        grandchild = int(shell.stdout.readline())
        bed.kill(0)
        assert shell.returncode is not None
        assert gone(grandchild)
        assert spared.poll() is None
        listening(bed, 0)
        assert reaches(bed, 1, 0)


def test_nothing_is_left_after_the_end_even_when_the_body_raises():
    bed = Testbed(2)
    started = []

    def body() -> None:
        with bed:
            started.append(bed.popen(0, ["sleep", "600"]))
            raise RuntimeError("on purpose")

    with pytest.raises(RuntimeError, match="on purpose"):
        body()
    assert started[0].returncode is not None
    assert not [name for name in namespaces() if name.startswith(f"tw{os.getpid()}-")]
    bed.close()


def test_leftovers_of_a_dead_run_are_removed_by_the_next():
    code = (
        "import os; from thinwire_lab.testbed import Testbed; bed = Testbed(2); bed.__enter__(); "
        "print(bed.popen(0, ['sleep', '600'], stdout=-3, stderr=-3).pid, bed.namespace(0), flush=True); os._exit(9)"
    )
    dead = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    pid, name = dead.stdout.split()
    assert name in namespaces()
    assert name in remove_leftovers()
    assert name not in namespaces()
    assert gone(int(pid))


def test_a_command_past_its_time_is_ended_and_named():
    with Testbed(1) as bed, pytest.raises(TimedOutError, match="sleep 30 on node 0"):
        bed.run(0, ["sleep", "30"], 0.3)


@pytest.mark.parametrize("rate", ["0gbit", "fast", "1gb", ""])
def test_a_rate_that_is_none_is_refused(rate):
    with pytest.raises(ConfigError, match="write a number above 0 and a unit, one of kbit, mbit, gbit"):
        Testbed(2, rate)


def test_a_node_that_is_not_there_is_refused():
    with pytest.raises(ConfigError, match="nodes 0 to 1"):
        Testbed(2).address(2)


def test_rates_are_bits_per_second():
    assert rate_bits("1.5gbit") == 1.5e9


def namespaces() -> list[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return [line.split()[0] for line in listed.splitlines()]


def gone(pid: int) -> bool:
    for _ in range(3000):
        try:
            with open(f"/proc/{pid}/stat") as stat:
                if stat.read().rsplit(")", 1)[1].split()[0] == "Z":
                    return True
        except FileNotFoundError:
            return True
        time.sleep(0.02)
    return False


def test_a_short_message_does_not_pass_faster_than_the_link():
    """A bucket that holds more than a millisecond's worth would let it through at once, which no cable does."""
    with Testbed(2, "100mbit") as bed:
        assert transfer(bed, 1, 0, 100_000) <= 200e6


@pytest.mark.long
def test_codecs_put_fewer_bytes_on_the_cable_as_its_interface_counts_them():
    crossed = {}
    with Testbed(3, "1gbit") as bed:
        for codec in ("float32", "int8", "int4", "sign2", "sign1"):
            before = bed.sent_bytes(0)
            options = {"size": 4_000_000, "codec": codec, "blocks": 1, "block": 3, "gloo": False, "interface": "eth0"}
            Processes(bed).run("exchange_seconds", options)
            crossed[codec] = bed.sent_bytes(0) - before
    assert crossed["float32"] >= 4 * 4 * 4_000_000
    assert crossed["float32"] / crossed["int8"] >= 3.5
    assert crossed["float32"] / crossed["int4"] >= 7.0
    assert crossed["float32"] / crossed["sign2"] >= 13.0
    assert crossed["float32"] / crossed["sign1"] >= 25.0


@pytest.mark.long
@pytest.mark.parametrize("busy", [0, 4], ids=["idle", "beside busy programs"])
@pytest.mark.parametrize(("rate", "steps"), [("10mbit", 40), ("100mbit", 60), ("1gbit", 80)])
def test_relay_takes_the_link_for_no_more_than_twice_and_no_less_than_half_of_what_it_is(
    rate: str, steps: int, busy: int
) -> None:
    options = {"size": 2_500_000, "name": "relay", "knobs": {}, "codec": "float32", "step_s": 0.1}
    options |= {"warm_up": 8, "steps": steps, "exchanging": True}
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(busy)]
    try:
        with Testbed(3, rate) as bed:
            found = Processes(bed, workers=2).run("paced_steps", options)[0]["link_bytes_per_s"]
    finally:
        for other in others:
            other.kill()
            other.wait()
    if found is not None:  # not certain: the setting is held
        assert rate_bits(rate) / 2 < found * 8 < rate_bits(rate) * 2
