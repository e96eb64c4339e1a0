"""The certificate of a node: what it is, how it is set, what it reached, and the verdict.

It is signed over its fields in a fixed order, so that a file may be formatted anew and not changed.
"""

from __future__ import annotations

import json
import time

import msgspec
from msgspec import Struct

from phalanx.doctor.acceptance.report import AcceptanceReport, Outcome
from phalanx.doctor.setup import NodeSetup
from phalanx.hardware.probe.description import NodeDescription

FORMAT = 1
SIGNED = b"phalanx acceptance certificate 1\n"  # no other signature passes for one of this


class Certificate(Struct, frozen=True, kw_only=True):
    """One node at one time."""

    format: int
    node: str
    node_key: str  # fingerprint of the key that its agent joins with
    time_ns: int
    outcome: Outcome
    description: NodeDescription
    setup: NodeSetup
    report: AcceptanceReport


class SignedCertificate(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A certificate, and who signed it."""

    certificate: msgspec.Raw
    key: str  # public, Ed25519, as hexadecimal digits
    signature: str


class InvalidCertificateError(Exception):
    """This is no certificate, or not as it was signed; says which."""


def make_certificate(
    report: AcceptanceReport, description: NodeDescription, setup: NodeSetup, node_key: str
) -> Certificate:
    """What is signed."""
    return Certificate(
        format=FORMAT,
        node=report.node,
        node_key=node_key,
        time_ns=time.time_ns(),
        outcome=report.outcome,
        description=description,
        setup=setup,
        report=report,
    )


def signed_bytes(certificate: bytes) -> bytes:
    """The bytes that a signature covers: every field, in the order of their names."""
    try:
        fields = msgspec.json.decode(certificate)
    except msgspec.MsgspecError as error:
        raise InvalidCertificateError(f"it cannot be read: {error}") from None
    return SIGNED + msgspec.json.encode(fields, order="sorted")


def _refuse_twice(fields: list[tuple[str, object]]) -> None:
    """Of a field that comes twice one reader sees the first and another the second."""
    names = [name for name, _ in fields]
    if len({*names}) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise InvalidCertificateError(f"it was changed after it was signed: {twice} comes twice")


def read_signed(data: bytes) -> tuple[SignedCertificate, Certificate]:
    """A certificate of a file; InvalidCertificateError where it is none."""
    try:
        json.loads(data, object_pairs_hook=_refuse_twice)
        signed = msgspec.json.decode(data, type=SignedCertificate)
        certificate = msgspec.json.decode(signed.certificate, type=Certificate)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise InvalidCertificateError(f"this is no certificate: {error}") from None
    if certificate.format != FORMAT:
        rule = f"it has format {certificate.format}, and this release reads {FORMAT}"
        raise InvalidCertificateError(rule)
    return signed, certificate
