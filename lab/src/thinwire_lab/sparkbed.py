"""A Spark standalone cluster on a testbed: master and driver on node 0, a Spark worker on every other node."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any

from thinwire.errors import ConfigError, TimedOutError
from thinwire_lab.testbed import Testbed

MASTER_PORT = 7077
START_S = 600.0


class SparkBed:
    """A Spark cluster of `nodes` workers with one executor each, every node limited to a rate; a context manager.

    Node 0 is the driver's; nodes 1 to `nodes` are the workers'. `bed` throttles, cuts, heals and kills nodes.

    Args:
        nodes: number of Spark workers.
        rate: rate of every node in each direction.
        cores: task slots of each worker.
        memory: memory of each executor, in Spark's notation.
        folder: folder for all temporary files; by default the system's.
    """

    def __init__(
        self,
        nodes: int,
        rate: str | None = "1gbit",
        *,
        cores: int = 1,
        memory: str = "1g",
        folder: str | None = None,
    ) -> None:
        self.nodes, self._cores, self._memory, self._temporary = nodes, cores, memory, folder
        self.bed = Testbed(nodes + 1, rate)
        self._folder = tempfile.TemporaryDirectory(prefix="thinwire-sparkbed-", dir=folder)

    @staticmethod
    def why_not() -> str | None:
        """Why this machine cannot run such a cluster; None where it can."""
        if shutil.which("java") is None:
            return "there is no Java here, which Spark needs"
        try:
            import pyspark  # noqa: F401
        except ImportError:
            return "pyspark is not installed: pip install 'thinwire[spark]'"
        return Testbed.why_not()

    @property
    def master(self) -> str:
        """The cluster's address for drivers on node 0."""
        return f"spark://{self.bed.address(0)}:{MASTER_PORT}"

    def __enter__(self) -> SparkBed:
        if why := self.why_not():
            raise ConfigError(f"a Spark testbed cannot run here: {why}")
        self.bed.__enter__()
        try:
            self._start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends all processes on the nodes and removes the network."""
        self.bed.close()
        self._folder.cleanup()

    def drive(self, argv: Sequence[str], **kw: Any) -> subprocess.Popen[Any]:
        """Starts a driver program on node 0; THINWIRE_MASTER holds the cluster's address for it."""
        environment = self.environment(0) | {"THINWIRE_MASTER": self.master} | kw.pop("env", {})
        return self.bed.popen(0, argv, env=environment, **kw)

    def start_worker(self, node: int) -> None:
        """Starts the Spark worker of a node, also after `bed.kill`."""
        options = ["--host", self.bed.address(node), "--cores", str(self._cores), "--memory", self._memory]
        options += ["--webui-port", "0", "--work-dir", os.path.join(self._folder.name, f"work{node}")]
        self._java(node, "org.apache.spark.deploy.worker.Worker", *options, self.master)

    def environment(self, node: int) -> dict[str, str]:
        """Environment variables of processes on a node."""
        own = {"SPARK_LOCAL_IP": self.bed.address(node), "PYSPARK_PYTHON": sys.executable, "SPARK_HOME": _home()}
        own["GLOO_SOCKET_IFNAME"] = "eth0"  # the machine's name resolves to a loopback address here
        own |= {"TMPDIR": self._temporary} if self._temporary else {}
        path = os.pathsep.join(p for p in sys.path if p)  # executors find the modules of this process
        return os.environ | own | {"PYTHONPATH": path, "SPARK_LOCAL_DIRS": self._folder.name, "SPARK_NO_DAEMONIZE": "1"}

    def _start(self) -> None:
        where = ["--host", self.bed.address(0), "--port", str(MASTER_PORT), "--webui-port", "0"]
        self._java(0, "org.apache.spark.deploy.master.Master", *where)
        for node in range(1, self.nodes + 1):
            self.start_worker(node)
        deadline = time.monotonic() + START_S
        while self._registered() < self.nodes:
            if time.monotonic() > deadline:
                raise TimedOutError(
                    f"{self._registered()} of {self.nodes} Spark workers had registered after {START_S:.0f} s:\n"
                    + self._log(0)[-2000:]
                )
            time.sleep(0.5)

    def _registered(self) -> int:
        return len(re.findall(r"Registering worker ", self._log(0)))

    def _log(self, node: int) -> str:
        path = os.path.join(self._folder.name, f"{node}.log")
        if not os.path.exists(path):
            return ""
        with open(path, errors="replace") as file:
            return file.read()

    def _java(self, node: int, name: str, *options: str) -> None:
        log = open(os.path.join(self._folder.name, f"{node}.log"), "a")  # noqa: SIM115 - the child process keeps it open
        argv = [os.path.join(_home(), "bin", "spark-class"), name, *options]
        self.bed.popen(node, argv, env=self._logged(node), stdout=log, stderr=subprocess.STDOUT)
        log.close()

    def _logged(self, node: int) -> dict[str, str]:
        """Environment of a process whose log shows the registration of workers, which Spark hides by default."""
        conf = os.path.join(self._folder.name, "conf")
        os.makedirs(conf, exist_ok=True)
        with open(os.path.join(conf, "log4j2.properties"), "w") as file:
            file.write(_LOGGING)
        return self.environment(node) | {"SPARK_CONF_DIR": conf}


_LOGGING = """
rootLogger.level = info
rootLogger.appenderRef.stdout.ref = console
appender.console.type = Console
appender.console.name = console
appender.console.layout.type = PatternLayout
appender.console.layout.pattern = %d %p %c{1}: %m%n
"""


def _home() -> str:
    import pyspark

    return os.path.dirname(pyspark.__file__)
