"""Orders that a command gives about a job or about a node."""

from __future__ import annotations

from typing import Any, cast

from phalanx.cli.connection import order_job_or_node
from phalanx.control.client.client import Client
from phalanx.control.wire.api_types import Done, DrainIn, OrderWhy, Readmit


class RecordingClient:
    def __init__(self) -> None:
        self.orders: list[tuple[str, object]] = []

    def post(self, path: str, body: object, answer_type: type[Any]) -> Done:
        self.orders.append((path, body))
        return Done(accepted=True, message="done", sequence=1)


def test_a_number_is_a_job_and_a_name_a_node() -> None:
    client = RecordingClient()
    drain, back = DrainIn(deadline_seconds=60, why="fan"), Readmit(tested=True)
    for what, order in (("7", drain), ("rack 1/n7", drain), ("7", back), ("n7", back)):
        verbs = ("drain", "drain") if order is drain else ("release", "readmit")
        order_job_or_node(cast(Client, client), what, *verbs, order)
    assert client.orders == [
        ("/v1/jobs/7/drain", OrderWhy(why="fan")),
        ("/v1/nodes/rack%201%2Fn7/drain", drain),
        ("/v1/jobs/7/release", None),
        ("/v1/nodes/n7/readmit", back),
    ]
