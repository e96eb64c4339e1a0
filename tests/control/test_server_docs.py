"""The examples of the pages about the server and its API run as they stand."""

from __future__ import annotations

import os
import pwd
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import pytest

from tests.control.servers import ServerProcess
from tests.ports import free_port

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "how-to" / "run-the-server.md"
API_PAGE = ROOT / "docs" / "how-to" / "use-the-api.md"


FIRST_BLOCK_SECONDS = 120
ORDINARY = "nobody"


def first_block() -> list[str]:
    """The lines of the page's first example, without their comments."""
    block = re.search(r"```sh\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert block is not None
    return [line.split("  #")[0].strip() for line in block[1].splitlines()]


class Person:
    """A user of this machine with an empty home folder and the command `phalanx`."""

    def __init__(self, home: Path, user: str = "") -> None:
        self.home, self.user = home, user
        (home / "bin").mkdir(parents=True)
        python, paths = interpreter_of(user)
        command = home / "bin" / "phalanx"
        command.write_text(f'#!/bin/sh\nPYTHONPATH={paths} exec {python} -m phalanx "$@"\n')
        command.chmod(0o755)
        if user:
            shutil.chown(home, user)
        self.environment = {
            "HOME": str(home),
            "PATH": f"{home / 'bin'}:{os.environ['PATH']}",
            "OMP_NUM_THREADS": "1",
        }

    def start(self, line: str) -> subprocess.Popen[str]:
        """One line of a shell, in the background; what it says goes to one pipe."""
        return subprocess.Popen(
            ["bash", "-c", line],
            cwd=self.home,
            env=self.environment,
            user=self.user or None,
            group=pwd.getpwnam(self.user).pw_gid if self.user else None,
            extra_groups=[] if self.user else None,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, line: str) -> str:
        """What a line prints; it must work."""
        process = self.start(line)
        output, _ = process.communicate(timeout=FIRST_BLOCK_SECONDS)
        assert process.returncode == 0, f"{line}: {output}"
        return output


def interpreter_of(user: str) -> tuple[str, str]:
    """A Python that a user may run, and where it finds us and what we need."""
    packages = ":".join(dict.fromkeys([str(ROOT), *filter(None, sys.path)]))
    if not user:
        return sys.executable, packages
    system = f"/usr/bin/python3.{sys.version_info.minor}"
    for python in (sys.executable, system):
        trial = subprocess.run(
            ["/bin/sh", "-c", f"exec {python} -c 'import phalanx.control.server.process'"],
            user=user,
            env={"PYTHONPATH": packages, "PATH": os.environ["PATH"]},
            cwd="/",
            capture_output=True,
            check=False,
        )
        if trial.returncode == 0:
            return python, packages
    pytest.skip(f"{user} can run no Python here that has what Phalanx needs")


def healthy_nodes(person: Person, port: int) -> int:
    """How many have joined a person's server, if it is up: a command each time would cost more."""
    server = ServerProcess(person.home / ".phalanx" / "server", port=port)
    with suppress(OSError):
        found = server.call("GET", "/v1/nodes")[1]
        return sum(node["state"] == "healthy" for node in found.get("nodes", []))
    return 0


# Root's own agents are tried by many tests: where there is root, an ordinary user's are tried here.
AS_ROOT = [pytest.mark.soak] if os.getuid() == 0 else []


@pytest.mark.parametrize("user", [pytest.param("", marks=AS_ROOT), ORDINARY])
def test_the_first_example_runs_in_an_empty_home(user: str) -> None:
    """As whoever runs the tests (in CI root), and as an ordinary user."""
    if user and os.getuid() != 0:
        pytest.skip("only root can be somebody else")
    up, agent, submit, look = first_block()
    # Not below pytest's own folder, which only its owner may enter.
    with tempfile.TemporaryDirectory(prefix="phalanx-docs-") as name:
        Path(name).chmod(0o755)
        person, port = Person(Path(name) / "home", user), str(free_port())
        running = [person.start(f"exec {up} --port {port}")]
        try:
            running.append(person.start(f"exec {agent.replace('7070', port)}"))
            deadline = time.monotonic() + FIRST_BLOCK_SECONDS
            while not healthy_nodes(person, int(port)):
                assert time.monotonic() < deadline and running[1].poll() is None
                time.sleep(0.1)
            assert "healthy" in person.run("phalanx nodes")
            assert "accepted" in person.run(submit)
            assert look.endswith("phalanx top")  # which goes on until somebody ends it
            assert "hello" in person.run(f"{look} --once")
            assert "job 1 is done" in person.run("phalanx why 1")
        finally:
            for process in reversed(running):
                process.send_signal(signal.SIGINT)
                process.communicate(timeout=60)


def examples(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", API_PAGE.read_text(), re.DOTALL)


def environment(server: ServerProcess) -> dict[str, str]:
    return {**os.environ, "PHALANX_STATE": str(server.state), "PHALANX_SERVER": server.url}


def test_the_shell_examples_run(server: ServerProcess, tmp_path: Path) -> None:
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    (script,) = examples("sh")
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        cwd=tmp_path,
        env=environment(server),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert '"SetQuota"' in done.stdout and '"accepted":true' in done.stdout


def test_the_python_example_runs(server: ServerProcess) -> None:
    (script,) = examples("python")
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=environment(server),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "healthy" in done.stdout and "[]" in done.stdout


def test_every_command_of_the_table_exists() -> None:
    from phalanx.cli.app import COMMANDS

    table = PAGE.read_text().partition("| command |")[2].partition("All print JSON")[0]
    named = {
        word for line in re.findall(r"^\| (.*?) \|", table, re.MULTILINE) for word in _words(line)
    }
    assert len(named) > 12 and named <= set(COMMANDS)


def _words(cell: str) -> list[str]:
    return [code.split()[0] for code in re.findall(r"`([^`]+)`", cell)]
