"""Acceptance of this machine or of nodes of a cluster: a burn-in, and a certificate of each."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from urllib.parse import quote

import msgspec
from msgspec import structs

from phalanx.control.agent.cold_start import node_here, state_folder
from phalanx.control.agent.description import DescriptionSources
from phalanx.control.client.client import Client, ClientError
from phalanx.control.trust.acceptance_signature import sign_certificate
from phalanx.control.trust.node_key import fingerprint, node_key
from phalanx.control.wire.api_types import (
    AcceptanceIn,
    AcceptanceOut,
    Done,
    DrainIn,
    NodeDetail,
    NodeOut,
    Readmit,
)
from phalanx.doctor.acceptance.burn_in import burn_in
from phalanx.doctor.acceptance.certificate import (
    Certificate,
    SignedCertificate,
    make_certificate,
)
from phalanx.doctor.acceptance.ranking import Ranked, rank
from phalanx.doctor.acceptance.report import AcceptanceRequest
from phalanx.doctor.setup import read_setup
from phalanx.hardware.probe.site_file import GivenDescription

POLL_SECONDS = 1.0
STOP_SECONDS = 60.0  # for burn-ins that were told to end
OUT = ("draining", "quarantined")  # states of nodes that get no work


def accept_here(
    request: AcceptanceRequest, state: Path | None, say: Callable[[str], None]
) -> tuple[SignedCertificate, Certificate]:
    """Burn this machine in; ``state``: folder of its agent, whose key signs (made if missing)."""
    name = request.node or socket.gethostname()
    # First, because loads are forked, and what describes the machine makes threads.
    report = burn_in(structs.replace(request, node=name), say)
    node, sources = node_here("", DescriptionSources(), GivenDescription(), name=name, gpus=None)
    description = sources.describe(node.name, None)
    key = node_key(state_folder(state, name))
    setup = read_setup(Path(request.folder))
    made = make_certificate(report, description, setup, fingerprint(key.public))
    return sign_certificate(made, key), made


def write_certificate(folder: Path, node: str, signed: SignedCertificate) -> Path:
    """Keep a certificate as a file that people can read."""
    path = folder / f"acceptance-{node}.json"
    path.write_bytes(msgspec.json.format(msgspec.json.encode(signed), indent=1) + b"\n")
    return path


class NodeBurnIn:
    """A burn-in of one node of a cluster: drained before, given back when it is accepted."""

    def __init__(self, client: Client, node: str) -> None:
        self._client, self.node = client, node
        self._path = f"/v1/nodes/{quote(node, safe='')}"
        self._drained = False  # by us
        self.started = False
        self._said = ""

    def drain(self) -> None:
        """Let it have no new work."""
        if self._shown().state not in OUT:
            body = DrainIn(why="burn-in by phalanx doctor accept")
            self._client.post(f"{self._path}/drain", body, Done)
            self._drained = True

    def empty(self) -> bool:
        """Whether its jobs have left it."""
        shown = self._shown()
        return shown.state in OUT and not shown.jobs

    def start(self, request: AcceptanceRequest) -> None:
        """Begin."""
        body = AcceptanceIn(
            seconds=request.seconds, loads=request.loads, dcgm_level=request.dcgm_level
        )
        self._client.post(f"{self._path}/acceptance", body, AcceptanceOut)
        self.started = True

    def look(self, say: Callable[[str], None]) -> AcceptanceOut | None:
        """What came of it; None while it runs, whose newest line is said."""
        if not self.started:
            raise AcceptanceError("it was interrupted before it began")
        now = self._client.get(f"{self._path}/acceptance", AcceptanceOut)
        if not now.ordered:
            raise AcceptanceError("the server was restarted and knows of no burn-in")
        if now.lines and now.lines[-1] != self._said:
            self._said = now.lines[-1]
            say(f"{self.node}: {self._said}")
        return now if now.ended else None

    def stop(self) -> None:
        """End it early."""
        if not self.started:
            return
        with suppress(ClientError):
            self._client.delete(f"{self._path}/acceptance", AcceptanceOut)

    def give_back(self) -> None:
        """Undo the drain, where it was ours."""
        if self._drained:
            with suppress(ClientError):
                self._client.post(f"{self._path}/readmit", Readmit(tested=True), Done)

    def _shown(self) -> NodeOut:
        return self._client.get(self._path, NodeDetail).node


class AcceptanceError(Exception):
    """A burn-in did not come to its end, and why."""


def accept_nodes(
    client: Client, nodes: Sequence[str], request: AcceptanceRequest, say: Callable[[str], None]
) -> dict[str, SignedCertificate | str]:
    """Burn nodes in at the same time: their certificates, or why there is none.

    SIGINT ends all burn-ins with what they measured; nodes that we drained go back to work unless
    they were rejected.
    """
    burn_ins = [NodeBurnIn(client, node) for node in dict.fromkeys(nodes)]
    results: dict[str, SignedCertificate | str] = {}
    try:
        for each in burn_ins:
            each.drain()
        while waiting := [each.node for each in burn_ins if not each.empty()]:
            say(f"waits until {', '.join(waiting)} is empty")
            time.sleep(POLL_SECONDS)
        for each in burn_ins:
            try:
                each.start(request)
            except ClientError as error:
                results[each.node] = str(error)
        _collect(burn_ins, results, say, None)
    except KeyboardInterrupt:
        say("interrupted: what follows was measured until now")
        for each in burn_ins:
            each.stop()
        _collect(burn_ins, results, say, time.monotonic() + STOP_SECONDS)
    finally:
        for each in burn_ins:
            if each.node not in results:  # the server was lost: no job shall find it under load
                each.stop()
            if _outcome(results.get(each.node)) != "rejected":
                each.give_back()
    return results


def _collect(
    burn_ins: list[NodeBurnIn],
    results: dict[str, SignedCertificate | str],
    say: Callable[[str], None],
    deadline: float | None,
) -> None:
    while left := [each for each in burn_ins if each.node not in results]:
        for each in left:
            try:
                done = each.look(say)
            except AcceptanceError as error:
                results[each.node] = str(error)
                continue
            if done is not None:
                results[each.node] = _result(done)
            elif deadline is not None and time.monotonic() > deadline:
                results[each.node] = "it did not end in time"
        if len(results) < len(burn_ins):
            time.sleep(POLL_SECONDS)


def _result(done: AcceptanceOut) -> SignedCertificate | str:
    if done.problem or done.certificate is None:
        return done.problem or "the server has no certificate of it"
    return done.certificate


def _outcome(result: SignedCertificate | str | None) -> str:
    if not isinstance(result, SignedCertificate):
        return ""
    return msgspec.json.decode(result.certificate, type=Certificate).outcome


def rank_nodes(certificates: Iterable[Certificate]) -> dict[str, list[Ranked]]:
    """By load: all nodes that ran it, the slowest first; of three or more stragglers are marked."""
    rates: dict[str, dict[str, float]] = {}
    for made in certificates:
        for each in made.report.loads:
            if each.samples:
                rates.setdefault(each.key, {})[made.node] = each.median
    return {load: rank(by_node) for load, by_node in rates.items()}
