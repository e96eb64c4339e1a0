"""A server that pages of tests are of: some runs that it has kept, and a token for every role."""

from __future__ import annotations

from typing import Any

from tests.control.servers import WORK, ServerProcess


class Site:
    """A server that has kept some runs, and a token for every role."""

    def __init__(self, server: ServerProcess) -> None:
        self.server = server
        self.tokens = {
            "admin": server.admin(),
            "user": server.token("user", "ann", team="text"),
            "read": server.token("read", "vera"),
        }

    def submit(self, name: str, role: str = "admin", **spec: Any) -> int:
        """A job that waits: it is held."""
        asked = {"name": name, "gang": {"slot_gpus": 1}, "held": True, **spec}
        body = {"spec": asked, "work": WORK}
        status, done = self.server.call("POST", "/v1/jobs", body, token=self.tokens[role])
        assert status == 201, done
        return int(done["jobs"][0])

    def get(self, path: str) -> Any:
        return self.server.call("GET", path)[1]
