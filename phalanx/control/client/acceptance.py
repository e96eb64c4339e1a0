"""Acceptance of this machine: a burn-in, and a certificate signed with the node's own key."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path

import msgspec
from msgspec import structs

from phalanx.control.agent.cold_start import node_here, state_folder
from phalanx.control.agent.description import DescriptionSources, ToldNode
from phalanx.control.trust.node_key import fingerprint, node_key
from phalanx.control.trust.signed_certificate import sign_certificate
from phalanx.doctor.acceptance.burn_in import burn_in
from phalanx.doctor.acceptance.certificate import (
    Certificate,
    SignedCertificate,
    make_certificate,
)
from phalanx.doctor.acceptance.report import AcceptanceRequest
from phalanx.doctor.setup import read_setup


def accept_here(
    request: AcceptanceRequest, state: Path | None, say: Callable[[str], None]
) -> tuple[SignedCertificate, Certificate]:
    """Burn this machine in; ``state``: folder of its agent, whose key signs (made if missing)."""
    name = request.node or socket.gethostname()
    # First, because loads are forked, and what describes the machine makes threads.
    report = burn_in(structs.replace(request, node=name), say)
    node, sources = node_here("", DescriptionSources(), ToldNode(), name=name, gpus=None)
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
