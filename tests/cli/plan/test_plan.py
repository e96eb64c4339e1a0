"""``phalanx plan``: what is printed, written and refused."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from phalanx.cli.app import app
from phalanx.config import check, load_job

ASKED = ("--model", "llama3-8b", "--cluster", "h100-64", "--tokens", "1T")


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["plan", *arguments], env={"COLUMNS": "200"})


def test_a_plan_is_printed_with_its_facts() -> None:
    result = run(*ASKED)
    assert result.exit_code == 0, result.output
    for word in ("mapping", "MFU", "GiB", "goodput", "spares", "days", "GPU-hours", "CO2"):
        assert word in result.stdout
    assert "assumed: sequence 8192" in result.stdout


def test_a_plan_as_json_has_numbers_and_intervals() -> None:
    found = json.loads(run(*ASKED, "--json").stdout)
    assert found["gpus"] == 64
    assert found["bill"]["days"]["low"] < found["bill"]["days"]["high"]
    mapping = found["prediction"]["mapping"]
    product = 1
    for axis in ("tensor", "pipeline", "data", "context"):
        product *= mapping[axis]
    assert product == 64


def test_pins_and_objectives_are_passed_on() -> None:
    found = json.loads(run(*ASKED, "--tp", "4", "--pp", "2", "--zero", "1", "--json").stdout)
    mapping = found["prediction"]["mapping"]
    assert (mapping["tensor"], mapping["pipeline"], mapping["zero"]) == (4, 2, 1)


def test_a_job_and_a_picture_are_written(tmp_path: Path) -> None:
    job, page = tmp_path / "job.toml", tmp_path / "plan.html"
    result = run(*ASKED, "--emit", str(job), "--plot", str(page))
    assert result.exit_code == 0, result.output
    check(load_job(job), 64)
    assert "<svg" in page.read_text(encoding="utf-8")


def test_the_trainer_dry_runs_an_emitted_job(tmp_path: Path) -> None:
    job = tmp_path / "job.toml"
    asked = ("--model", "tiny", "--cluster", "h100-8", "--tokens", "1B", "--tp", "2", "--pp", "2")
    assert run(*asked, "--emit", str(job)).exit_code == 0
    result = CliRunner().invoke(app, ["train", str(job), "--dry-run", "--json"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["world_size"] == 8


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "--model: is missing"),
        (("--model", "llama3-8b"), "--cluster: is missing"),
        (("--model", "llama3-8", "--cluster", "h100-64"), '"llama3-8b"'),
        (("--model", "llama3-8b", "--cluster", "h100-63"), "try 56 or 64"),
        (("--model", "llama3-8b", "--cluster", "x100-64"), '"v100-64"'),
        ((*ASKED[:4], "--tokens", "-1"), "positive"),
        ((*ASKED, "--tp", "3"), "nearest: 2"),
        ((*ASKED, "--plot", "a.gif"), "a.html"),
        ((*ASKED, "--emit", "/nowhere/at/all/job.toml"), "cannot be written"),
        ((*ASKED, "--schedule", "1f2b"), '"1f1b"'),
    ],
)
def test_a_mistake_is_refused_with_exit_code_2(arguments: tuple[str, ...], said: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert said in result.stderr


def test_a_mistake_as_json_is_a_list_of_problems() -> None:
    result = run("--model", "llama3-8", "--cluster", "h100-64", "--json")
    assert result.exit_code == 2
    assert json.loads(result.stdout)["problems"][0]["key"] == "model"


def test_explain_says_what_bounds_a_step_and_what_would_help() -> None:
    result = run("explain", *ASKED)
    assert "bound by matrix products" in result.stdout
    assert "What would help most" in result.stdout
    found = json.loads(run("explain", *ASKED, "--json").stdout)
    assert found["explanation"]["changes"]


def test_compare_puts_two_plans_side_by_side() -> None:
    result = run("compare", "tp=1", "tp=8,cluster=h200-64", *ASKED)
    assert "tp=8,cluster=h200-64" in result.stdout and "change" in result.stdout
    assert run("compare", "tq=1", "", *ASKED).exit_code == 2


def test_sweep_prints_a_line_for_each_size() -> None:
    found = json.loads(run("sweep", *ASKED, "--gpus", "16,64", "--json").stdout)
    assert [plan["gpus"] for plan in found["plans"]] == [16, 64]
    assert "dp64" in run("sweep", *ASKED, "--gpus", "64").stdout


def test_textbook_shows_formulas_and_contradictions() -> None:
    result = run("textbook")
    for text in ("16.0 TB", ">= 200 GPUs", "6.6M tok/s", "26 days", "18x", "9x", "781 replicas"):
        assert text in result.stdout
    assert "do not fit together" in result.stdout
    assert run("textbook", "--cluster", "h100-64").exit_code == 2


HEADER = (
    "source,certainty,model,layers,hidden,heads,kv_heads,ffn,vocab,seq,experts,topk,gpu,num_gpus,tp,"
    "pp,dp,cp,ep,vpp,zero_fsdp,microbatch,global_batch,precision,recompute,mem_gb,tflops_per_gpu,"
    "mfu_pct,tokens_per_s_per_gpu,iter_time_s,notes\n"
)
ROW = (
    "a lab,seen,GPT,80,8192,64,64,32768,50368,2048,,,H100-80G-SXM,128,1,1,128,1,,,FULL_SHARD,8,"
    "1024,amp_bf16,full,,428,43.36,1058,,\n"
)


def test_check_compares_rows_and_counts_those_it_skips(tmp_path: Path) -> None:
    path = tmp_path / "runs.csv"
    path.write_text(HEADER + ROW + ROW.replace(",128,1,1,128,", ",,1,1,,"), encoding="utf-8")
    found = json.loads(run("check", str(path), "--json").stdout)
    assert found["groups"]["dense"]["n"] == found["groups"]["all"]["n"] == 1
    assert set(found["groups"]["all"]) == {"n", "mape", "median", "bias", "coverage80"}
    assert abs(found["rows"][0]["error"]) < 0.5
    assert [skipped["row"] for skipped in found["skipped"]] == [3]
    assert "1 rows skipped" in run("check", str(path), "--rows").stdout


@pytest.mark.parametrize("command", ["check", "calibrate"])
def test_files_that_cannot_be_read_are_refused(command: str, tmp_path: Path) -> None:
    assert run(command, str(tmp_path / "nowhere.csv")).exit_code == 2
    assert run(command, str(tmp_path)).exit_code == 2
    binary = tmp_path / "binary.csv"
    binary.write_bytes(bytes(range(256)))
    assert "cannot be read" in run(command, str(binary)).stderr


def test_calibrate_wants_runs_or_a_gpu() -> None:
    assert "either" in run("calibrate").stderr


def test_planning_needs_no_torch() -> None:
    code = (
        "import sys; from typer.testing import CliRunner; from phalanx.cli.app import app; "
        f"result = CliRunner().invoke(app, ['plan', *{ASKED!r}]); "
        "assert result.exit_code == 0, result.output; "
        "assert 'torch' not in sys.modules and 'matplotlib' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_job_files_own_steps_are_planned(tmp_path: Path) -> None:
    job = tmp_path / "job.toml"
    job.write_text(
        '[model]\npreset = "llama3-8b"\n[data]\nsequence = 8192\n'
        "[train]\nsteps = 1000\nglobal_batch = 512\n"
    )
    arguments = ["plan", "--model", str(job), "--cluster", "h100-64", "--json"]
    planned = json.loads(CliRunner().invoke(app, arguments).stdout)
    assert planned["tokens"] == 1000 * 512 * 8192
    assert not [each for each in planned["assumed"] if "tokens" in each]
    other = json.loads(CliRunner().invoke(app, [*arguments, "--tokens", "1T"]).stdout)
    assert other["tokens"] == 10**12
