"""The controller with a large fleet of agents over real sockets on loopback.

    python -m benchmarks.controller [--nodes 12500]

The server is a process of its own (one thread, and one that waits for the disk); the agents are
this process (benchmarks/agents.py). CPU seconds stand beside the wall clock, because the machine
may have other work. Measured: joining from nothing, heartbeats, gangs that form, the latency of
commands, many nodes that vanish at once, and a SIGKILL of the server with the fleet connected.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import os
import resource
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.agents import LoadFleet
from proof.report import report

POLICY = """
[timeouts]
heartbeat_ns = {heartbeat_ns}
reconnect_ns = 1000000000   # a broken connection is a lost node after this
[health]
breaker_nodes_ppm = 1000000   # every failure is acted on
[recovery]
cancel_grace_ns = 0   # an order that ends something does so at once
"""

ORDER_ROUNDS = 4  # a 99th percentile of few orders is a lottery


class ServerUnderTest:
    """``phalanx up`` on one core."""

    def __init__(self, folder: Path, heartbeat_seconds: float) -> None:
        self.folder = folder
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])
        (folder / "policy.toml").write_text(
            POLICY.format(heartbeat_ns=int(heartbeat_seconds * 1e9))
        )
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [sys.executable, "-m", "phalanx", "up", "--state", str(self.folder)]
        command += ["--port", str(self.port), "--policy", str(self.folder / "policy.toml")]
        # An installed package has its bytecode; a checkout may not.
        cached = {"PYTHONPYCACHEPREFIX": str(self.folder / "bytecode")}
        env = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"} | cached
        with (self.folder / "log.txt").open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=env)

    async def wait(self) -> float:
        began = time.monotonic()
        while True:
            try:
                if (self.folder / "admin.token").exists():
                    await self.call("GET", "/v1/status")
                    return time.monotonic() - began
            except OSError:
                pass
            assert self.process is not None and self.process.poll() is None, self.log()
            await asyncio.sleep(0.1)

    def log(self) -> str:
        return (self.folder / "log.txt").read_text()[-3000:]

    def kill(self) -> None:
        if self.process is not None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()

    def usage(self) -> tuple[float, float]:
        """CPU seconds so far and resident MiB."""
        assert self.process is not None
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        ticks = os.sysconf("SC_CLK_TCK")
        pages = int(fields[21])
        return (int(fields[11]) + int(fields[12])) / ticks, pages * 4096 / 2**20

    def secret(self, name: str) -> str:
        return (self.folder / f"{name}.token").read_text().strip()

    async def call(
        self, method: str, path: str, body: object = None, token: str = "admin", most: int = 60
    ) -> Any:
        data = None if body is None else json.dumps(body).encode()
        headers = {"Authorization": f"Bearer {self.secret(token)}"}
        if data:
            headers["Content-Type"] = "application/json"
        url = f"http://127.0.0.1:{self.port}{path}"
        request = urllib.request.Request(url, data, headers, method=method)

        def send() -> Any:
            with urllib.request.urlopen(request, timeout=most) as answer:
                return json.loads(answer.read())

        while True:
            try:
                return await asyncio.to_thread(send)
            except urllib.error.HTTPError as error:
                if error.code not in (429, 503):
                    raise AssertionError(error.read()) from None
                await asyncio.sleep(0.1)


async def join(server: ServerUnderTest, fleet: LoadFleet) -> float:
    """Every node exchanges the join token for its own."""
    began = time.monotonic()
    limit = asyncio.Semaphore(64)

    async def one(index: int) -> None:
        async with limit:
            name, key = fleet.describe(index).name, fleet.keys[index].public
            body = {"name": name, "machine": fleet.machine(index), "key": key}
            fleet.tokens[index] = (await server.call("POST", "/v1/join", body, "join"))["token"]

    await asyncio.gather(*(one(index) for index in range(fleet.count)))
    return time.monotonic() - began


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


async def run(nodes: int, heartbeat_seconds: float, seconds: float) -> dict[str, Any]:
    """The whole measurement."""
    found: dict[str, Any] = {"nodes": nodes, "heartbeat_seconds": heartbeat_seconds}
    # People who give orders do not queue for each other.
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(64))
    with tempfile.TemporaryDirectory() as folder:
        server = ServerUnderTest(Path(folder), heartbeat_seconds)
        server.start()
        try:
            await server.wait()
            fleet = LoadFleet(server.port, nodes, heartbeat_seconds)
            await measure(server, fleet, seconds, found)
        except BaseException:
            print(server.log(), file=sys.stderr)
            raise
        finally:
            server.kill()
    return found


async def measure(
    server: ServerUnderTest, fleet: LoadFleet, seconds: float, found: dict[str, Any]
) -> None:
    nodes = fleet.count
    found["join_seconds"] = round(await join(server, fleet), 2)
    beating = asyncio.create_task(fleet.beat())
    await fleet.connect_first()
    began = time.monotonic()
    await fleet.connect_all()
    found["connect_seconds"] = round(time.monotonic() - began, 2)
    say(found)
    await asyncio.sleep(1.0)
    before, _ = server.usage()
    found["server_cpu_seconds"] = {"join_and_connect": round(before, 2)}
    fleet.late_seconds, began = 0.0, time.monotonic()
    await asyncio.sleep(seconds)
    cpu, mib = server.usage()
    found["heartbeat_cpu_share"] = (cpu - before) / (time.monotonic() - began)
    found["resident_mib"] = mib
    say(found)
    for part in (gangs, latency, failures, restart):
        before, _ = server.usage()
        await part(server, fleet, found)
        spent = server.usage()[0] - (before if part is not restart else 0.0)
        found.setdefault("server_cpu_seconds", {})[part.__name__] = round(spent, 2)
        say(found)
    beating.cancel()
    fleet.reconnect = False
    found["load_average"] = os.getloadavg()[0]
    assert (await server.call("GET", "/v1/status"))["nodes"]["healthy"] > nodes // 2


def say(found: dict[str, Any]) -> None:
    """Tells how far it is."""
    print(json.dumps(found), file=sys.stderr, flush=True)


async def submit(server: ServerUnderTest, slots: int, count: int, name: str) -> int:
    gang = {"replicas": slots, "tensor": 8, "slot_gpus": 8}
    spec = {"name": name, "gang": gang, "array": {"count": count, "width": 0}, "retries": 100}
    body = {"spec": spec, "work": {"kind": "Script", "argv": ["true"]}}
    return int((await server.call("POST", "/v1/jobs", body))["jobs"][0])


async def gangs(server: ServerUnderTest, fleet: LoadFleet, found: dict[str, Any]) -> None:
    """Forty gangs that take four fifths of the fleet."""
    slots = max(1, fleet.count // 49)
    began = time.monotonic()
    await submit(server, slots, 40, "gang")
    await fleet.until(lambda: len(fleet.restore_seconds) >= 40, 120)
    found["gangs"] = {"count": 40, "nodes": slots, "all_running_seconds": time.monotonic() - began}


async def latency(server: ServerUnderTest, fleet: LoadFleet, found: dict[str, Any]) -> None:
    """Small jobs start, then are cancelled one by one: from the order to the node's Stop."""
    count = min(1000, fleet.count // 20)
    fleet.restore_seconds.clear()
    restored: list[float] = []
    taken: list[float] = []
    disk = asyncio.create_task(syncs(server.folder / "probe"))
    for _ in range(ORDER_ROUNDS):
        first = await submit(server, 1, count, "small")
        await fleet.until(lambda: len(fleet.restore_seconds) >= count, 120)
        restored += fleet.restore_seconds
        fleet.restore_seconds.clear()
        taken += await cancelled(server, fleet, range(first, first + count))
    disk.cancel()
    found["restore_latency_ms"] = summary(restored)
    found["order_latency_ms"] = summary(taken)
    found["disk_sync_ms"] = summary(await disk)
    found["agents_own_delay_ms"] = round(fleet.late_seconds * 1000, 1)


async def cancelled(server: ServerUnderTest, fleet: LoadFleet, jobs: range) -> list[float]:
    """Seconds from each order to the node that has it; an order every 20 ms."""
    ordered: dict[int, float] = {}

    async def one(job: int) -> None:
        ordered[job] = time.monotonic()
        await server.call("POST", f"/v1/jobs/{job}/cancel")

    orders = []
    for job in jobs:
        orders.append(asyncio.create_task(one(job)))
        await asyncio.sleep(0.02)
    await asyncio.gather(*orders)
    await fleet.until(lambda: all(job in fleet.stopped_at for job in ordered), 30)
    return [fleet.stopped_at[job] - at for job, at in ordered.items()]


async def syncs(path: Path) -> list[float]:
    """What the disk takes for a small write meanwhile: an order is answered behind one of these."""
    taken: list[float] = []

    def write() -> float:
        began = time.monotonic()
        with path.open("ab") as file:
            file.write(bytes(4096))
            os.fsync(file.fileno())
        return time.monotonic() - began

    with contextlib.suppress(asyncio.CancelledError):
        while True:
            taken.append(await asyncio.to_thread(write))
            await asyncio.sleep(0.1)
    return taken


def summary(taken: list[float]) -> dict[str, float]:
    taken = [1000 * value for value in taken]
    return {
        "samples": len(taken),
        "median": round(statistics.median(taken), 2),
        "p99": round(percentile(taken, 0.99), 1),
        "most": round(max(taken), 1),
    }


async def failures(server: ServerUnderTest, fleet: LoadFleet, found: dict[str, Any]) -> None:
    """A tenth of the fleet (at most 1,000) vanishes at once, spread over all gangs."""
    count = min(1000, fleet.count // 10)
    victims = [fleet.agents[index * 12 % fleet.count] for index in range(count)]
    fleet.gone = {agent.index for agent in victims}
    before = len(fleet.forms)
    began = time.monotonic()
    for agent in victims:
        assert agent.transport is not None
        agent.transport.abort()
    while True:
        status = await server.call("GET", "/v1/status")
        if status["nodes"]["dead"] >= count:
            break
        assert time.monotonic() - began < 60, status
        await asyncio.sleep(0.05)
    handled = time.monotonic() - began
    while True:
        jobs = (await server.call("GET", "/v1/jobs?limit=1000"))["jobs"]
        if all(job["state"] == "running" for job in jobs):
            break
        assert time.monotonic() - began < 120, [j["state"] for j in jobs]
        await asyncio.sleep(0.1)
    found["failures"] = {
        "nodes": count,
        "all_handled_seconds": round(handled, 2),
        "all_gangs_running_again_seconds": round(time.monotonic() - began, 2),
        "formations": len(fleet.forms) - before,
    }


async def restart(server: ServerUnderTest, fleet: LoadFleet, found: dict[str, Any]) -> None:
    """SIGKILL; how long until it leads again, and until the whole fleet is back."""
    alive = fleet.count - len(fleet.gone)
    before = await server.call("GET", "/v1/status")
    server.kill()
    began = time.monotonic()
    server.start()
    leads = await server.wait()
    while (await server.call("GET", "/v1/status"))["connected"] < alive:
        assert time.monotonic() - began < 120
        await asyncio.sleep(0.1)
    back = time.monotonic() - began
    after = await server.call("GET", "/v1/status")
    for key in ("nodes", "jobs"):
        assert after[key] == before[key], (before[key], after[key])
    found["restart"] = {
        "leads_seconds": round(leads, 2),
        "whole_fleet_back_seconds": round(back, 2),
        "events": before["sequence"],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description="The controller with a large fleet.")
    parser.add_argument("--nodes", type=int, default=12_500)
    parser.add_argument("--heartbeat", type=float, default=5.0, help="seconds between two")
    parser.add_argument("--seconds", type=float, default=20.0, help="of heartbeats alone")
    chosen = parser.parse_args()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if hard < chosen.nodes + 500:
        sys.exit(f"{chosen.nodes} connections need `ulimit -n` of {chosen.nodes + 500}, not {hard}")
    gc.disable()  # pauses of the agents must not count as the server's
    found = asyncio.run(run(chosen.nodes, chosen.heartbeat, chosen.seconds))
    print(json.dumps(found, indent=2))
    figures = {
        "heartbeat_share": found["heartbeat_cpu_share"],
        "connect_seconds": found["connect_seconds"],
        "order_median_ms": found["order_latency_ms"]["median"],
        "order_p99_ms": found["order_latency_ms"]["p99"],
        "failures_handled_seconds": found["failures"]["all_handled_seconds"],
        "restart_seconds": found["restart"]["whole_fleet_back_seconds"],
    }
    return report("controller", figures)


if __name__ == "__main__":
    sys.exit(main())
