"""The dry run's table and its JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from phalanx.cli.app import app
from phalanx.cli.train.dry_run_table import print_report, spans
from phalanx.parallel.dryrun import DryRunReport, StageRow


@pytest.mark.parametrize(
    ("numbers", "text"),
    [([], "none"), ([3], "3"), ([0, 1, 2], "0-2"), ([0, 1, 6, 7], "0-1, 6-7"), ([7, 0], "0, 7")],
)
def test_layers_are_written_as_runs(numbers: list[int], text: str) -> None:
    assert spans(numbers) == text


def row(position: int, weight_gib: int) -> StageRow:
    return StageRow(
        pipeline_rank=position,
        stages=[position],
        layers=[2 * position, 2 * position + 1],
        parameters=1000,
        parameters_per_rank=1000,
        weight_bytes=weight_gib * 2**30,
        gradient_bytes=2**30,
        optimizer_bytes=2**31,
        activation_bytes=2**29,
        total_bytes=weight_gib * 2**30 + 2**30 + 2**31 + 2**29,
    )


def test_the_table_names_the_position_that_holds_most() -> None:
    report = DryRunReport(
        name="job",
        world_size=4096,
        mesh={"pipeline": 2, "shard": 2048, "tensor": 1},
        micro_batches=4,
        parameters=2000,
        rows=[row(0, 1), row(1, 7)],
        notes=["a note"],
        seconds=0.5,
    )
    console = Console(width=120)
    with console.capture() as captured:
        print_report(report, console)
    text = captured.get()
    assert "position 1 holds the most, 10.50 GiB" in text
    assert "4,096 ranks: pipeline 2 x shard 2048" in text
    assert "2-3" in text and "note: a note" in text


def test_a_dry_run_counts_every_pipeline_position(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text('[model]\npreset = "tiny"\n', encoding="utf-8")
    mesh = ["--set", "parallel.pipeline=2", "--set", "parallel.tensor=2", "--world-size", "64"]
    batch = ["--set", "train.global_batch=64"]
    result = CliRunner().invoke(app, ["train", str(path), "--dry-run", "--json", *mesh, *batch])
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert [layer for entry in report["rows"] for layer in entry["layers"]] == [0, 1, 2, 3]
    assert report["parameters"] == 2_032_768
