"""Who gets what Phalanx tells: an HTTP server that keeps what it is sent, and a real Prometheus."""

from __future__ import annotations

import gzip
import json
import shutil
import subprocess
import threading
import time
import urllib.request
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.ports import free_port

START_SECONDS = 60.0
NEEDS_PROMETHEUS = pytest.mark.skipif(
    shutil.which("prometheus") is None, reason="prometheus is not installed"
)


class HttpReceiver:
    """Keeps the bodies of POST requests; the first ``refuse`` of them are answered with 503.

    With ``redirect`` it sends all others there instead.
    """

    def __init__(self, refuse: int = 0, redirect: str = "") -> None:
        self.got: list[bytes] = []
        receiver, left = self, [refuse]

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                data = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers.get("Content-Encoding") == "gzip":
                    data = gzip.decompress(data)
                if left[0]:
                    left[0] -= 1
                    self.send_response(503)
                elif redirect:
                    self.send_response(302)
                    self.send_header("Location", redirect)
                else:
                    receiver.got.append(data)
                    self.send_response(200)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> HttpReceiver:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


class Prometheus:
    """Debian's ``prometheus``, set up as the how-to has it, for as long as a block runs."""

    def __init__(self, folder: Path, target: str, token: str, rules: str) -> None:
        self._folder, self.port = folder, free_port()
        folder.mkdir(exist_ok=True)
        (folder / "phalanx.token").write_text(token)
        (folder / "alerts.yml").write_text(rules)
        (folder / "prometheus.yml").write_text(f"""
global: {{scrape_interval: 1s, evaluation_interval: 1s}}
scrape_configs:
  - job_name: phalanx
    authorization: {{credentials_file: {folder}/phalanx.token}}
    static_configs: [{{targets: ["{target}"]}}]
rule_files: [{folder}/alerts.yml]
""")

    def __enter__(self) -> Prometheus:
        command = ["prometheus", f"--config.file={self._folder}/prometheus.yml"]
        command += [f"--storage.tsdb.path={self._folder}/data"]
        command += [f"--web.listen-address=127.0.0.1:{self.port}"]
        with (self._folder / "log").open("wb") as log:
            self._process = subprocess.Popen(command, stderr=log)
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait()

    def asked(self, path: str) -> dict[str, Any]:
        """What it answers."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=60) as answer:
            return dict(json.load(answer)["data"])

    def series(self, query: str) -> list[dict[str, Any]]:
        """What it has of an expression, once it has something."""
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            with suppress(OSError):
                if found := self.asked(f"/api/v1/query?query={query}")["result"]:
                    return list(found)
            time.sleep(1)
        raise TimeoutError(f"{query}: {(self._folder / 'log').read_text()}")
