"""Certificates: what a server shows, whom a client trusts, and what went wrong in words."""

from __future__ import annotations

import http.client
import ssl
from pathlib import Path

CA_VARIABLE = "PHALANX_CA"


class TlsError(Exception):
    """A certificate, key or authority that cannot be used, and why."""


def check_server_files(certificate: Path, key: Path) -> None:
    """Refuses files that no server could show to anybody."""
    for path in (certificate, key):
        _readable(path, str(path))
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(certificate, key)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise TlsError(f"{key} is not the key of {certificate}") from None
        raise TlsError(
            f"{certificate} and {key} are no certificate chain and key in PEM ({_short(error)})"
        ) from None


def is_loopback(host: str) -> bool:
    """Whether only this machine hears what is said at an address."""
    return host in ("localhost", "::1") or host.startswith("127.")


def trusting(ca: str) -> ssl.SSLContext:
    """A client's context; "" trusts what the system trusts."""
    if ca:
        _readable(Path(ca), f"{CA_VARIABLE} = {ca}")
    try:
        return ssl.create_default_context(cafile=ca or None)
    except ssl.SSLError as error:
        rule = f"is no certificate of an authority in PEM ({_short(error)})"
        raise TlsError(f"{CA_VARIABLE} = {ca}: {rule}") from None


def advice(error: BaseException, url: str) -> str:
    """What a failed connection says about TLS; "" where it says nothing."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return (
            f"its certificate is not trusted ({error.verify_message}): set {CA_VARIABLE} to the "
            "file of its authority"
        )
    if isinstance(error, ssl.SSLError) and error.reason == "WRONG_VERSION_NUMBER":
        return f"it does not speak TLS: try http{url.removeprefix('https')}"
    if url.startswith("http:") and isinstance(error, http.client.RemoteDisconnected):
        return f"it hung up at once: if it speaks TLS, try https{url.removeprefix('http')}"
    return ""


def _readable(path: Path, what: str) -> None:
    try:
        path.open("rb").close()
    except OSError as error:
        raise TlsError(f"{what}: {error.strerror}") from None


def _short(error: ssl.SSLError) -> str:
    return error.reason or str(error)
