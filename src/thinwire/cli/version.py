"""`thinwire --version`: versions for an issue report, without slow imports."""

from __future__ import annotations

import argparse
import platform
from importlib import metadata
from typing import Any

PACKAGES = ("torch", "pyspark", "pyarrow", "pyzmq", "numba", "numpy")


class ShowVersion(argparse.Action):
    """Prints the versions and ends the command."""

    def __init__(self, option_strings: list[str], dest: str, **more: Any) -> None:
        super().__init__(option_strings, dest, nargs=0, **more)

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        print("\n".join(f"{name} {value}" for name, value in parts().items()))
        parser.exit()


def parts() -> dict[str, str]:
    """Names and versions of the packages that a run depends on."""
    from thinwire.protocol.handshake import PROTOCOL
    from thinwire.version import __version__

    found = {"thinwire": __version__, "protocol": str(PROTOCOL), "Python": platform.python_version()}
    found |= {name: _installed(name) for name in PACKAGES}
    return found | {"libzmq": _libzmq(), "platform": platform.platform()}


def _installed(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _libzmq() -> str:
    try:
        import zmq  # only pyzmq knows the libzmq that it is linked with
    except ImportError:
        return "not installed"
    return zmq.zmq_version()
