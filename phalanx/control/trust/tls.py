"""Certificates: what a server shows, whom a client trusts, and what went wrong in words."""

from __future__ import annotations

import http.client
import json
import re
import ssl
import urllib.request
from pathlib import Path
from urllib.parse import urlsplit

from phalanx.control.trust.secret_file import write_secret

CA_VARIABLE = "PHALANX_CA"
FINGERPRINT_VARIABLE = "PHALANX_FINGERPRINT"
FINGERPRINT = re.compile(r"sha256:[0-9a-f]{64}")
AUTHORITY_PATH = "/v1/authority"
FETCH_SECONDS = 10.0


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


def trusting_pinned(url: str, fingerprint: str, kept: Path) -> ssl.SSLContext:
    """A client's context that trusts the authority with this fingerprint alone.

    Its certificate comes from the server itself, is compared with the fingerprint before anything
    else is said, and kept in a file. "": the one that is kept.
    """
    if fingerprint and not FINGERPRINT.fullmatch(fingerprint):
        raise TlsError(f"{fingerprint!r} is no fingerprint: sha256: and 64 hexadecimal digits")
    if not kept.exists() or (fingerprint and _fingerprint(kept.read_text()) != fingerprint):
        text = _fetch_authority(url)
        shown = _fingerprint(text)
        if shown != fingerprint:
            raise TlsError(
                f"{url} shows the fingerprint {shown}, not {fingerprint}: it is another server, or "
                "somebody is in between (the server's is in its output and `phalanx up` prints it)"
            )
        kept.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_secret(kept, text)
    context = trusting(str(kept))
    # Nobody but the cluster's servers has certificates of this authority: any name will do.
    context.check_hostname = False
    return context


def _fetch_authority(url: str) -> str:
    """The certificate that a server says is its authority's; nothing is believed of it yet."""
    unverified = ssl.create_default_context()
    unverified.check_hostname, unverified.verify_mode = False, ssl.CERT_NONE
    where = url.rstrip("/") + AUTHORITY_PATH
    with urllib.request.urlopen(where, timeout=FETCH_SECONDS, context=unverified) as answer:
        return str(json.loads(answer.read())["pem"])


def _fingerprint(pem: str) -> str:
    from phalanx.control.trust.certificates import read_fingerprint

    try:
        return read_fingerprint(pem)
    except ValueError:
        raise TlsError("the server shows no certificate of an authority") from None


def kept_authority(url: str, folder: Path) -> Path:
    """Where the authority of a server is kept once its fingerprint was seen to be right."""
    where = urlsplit(url)
    return folder / f"{where.hostname}_{where.port or 443}.pem"


def advice(error: BaseException, url: str) -> str:
    """What a failed connection says about TLS; "" where it says nothing."""
    if isinstance(error, ssl.SSLCertVerificationError):
        if "expired" in error.verify_message or "not yet valid" in error.verify_message:
            return (
                f"its certificate is not good now ({error.verify_message}): set the clocks right, "
                "or start the server again, which renews a certificate of its own"
            )
        return (
            f"its certificate is not trusted ({error.verify_message}): give the fingerprint that "
            f"`phalanx up` prints (--fingerprint, or {FINGERPRINT_VARIABLE}), or set {CA_VARIABLE} "
            "to the file of its authority"
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
