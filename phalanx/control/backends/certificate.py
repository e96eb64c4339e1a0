"""A certificate for a controller inside an allocation, which no authority knows beforehand.

Whoever reads the controller's state (agents by shared storage, actors by a message) trusts it.
"""

from __future__ import annotations

import secrets
from pathlib import Path

from phalanx.control.trust.certificates import Authority, write_certificate


class CertificateError(Exception):
    """No certificate can be made, and what to change."""


def make_certificate(folder: Path, host: str) -> None:
    """A certificate for this host and its key, both in the folder, by an authority of their own."""
    try:
        write_certificate(Authority(secrets.token_bytes(32)), folder, (host,))
    except (OSError, ValueError) as error:
        raise CertificateError(f"no certificate can be made in {folder}: {error}") from None
