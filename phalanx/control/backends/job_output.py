"""What a job's ranks print, copied to where an engine's users look for it."""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from typing import BinaryIO

from phalanx.control.client.client import Client, ClientError

FIRST_BYTES = 16 << 20  # of what was printed before somebody listened
AWAY_SECONDS = 2.0  # before a controller that was restarted is asked again


class JobOutput:
    """Follows the first node's ranks in a thread of its own, until the job has ended."""

    def __init__(self, client: Client, number: int, outs: list[BinaryIO], *, seen: bool) -> None:
        """``seen``: an earlier turn has copied what is there already."""
        self._client, self._path = client, f"/v1/jobs/{number}/logs"
        self._outs, self._tail = outs, 0 if seen else FIRST_BYTES
        self._leaving = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()

    def finish(self, seconds: float) -> None:
        """Wait for the last lines, but not for ever."""
        self._leaving.set()
        self._thread.join(seconds)

    def _follow(self) -> None:
        while True:
            with suppress(ClientError):  # it is being restarted: what is printed then is not copied
                for piece in self._client.stream(
                    self._path, rank=-1, follow=True, tail_bytes=self._tail
                ):
                    self._tail = 0
                    for out in self._outs:
                        out.write(piece)
                        out.flush()
                return
            if self._leaving.is_set():
                return
            time.sleep(AWAY_SECONDS)
