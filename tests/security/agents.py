"""Real agents that run as root and switch to the user of each job."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from phalanx.control.agent.safe_files import Owner
from phalanx.control.agent.socket_paths import make_runtime_folder
from phalanx.testing.fork_server import fork_zygote
from tests.control.servers import ServerProcess


class RootAgent:
    """``phalanx agent`` as a process of its own."""

    def __init__(
        self,
        server: ServerProcess,
        folder: Path,
        name: str,
        *options: str,
        zygote_ready: bool = False,
    ) -> None:
        self.name, self.state = name, folder / name
        self._log = folder / f"{name}.log"
        if zygote_ready:
            self._have_zygote()
        command = [sys.executable, "-m", "phalanx", "agent", "--join", server.url, "--name", name]
        command += ["--gpus", "1", "--state", str(self.state), "--address", "127.0.0.1", *options]
        token = {"PHALANX_TOKEN_FILE": str(server.state / "join.token")}
        with self._log.open("wb") as output:
            self.process = subprocess.Popen(
                command, env={**os.environ, **token}, stdout=output, stderr=output
            )

    def _have_zygote(self) -> None:
        """It finds one as if an agent before it had left it, and need not import torch."""
        self.state.mkdir(mode=0o700, exist_ok=True)
        path = make_runtime_folder(self.state) / "zygote.sock"
        if not path.exists():  # an agent before it has
            fork_zygote(path, self.state / "zygote.log")

    def alive(self) -> bool:
        """Whether its process is the one that was started."""
        return self.process.poll() is None

    def log(self) -> str:
        """What it said."""
        return self._log.read_text()

    def end(self) -> None:
        """End it with all that runs on its node."""
        if self.alive():
            self.process.send_signal(signal.SIGINT)
            self.process.wait(120)

    def __enter__(self) -> RootAgent:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()


def wait_for(ready: Callable[[], object], seconds: float = 120.0) -> bool:
    """Whether something became true in time."""
    deadline = time.monotonic() + seconds
    while not ready():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def as_user(owner: Owner, act: Callable[[], object]) -> int:
    """Whether a user can do something: 0 yes, else the error's number. In a process of theirs."""
    pid = os.fork()
    if pid == 0:
        code = 0
        try:
            os.setgroups([])
            os.setgid(owner.gid)
            os.setuid(owner.uid)
            act()
        except OSError as error:
            code = error.errno or 255
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
