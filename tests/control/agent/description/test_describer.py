"""An agent describes its node at start and after changes, whatever its tools do."""

from __future__ import annotations

import asyncio
import shutil
import threading
import time
from pathlib import Path

import pytest
from msgspec import structs

from phalanx.cluster.node import Node
from phalanx.config import ConfigError
from phalanx.control.agent.cold_start import node_here
from phalanx.control.agent.config import DescribeOptions
from phalanx.control.agent.description import DescriptionSources, NodeDescriber
from phalanx.control.agent.description import describer as module
from phalanx.control.agent.description.node import described_node
from phalanx.hardware.probe import Fact, NodeDescription
from phalanx.hardware.probe.site_file import GivenDescription
from tests.hardware.probe.test_parsers import RECORDED

FAST = DescribeOptions(poll_seconds=0.02, join_seconds=120.0)


def told(tree: Path, **options: object) -> tuple[Node, DescriptionSources]:
    sources = DescriptionSources(hardware=str(tree))
    return node_here("", sources, GivenDescription(**options), name="n7", gpus=None)  # type: ignore[arg-type]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    return Path(shutil.copytree(RECORDED / "h100-4-rails", tmp_path / "tree"))


def describer(tree: Path, state: Path, **options: object) -> NodeDescriber:
    state.mkdir(exist_ok=True)
    return NodeDescriber(*told(tree, **options), state, FAST)


async def until(true: object) -> None:
    async with asyncio.timeout(120):
        while not true():  # type: ignore[operator]
            await asyncio.sleep(0.01)


def test_a_recorded_machine_is_offered_as_it_was(tree: Path) -> None:
    node, sources = told(tree, leaf="mine", features=("ssd",))
    assert (node.gpus, node.cpus, node.memory_bytes) == (8, 224, 2113503876 << 10)
    assert {(fact.key, fact.value, fact.source) for fact in sources.told} >= {
        ("gpus", 8, "devices"),
        ("leaf", "mine", "agent option"),
        ("features", "ssd", "agent option"),
    }


