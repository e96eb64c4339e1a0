"""The controller of one job: a process beside whoever leads it, started again when it dies."""

from __future__ import annotations

import logging
import os
import secrets
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

from phalanx.control.client.client import TLS_FILE
from phalanx.control.trust.certificates import KEY_FILE, Authority, write_certificate

END_SECONDS = 10.0

log = logging.getLogger("phalanx.lead")


class CertificateError(Exception):
    """No certificate can be made, and what to change."""


class OwnController:
    """``phalanx up`` at a URL, with its state in a folder."""

    def __init__(self, state: Path, url: str, policy: Path | None) -> None:
        self._state, self._url, self._policy = state, url, policy
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, with a certificate of its own where the URL wants one."""
        if self._url.startswith("https:"):
            make_certificate(self._state, urlsplit(self._url).hostname or "")
        self._spawn()

    def _spawn(self) -> None:
        where = urlsplit(self._url)
        local = (where.hostname or "").startswith("127.")
        command = [sys.executable, "-m", "phalanx", "up", "--state", str(self._state)]
        command += ["--host", where.hostname or "" if local else "0.0.0.0"]
        command += ["--port", str(where.port), "--url", self._url]
        command += ["--follow", str(os.getpid()), "--own-nodes"]
        if where.scheme == "https":
            command += ["--tls-cert", str(self._state / TLS_FILE)]
            command += ["--tls-key", str(self._state / KEY_FILE)]
        else:
            command += ["--plain-http"]
        if self._policy is not None:
            command += ["--policy", str(self._policy)]
        with self._log.open("ab") as output:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,  # a warning to our group is ours to act on
            )

    @property
    def _log(self) -> Path:
        return self._state / "server.log"

    @property
    def last_words(self) -> str:
        """What it said before it ended; "": it has not ended."""
        if self._process is None or self._process.poll() is None:
            return ""
        return " ".join(self._log.read_text(errors="replace").splitlines()[-2:]) or "nothing"

    def look_after(self) -> None:
        """Start it again, should it have died."""
        if self._process is not None and self._process.poll() is not None:
            log.warning("the controller ended (%s): starting it again", self._process.poll())
            self._spawn()

    def end(self) -> None:
        """End it."""
        if self._process is not None:
            self._process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(END_SECONDS)
            self._process.kill()
            self._process = None


def make_certificate(folder: Path, host: str) -> None:
    """A certificate for this host and its key, both in the folder, by an authority of their own.

    No other authority knows the controller of an allocation beforehand: whoever reads its state
    (agents by shared storage, actors by a message) trusts it.
    """
    try:
        write_certificate(Authority(secrets.token_bytes(32)), folder, (host,))
    except (OSError, ValueError) as error:
        raise CertificateError(f"no certificate can be made in {folder}: {error}") from None
