"""What the channel between keepers costs: bytes a second, plain and encrypted, on loopback."""

from __future__ import annotations

import argparse
import secrets
import socket
import sys
import threading
import time

from phalanx.checkpoint.keeper.channel import accept, connect
from phalanx.checkpoint.keeper.wire import receive_into
from proof.report import report

TOKEN = secrets.token_bytes(32)
BYTES = 256 << 20


def measure(*, encrypt: bool) -> tuple[float, float]:
    """Seconds of a handshake, and GB/s of one transfer; one thread sends, another receives."""
    listener = socket.create_server(("127.0.0.1", 0))
    done = threading.Event()

    def receive() -> None:
        connection, _ = listener.accept()
        stream = accept(connection, TOKEN, encrypt=encrypt)
        buffer = memoryview(bytearray(4 << 20))
        for _ in range(BYTES // len(buffer)):
            assert receive_into(stream, buffer)
        done.set()
        stream.close()

    threading.Thread(target=receive, daemon=True).start()
    data = memoryview(bytes(BYTES))
    began = time.perf_counter()
    stream = connect("127.0.0.1", listener.getsockname()[1], TOKEN, 10)
    met = time.perf_counter()
    stream.sendall(data)
    done.wait(60)
    seconds = time.perf_counter() - met
    stream.close()
    listener.close()
    return met - began, BYTES / seconds / 1e9


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    figures: dict[str, float] = {}
    for encrypt in (False, True):
        found = [measure(encrypt=encrypt) for _ in range(rounds)]
        handshake, rate = min(f[0] for f in found), max(f[1] for f in found)
        name = "encrypted" if encrypt else "plain"
        print(f"{name:10} handshake {1e3 * handshake:.2f} ms, {rate:.2f} GB/s")
        figures |= {name: rate, f"{name}_handshake_ms": 1e3 * handshake}
    return report("replica-channel", figures)


if __name__ == "__main__":
    sys.exit(main())
