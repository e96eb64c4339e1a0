"""``phalanx describe`` and how a description is shown."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from msgspec import structs
from typer.testing import CliRunner

from phalanx.cli.app import app
from phalanx.cli.cluster.description import print_description
from phalanx.hardware.probe import Fact, Known, NodeDescription, RecordedReader, describe
from tests.hardware.probe.test_parsers import RECORDED


def run(*words: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["describe", *words], env={"COLUMNS": "240"})
    return done.exit_code, done.output


def test_every_fact_stands_with_its_source() -> None:
    code, text = run("--hardware", str(RECORDED / "h100-4-rails"))
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert code == 0
    for line in ("kind h100 catalogue", "rails 4 infiniband", "leaf su3-rail1 infiniband"):
        assert line in lines
    assert "driver 550.90.07 nvidia-smi" in lines
    assert any(
        line.startswith("mlx5_9 (ibs5) InfiniBand 400 Gb/s up 1 1 5 su3-rail2") for line in lines
    )


def test_a_site_file_is_believed_and_json_has_everything(tmp_path: Path) -> None:
    site = tmp_path / "site.toml"
    site.write_text('[[node]]\nmatch = "n7"\nrack = "r7"\n')
    tree = str(RECORDED / "gb200-nvl72-tray")
    code, text = run("--hardware", tree, "--site-file", str(site), "--name", "n7", "--json")
    found = json.loads(text)
    assert code == 0 and len(found["gpus"]) == 4
    assert {"key": "rack", "value": "r7", "source": "site file"} in found["facts"]


def test_a_machine_is_recorded_and_read_again(tmp_path: Path) -> None:
    folder = tmp_path / "here"
    assert run("--record", str(folder))[0] == 0
    code, text = run("--hardware", str(folder), "--json")
    facts = {fact["key"] for fact in json.loads(text)["facts"]}
    assert code == 0 and {"cpus", "memory_bytes"} <= facts


@pytest.mark.parametrize("option", ["--hardware", "--site-file"])
def test_a_file_that_is_not_there_is_named(option: str, tmp_path: Path) -> None:
    code, text = run(option, str(tmp_path / "none"))
    assert code != 0 and "none" in text and "Traceback" not in text


def test_what_is_odd_is_shown_last(capsys: pytest.CaptureFixture[str]) -> None:
    found = describe(RecordedReader(RECORDED / "cpu-only"), Known())
    odd = structs.replace(found, warnings=("look \x1b[31mhere",), unread=("lldpctl: not there",))
    print_description(odd)
    assert capsys.readouterr().out.endswith("warning: look here\nnot read: lldpctl: not there\n")
    print_description(NodeDescription(facts=(Fact("leaf", "[red]x", "lldp"),)))
    assert "[red]x" in capsys.readouterr().out
