"""What a job's ranks print, copied to where an engine's users look for it."""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import BinaryIO

from phalanx.control.client.client import Client, ClientError
from phalanx.control.client.followed_log import follow_log

FIRST_BYTES = 16 << 20  # of what was printed before somebody listened


class JobOutput:
    """Follows the first node's ranks in a thread of its own, until the job has ended."""

    def __init__(self, client: Client, number: int, outs: list[BinaryIO], *, seen: bool) -> None:
        """``seen``: an earlier turn has copied what is there already."""
        self._client, self._number = client, number
        self._outs, self._tail = outs, 0 if seen else FIRST_BYTES
        self._leaving = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()

    def finish(self, seconds: float) -> None:
        """Wait for the last lines, but not for ever."""
        self._leaving.set()
        self._thread.join(seconds)

    def _follow(self) -> None:
        with suppress(ClientError):
            for piece in follow_log(
                self._client, self._number, self._away, rank=-1, tail_bytes=self._tail
            ):
                for out in self._outs:
                    out.write(piece)
                    out.flush()

    def _away(self, error: ClientError) -> None:
        """The controller is being restarted, or was ended behind its job."""
        if self._leaving.is_set():
            raise error
