"""A job's output as its ranks print it, over restarts of the server: no line is lost or doubled."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator

import msgspec

from phalanx.control.client.client import Client, ClientError
from phalanx.control.wire.api_types import JobDetail, JobOut, LogPieceOut

FIRST_PAUSE, LONGEST_PAUSE = 0.5, 8.0  # seconds until a server that is away is asked again
AWAY = (0, 503)  # status: nothing answers; it does not lead, or cannot store anything now

decode_piece = msgspec.json.Decoder(LogPieceOut).decode


class BackOff:
    """Pauses that grow for as long as a server is away."""

    def __init__(self, told: Callable[[ClientError], None]) -> None:
        """``told``: hears of it once, each time that the server goes."""
        self._told = told
        self.answered()

    def answered(self) -> None:
        """The server is there."""
        self._seconds, self._away = FIRST_PAUSE, False

    def wait(self, error: ClientError | None = None) -> None:
        """Until it is asked again; a refusal is raised: asking again would not help."""
        if error is not None:
            if error.status not in AWAY:
                raise error
            if not self._away:
                self._told(error)
            self._away = True
        time.sleep(self._seconds)
        self._seconds = min(2 * self._seconds, LONGEST_PAUSE)


def follow_log(
    client: Client, job: int, away: Callable[[ClientError], None], **wanted: object
) -> Iterator[bytes]:
    """The log, until the job has ended; ``wanted``: what ``GET /v1/jobs/{job}/logs`` takes.

    ``away`` hears once each time that the server goes; what it raises ends the following.
    """
    cursor, back_off = "", BackOff(away)
    while True:
        try:
            stream = client.stream(
                f"/v1/jobs/{job}/logs", follow=True, cursors=True, after=cursor, **wanted
            )
            for piece in _pieces(stream):
                back_off.answered()
                cursor = piece.cursor or cursor
                if piece.data:
                    yield piece.data
            if job_now(client, job).ended_ns:
                return
        except ClientError as error:
            back_off.wait(error)
        else:
            back_off.wait()  # a server that ends lets its readers go


def job_now(client: Client, job: int) -> JobOut:
    """A job as the server knows it."""
    return client.get(f"/v1/jobs/{job}", JobDetail).job


def _pieces(stream: Iterable[bytes]) -> Iterator[LogPieceOut]:
    rest = b""
    for part in stream:
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            try:
                yield decode_piece(line)
            except msgspec.DecodeError:  # why the server ends this
                yield LogPieceOut(data=line + b"\n", cursor="")
