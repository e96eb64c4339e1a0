"""A recording, asked as a server is: its log is replayed, and its clock stands at the end.

Requests go through the server's own application, so that commands print of a recording what they
would print of the server that wrote it. Nothing is changed: whoever asks may only read.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import unquote

import msgspec
from starlette.types import Message

from phalanx import __version__
from phalanx.cluster.core import Core
from phalanx.cluster.policy import Policy
from phalanx.control.recording import MARK
from phalanx.control.recording.write import RecordingMark
from phalanx.control.server.agent_link.connections import Hub
from phalanx.control.server.app import make_app
from phalanx.control.server.controller import Controller, ServerClock
from phalanx.control.server.leading import Leading
from phalanx.control.server.process import Options, Server
from phalanx.control.server.replay import Recovered
from phalanx.control.server.security.auth import Tokens
from phalanx.control.server.security.joining import Joining
from phalanx.control.server.shell_memory import ShellMemory
from phalanx.control.server.store.chain import START
from phalanx.control.server.store.interface import StoreError, tail
from phalanx.control.wire.api_types import Failure, Problem

LOG = "log.sqlite"
READ_ONLY = "this is a recording: it can be looked at, and nothing of it can be changed"


class StoppedClock(ServerClock):
    """It shows when the recording ends."""

    def __init__(self, now_ns: int) -> None:
        super().__init__()
        self._stopped_ns = now_ns

    def now_ns(self) -> int:
        return self._stopped_ns


class Recording:
    """An opened recording; StoreError where it cannot be read."""

    def __init__(self, folder: Path) -> None:
        self._copy = tempfile.TemporaryDirectory(prefix="phalanx-recording-")
        self._runner = asyncio.Runner()
        try:
            self._runner.run(self._open(folder))
        except BaseException:
            self.close()
            raise

    def request(self, method: str, path: str) -> tuple[int, bytes]:
        """Status and body of an answer."""
        if method != "GET":
            problem = Problem(code="recording", message=READ_ONLY)
            return 409, msgspec.json.encode(Failure(error=problem))
        return self._runner.run(self._get(path))

    def close(self) -> None:
        """Let go of the replayed state."""
        if hasattr(self, "_server"):
            self._server.close()
        self._runner.close()
        self._copy.cleanup()

    async def _open(self, folder: Path) -> None:
        state = Path(self._copy.name)  # a server writes beside its log: not beside the original
        try:
            mark = msgspec.json.decode((folder / MARK).read_bytes(), type=RecordingMark)
            for path in folder.glob("log.*"):
                shutil.copy(path, state)
        except (OSError, msgspec.MsgspecError) as error:
            raise StoreError(f"{folder} cannot be read as a recording: {error}") from None
        if not (state / LOG).exists():
            raise StoreError(f"{folder} has no {LOG}: play it again")
        self._server = Server(Options(state=state, requests_per_second=0))
        self._server.store.lead("", __version__)
        leading = self._replayed(mark)
        self._server.leading = leading
        self._token, _ = leading.tokens.create("read", "reader")
        self._app = make_app(self._server)

    def _replayed(self, mark: RecordingMark) -> Leading:
        """As a server that had heard every event."""
        store = self._server.store
        first = next(iter(store.snapshots()), None)
        if first is None:
            raise StoreError("the log does not say how the fleet began")
        core = Core.restore(first.core)
        controller = Controller(store, Recovered(core, ShellMemory()), 1)
        controller.clock = StoppedClock(mark.end_ns)
        hub = Hub(controller, __version__)
        controller.listeners.clear()  # nobody is there whom an order could be sent to
        tokens = Tokens(store)
        leading = Leading(
            controller,
            hub,
            tokens,
            Joining(tokens, Policy().join, own=False),
            self._server.journal,
            self._server.webhooks,
        )
        for event in tail(store, 0, START):
            commands = core.handle(event)
            controller.memory.note(event, commands)
            for listener in controller.listeners:
                listener(event, commands)
        controller.epoch = core.epoch
        return leading

    async def _get(self, path: str) -> tuple[int, bytes]:
        name, _, query = path.partition("?")
        headers: Iterable[tuple[bytes, bytes]] = [
            (b"authorization", f"Bearer {self._token}".encode())
        ]
        scope = {
            "type": "http",
            "method": "GET",
            "path": unquote(name),
            "raw_path": name.encode(),
            "query_string": query.encode(),
            "headers": headers,
            "client": ("127.0.0.1", 0),
            "server": ("recording", 80),
            "scheme": "http",
            "http_version": "1.1",
            "root_path": "",
        }
        status, parts = 500, []

        async def receive() -> Message:
            return {"type": "http.request", "body": b"", "more_body": False}

        async def send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            elif message["type"] == "http.response.body":
                parts.append(message.get("body", b""))

        await self._app(scope, receive, send)
        return status, b"".join(parts)
