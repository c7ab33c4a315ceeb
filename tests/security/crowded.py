"""A worker's link in a process with few descriptors: says where it listens, and then what it could not open.

`python -m tests.security.crowded LIMIT`; it ends when its input does.
"""

from __future__ import annotations

import json
import os
import resource
import select
import sys
import tempfile

from thinwire.transport.zmq import Keys, ZmqHub, ZmqLink


def main(limit: int) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit // 2, limit))
    keys = Keys.make()
    hub = ZmqHub(keys=keys, host="127.0.0.1")
    link = ZmqLink(me=0, attempt=0, keys=keys, coordinator=hub.address, host="127.0.0.1")
    print(json.dumps({"address": link.address, "soft": resource.getrlimit(resource.RLIMIT_NOFILE)[0]}), flush=True)
    told = {"most": 0, "failed": 0, "why": ""}
    while not select.select([sys.stdin], [], [], 0)[0]:
        link.receive(0.01)
        try:
            told["most"] = max(told["most"], len(os.listdir("/proc/self/fd")))
            for file in [tempfile.TemporaryFile() for _ in range(8)]:  # noqa: SIM115 - as a checkpoint's parts
                file.close()
        except OSError as error:
            told["failed"], told["why"] = told["failed"] + 1, str(error)
    print(json.dumps(told | {"refused": link.refused}), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]))
