"""A server that waits for its store."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import pytest

from phalanx.control.server import process as module
from phalanx.control.server.process import Options, Server
from phalanx.control.server.store.interface import StoreBusyError, StoreError


def test_a_store_that_is_away_is_told_once_and_not_at_every_try(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    problems = ["refused", "refused", "refused", "the password is wrong", "refused"]
    tries: list[Exception] = [StoreError(problem) for problem in problems]
    tries.append(StoreBusyError("another server leads", ""))  # which ends it
    monkeypatch.setattr(module, "STANDBY_SECONDS", 0.0)

    async def lead() -> None:
        server = Server(Options(state=tmp_path))

        def answer(url: str, version: str) -> None:
            raise tries.pop(0)

        monkeypatch.setattr(server.store, "lead", answer)
        server.settled.set()  # it has led before: others know it, so it does not go away
        try:
            await server.lead_forever()
        finally:
            server.close()

    with caplog.at_level(logging.WARNING, "phalanx.server"), pytest.raises(StoreBusyError):
        asyncio.run(lead())
    told = [record.getMessage() for record in caplog.records if "cannot lead" in record.message]
    assert told == [f"cannot lead: {each}" for each in ("refused", problems[3], "refused")]
