"""A server with thousands of connections that show no token, and how long others wait.

    python -m benchmarks.slow_clients [--connections 10000]

A process of its own holds the connections on loopback: a third are idle, a third send the head of
a request and a third its body, a few bytes now and then. Whoever is closed connects again. This
process asks the server for its status meanwhile, as anybody does: over a connection that it keeps,
and over a new one each time.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import http.client
import multiprocessing
import os
import resource
import tempfile
import time
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

from benchmarks.controller import ServerUnderTest, percentile
from proof.report import report

PAUSE_SECONDS = 2.0  # between two bytes, and before connecting again
AT_ONCE = 200  # connections that are being made at a time
REQUESTS_PER_SECOND = 25
HEAD = b"POST /v1/jobs HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
BODY = HEAD + b"Content-Length: 100000\r\n\r\n"


async def hold(port: int, kind: int, limit: asyncio.Semaphore, made: asyncio.Event) -> None:
    """One connection that is never of use to anybody; ``made`` once it was there."""
    while True:
        with contextlib.suppress(OSError):
            async with limit:
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
            made.set()
            try:
                if kind:
                    writer.write(HEAD if kind == 1 else BODY)
                while not reader.at_eof():
                    if kind:
                        writer.write(b"x: y\r\n" if kind == 1 else b"{")
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(PAUSE_SECONDS):
                            await reader.read(4096)
            finally:
                writer.close()
        await asyncio.sleep(PAUSE_SECONDS)


def crowd(port: int, count: int, there: Event) -> None:
    """The process that holds them all, until it is killed."""

    async def run() -> None:
        limit = asyncio.Semaphore(AT_ONCE)
        made = [asyncio.Event() for _ in range(count)]
        tasks = [
            asyncio.create_task(hold(port, index % 3, limit, each))
            for index, each in enumerate(made)
        ]
        for each in made:
            await each.wait()
        there.set()
        await asyncio.gather(*tasks)

    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    os.nice(15)  # elsewhere it would take no core from those who are measured
    asyncio.run(run())


def ask(server: ServerUnderTest, seconds: float, *, keep: bool) -> list[float]:
    """Milliseconds that requests of somebody with a token took."""
    headers = {"Authorization": f"Bearer {server.secret('admin')}"}
    taken: list[float] = []
    until = time.monotonic() + seconds
    connection: http.client.HTTPConnection | None = None
    while time.monotonic() < until:
        began = time.monotonic()
        connection = connection or http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
        connection.request("GET", "/v1/status", headers=headers)
        answer = connection.getresponse()
        answer.read()
        assert answer.status == 200, answer.status
        taken.append(1000 * (time.monotonic() - began))
        if not keep:
            connection.close()
            connection = None
        time.sleep(max(0.0, 1 / REQUESTS_PER_SECOND - (time.monotonic() - began)))
    return taken


def measure(connections: int, seconds: float) -> dict[str, Any]:
    """Requests of others without the crowd and with it."""
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as name:
        server = ServerUnderTest(Path(name), 5.0)
        server.start()
        there = spawn.Event()
        holder = spawn.Process(target=crowd, args=(server.port, connections, there), daemon=True)
        try:
            asyncio.run(server.wait())
            alone = ask(server, seconds / 4, keep=False)
            holder.start()
            assert there.wait(300), "the connections were not made"
            before, _ = server.usage()
            began = time.monotonic()
            kept = ask(server, seconds / 2, keep=True)
            fresh = ask(server, seconds / 2, keep=False)
            cpu, memory = server.usage()
            spent = (cpu - before) / (time.monotonic() - began)
        finally:
            holder.kill()
            server.kill()
    return {
        "connections": connections,
        "alone_p99_ms": percentile(alone, 0.99),
        "p50_ms": percentile(kept + fresh, 0.5),
        "kept_p99_ms": percentile(kept, 0.99),
        "fresh_p99_ms": percentile(fresh, 0.99),
        "p99_ms": max(percentile(kept, 0.99), percentile(fresh, 0.99)),
        "server_share": spent,
        "memory_mib": memory,
    }


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--connections", type=int, default=10_000)
    parser.add_argument("--seconds", type=float, default=40.0)
    given = parser.parse_args()
    found = measure(given.connections, given.seconds)
    for name, value in found.items():
        print(f"{name}: {value:.2f}")
    return report("slow-clients", found)


if __name__ == "__main__":
    raise SystemExit(main())
