"""The HTTP client of the command line: finds the server, retries safely, explains refusals."""

from __future__ import annotations

import http.client
import os
import ssl
import time
import uuid
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import urlencode, urlsplit

import msgspec

from phalanx.config.errors import plain_reason
from phalanx.control.recording import is_recording
from phalanx.control.trust.tls import (
    CA_VARIABLE,
    FINGERPRINT_VARIABLE,
    TlsError,
    advice,
    kept_authority,
    trusting,
    trusting_pinned,
)
from phalanx.control.wire.api_types import Failure, Status
from phalanx.control.wire.server_file import ServerFile

if TYPE_CHECKING:
    from phalanx.control.recording.read import Recording

T = TypeVar("T")

RETRY_SECONDS = 10.0  # a standby takes over within this time
TIMEOUT_SECONDS = 30.0
PIECE_BYTES = 65_536
NOT_RECORDED = "this is a recording of an event log: it has neither ranks' output nor shells"


class ClientError(Exception):
    """The server refused, or there is none. ``status`` 0: nothing answered."""

    def __init__(self, message: str, status: int = 0, code: str = "unreachable") -> None:
        super().__init__(message)
        self.status, self.code = status, code


TLS_FILE = "tls.crt"


def default_state() -> Path:
    """The state folder of a server on this machine."""
    return Path(os.environ.get("PHALANX_STATE") or Path.home() / ".phalanx" / "server")


