"""A certificate for a controller inside an allocation, which no authority knows beforehand.

Whoever reads the controller's state (agents by shared storage, actors by a message) trusts it.
"""

from __future__ import annotations

import ipaddress
import os
import shutil
import subprocess
from pathlib import Path

from phalanx.control.client import TLS_FILE

KEY_FILE = "tls.key"
DAYS = 3650


class CertificateError(Exception):
    """No certificate can be made, and what to change."""


def make_certificate(folder: Path, host: str) -> tuple[Path, Path]:
    """A certificate for this host and its key, both in the folder."""
    if not shutil.which("openssl"):
        raise CertificateError("openssl not found: install it, or set backend.tls = false")
    try:
        name = f"IP:{ipaddress.ip_address(host)}"
    except ValueError:
        name = f"DNS:{host}"
    made = {}
    command = ["openssl", "req", "-x509", "-nodes", "-days", str(DAYS), "-subj", "/CN=phalanx"]
    command += ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"]
    command += ["-addext", f"subjectAltName={name}"]
    for option, file in (("-keyout", KEY_FILE), ("-out", TLS_FILE)):
        made[file] = folder / f"{file}.{os.getpid()}"
        made[file].touch(mode=0o600)
        command += [option, str(made[file])]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise CertificateError(f"openssl: {done.stderr.strip().splitlines()[-1]}")
    for file, draft in made.items():
        draft.rename(folder / file)
    return folder / TLS_FILE, folder / KEY_FILE
