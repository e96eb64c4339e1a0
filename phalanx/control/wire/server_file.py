"""``server.json``: how the command line finds a server on this machine."""

from __future__ import annotations

from pathlib import Path

import msgspec
from msgspec import Struct

from phalanx.control.trust.secret_file import write_secret

NAME = "server.json"


class ServerFile(Struct, frozen=True):
    """A server's address and process."""

    url: str
    pid: int
    version: str

    def write(self, state: Path) -> None:
        """Writes it into the state folder, whole or not at all."""
        write_secret(state / NAME, msgspec.json.encode(self).decode())

    @classmethod
    def there(cls, state: Path) -> bool:
        """Whether a server has run with this state folder."""
        return (state / NAME).exists()

    @classmethod
    def read(cls, state: Path) -> ServerFile:
        """The server that runs (or ran last) with this state folder."""
        return msgspec.json.decode((state / NAME).read_bytes(), type=cls)
