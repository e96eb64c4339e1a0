"""Agents onto hosts over SSH: a few at a time, each proved by its joining, resumable."""

from __future__ import annotations

import hashlib
import json
import re
import shlex
import subprocess
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from msgspec import Struct, structs

from phalanx.config import ConfigError
from phalanx.control.backends.bare.unit import InstallOptions, script_of
from phalanx.hardware.tables import nearest

SSH_SECONDS = 900.0
JOIN_SECONDS = 120.0
HOST = re.compile(r"[A-Za-z0-9_.@:\[\]-]+")
VALUE = re.compile(r"\w[\w.:+-]{0,127}", re.ASCII)  # a word of the agent's command line
PLACES = (
    *("leaf", "pod", "rack", "power", "switch", "domain", "rails", "partition", "kind", "feature"),
)
MEANINGS = {
    10: "there is no Python",
    11: "no virtual environment can be made (install python3-venv)",
    12: "phalanx cannot be installed",
    255: "SSH does not get in (BatchMode: a key that needs no password must be known)",
}


class RolloutHost(Struct, frozen=True):
    """One line of a file of hosts: ``[user@]address[:port] [name] [key=value ...]``."""

    address: str
    name: str
    port: int = 22
    places: tuple[tuple[str, str], ...] = ()  # what the file says of it: leaf, rack, …

    def agent_options(self) -> str:
        """The same for its agent."""
        return " ".join(f"--{key} {value}" for key, value in self.places)


class HostOutcome(Struct, frozen=True, kw_only=True):
    """What became of a host."""

    host: str
    state: str  # joined, failed, skipped
    detail: str = ""
    seconds: float = 0.0


def read_hosts(text: str) -> list[RolloutHost]:
    """Hosts of a file, one a line; ``#`` begins a comment."""
    hosts: list[RolloutHost] = []
    for number, host_line in enumerate(text.splitlines(), start=1):
        fields = host_line.partition("#")[0].split()
        if not fields:
            continue
        places = [field.partition("=")[::2] for field in fields if "=" in field]
        fields = [field for field in fields if "=" not in field]
        _check_places(places, number)
        address, colon, port = (fields or [""])[0].partition(":")
        good = 0 < len(fields) <= 2 and HOST.fullmatch(fields[0]) and (not colon or port.isdigit())
        if not good:
            rule = "must be [user@]address[:port] and a name, if it has another"
            raise ConfigError(
                f"line {number}", f'"{host_line.strip()}"', rule, "e.g. root@10.0.0.7 n7"
            )
        name = fields[1] if len(fields) > 1 else address.rpartition("@")[2]
        hosts.append(RolloutHost(address, name, int(port) if port else 22, tuple(places)))
    names = [host.name for host in hosts]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError("hosts", f'"{name}"', "is named twice", "give each a name of its own")
    return hosts


def _check_places(places: list[tuple[str, str]], line_number: int) -> None:
    """What a file says of a host must be what an agent can be told."""
    for key, value in places:
        if key not in PLACES:
            rule, fix = f"no such key (line {line_number})", nearest(key, list(PLACES))
            raise ConfigError(key, f'"{value}"', rule, fix)
        if not VALUE.fullmatch(value) or (key == "rails" and not value.isdigit()):
            rule = f"must be a {'number' if key == 'rails' else 'word'} (line {line_number})"
            raise ConfigError(key, f'"{value}"', rule, "use letters, digits and . : + - _")


def memory_of(url: str) -> Path:
    """Where this user's rollouts for a server note which hosts are done."""
    digest = hashlib.blake2b(url.encode(), digest_size=6).hexdigest()
    return Path.home() / ".phalanx" / "fleet" / f"{digest}.json"


class Rollout:
    """Installs on every host that is not done yet; ``joined`` tells which nodes are connected."""

    def __init__(
        self, options: InstallOptions, memory: Path, joined: Callable[[], Iterable[str]]
    ) -> None:
        self.options, self._memory, self._joined = options, memory, joined

    def run(
        self, hosts: list[RolloutHost], parallel: int, report: Callable[[HostOutcome], None]
    ) -> list[HostOutcome]:
        """All hosts, ``parallel`` at a time; a failed one does not hold up the others."""
        done, marks = self._read(), {host.name: self._mark(host) for host in hosts}
        with ThreadPoolExecutor(max_workers=parallel) as pool:
            outcomes = []
            for outcome in pool.map(lambda host: self._one(host, done), hosts):
                report(outcome)
                outcomes.append(outcome)
                if outcome.state == "joined":
                    done[outcome.host] = marks[outcome.host]
                    self._write(done)
        return outcomes

    def _mark(self, host: RolloutHost) -> str:
        """What a host that is done has: this version, with what the file says of it."""
        return f"{self.options.version} {host.agent_options()}".rstrip()

    def _one(self, host: RolloutHost, done: dict[str, str]) -> HostOutcome:
        began = time.monotonic()
        if done.get(host.name) == self._mark(host) and host.name in set(self._joined()):
            return HostOutcome(
                host=host.name, state="skipped", detail="this version is there already"
            )
        problem = self._install(host) or self._wait(host)
        return HostOutcome(
            host=host.name,
            state="failed" if problem else "joined",
            detail=problem,
            seconds=time.monotonic() - began,
        )

    def _install(self, host: RolloutHost) -> str:
        """Run the script there, through its input: no secret stands in a list of processes."""
        command = [*shlex.split(self.options.ssh), "-o", "BatchMode=yes"]
        command += ["-o", "ConnectTimeout=10", "-p", str(host.port)]
        try:
            ended = subprocess.run(
                [*command, host.address, "bash -s"],
                input=script_of(host.name, self._with_places(host)),
                capture_output=True,
                text=True,
                check=False,
                timeout=SSH_SECONDS,
            )
        except FileNotFoundError:
            return f"{command[0]} is not installed here"
        except subprocess.TimeoutExpired:
            return f"not done within {SSH_SECONDS:.0f} s"
        if ended.returncode == 0:
            return ""
        said = (ended.stderr or ended.stdout).strip().splitlines()[-3:]
        meaning = MEANINGS.get(ended.returncode, f"the installation ended with {ended.returncode}")
        return f"{meaning}: {' | '.join(said)}"

    def _with_places(self, host: RolloutHost) -> InstallOptions:
        more = f"{self.options.options} {host.agent_options()}".strip()
        return structs.replace(self.options, options=more)

    def _wait(self, host: RolloutHost) -> str:
        deadline = time.monotonic() + JOIN_SECONDS
        while time.monotonic() < deadline:
            if host.name in set(self._joined()):
                return ""
            time.sleep(0.5)
        return (
            f"its agent did not join within {JOIN_SECONDS:.0f} s: see, there, "
            f"`journalctl -u phalanx-agent` or {self.options.folder}/agent.log"
        )

    def _read(self) -> dict[str, str]:
        with suppress(OSError, ValueError):
            found: dict[str, str] = json.loads(self._memory.read_text())
            return found
        return {}

    def _write(self, done: dict[str, str]) -> None:
        self._memory.parent.mkdir(parents=True, exist_ok=True)
        draft = self._memory.with_suffix(".new")
        draft.write_text(json.dumps(done, indent=1))
        draft.rename(self._memory)
