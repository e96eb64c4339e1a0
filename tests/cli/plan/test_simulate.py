"""``phalanx simulate`` as a user meets it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner, Result

from phalanx.cli.app import app
from phalanx.config import ConfigError, explain
from phalanx.simulate.scenario.load import load_scenario, scenario_names
from phalanx.simulate.scenario.scenario import Scenario

SMALL = ["--days", "1", "--gpus", "512", "--set", "faults.per_1000_node_days=100"]

BUSY = ["multi-tenant", "--set", "workload.utilisation=1.2"]
TRACE = ["--set", "workload.kind=csv", "--set", "workload.file=trace.csv"]


def simulate(*args: str) -> Result:
    return CliRunner().invoke(app, ["simulate", *args])


def test_the_five_scenarios_are_there_and_load() -> None:
    assert {"llama3-54d", "100k-1t", "rsc-11mo", "multi-tenant", "chaos"} <= set(scenario_names())
    for name in scenario_names():
        assert load_scenario(name).about
    assert "llama3-54d" in simulate("list").stdout


def test_json_has_the_promised_form() -> None:
    done = simulate("llama3-54d", *SMALL, "--seeds", "3:5", "--json")
    assert done.exit_code == 0
    report = msgspec.json.decode(done.stdout)
    assert [one["seed"] for one in report["seeds"]] == [3, 4]
    wanted = {"seed", "interruptions", "ettr", "goodput", "violations", "wall_seconds"}
    for one in report["seeds"]:
        assert wanted <= one.keys()
        assert 0 < one["ettr"] < 1 and one["violations"] == 0
        assert sum(one["buckets"].values()) == pytest.approx(1)
    assert report["summary"]["seeds"] == 2
    assert report["summary"]["mean"].keys() >= {"interruptions", "ettr", "goodput"}


def test_the_text_shows_seeds_mean_and_buckets() -> None:
    done = simulate("llama3-54d", *SMALL, "--seeds", "0:2")
    assert done.exit_code == 0
    for word in ("mean", "ETTR", "productive", "restart", "no violations"):
        assert word in done.stdout


def test_a_picture_is_drawn(tmp_path: Path) -> None:
    for name in ("run.png", "run.html"):
        done = simulate("llama3-54d", *SMALL, "--plot", str(tmp_path / name))
        assert done.exit_code == 0, done.output
        assert (tmp_path / name).stat().st_size > 20_000
    assert "What interrupted jobs" in (tmp_path / "run.html").read_text()


def test_replay_tells_what_happened() -> None:
    done = simulate("llama3-54d", *SMALL, "--replay", "1")
    assert done.exit_code == 0
    assert "-> Form" in done.stdout and "GangReady" in done.stdout
    assert "no violation in seed 1" in done.stdout


def test_a_story_can_be_had_as_json() -> None:
    done = simulate("chaos", "--replay", "3", "--json")
    told = msgspec.json.decode(done.stdout)
    assert told["seed"] == 3 and any("-> Form" in line for line in told["story"])


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (["chaos", "--set", "chaos.loss=0.9"], 1, "VIOLATION"),
        (["llama3-54d", "--gpus", "512", "--set", "job.tensor=16"], 2, "NVLink domain"),
        (
            ["llama3-54d", *SMALL[:4], "--set", "faults.causes.software_bug=1000000"],
            1,
            "job run failed",
        ),
    ],
)
def test_a_story_that_ends_badly_has_the_exit_code_of_the_run(
    words: list[str], code: int, told: str
) -> None:
    done = simulate(*words, "--replay", "0")
    assert done.exit_code == code and told in " ".join(done.output.split())
    if code == 1:
        whole = msgspec.json.decode(simulate(*words, "--replay", "0", "--json").stdout)
        assert whole["violations"] + whole["failures"]


def test_names_are_no_markup(tmp_path: Path) -> None:
    done = simulate("compare", "llama3-54d", *SMALL, "--with", "[red]x[/z]: restart.seconds=9")
    assert done.exit_code == 0 and "[red]x[/z]" in done.stdout
    named = simulate("llama3-54d", *SMALL, "--set", "name=[bold]y[/z]")
    assert named.exit_code == 0 and "[bold]y[/z]:" in named.stdout


def test_an_output_that_is_full_is_said_in_one_line() -> None:
    command = [sys.executable, "-m", "phalanx", "simulate", "list"]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 74
    assert done.stderr == "error: the output cannot be written: No space left on device\n"


def test_a_job_that_waits_for_nodes_loses_time_and_says_what_for() -> None:
    forever = ["--set", "fleet.spare_nodes=0", "--set", "repair.hours=100000"]
    often = ["--gpus", "64", "--days", "2", "--set", "faults.per_1000_node_days=2000"]
    done = simulate("llama3-54d", *often, *forever, "--json")
    one = msgspec.json.decode(done.stdout)["seeds"][0]
    assert one["interruptions"] and one["waiting"].startswith("job run waits: ")
    assert "it needs 8 nodes" in one["waiting"]
    assert one["queued_seconds"] > 86400 and one["ettr"] <= one["goodput"] / 0.8
    text = " ".join(simulate("llama3-54d", *often, *forever).stdout.split())
    assert "the job had no nodes for" in text and "job run waits" in text


def test_one_job_that_fails_is_told_with_its_reason_and_the_exit_code() -> None:
    bugs = ["--gpus", "64", "--days", "1", "--set", "faults.causes.software_bug=1000000"]
    done = simulate("llama3-54d", *bugs)
    assert done.exit_code == 1
    told = " ".join(done.stdout.split())
    assert "seed 0: job run failed:" in told and "last: software_bug" in told
    compared = simulate("compare", "llama3-54d", *bugs, "--with", "x: restart.seconds=9")
    assert compared.exit_code == 1 and "job run failed" in compared.stdout
    report = msgspec.json.decode(simulate("llama3-54d", *bugs, "--json").stdout)
    assert list(report["seeds"][0]["failed"].values()) == [1]


def test_a_trace_is_played_to_its_end_and_what_is_left_out_is_said(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    rows = ["0,8,3600", "10,0,50", "20,8,0", "30,99999,100", "900000,8,100", "100,16,7200"]
    path.write_text("\n".join(["submit_time,gpu_num,duration", *rows, ""]))
    trace = ["--set", "workload.kind=csv", "--set", f"workload.file={path}"]
    done = simulate("multi-tenant", *trace, "--json")
    assert done.exit_code == 0
    one = msgspec.json.decode(done.stdout)["seeds"][0]
    assert (one["jobs"], one["jobs_done"]) == (2, 2)
    assert sorted(one["left_out"].values()) == [1, 1, 1, 1]
    assert 7200 / 86400 < one["days"] < 0.12 and one["gpu_hours"] < 2100 * 24 * 0.12
    text = " ".join(simulate("multi-tenant", *trace).stdout.split())  # however lines are broken
    assert "left out" in text and "never ran" in text and "after the last" in text


def test_compare_puts_variants_side_by_side() -> None:
    variant = ["--with", "slow: restart.seconds=900, fleet.spare_nodes=0"]
    done = simulate("compare", "llama3-54d", *SMALL, *variant, "--json")
    assert done.exit_code == 0
    found = msgspec.json.decode(done.stdout)["variants"]
    assert found["slow"]["mean"]["ettr"] < found["llama3-54d"]["mean"]["ettr"]


def test_every_key_is_explained_and_shown() -> None:
    done = simulate("keys", "restart")
    assert "restart.seconds" in done.stdout and "default" in done.stdout
    shown = simulate("show", "100k-1t", "--set", "repair.hours=7")
    assert "hours = 7" in shown.stdout
    listed = simulate("faults").stdout
    assert "llama3" in listed and "failover" in listed


def test_a_scenario_shown_is_a_scenario_that_loads(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    for name in scenario_names():
        path.write_text(simulate("show", name).stdout)
        assert load_scenario(str(path)) == load_scenario(name)


def test_dollars_and_energy_follow_the_kind_of_gpu_and_what_is_set() -> None:
    def bill(*changes: str) -> tuple[float, float, float]:
        settings = [word for change in changes for word in ("--set", change)]
        done = simulate("llama3-54d", "--days", "1", "--gpus", "64", *settings, "--json")
        one = msgspec.json.decode(done.stdout)["seeds"][0]
        return one["gpu_hours"], one["dollars"], one["megawatt_hours"]

    hours, h100, energy = bill()
    _, a100, less = bill("fleet.kind=a100")
    assert a100 < h100 and less < energy
    _, cheap, cold = bill(
        *("fleet.dollars_per_gpu_hour=0.5", "fleet.watts_per_gpu=100"),
        "fleet.idle_watts_per_gpu=100",
    )
    assert cheap == pytest.approx(0.5 * hours, abs=1)
    assert cold == pytest.approx(100 * hours / 1e6, rel=1e-3)


def test_a_scenario_of_many_teams_lends_its_fleet_to_a_trace_of_jobs(tmp_path: Path) -> None:
    """What it says about generated jobs is not meant for them, and not shown either."""
    path = tmp_path / "mine.toml"
    path.write_text(simulate("show", "multi-tenant", *TRACE).stdout)
    assert load_scenario(str(path)).workload.kind == "csv"
    assert load_scenario("multi-tenant", ["workload.kind=one-job"]).fleet.gpus == 2048


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (["lama3-54d"], 'did you mean "llama3-54d"'),
        (["llama3-54d", "--set", "restart.secnds=3"], "seconds"),
        (["llama3-54d", "--set", "faults.per_1000_node_days=-1"], "faults.per_1000_node_days"),
        (["llama3-54d", "--set", "days=0"], "days"),
        (["llama3-54d", "--days", "-3"], "days"),
        (["llama3-54d", "--gpus", "1001"], "try 1000"),
        (["llama3-54d", "--set", "faults.model=lama3"], "llama3"),
        (["llama3-54d", "--set", "faults.causes.hbm=3"], "hbm_ecc"),
        (["llama3-54d", "--set", "nonsense"], "key=value"),
        (["llama3-54d", "--seeds", "5"], "A:B"),
        (["llama3-54d", "--seeds", "5:5"], "A:B"),
        (["llama3-54d", "--plot", "x.bmp"], "png"),
        (["chaos", "--set", 'chaos.kinds=["node_crsh"]'], "node_crash"),
        (["missing.toml"], "no such file"),
        (["compare", "llama3-54d", "--with", "no colon"], "KEY=VALUE"),
        (["compare", "chaos"], "--with"),
        (["compare", "llama3-54d", "--with", "a: days=1", "--with", "a: days=2"], "already"),
        (["compare", "llama3-54d", "--with", "llama3-54d: days=1"], "already"),
        (["llama3-54d", "--seeds", "²:5"], "A:B"),
        (["llama3-54d", "--set", "job.least_replicas=5000"], "least_replicas"),
        (["llama3-54d", "--gpus", "7"], "try 8"),
        (["multi-tenant", "--gpus", "1001"], "try 1000"),
        (["multi-tenant", "--gpus", "100000000"], "1000000"),
        (["llama3-54d", "--days", "inf"], "finite"),
        (["llama3-54d", "--days", "1e9"], "3,660"),
        (["multi-tenant", "--set", "restart.seconds=1e20"], "restart.seconds"),
        (["llama3-54d", "--set", "fleet.kind=h10"], '"h100"'),
        (["llama3-54d", "--set", "job.bubble_share=0.95"], "exposed_share"),
        (["llama3-54d", "--gpus", "512", "--set", "job.tensor=16"], "NVLink domain"),
        (["compare", "100k-1t", "--gpus", "512", "--set", "job.tensor=16"], "least_replicas"),
        (["multi-tenant", "--set", "workload.file=x.csv"], "workload.kind=csv"),
        (["llama3-54d", "--set", "workload.jobs_per_day=5"], "means nothing"),
        (["multi-tenant", "--set", "job.tensor=16"], "means nothing"),
        (["multi-tenant", *TRACE, "--set", "workload.teams=6"], "means nothing"),
        (["multi-tenant", *TRACE, "--set", "workload.utilisation=0.5"], "means nothing"),
        (["llama3-54d", "--gpus", "1024", "--set", "fleet.gpus=eight"], "leave one of them out"),
        (["llama3-54d", "--days", "0.1", "--set", "days=nan"], "leave one of them out"),
        (["llama3-54d", "--set", "days=nan", "--set", "days=0.1"], "days"),
        (["llama3-54d", "--set", "policy.shrink=false"], "job.least_replicas"),
        (
            ["llama3-54d", "--set", "policy.rebalance=false", "--set", "job.micro_batches=1"],
            "too few to give away",
        ),
        (
            [*BUSY, "--set", "workload.starved_days=3"],
            "somebody waits",
        ),
        (
            [
                "llama3-54d",
                "--set",
                "fleet.watts_per_gpu=90",
                "--set",
                "fleet.idle_watts_per_gpu=99",
            ],
            "is more than fleet.watts_per_gpu",
        ),
        (["compare", "chaos"], "phalanx simulate keys lists"),
        (["chaos", "--days", "3"], "chaos.fault_minutes"),
        (["chaos", "--gpus", "64"], "chaos.nodes"),
        (["chaos", "--set", "restart.seconds=3"], "restart.seconds"),
        (["chaos", "--set", "faults.model=rsc-1"], "chaos.kinds"),
        (["chaos", "--plot", "x.png"], "no timeline"),
        (["chaos", "--seed", "1", "--seeds", "0:2"], "--seeds"),
        (["chaos", "--replay", "1", "--seeds", "0:2"], "leave --seed"),
        (["chaos", "--replay", "-1"], "must be at least 0"),
    ],
)
def test_bad_input_is_refused_with_the_nearest_fix(args: list[str], told: str) -> None:
    done = simulate(*args)
    assert done.exit_code == 2, done.output
    assert told in " ".join(done.stderr.replace("│", "").split())
    assert "Traceback" not in done.output


def test_the_command_starts_without_torch() -> None:
    code = (
        "import sys; from typer.testing import CliRunner; from phalanx.cli.app import app; "
        "r = CliRunner().invoke(app, ['simulate', 'multi-tenant', '--days', '0.05']); "
        "print(r.exit_code, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["0", "False"]


def test_no_key_takes_what_virtual_time_cannot_hold() -> None:
    numbers = [doc.key for doc in explain("", Scenario) if doc.key not in ("name", "about")]
    assert len(numbers) > 80
    for key in numbers:
        for value in ("nan", "inf", "-1e300", "1e300"):
            with pytest.raises(ConfigError, match=key.split(".")[0]):
                load_scenario("multi-tenant", [f"{key}={value}"])


def test_a_fleet_of_another_size_has_as_large_a_share_of_spares() -> None:
    usual = load_scenario("llama3-54d").fleet
    small = load_scenario("llama3-54d", ["fleet.gpus=512"]).fleet
    assert small.spare_nodes == max(1, -(-usual.spare_nodes * 512 // usual.gpus)) < 10
    given = load_scenario("llama3-54d", ["fleet.gpus=512", "fleet.spare_nodes=7"]).fleet
    assert given.spare_nodes == 7
    none = load_scenario("rsc-11mo", ["fleet.gpus=512"]).fleet
    assert none.spare_nodes == 0