class Client:
    """Speaks to a server, or to whichever of several leads."""

    def __init__(self, server: str = "", state: Path | None = None) -> None:
        self.state = state or default_state()
        self._urls: list[str] = []
        self._recording = None if server else self._recorded()
        if self._recording is not None:
            return
        given = server or os.environ.get("PHALANX_SERVER", "")
        self._urls = [url.strip().rstrip("/") for url in given.split(",") if url.strip()]
        for url in self._urls:
            _refuse_address(url)
        if not self._urls:
            self._urls = self._of_this_machine()
        if not self._urls:
            raise ClientError(
                f"no server is known here ({self.state} has none): start one with `phalanx up`, "
                "or name one with --server or PHALANX_SERVER"
            )
        self._token = self._find_token()
        self._context: ssl.SSLContext | None = None
        if any(url.startswith("https:") for url in self._urls):
            try:
                self._context = self._trust()
            except TlsError as error:
                raise ClientError(str(error)) from None
            except OSError as error:
                raise self._unreachable(getattr(error, "reason", error)) from None

    def _recorded(self) -> Recording | None:
        """What stands in the state folder where it is no server's."""
        if not is_recording(self.state):
            return None
        from phalanx.control.recording.read import Recording
        from phalanx.control.server.store.interface import StoreError

        try:
            opened = Recording(self.state)
        except StoreError as error:
            raise ClientError(str(error), 409, "recording") from None
        weakref.finalize(self, opened.close)
        return opened

    def _trust(self) -> ssl.SSLContext:
        """An authority that is named, or known by its fingerprint, or the server's own here."""
        if named := os.environ.get(CA_VARIABLE):
            return trusting(named)
        own = self.state / TLS_FILE  # of a server of this user, or inside an allocation
        url = next(url for url in self._urls if url.startswith("https:"))
        kept = kept_authority(url, Path.home() / ".phalanx" / "authorities")
        fingerprint = os.environ.get(FINGERPRINT_VARIABLE, "")
        if fingerprint or (kept.exists() and not own.exists()):
            return trusting_pinned(url, fingerprint, kept)
        return trusting(str(own) if own.exists() else "")

    def _of_this_machine(self) -> list[str]:
        """The server that runs, or ran last, with the state folder here."""
        try:
            return [ServerFile.read(self.state).url] if ServerFile.there(self.state) else []
        except (OSError, msgspec.MsgspecError) as error:
            problem = plain_reason(error)
            raise ClientError(f"{self.state}/server.json cannot be read: {problem}") from None

    def _find_token(self) -> str:
        token = os.environ.get("PHALANX_TOKEN", "").strip()
        where, problem = "PHALANX_TOKEN", ""
        if not token:
            path = Path(os.environ.get("PHALANX_TOKEN_FILE") or self.state / "admin.token")
            where = str(path)
            try:
                token = path.read_text(errors="replace").strip()
            except OSError as error:
                problem = plain_reason(error)
        if not problem and not (token and token.isascii() and token.isprintable()):
            problem = "its content is not a token"
        if problem:
            raise ClientError(
                f"no token: {where}: {problem}; set PHALANX_TOKEN_FILE to a file that has "
                "one (an administrator makes it with `phalanx token create`), or PHALANX_STATE to "
                "the state folder of a server of yours on this machine"
            )
        return token

    @property
    def urls(self) -> tuple[str, ...]:
        """Addresses of the server, or of several of which one leads; none of a recording."""
        return tuple(self._urls)

    def reached_by(self) -> dict[str, str]:
        """Variables by which a job of the same user reaches this server; no secret is in them."""
        if os.environ.get("PHALANX_TOKEN"):
            raise ClientError(
                "a token in PHALANX_TOKEN would stand in the server's log: put it into a file that "
                "nodes can read, and name that in PHALANX_TOKEN_FILE",
                409,
                "token_file",
            )
        token = Path(os.environ.get("PHALANX_TOKEN_FILE") or self.state / "admin.token")
        own, given = self.state / TLS_FILE, os.environ.get(CA_VARIABLE)
        authority = given or (str(own.absolute()) if own.exists() else "")
        options = {
            "PHALANX_SERVER": ",".join(self._urls),
            "PHALANX_TOKEN_FILE": str(token.absolute()),
            CA_VARIABLE: authority,
            FINGERPRINT_VARIABLE: os.environ.get(FINGERPRINT_VARIABLE, ""),
        }
        return {name: value for name, value in options.items() if value}

    def get(self, path: str, answer_type: type[T], **query: object) -> T:
        """Reads something."""
        given = {name: str(value).lower() for name, value in query.items() if value is not None}
        return self._call(
            "GET", path + (f"?{urlencode(given)}" if given else ""), None, answer_type
        )

    def post(self, path: str, body: object, kind: type[T]) -> T:
        """Asks for something; retried with one key, it is done once."""
        return self._call("POST", path, body, kind)

    def put(self, path: str, body: object, kind: type[T]) -> T:
        """Sets something."""
        return self._call("PUT", path, body, kind)

    def delete(self, path: str, kind: type[T]) -> T:
        """Takes something away."""
        return self._call("DELETE", path, None, kind)

    def node_gpus(self) -> int:
        """GPUs of a node of the fleet, once its own nodes have joined."""
        while (status := self.get("/v1/status", Status)).starting:
            time.sleep(0.2)  # its nodes are about to join: what they have is not known yet
        return status.node_gpus

    def stream(self, path: str, **query: object) -> Iterator[bytes]:
        """A text as it comes."""
        given = {name: str(value).lower() for name, value in query.items() if value is not None}
        if self._recording is not None:
            raise ClientError(NOT_RECORDED, 409, "recording")
        self._call("GET", "/v1/status", None, dict)  # finds the one that leads
        try:
            connection, answer = self._open(
                "GET", f"{path}?{urlencode(given)}", None, "", timeout=None
            )
        except (OSError, http.client.HTTPException) as error:
            raise self._unreachable(error) from None
        try:
            if answer.status != 200:
                raise _refusal(answer.status, answer.read())
            while piece := answer.read1(PIECE_BYTES):
                yield piece
        except (OSError, http.client.HTTPException) as error:
            why = f" ({plain_reason(error)})" if isinstance(error, OSError) else ""
            raise ClientError(f"{self._urls[0]} broke off in the middle{why}") from None
        finally:
            connection.close()

    def live(self, path: str) -> tuple[str, dict[str, str], ssl.SSLContext | None]:
        """Address, headers and trust of a WebSocket; at the server that leads."""
        if self._recording is not None:
            raise ClientError(NOT_RECORDED, 409, "recording")
        self._call("GET", "/v1/status", None, dict)
        headers = {"Authorization": f"Bearer {self._token}"}
        url = self._urls[0].replace("http", "ws", 1) + path
        return url, headers, self._context if url.startswith("wss:") else None

    def _call(self, method: str, path: str, body: object, answer_type: type[T]) -> T:
        if self._recording is not None:
            return _decoded(self._ask(self._recording, method, path), answer_type, 200)
        key = uuid.uuid4().hex if method != "GET" else ""
        data = None if body is None else msgspec.json.encode(body)
        deadline = time.monotonic() + RETRY_SECONDS
        refusal: ClientError | None = None  # by a server that is there: tells more than silence
        while True:
            try:
                connection, answer = self._open(method, path, data, key, TIMEOUT_SECONDS)
                try:
                    text = answer.read()
                finally:
                    connection.close()
                if answer.status < 300:
                    return _decoded(text, answer_type, answer.status)
                raise _refusal(answer.status, text)
            except (OSError, http.client.HTTPException) as error:
                problem = self._unreachable(error)
                final = isinstance(error, ConnectionRefusedError | ssl.SSLError)
                again = not final or len(self._urls) > 1
            except ClientError as error:
                problem, again = error, error.status in (429, 503)
                refusal = error
            if not again or time.monotonic() > deadline:
                raise (refusal if refusal and len(self._urls) > 1 else problem) from None
            self._urls.append(self._urls.pop(0))
            time.sleep(0.3)

    def _ask(self, recording: Recording, method: str, path: str) -> bytes:
        status, text = recording.request(method, path)
        if status >= 300:
            raise _refusal(status, text)
        return text

    def _open(
        self, method: str, path: str, data: bytes | None, key: str, timeout: float | None
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        where = urlsplit(self._urls[0])
        connection: http.client.HTTPConnection
        if where.scheme == "https":
            connection = http.client.HTTPSConnection(
                where.hostname or "", where.port, timeout=timeout, context=self._context
            )
        else:
            connection = http.client.HTTPConnection(
                where.hostname or "", where.port, timeout=timeout
            )
        headers = {"Authorization": f"Bearer {self._token}"}
        if data is not None:
            headers["Content-Type"] = "application/json"
        if key:
            headers["Idempotency-Key"] = key
        connection.request(method, path, data, headers)
        return connection, connection.getresponse()

    def _unreachable(self, error: Exception) -> ClientError:
        where = " or ".join(self._urls)
        if told := advice(error, self._urls[0]):
            return ClientError(f"{self._urls[0]}: {told}")
        return ClientError(
            f"no server answers at {where} ({plain_reason(error)}): start one with `phalanx up`, "
            "or name another with --server or PHALANX_SERVER"
        )


def _refuse_address(url: str) -> None:
    """What cannot be the address of a server is said to be none, before anything is asked."""
    try:
        parts = urlsplit(url)
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is no number, half an IPv6 address
        good = False
    if not good or not url.isascii() or not url.isprintable() or any(c.isspace() for c in url):
        raise ClientError(f"{url!r} is not a server's address: use http://HOST:PORT")


def _decoded(text: bytes, kind: type[T], status: int) -> T:
    try:
        return msgspec.json.decode(text, type=kind)
    except msgspec.ValidationError as error:
        message = f"the server's answer is not understood ({error}): is it another release?"
        raise ClientError(message, status, "not_known") from None
    except msgspec.MsgspecError:
        message = f"not a Phalanx server: it answered {status}, but not JSON"
        raise ClientError(message, status, "not_phalanx") from None


def _refusal(status: int, text: bytes) -> ClientError:
    try:
        problem = msgspec.json.decode(text, type=Failure).error
        return ClientError(problem.message, status, problem.code)
    except msgspec.MsgspecError:
        return ClientError(f"not a Phalanx server: it answered {status}", status, "not_phalanx")
