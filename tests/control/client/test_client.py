"""The client with several servers, of which none can help."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from phalanx.control.client import client
from phalanx.control.client.client import Client, ClientError
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


@pytest.mark.parametrize(
    "url",
    ["foo", "http://", "http://h:abc", "http://[::1", "http://a b:1", "ftp://x", "http://h:0"],
)
def test_what_is_no_address_is_refused_before_anything_is_asked(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PHALANX_TOKEN", "x")
    with pytest.raises(ClientError, match="is not a server's address"):
        Client(url)


def test_a_stream_from_nobody_is_told_like_any_other_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PHALANX_TOKEN", "x")
    with pytest.raises(ClientError, match="no server answers"):
        list(Client(f"http://127.0.0.1:{free_port()}").stream("/v1/jobs/1/logs"))


def test_a_token_that_no_header_can_carry_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PHALANX_TOKEN", raising=False)
    (tmp_path / "admin.token").write_bytes(b"\xff\x00\n\n")
    with pytest.raises(ClientError, match="its content is not a token"):
        Client("http://127.0.0.1:1", tmp_path)
    (tmp_path / "server.json").write_text("{")
    with pytest.raises(ClientError, match=r"server\.json cannot be read"):
        Client("", tmp_path)
