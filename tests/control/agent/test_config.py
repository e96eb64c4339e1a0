"""A node's settings: the documented example holds, and mistakes are named."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from phalanx.config import ConfigError
from phalanx.control.agent.config import AgentConfig, read_agent_config
from tests.commands import run_phalanx

DOCS = Path(__file__).parents[3] / "docs" / "how-to" / "set-up-a-node.md"


def documented() -> str:
    section = DOCS.read_text().split("## A node's settings", 1)[1]
    return section.split("```toml\n", 1)[1].split("```", 1)[0]


def test_the_documented_file_is_read_and_its_other_lines_are_the_defaults(tmp_path: Path) -> None:
    path = tmp_path / "agent.toml"
    path.write_text(documented())
    assert read_agent_config(path).hooks.prolog == ("/etc/phalanx/prolog",)
    lines = [line for line in documented().splitlines() if "# example" not in line]
    path.write_text("\n".join(lines))
    assert read_agent_config(path) == AgentConfig()


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ('[hooks]\nprologue = ["x"]', "hooks"),
        ('[binding]\npolicy = "sockets"', "binding.policy"),
        ("[faults]\npoll_seconds = true", "faults.poll_seconds"),
        ("[", "--config"),
    ],
)
def test_a_mistake_is_named(tmp_path: Path, text: str, key: str) -> None:
    path = tmp_path / "agent.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_agent_config(path)
    assert key in str(caught.value)


def test_an_interface_that_is_not_there_is_refused_before_anything_starts(tmp_path: Path) -> None:
    path = tmp_path / "agent.toml"
    path.write_text('[replicas]\ninterface = "no-card"\n')
    done = run_phalanx("agent", "--join", "http://127.0.0.1:9", "--config", str(path))
    assert done.returncode == 2
    assert "replicas.interface" in done.stderr and "lo" in done.stderr


def test_replica_settings_reach_keepers() -> None:
    config = msgspec.convert({"replicas": {"interface": "lo", "encrypt": True}}, AgentConfig)
    assert config.replicas.resolved().environment()["PHALANX_REPLICA_ADDRESS"] == "127.0.0.1"
