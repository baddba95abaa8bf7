"""A relay that delays every byte: `python relay.py PORT SECONDS [BYTES_PER_SECOND]`.

It listens in place of PORT, passes on so many bytes a second of each connection, and takes no more
than it can pass on. Prints its port: one whose low byte is 0, below those that sockets get by
themselves.
"""

from __future__ import annotations

import contextlib
import queue
import socket
import sys
import threading
import time

UnderWay = queue.Queue[tuple[float, bytes]]


def accept(listener: socket.socket, port: int, latency: float, rate: float) -> None:
    """Pass on what comes, both ways, of every connection."""
    while True:
        near, _ = listener.accept()
        far = socket.create_connection(("127.0.0.1", port))
        for source, sink in ((near, far), (far, near)):
            sink.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            under_way: UnderWay = queue.Queue(2 if rate else 0)
            for function, end, limit in ((read, source, latency), (write, sink, rate)):
                arguments = (end, under_way, limit)
                threading.Thread(target=function, args=arguments, daemon=True).start()


def read(source: socket.socket, under_way: UnderWay, latency: float) -> None:
    """Note when what comes is due at the other end."""
    while data := source.recv(65536):
        under_way.put((time.monotonic() + latency, data))


def write(sink: socket.socket, under_way: UnderWay, rate: float) -> None:
    """Send what is due, at a rate if there is one."""
    never = threading.Event()
    while True:
        due, data = under_way.get()
        never.wait(max(due - time.monotonic(), 0))
        sink.sendall(data)
        if rate:
            never.wait(len(data) / rate)


def listen() -> socket.socket:
    """Return a listener on the first of those ports that is free."""
    for port in range(20_224, 32_768, 256):
        with contextlib.suppress(OSError):
            return socket.create_server(("127.0.0.1", port))
    raise RuntimeError("no port is free")


if __name__ == "__main__":
    own = listen()
    print(own.getsockname()[1], flush=True)
    accept(own, int(sys.argv[1]), *map(float, [*sys.argv[2:], 0.0][:2]))
