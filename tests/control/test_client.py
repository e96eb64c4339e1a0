"""The client with several servers, of which none can help."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from phalanx.control import client
from phalanx.control.client import Client, ClientError
from tests.ports import free_port

SAID = "this server stands by and cannot lead: cannot reach PostgreSQL"


class Standby(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        body = f'{{"error": {{"code": "not_leader", "message": "{SAID}"}}}}'.encode()
        self.send_response(503)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Not into the output of tests."""


@pytest.fixture
def standby() -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), Standby)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_what_a_server_says_goes_before_the_silence_of_another(
    standby: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "RETRY_SECONDS", 0.6)
    monkeypatch.setenv("PHALANX_TOKEN", "x")
    silent = f"http://127.0.0.1:{free_port()}"
    for servers in (f"{silent},{standby}", f"{standby},{silent}"):
        with pytest.raises(ClientError, match="cannot reach PostgreSQL"):
            Client(servers).get("/v1/status", dict)
