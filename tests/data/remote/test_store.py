"""Reads from a store: tried again, asked for twice when slow, and clear about what is wrong."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from obstore.exceptions import GenericError, NotFoundError, PermissionDeniedError

from phalanx.config import Store
from phalanx.data import DataError
from phalanx.data.errors import ObjectStoreError
from phalanx.data.remote.store import RangeStore

CONTENT = bytes(range(256)) * 16


class Client:
    """Answers like an object store's client, with what ``before`` does at each request."""

    def __init__(self, before: Callable[[int], Any] = lambda request: None) -> None:
        self.requests = 0
        self._before = before

    async def get_range_async(self, name: str, *, start: int, length: int) -> bytes:
        self.requests += 1
        pause = self._before(self.requests)
        if pause:
            await asyncio.sleep(pause)
        return CONTENT[start : start + length]

    async def head_async(self, name: str) -> dict[str, int]:
        return {"size": len(CONTENT)}


def store_with(client: Client, monkeypatch: pytest.MonkeyPatch, **settings: float) -> RangeStore:
    monkeypatch.setattr("phalanx.data.remote.store.connect", lambda url: client)
    monkeypatch.setattr("phalanx.data.remote.store._FIRST_WAIT_SECONDS", 0.001)
    return RangeStore("s3://bucket/corpus", Store(**settings))  # type: ignore[arg-type]


def read(store: RangeStore, first: int = 10, length: int = 20) -> bytes:
    return bytes(store.submit(store.read("shard", first, length)).result(timeout=90))


def failing(times: int, error: Exception) -> Callable[[int], None]:
    def before(request: int) -> None:
        if request <= times:
            raise error

    return before


def test_a_failing_read_is_tried_again_until_it_succeeds(monkeypatch: pytest.MonkeyPatch) -> None:
    client = Client(failing(5, GenericError("connection refused")))
    store = store_with(client, monkeypatch)
    assert read(store) == CONTENT[10:30]
    assert (client.requests, store.retries) == (6, 5)


def test_patience_ends_with_the_name_of_the_object(monkeypatch: pytest.MonkeyPatch) -> None:
    client = Client(failing(10**9, GenericError("connection refused")))
    store = store_with(client, monkeypatch, retry_seconds=1.0)
    with pytest.raises(ObjectStoreError, match=r"s3://bucket/corpus/shard: failed for .*refused"):
        read(store)
    assert client.requests > 2


def test_a_failure_is_told_in_one_line_and_absent_credentials_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text = (
        "Error performing PUT http://169.254.169.254/latest/api/token\n\nDebug source:\nGeneric {"
    )
    client = Client(failing(10**9, GenericError(text)))
    with pytest.raises(ObjectStoreError, match=r"no credentials.*AWS_ACCESS_KEY_ID") as caught:
        read(store_with(client, monkeypatch))
    assert "\n" not in str(caught.value)
    assert client.requests == 1  # nobody waits for keys that are not there


def test_a_role_that_cannot_be_renewed_for_a_while_is_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def before(request: int) -> None:
        if request in (2, 3):
            raise GenericError("Error performing GET http://169.254.169.254/latest/meta-data")

    client = Client(before)
    store = store_with(client, monkeypatch)
    assert read(store) == read(store) == CONTENT[10:30]
    assert client.requests == 4


def test_what_is_missing_or_forbidden_is_not_asked_for_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    client = Client(failing(10**9, NotFoundError("404")))
    with pytest.raises(DataError, match=r"s3://bucket/corpus/shard: .*missing"):
        read(store_with(client, monkeypatch))
    assert client.requests == 1
    client = Client(failing(10**9, PermissionDeniedError("403")))
    with pytest.raises(ObjectStoreError, match="access is refused"):
        read(store_with(client, monkeypatch))
    assert client.requests == 1


def test_a_range_beyond_the_end_means_a_truncated_object(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match=r"truncated: 4096 bytes, where the corpus needs 4106"):
        read(store_with(Client(), monkeypatch), first=4086)


def test_a_slow_read_is_asked_for_a_second_time(monkeypatch: pytest.MonkeyPatch) -> None:
    client = Client(lambda request: 60 if request == 11 else 0)
    store = store_with(client, monkeypatch)
    for _ in range(12):
        assert read(store) == CONTENT[10:30]
    assert (store.reads, store.hedges, client.requests) == (12, 1, 13)


def test_the_first_answer_counts_even_when_the_second_request_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def before(request: int) -> float:
        if request == 12:
            raise GenericError("the second request fails at once")
        return 0.3 if request == 11 else 0

    store = store_with(Client(before), monkeypatch)
    for _ in range(11):
        assert read(store) == CONTENT[10:30]
    assert (store.hedges, store.retries) == (1, 0)


def test_without_hedging_nothing_is_asked_for_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    client = Client(lambda request: 0.3 if request == 11 else 0)
    store = store_with(client, monkeypatch, hedge_factor=0)
    for _ in range(12):
        read(store)
    assert client.requests == 12


def test_a_url_of_no_store_is_refused() -> None:
    with pytest.raises(DataError, match="is no usable URL"):
        RangeStore("nothing://bucket/x", Store())
