"""Starting keepers, finding those that an earlier run left, and which of them are buddies."""

from __future__ import annotations

import hashlib
import os
import secrets
import socket
import subprocess
import sys
import time
from pathlib import Path

CONNECT_SECONDS = 30.0  # for a keeper to come up on a busy node


def node_name() -> str:
    """Ranks with the same one share a keeper."""
    return os.environ.get("PHALANX_NODE") or socket.gethostname()


def domain_name() -> str:
    """The failure domain of this node, where somebody said; otherwise every node is its own."""
    return os.environ.get("PHALANX_DOMAIN") or node_name()


def own_address() -> str:
    """The address at which the other nodes of the job reach this one's keeper."""
    if given := os.environ.get("PHALANX_REPLICA_ADDRESS"):
        return given
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((os.environ.get("MASTER_ADDR", "127.0.0.1"), 9))  # sends nothing
            return str(probe.getsockname()[0])
        except OSError:
            return "127.0.0.1"


def socket_base() -> Path:
    """Where this user's sockets lie; root's where nobody else can take the name before it."""
    if given := os.environ.get("XDG_RUNTIME_DIR"):
        return Path(given)
    if os.getuid() == 0 and os.access("/run", os.W_OK):
        return Path("/run/phalanx")
    return Path(f"/tmp/phalanx-{os.getuid()}")


def home_of(name: str) -> Path:
    """The folder of sockets where the keepers of a job's runs on this node are found."""
    digest = hashlib.blake2b(name.encode(), digest_size=8).hexdigest()
    return socket_base() / f"keepers-{digest}-{node_tag()}"


def node_tag() -> str:
    """Tells pretended nodes on one machine apart."""
    return hashlib.blake2b(node_name().encode(), digest_size=3).hexdigest()


def private_folder(path: Path) -> None:
    """Make a folder for sockets; refused where somebody else could reach into it."""
    for folder in (path.parent, path):
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.stat()
        if status.st_uid != os.getuid() or status.st_mode & 0o022:
            raise PermissionError(f"{folder} belongs to somebody else or is open to others")


def start_keeper(
    home: Path, lease_seconds: float, log: Path
) -> tuple[str, subprocess.Popen[bytes]]:
    """Start a keeper on this node; the address that its workers connect to, and the process."""
    private_folder(home)
    address = str(home / f"{secrets.token_hex(4)}.sock")
    command = [sys.executable, "-m", "phalanx.checkpoint.keeper.process", "--socket", address]
    command += ["--host", own_address(), "--lease", str(lease_seconds)]
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener,
        log.open("ab") as output,
    ):
        listener.bind(address)
        listener.listen(128)
        command += ["--listener", str(listener.fileno())]
        process = subprocess.Popen(
            command,
            pass_fds=[listener.fileno()],
            stdin=subprocess.DEVNULL,
            # Its own log: whoever reads the worker's output is not to wait for the keeper.
            stdout=output,
            stderr=output,
            start_new_session=True,  # what ends the worker's group must not end the keeper
        )
    return address, process


def find_keepers(home: Path) -> list[str]:
    """Sockets of keepers that live; those of dead ones are removed."""
    if given := os.environ.get("PHALANX_KEEPER"):
        return [given]
    sockets = []
    for path in sorted(home.glob("*.sock")):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.settimeout(1.0)
            try:
                probe.connect(str(path))
                sockets.append(str(path))
            except OSError:
                if time.time() - path.lstat().st_mtime > CONNECT_SECONDS:
                    path.unlink(missing_ok=True)
    return sockets


def buddies(domains: list[str]) -> list[int]:
    """For each node the one that holds its replica: in another domain, each serving one node.

    Nodes are put in order of their domains and shifted by the largest domain; that is enough
    unless one domain has more than half of all nodes.
    """
    order = sorted(range(len(domains)), key=lambda node: (domains[node], node))
    largest = max(domains.count(domain) for domain in set(domains))
    shift = min(largest, len(order) - 1)
    buddy_of = [0] * len(order)
    for place, node in enumerate(order):
        buddy_of[node] = order[(place + shift) % len(order)]
    return buddy_of
