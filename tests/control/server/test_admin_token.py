"""The administrator's token as the site gives it: known to the server, and nowhere in its state."""

from __future__ import annotations

from pathlib import Path

from tests.control.servers import ServerProcess


class Given(ServerProcess):
    """A server whose administrator's token is in a file of the site."""

    def __init__(self, folder: Path, secret: str) -> None:
        self.given = folder / "given"
        self.given.write_text(secret + "\n")
        super().__init__(folder / "state", "--admin-token", str(self.given))

    @property
    def token_file(self) -> Path:
        return self.given


SECRET = "chosen-by-the-site-0123456789abcdef"


def test_a_given_administrators_token_is_good_and_not_kept_in_the_state(tmp_path: Path) -> None:
    for _ in range(2):  # also when it starts again
        with Given(tmp_path, SECRET) as server:
            assert server.call("GET", "/v1/tokens")[0] == 200
    state = tmp_path / "state"
    assert not (state / "admin.token").exists() and (state / "join.token").exists()
    kept = [path for path in state.rglob("*") if path.is_file()]
    assert kept and not [path for path in kept if SECRET.encode() in path.read_bytes()]


def test_a_short_token_is_refused(tmp_path: Path) -> None:
    server = Given(tmp_path, "short").start(wait=False)
    assert server.process is not None and server.process.wait(60) != 0
    assert "32 letters" in server.output()
