"""A network of its own for each node of a local cluster, to cut it off or slow it down (root only).

Namespaces on a bridge: the server listens on the bridge's address, each node has a card of its own.
"""

from __future__ import annotations

import os
import subprocess
from contextlib import suppress
from pathlib import Path

from phalanx.config import ConfigError

BURST_BYTES = 65_536  # that go at once, whatever the rate
NOBODY = ("lladdr", "02:00:00:00:00:01", "nud", "permanent")  # a card that does not exist


class NodeNamespaces:
    """Namespaces for ``nodes`` nodes, numbered as they are."""

    def __init__(self, nodes: int) -> None:
        self._tag = f"phx{os.getpid() % 100_000:x}"
        # 198.18.0.0/15 is set aside for tests of networks.
        self._subnet = f"198.{18 + os.getpid() // 250 % 2}.{os.getpid() % 250}"
        self._nodes = range(nodes)
        self.host = f"{self._subnet}.1"
        self.card = "eth0"  # of a node, in its namespace

    def open(self) -> None:
        """Make it all; ConfigError where we may not."""
        if os.getuid() != 0:
            raise ConfigError("--namespaces", "", "only root can make namespaces", "leave it out")
        bridge = f"{self._tag}b"
        try:
            _ip("link", "add", bridge, "type", "bridge")
            _ip("addr", "add", f"{self.host}/24", "dev", bridge)
            _ip("link", "set", bridge, "up")
            for node in self._nodes:
                space, cable = self.space(node), self._cable(node)
                _ip("netns", "add", space)
                _ip("link", "add", cable, "type", "veth", "peer", "name", self.card, "netns", space)
                _ip("link", "set", cable, "master", bridge, "up")
                _ip("-n", space, "addr", "add", f"{self.address(node)}/24", "dev", self.card)
                _ip("-n", space, "link", "set", self.card, "up")
                _ip("-n", space, "link", "set", "lo", "up")
        except (OSError, subprocess.CalledProcessError) as error:
            self.close()
            rule = f"namespaces cannot be made here: {getattr(error, 'stderr', error)}"
            raise ConfigError("--namespaces", "", rule, "leave it out") from None

    def close(self) -> None:
        """Take it all away."""
        for node in self._nodes:
            with suppress(OSError, subprocess.CalledProcessError):
                _ip("netns", "del", self.space(node))
        with suppress(OSError, subprocess.CalledProcessError):
            _ip("link", "del", f"{self._tag}b")

    def space(self, node: int) -> str:
        """The namespace of a node."""
        return f"{self._tag}n{node}"

    def path(self, node: int) -> Path:
        """Where a process finds it."""
        return Path("/var/run/netns") / self.space(node)

    def address(self, node: int) -> str:
        """The address of a node."""
        return f"{self._subnet}.{node + 2}"

    def cut(self, name: str) -> None:
        """Nothing reaches the node of this name, and it reaches nobody."""
        _ip("link", "set", self._cable(_number(name)), "down")

    def mend(self, name: str) -> None:
        """It is reachable again."""
        _ip("link", "set", self._cable(_number(name)), "up")

    def deafen(self, name: str) -> None:
        """Nothing reaches the node of this name; what it sends arrives."""
        deaf = _number(name)
        _ip("neigh", "replace", self.address(deaf), *NOBODY, "dev", f"{self._tag}b")
        for node in self._nodes:
            if node != deaf:
                self._lose(node, self.address(deaf))

    def mute(self, name: str) -> None:
        """Nothing of what the node of this name sends arrives; it hears everybody."""
        mute = _number(name)
        for address in (self.host, *(self.address(node) for node in self._nodes if node != mute)):
            self._lose(mute, address)

    def undo(self) -> None:
        """Everybody hears everybody again who was deaf or mute."""
        _ip("neigh", "flush", "nud", "permanent", "dev", f"{self._tag}b")
        for node in self._nodes:
            space = self.space(node)
            _ip("-n", space, "neigh", "flush", "nud", "permanent", "dev", self.card)

    def _lose(self, node: int, address: str) -> None:
        """What a node sends to an address goes to a card that nobody has."""
        space = self.space(node)
        _ip("-n", space, "neigh", "replace", address, *NOBODY, "dev", self.card)

    def limit(self, name: str, bits_per_second: int) -> None:
        """What the node of this name sends and receives goes at this rate; ConfigError: no tc."""
        number, rate = _number(name), f"{bits_per_second}bit"
        shape = ("root", "tbf", "rate", rate, "burst", str(BURST_BYTES), "latency", "50ms")
        try:
            _run("tc", "qdisc", "replace", "dev", self._cable(number), *shape)
            space = self.space(number)
            _run("tc", "-n", space, "qdisc", "replace", "dev", self.card, *shape)
        except (OSError, subprocess.CalledProcessError) as error:
            rule = f"rates cannot be limited here: {getattr(error, 'stderr', error)}"
            raise ConfigError("tc", name, rule, "use a kernel with the tbf queue") from None

    def _cable(self, node: int) -> str:
        return f"{self._tag}v{node}"


def _number(name: str) -> int:
    return int(name.removeprefix("node-"))


def _ip(*arguments: str) -> None:
    _run("ip", *arguments)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)
