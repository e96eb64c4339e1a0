"""The authority of a cluster and the certificates of its servers, made where none are given.

The authority's key is made from a secret, which a pair of servers shares through its store. People
and agents know it by the fingerprint of its public key, which is the same wherever it is made.
"""

from __future__ import annotations

import hashlib
import ipaddress
import os
import socket
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from phalanx.control.trust.secret_file import write_secret

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
    from cryptography.x509 import Certificate, GeneralName, KeyUsage

CERTIFICATE_FILE, KEY_FILE = "tls.crt", "tls.key"
DAYS = 365  # of a server's certificate
RENEW_DAYS = 30  # before its end
AUTHORITY_YEARS = 100
EARLIER = timedelta(hours=24)  # a client's clock may be behind
FINGERPRINT_PREFIX = "sha256:"
_P256_ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551


class Authority:
    """Signs certificates of a cluster's servers."""

    def __init__(self, seed: bytes) -> None:
        from cryptography.hazmat.primitives.asymmetric import ec

        number = int.from_bytes(hashlib.sha512(b"phalanx authority" + seed).digest(), "big")
        self._key = ec.derive_private_key(number % (_P256_ORDER - 1) + 1, ec.SECP256R1())
        self.certificate = self._own()
        self.fingerprint = fingerprint_of(self.certificate)

    @property
    def pem(self) -> str:
        """Its certificate, for those who trust it."""
        return _pem(self.certificate)

    def issue(self, hosts: tuple[str, ...]) -> tuple[str, str]:
        """A certificate chain for a server of these names and addresses, and its key; PEM."""
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ec

        key = ec.generate_private_key(ec.SECP256R1())
        made = _pem(self._signed(key, "phalanx server", timedelta(days=DAYS), hosts))
        plain = serialization.NoEncryption()
        kind = serialization.PrivateFormat.PKCS8
        text = key.private_bytes(serialization.Encoding.PEM, kind, plain).decode()
        return made + self.pem, text

    def _own(self) -> Certificate:
        return self._signed(self._key, "phalanx authority", timedelta(days=365 * AUTHORITY_YEARS))

    def _signed(
        self,
        key: EllipticCurvePrivateKey,
        name: str,
        good_for: timedelta,
        hosts: tuple[str, ...] = (),
    ) -> Certificate:
        from cryptography import x509
        from cryptography.hazmat.primitives.hashes import SHA256
        from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

        def named(text: str) -> x509.Name:
            return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])

        now = datetime.now(UTC)
        authority = not hosts
        own = x509.SubjectKeyIdentifier.from_public_key(self._key.public_key())
        builder = (
            x509.CertificateBuilder()
            .subject_name(named(name))
            .issuer_name(named("phalanx authority"))
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - EARLIER)
            .not_valid_after(now + good_for)
            .add_extension(x509.BasicConstraints(ca=authority, path_length=None), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(own), False
            )
            .add_extension(_usage(authority=authority), critical=True)
        )
        if hosts:
            names = x509.SubjectAlternativeName([_general_name(host) for host in hosts])
            usage = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH])
            builder = builder.add_extension(names, False).add_extension(usage, False)
        return builder.sign(self._key, SHA256())


def write_certificate(authority: Authority, folder: Path, hosts: tuple[str, ...]) -> None:
    """A certificate of a server and its key, in a folder."""
    chain, key = authority.issue(hosts)
    write_secret(folder / KEY_FILE, key)
    write_secret(folder / CERTIFICATE_FILE, chain)


def is_current(authority: Authority, folder: Path, hosts: tuple[str, ...]) -> bool:
    """Whether the certificate in a folder is this authority's, for these hosts, and has time."""
    from cryptography import x509

    try:
        chain = x509.load_pem_x509_certificates((folder / CERTIFICATE_FILE).read_bytes())
        there = os.access(folder / KEY_FILE, os.R_OK)
        leaf, issuer = chain[0], chain[-1]
        names = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (OSError, ValueError, IndexError, x509.ExtensionNotFound):
        return False
    wanted = [_general_name(host) for host in hosts]
    left = leaf.not_valid_after_utc - datetime.now(UTC)
    same = fingerprint_of(issuer) == authority.fingerprint
    return there and same and left > timedelta(days=RENEW_DAYS) and list(names) == wanted


def fingerprint_of(certificate: Certificate) -> str:
    """By which people know an authority: a hash of its public key."""
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    public = certificate.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    return FINGERPRINT_PREFIX + hashlib.sha256(public).hexdigest()


def read_fingerprint(pem: str) -> str:
    """The fingerprint of an authority's certificate; ValueError where it is none."""
    from cryptography import x509

    return fingerprint_of(x509.load_pem_x509_certificates(pem.encode())[-1])


def hosts_of(host: str, url_host: str) -> tuple[str, ...]:
    """Names and addresses that a server on this machine is reached by."""
    names = [url_host, host if host not in ("0.0.0.0", "::") else "", socket.gethostname()]
    names += [socket.getfqdn(), _own_address(), "localhost", "127.0.0.1", "::1"]
    return tuple(dict.fromkeys(name for name in names if name and name.isascii()))


def _own_address() -> str:
    """The address that this machine would be seen by; "": it has no network."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # an example's address: nothing is sent
            return str(probe.getsockname()[0])
        except OSError:
            return ""


def _usage(*, authority: bool) -> KeyUsage:
    from cryptography import x509

    return x509.KeyUsage(
        digital_signature=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=authority,
        crl_sign=authority,
        encipher_only=False,
        decipher_only=False,
    )


def _general_name(host: str) -> GeneralName:
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _pem(certificate: Certificate) -> str:
    from cryptography.hazmat.primitives.serialization import Encoding

    return certificate.public_bytes(Encoding.PEM).decode()
