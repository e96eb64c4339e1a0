"""Signs a node's acceptance certificate with the node's own key, and checks one."""

from __future__ import annotations

import msgspec

from phalanx.control.trust.node_key import NodeKey, fingerprint, is_hexadecimal
from phalanx.control.trust.server_key import signed_by
from phalanx.doctor.acceptance.certificate import (
    Certificate,
    InvalidCertificateError,
    SignedCertificate,
    read_signed,
    signed_bytes,
)


def sign_certificate(certificate: Certificate, key: NodeKey) -> SignedCertificate:
    """The certificate as it is given away."""
    data = msgspec.json.encode(certificate)
    signature, public = key.sign(signed_bytes(data))
    return SignedCertificate(certificate=msgspec.Raw(data), key=public, signature=signature)


def verify_certificate(data: bytes, key: str = "") -> Certificate:
    """What a file certifies; InvalidCertificateError where it was changed or signed by another key.

    ``key``: fingerprint of the key that must have signed it; "": any.
    """
    signed, certificate = read_signed(data)
    if not (is_hexadecimal(signed.key, 32) and is_hexadecimal(signed.signature, 64)):
        raise InvalidCertificateError("this is no certificate: its key or signature is none")
    covered = signed_bytes(bytes(signed.certificate))
    if not signed_by(bytes.fromhex(signed.key), bytes.fromhex(signed.signature), covered):
        raise InvalidCertificateError(
            f"the certificate of {certificate.node} was changed after it was signed: its signature "
            "does not fit what it says"
        )
    if key and fingerprint(signed.key) != key:
        raise InvalidCertificateError(
            f"the certificate of {certificate.node} is signed by {fingerprint(signed.key)}, "
            f"not by {key}"
        )
    return certificate
