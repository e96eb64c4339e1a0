"""Bare metal: a real sshd on loopback gets an agent, twice, and says why where it cannot."""

from __future__ import annotations

import getpass
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest

from phalanx.config import ConfigError
from phalanx.control.backends.bare.rollout import Rollout, RolloutHost, read_hosts
from phalanx.control.backends.bare.unit import InstallOptions, unit_of
from tests.control.servers import ServerProcess, wait_for_port
from tests.ports import free_port

SSHD = shutil.which("sshd", path="/usr/sbin:/usr/local/sbin")
needs_sshd = pytest.mark.skipif(SSHD is None, reason="openssh-server is not installed")


def test_hosts_have_addresses_ports_and_names() -> None:
    text = "# rack 7\nroot@10.0.0.7 n7\n10.0.0.8:2222  # another port\n\n"
    assert read_hosts(text) == [
        RolloutHost("root@10.0.0.7", "n7", 22),
        RolloutHost("10.0.0.8", "10.0.0.8", 2222),
    ]


def test_a_line_says_where_its_host_stands() -> None:
    (host,) = read_hosts("10.0.0.7 n7 leaf=su1 rack=r7 rails=4")
    assert host.name == "n7"
    assert host.agent_options() == "--leaf su1 --rack r7 --rails 4"


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("a leef=x", 'leef = "x": no such key (line 1); did you mean "leaf"?'),
        ("a leaf=$(reboot)", "must be a word"),
        ("a leaf=", "must be a word"),
        ("a rails=four", "must be a number"),
        ("leaf=x", "must be [user@]address"),
    ],
)
def test_what_no_agent_can_be_told_is_named(line: str, named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_hosts(line)
    assert named in str(caught.value)


def test_a_host_that_stands_elsewhere_now_is_not_done(tmp_path: Path) -> None:
    options = InstallOptions(url="http://a", token="t", version="1", ssh="false")
    memory = tmp_path / "memory.json"
    memory.write_text('{"n7": "1 --leaf old"}')
    rollout = Rollout(options, memory, lambda: ["n7"])
    (same,) = rollout.run(read_hosts("h n7 leaf=old"), 1, lambda outcome: None)
    (moved,) = rollout.run(read_hosts("h n7 leaf=new"), 1, lambda outcome: None)
    assert (same.state, moved.state) == ("skipped", "failed")  # "false" installs nothing


@pytest.mark.parametrize("text", ["a b c", "a;reboot", "a:ssh", "a x\nb x"])
def test_a_line_that_makes_no_sense_is_named(text: str) -> None:
    with pytest.raises(ConfigError):
        read_hosts(text)


def test_the_unit_lets_workers_outlive_their_agent() -> None:
    text = unit_of("n7", InstallOptions(url="https://a:7070", token="secret", version="1"))
    assert "KillMode=process" in text and "Restart=always" in text
    assert "secret" not in text


@pytest.fixture
def ssh(tmp_path: Path) -> Iterator[tuple[str, int]]:
    """Program and port of a private sshd."""
    assert SSHD is not None
    folder = tmp_path / "sshd"
    folder.mkdir(mode=0o700)
    for name in ("host", "key"):
        command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)]
        subprocess.run(command, check=True)
    shutil.copy(folder / "key.pub", folder / "authorized")
    port = free_port()
    (folder / "config").write_text(
        f"Port {port}\nListenAddress 127.0.0.1\nHostKey {folder}/host\nUsePAM no\n"
        f"AuthorizedKeysFile {folder}/authorized\nPidFile {folder}/pid\nStrictModes no\n"
        "PermitRootLogin yes\n"
    )
    Path("/run/sshd").mkdir(exist_ok=True)
    server = subprocess.Popen([SSHD, "-D", "-f", str(folder / "config")])
    wait_for_port(port)
    options = f"-i {folder}/key -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null"
    try:
        yield f"ssh -F none -q {options}", port
    finally:
        server.terminate()
        server.wait()


def run(server: ServerProcess, hosts: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "phalanx", "fleet", "add", str(hosts), "--url", server.url]
    command += ["--state", str(server.state), *words]
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        env={**os.environ, "HOME": str(hosts.parent)},
    )


@needs_sshd
@pytest.mark.timeout(900)  # a virtual environment is made, by somebody else's pace
@pytest.mark.skipif(os.getuid() != 0, reason="sshd needs root to let anybody in")
def test_an_agent_is_installed_joins_and_is_not_installed_twice(
    tmp_path: Path, ssh: tuple[str, int]
) -> None:
    program, port = ssh
    hosts = tmp_path / "hosts.txt"
    hosts.write_text(f"{getpass.getuser()}@127.0.0.1:{port} metal-1\n")
    site = "$folder/venv/lib/python*/site-packages"
    packages = sysconfig.get_paths()["purelib"]
    install = f"printf '%s\\n' {Path.cwd()} {packages} > $(echo {site})/here.pth"
    words = ("--folder", str(tmp_path / "opt"), "--python", sys.executable, "--install", install)
    words += ("--ssh", program, "--agent-options", "--gpus 1 --no-standby --as-agent")
    with ServerProcess(tmp_path / "server") as server:
        first = run(server, hosts, *words)
        assert first.returncode == 0, first.stdout + first.stderr
        assert "metal-1: joined" in first.stdout and "1 of 1 hosts are ready" in first.stdout
        again = run(server, hosts, *words)
        assert "metal-1: skipped this version is there already" in again.stdout
        pid = int((tmp_path / "opt" / "agent.pid").read_text())
        os.kill(pid, 2)


@needs_sshd
@pytest.mark.skipif(os.getuid() != 0, reason="sshd needs root to let anybody in")
def test_what_keeps_a_host_from_joining_is_told(tmp_path: Path, ssh: tuple[str, int]) -> None:
    program, port = ssh
    host = RolloutHost(f"{getpass.getuser()}@127.0.0.1", "metal-1", port)
    options = InstallOptions(
        url="http://127.0.0.1:1",
        token="x",
        version="1",
        folder=str(tmp_path / "opt"),
        python="python-nosuch",
        ssh=program,
    )
    (found,) = Rollout(options, tmp_path / "memory", list).run([host], 1, lambda outcome: None)
    assert found.state == "failed" and "there is no Python" in found.detail
    lost = RolloutHost("127.0.0.1", "metal-2", 1)
    (found,) = Rollout(options, tmp_path / "memory", list).run([lost], 1, lambda outcome: None)
    assert "SSH does not get in" in found.detail
