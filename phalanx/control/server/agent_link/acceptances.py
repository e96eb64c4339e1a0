"""Burn-ins that were ordered: how each goes, and the certificate that comes of it."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable

from msgspec import Struct, field

from phalanx.control.server.history.node_facts import NodeFactHistory, measured
from phalanx.control.trust.acceptance_signature import verify_certificate
from phalanx.control.wire.agent_messages import (
    AcceptanceNews,
    StartAcceptance,
    StopAcceptance,
    encode,
)
from phalanx.control.wire.websocket_frames import framed
from phalanx.doctor.acceptance.certificate import InvalidCertificateError

MOST_LINES = 20
MOST_CERTIFICATE_BYTES = 4 << 20

logger = logging.getLogger("phalanx.server")


class Acceptance(Struct):
    """One burn-in of a node, as far as is known."""

    order: StartAcceptance
    lines: deque[str] = field(default_factory=lambda: deque(maxlen=MOST_LINES))
    ended: bool = False
    problem: str = ""


class Acceptances:
    """The last burn-in of each node. ``push`` sends a frame to a node if it is connected."""

    def __init__(
        self, push: Callable[[int, bytes], bool], signed: Callable[[StartAcceptance], bytes]
    ) -> None:
        self._push, self._signed = push, signed
        self._by_node: dict[int, Acceptance] = {}
        self.facts: NodeFactHistory | None = None

    def of(self, node: int) -> Acceptance | None:
        """The last one that this server ordered."""
        return self._by_node.get(node)

    def start(
        self, node: int, seconds: float, loads: tuple[str, ...], dcgm_level: int
    ) -> Acceptance | None:
        """Order one; None where the node is not connected."""
        order = StartAcceptance(
            request=time.time_ns(), seconds=seconds, loads=loads, dcgm_level=dcgm_level
        )
        if not self._push(node, self._signed(order)):
            return None
        self._by_node[node] = Acceptance(order)
        return self._by_node[node]

    def stop(self, node: int) -> bool:
        """End one early; False where none runs."""
        known = self._by_node.get(node)
        if known is None or known.ended:
            return False
        return self._push(node, framed(encode(StopAcceptance(request=known.order.request))))

    def connected(self, node: int) -> None:
        """An agent is back: it may not have heard the order, or its last word was lost."""
        known = self._by_node.get(node)
        if known is not None and not known.ended:
            self._push(node, self._signed(known.order))

    def receive(self, node: int, name: str, news: AcceptanceNews, now_ns: int) -> None:
        """An agent's word. A certificate counts also where this server did not order it."""
        known = self._by_node.get(node)
        ours = known if known is not None and known.order.request == news.request else None
        problem = news.problem[:500]
        if news.certificate:
            problem = self._certified(name, news.certificate, now_ns)
        if ours is not None and not ours.ended:
            if news.text:
                ours.lines.append(news.text[:500])
            ours.ended, ours.problem = news.end, problem
        elif problem:
            logger.warning("burn-in of %s: %s", name, ascii(problem))

    def _certified(self, name: str, data: bytes, now_ns: int) -> str:
        """What is wrong with a certificate; "": it is kept, with the speeds in it."""
        if len(data) > MOST_CERTIFICATE_BYTES:
            return f"its certificate has {len(data)} bytes: at most {MOST_CERTIFICATE_BYTES}"
        try:
            certificate = verify_certificate(data)
        except InvalidCertificateError as error:
            return str(error)
        if certificate.node != name:
            return f"its certificate is of another node: {certificate.node[:40]!a}"
        if self.facts is not None:
            self.facts.keep_certificate(name, now_ns, data)
            if certificate.outcome != "incomplete":
                self.facts.note(measured(certificate, now_ns))
        return ""
