"""Measures messages between two processes of this machine."""

from __future__ import annotations

import socket
import threading
import time

from thinwire.rules.placement import Wire

SIZE = 8 << 20
TURNS = 50


def loopback() -> Wire:
    """Latency and rate of a TCP connection of this machine to itself."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        answering = threading.Thread(target=_answer, args=(server,), name="loopback", daemon=True)
        answering.start()
        with socket.create_connection(server.getsockname()) as line:
            line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            began = time.perf_counter()
            for _ in range(TURNS):
                line.sendall(b"x")
                line.recv(1)
            latency_s = (time.perf_counter() - began) / TURNS / 2
            began = time.perf_counter()
            line.sendall(bytes(SIZE))
            line.recv(1)
            passed_s = time.perf_counter() - began
        answering.join()
    return Wire(latency_s, SIZE / passed_s)


def _answer(server: socket.socket) -> None:
    line, _ = server.accept()
    with line:
        for _ in range(TURNS):
            line.sendall(line.recv(1))
        left = SIZE
        while left and (came := len(line.recv(1 << 20))):
            left -= came
        line.sendall(b"x")