def test_slurm_names_the_leaf_and_an_option_is_believed_before_it(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURMD_NODENAME", "s1")
    monkeypatch.setenv("SLURM_TOPOLOGY_ADDR", "spine.leaf4.s1")
    monkeypatch.setenv("SLURM_TOPOLOGY_ADDR_PATTERN", "switch.switch.node")
    sources = DescriptionSources(hardware=str(tree))
    node, sources = node_here("slurm", sources, GivenDescription(pod="p"), name="", gpus=None)
    found = described_node(node, sources.describe(node.name, None))
    assert (found.name, found.leaf, found.pod, found.rack) == ("s1", "leaf4", "p", "s1")
    assert (found.kind, found.rails) == ("h100", 4)


def test_it_is_read_before_the_agent_joins_and_kept_for_the_next(
    tree: Path, tmp_path: Path
) -> None:
    async def scenario() -> None:
        first = describer(tree, tmp_path / "state")
        assert first.node.kind == "" and first.node.leaf == "leaf-0"
        following = asyncio.create_task(first.follow(lambda: None))
        await first.ready()
        rails = first.port_rails()
        assert rails["mlx5_9/1"] == 1 and len(rails) == 8 and "mlx5_1/1" not in rails
        assert (first.node.kind, first.node.rails, first.node.leaf) == ("h100", 4, "su3-rail1")
        following.cancel()
        again = describer(tree, tmp_path / "state")
        assert again.node == first.node  # at once, before anything is read

    asyncio.run(scenario())


def test_a_change_is_told_while_the_agent_runs(tree: Path, tmp_path: Path) -> None:
    async def scenario() -> None:
        changes: list[str] = []
        made = describer(tree, tmp_path / "state")
        following = asyncio.create_task(made.follow(lambda: changes.append(made.node.leaf)))
        await made.ready()
        made.registered()
        for file in (tree / "commands").glob("smpquery*"):
            file.write_text(file.read_text().replace("su3", "su9"))
        await until(lambda: changes[-1:] == ["su9-rail1"])
        assert made.unsaid() and made.message(3).described.leaf == "su9-rail1"
        assert not made.unsaid()
        following.cancel()

    asyncio.run(scenario())


def test_a_gpu_that_fell_off_is_said_and_does_not_make_another_machine(
    tree: Path, tmp_path: Path
) -> None:
    async def scenario() -> None:
        made = describer(tree, tmp_path / "state")
        following = asyncio.create_task(made.follow(lambda: None))
        await made.ready()
        before = made.node
        query = tree / "commands" / "nvidia-smi_-q_-x"
        text = query.read_text()
        query.write_text(text[: text.rindex("\t<gpu id=")] + "</nvidia_smi_log>\n")
        await until(lambda: len(made.description.gpus) == 7)
        assert made.node == before and made.node.gpus == 8
        assert any("lists 7 GPUs, and this node offers 8" in w for w in made.description.warnings)
        following.cancel()

    asyncio.run(scenario())


def test_a_machine_that_hangs_holds_no_join_up(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = threading.Event()
    slow = DescriptionSources.describe

    def hang(self: DescriptionSources, *given: object) -> NodeDescription:
        free.wait(60)
        return slow(self, *given)  # type: ignore[arg-type]

    monkeypatch.setattr(DescriptionSources, "describe", hang)
    monkeypatch.setattr(f"{__name__}.FAST", structs.replace(FAST, join_seconds=0.3))

    async def scenario() -> None:
        made = describer(tree, tmp_path / "state", leaf="mine")
        told_of: list[str] = []
        following = asyncio.create_task(made.follow(lambda: told_of.append(made.node.kind)))
        began = time.monotonic()
        await made.ready()
        assert time.monotonic() - began < 40
        assert (made.node.leaf, made.node.kind, made.node.gpus) == ("mine", "", 8)
        free.set()
        await until(lambda: told_of)
        assert told_of == ["h100"]
        following.cancel()

    asyncio.run(scenario())


def test_a_describer_that_fails_ends_no_agent(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: DescriptionSources, *given: object) -> NodeDescription:
        raise RuntimeError("no such thing")

    monkeypatch.setattr(DescriptionSources, "describe", broken)

    async def scenario() -> None:
        made = describer(tree, tmp_path / "state")
        following = asyncio.create_task(made.follow(lambda: None))
        await made.ready()
        assert not following.done() and made.node.gpus == 8
        following.cancel()

    asyncio.run(scenario())


def test_a_folder_that_cannot_be_written_is_told_and_no_more(
    tree: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = describer(tree, tmp_path / "state")
    (tmp_path / "state" / f"{module.FILE}.new").mkdir()
    made._take(made._read())
    assert made.node.kind == "h100" and "cannot be kept" in caplog.text


def test_a_wrong_site_file_is_refused_at_start_and_only_noted_later(
    tree: Path, tmp_path: Path
) -> None:
    site = tmp_path / "site.toml"
    site.write_text('[[node]]\nmatch = "n*"\nrack = "r7"\npower = "feed-2"\n')
    sources = DescriptionSources(hardware=str(tree), site_file=str(site)).checked()
    found = sources.describe("n7", None)
    assert found.fact("rack") == Fact("rack", "r7", "site file")
    site.write_text("[[node]]\nrack = 3\n")
    with pytest.raises(ConfigError):
        sources.checked()
    later = sources.describe("n7", None)
    assert later.fact("rack") is None and "site.toml" in later.unread[0]
    with pytest.raises(ConfigError, match="no folder of recorded hardware"):
        DescriptionSources(hardware=str(tmp_path / "none")).checked()


def test_what_no_node_can_be_is_left_out() -> None:
    base = Node(name="n", gpus=8)
    facts = (
        Fact("kind", "H100 80GB", "site file"),
        Fact("rails", 99, "site file"),
        Fact("leaf", "l" * 300, "lldp"),
        Fact("features", "good,b a d", "agent option"),
    )
    found = described_node(base, NodeDescription(facts=facts))
    assert found == structs.replace(base, leaf="l" * 128, features=("good",))


def test_labels_of_a_file_stand_for_the_api(tree: Path, tmp_path: Path) -> None:
    labels = tmp_path / "labels"
    labels.write_text('network.topology.nvidia.com/block="b7"\n')
    sources = DescriptionSources(hardware=str(tree), labels_file=str(labels))
    assert sources.describe("n", None).fact("leaf") == Fact("leaf", "b7", "kubernetes")
    labels.unlink()
    assert "No such file" in sources.describe("n", None).unread[0]
