"""Whoever follows a tutorial sees what it shows."""

from __future__ import annotations

import re
import shutil
import signal
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from phalanx.config import check
from phalanx.config.load import job_from_table
from tests.docs.reader import SAVED, Reader, blocks, missing
from tests.ports import free_port

DOCS = Path(__file__).parents[2] / "docs"
TUTORIALS = DOCS / "tutorials"


def jobs(name: str) -> Iterator[tuple[str, str]]:
    """Files that the reader is told to save."""
    yield from SAVED.findall((TUTORIALS / name).read_text(encoding="utf-8"))


def passed_over(_: str) -> str:
    """Of what is done already where a test runs."""
    return ""


ELSEWHERE = {
    "git clone": passed_over,  # benchmarks/first_picture.py
    "pip install 'phalanx[eval]'": passed_over,  # tests/train/evaluate
    "phalanx submit --world-size 1 --slot-gpus 1 --name scores": passed_over,
}


@pytest.mark.soak
@pytest.mark.parametrize(
    "name",
    [
        "tutorials/first-run.md",
        "tutorials/first-corpus.md",
        "tutorials/survive-a-kill.md",
        "how-to/evaluate.md",
    ],
)
def test_a_page_shows_what_its_commands_print(name: str, tmp_path: Path) -> None:
    with Reader(tmp_path) as reader:
        reader.follow(DOCS / name, instead=ELSEWHERE)


@pytest.mark.soak
def test_the_tutorial_on_plans_shows_what_its_commands_print(tmp_path: Path) -> None:
    with Reader(tmp_path, columns=96) as reader:  # as docs/refresh.py has it
        reader.follow(TUTORIALS / "plan-a-70b.md")


@pytest.mark.soak
@pytest.mark.skipif(shutil.which("slurmctld", path="/usr/sbin:/usr/bin") is None, reason="no Slurm")
def test_the_tutorial_on_slurm_shows_what_its_commands_print(tmp_path: Path) -> None:
    def inside(command: str) -> str:
        reader.wait(lambda: "inside:" in reader.type(command), "its server")
        return reader.type(command)

    def ended(command: str) -> str:
        reader.wait(lambda: not reader.type("squeue --noheader"), "the job to end")
        return reader.type(command)

    def alike(line: str) -> str:
        return re.sub(r"/\S*/(?=runs/|phalanx-slurm)|phalanx-slurm-\w+", "", line)

    with Reader(tmp_path) as reader:
        try:
            reader.follow(
                TUTORIALS / "slurm-site.md",
                instead={"phalanx why slurm:1": inside, "phalanx show slurm:1": ended},
                alike=alike,
            )
        except BaseException:
            reader.type("phalanx slurm sandbox down")
            raise


@pytest.mark.soak
def test_the_tutorial_on_a_cluster_shows_what_its_commands_print(tmp_path: Path) -> None:
    """Machines are agents with names and homes of their own here, and share the network."""
    address = f"127.0.0.1:{free_port()}"
    machines: dict[str, int] = {}

    def join(command: str) -> str:
        (fingerprint,) = re.findall(r"sha256:\w+", (reader.folder / ".started-0").read_text())
        command = re.sub(r"sha256:\S+", fingerprint, command.replace("a:7070", address))
        for name in ("b", "c", "d"):
            (tmp_path / name).mkdir()
            machines[name] = len(reader.running)
            own = f" --name {name} --address 127.0.0.1 --as-agent"
            reader.start(command + own, HOME=str(tmp_path / name))
        reader.wait(lambda: reader.type("phalanx nodes").count("healthy") == 3, "three nodes")
        return ""

    def shown(command: str) -> str:
        """The reader looks when it has made some steps, and again when it goes on."""
        text = "generation 2, running" if lost else "generation 1, running"
        reader.wait(lambda: text in reader.type(command), text)
        reader.wait(lambda: not re.search(r"step: +\d of", reader.type(command)), "ten steps")
        return reader.type(command)

    lost: list[str] = []

    def take_away(command: str) -> str:
        (name,) = re.findall(r"nodes: +(\w), \w\n", reader.type("phalanx show 1"))
        lost.append(name)
        reader.running[machines[name]].send_signal(signal.SIGINT)
        shown("phalanx show 1")
        return reader.type(command)

    def done(command: str) -> str:
        reader.wait(lambda: "did all its steps" in reader.type(command), "the job to end")
        return reader.type(command)

    def alike(line: str) -> str:
        line = re.sub(r"\b[bcd]\b", "X", re.sub(r"sha256:\S+", "sha256", line))
        return re.sub(r"a:7070|127.0.0.1:\d+", "a", re.sub(r"\S*/\.phalanx", "~/.phalanx", line))

    with Reader(tmp_path) as reader:
        reader.follow(
            TUTORIALS / "first-cluster.md",
            instead={
                "phalanx up": lambda command: reader.start(
                    command.replace("a:7070", address) + f" --port {address[10:]}"
                ),
                "PHALANX_TOKEN_FILE": join,
                "phalanx show": shown,
                "phalanx events": take_away,
                "phalanx ps --all": done,
            },
            alike=alike,
        )


@pytest.mark.parametrize("name", sorted(path.name for path in TUTORIALS.glob("*.md")))
def test_a_tutorial_shows_output_and_its_jobs_are_accepted(name: str) -> None:
    assert sum(bool(block.shown) for block in blocks(TUTORIALS / name)) >= 5
    for _, text in jobs(name):
        check(job_from_table(tomllib.loads(text)), 2)


def test_only_the_form_of_a_line_counts() -> None:
    shown = "step 1/20  loss 8.35\n…\nall in runs/tiny/20260101-120000-abc123\n"
    assert missing(shown, "step 7/9 loss 1.2\nall in runs/tiny/20270101-120000-ffffff") == []
    assert missing(shown, "step 7/9 loss 1.2") == ["all in runs/tiny/20260101-120000-abc123"]
