"""Selections of checks, and measurements judged against the catalogue, siblings and needs."""

from __future__ import annotations

from pathlib import Path

import pytest

from phalanx.config import ConfigError
from phalanx.doctor.checks.evidence import recorded_process
from phalanx.doctor.checks.registry import SETTINGS
from phalanx.doctor.checks.run import Source
from phalanx.doctor.examine import Request, examine
from phalanx.doctor.gemm import judge_gemm, measure_gemm
from phalanx.doctor.node import AGENT_CHECKS, CHECKS, CheckOptions, check_node
from phalanx.doctor.rates import (
    StorageNeeds,
    check_files,
    check_rates,
    check_store,
    judge_files,
    judge_rates,
)
from phalanx.doctor.selection import profiles_named, select, storage_needs

PEAK = {"bfloat16": 989e12, "fp8": 1979e12}


def test_products_are_judged_by_catalogue_and_siblings() -> None:
    rates = {f"cuda:{index}": {"bfloat16": 700e12} for index in range(8)}
    rates["cuda:3"] = {"bfloat16": 600e12, "fp8": 600e12}
    rates["cpu"] = {"float32": 1e11}
    found = {each.check: each for each in judge_gemm(rates, dict.fromkeys(rates, PEAK))}
    assert found["gemm cuda:0 bfloat16"].verdict == "pass"
    assert found["gemm cuda:3 bfloat16"].verdict == "warn"  # a straggler among its siblings
    assert "siblings" in found["gemm cuda:3 bfloat16"].expected
    assert found["gemm cuda:3 fp8"].verdict == "fail"
    assert found["gemm cuda:3 fp8"].cause == "slow_compute"
    assert found["gemm cpu float32"].verdict == "pass"


def test_a_product_on_the_processor_has_a_rate() -> None:
    assert measure_gemm("cpu")["float32"] > 1e8


def test_storage_is_measured_and_judged_by_what_a_job_needs(tmp_path: Path) -> None:
    found = check_rates(tmp_path, StorageNeeds())
    assert found.verdict == "pass" and float(found.measured["files_per_second"]) > 0
    assert list(tmp_path.iterdir()) == []
    slow = judge_rates(found.measured, StorageNeeds(files_per_second=1e12))
    assert slow.verdict == "warn" and "files_per_second" in slow.suggestion


def test_many_small_files_are_a_warning(tmp_path: Path) -> None:
    assert judge_files("/d", 5000, 5000 * 1000).verdict == "warn"
    assert judge_files("/d", 5000, 5000 << 22).verdict == "pass"
    assert judge_files("/d", 10, 10).verdict == "pass"
    assert check_files(tmp_path).verdict == "skip"
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "a").write_bytes(bytes(2 << 20))
    assert check_files(tmp_path).measured == {"files": 1, "mean_mib": 2.0}


def test_a_store_answers_or_is_told(tmp_path: Path) -> None:
    pytest.importorskip("obstore")
    (tmp_path / "shard").write_bytes(bytes(1 << 20))
    found = check_store(f"file://{tmp_path}")
    assert found.verdict == "pass" and float(found.measured["mb_per_second"]) > 0
    assert check_store("nonsense://x").verdict == "fail"


def test_checks_are_chosen_by_name_group_and_depth() -> None:
    assert select(quick=True).measured == AGENT_CHECKS and not select(quick=True).settings
    assert select().settings == tuple(SETTINGS) and select().short
    assert set(select().measured) == {"disk", "mounts"}  # nothing that imports torch
    assert {"gemm", "collective", "rates"} <= set(select(deep=True).measured)
    assert select(deep=True).measured[0] == "collective"  # its ranks are forked
    gpu = select(groups=["gpu"])
    assert gpu.settings and not gpu.measured
    assert all(name.startswith("gpu.") for name in gpu.settings)
    assert set(select(groups=["compute"]).measured) == {"collective", "matmul", "memory", "gemm"}
    assert not select(groups=["compute"]).short  # short ones would measure nothing
    assert select(also=["gpu", "rates"]).measured == ("disk", "mounts", "gpu", "rates")
    one = select(only=["os.thp", "disk"])
    assert (one.settings, one.measured) == (("os.thp",), ("disk",))
    assert set(AGENT_CHECKS) <= set(CHECKS)


@pytest.mark.parametrize(
    ("ask", "fix"),
    [
        (lambda: select(only=["os.thb"]), "os.thp"),
        (lambda: select(groups=["gpus"]), "gpu"),
        (lambda: profiles_named(["metall"]), "metal"),
        (lambda: storage_needs(["reed=5"]), "read"),
        (lambda: storage_needs(["read=fast"]), "read=500"),
        (lambda: storage_needs(["read=-5"]), "read=500"),
        (lambda: storage_needs(["files=nan"]), "files=500"),
        (lambda: storage_needs(["write=inf"]), "write=500"),
        (lambda: select(quick=True, deep=True), "--deep"),
        (lambda: select(quick=True, groups=["gpu"]), "--group"),
        (lambda: select(only=["os.thp"], groups=["gpu"]), "--group"),
    ],
)
def test_what_makes_no_sense_is_refused_with_what_would(ask: object, fix: str) -> None:
    assert callable(ask)
    with pytest.raises(ConfigError, match=fix):
        ask()


def test_needs_are_read() -> None:
    assert storage_needs(["read=500", "files=10"]) == StorageNeeds(
        read_mb_per_second=500.0, files_per_second=10.0
    )


def test_a_recorded_machine_is_judged_and_not_measured(tmp_path: Path) -> None:
    recorded = Path(__file__).parent / "recorded/cpu-virtual"
    options = CheckOptions(node="n", folder=tmp_path, quick=True)
    source = Source(folder=tmp_path, recorded=recorded)
    heard: list[object] = []
    report = examine(Request(selection=select(), options=options, source=source), heard.append)
    assert report.depth == "settings" and report.passed
    assert len(report.findings) == len(heard) == len(SETTINGS)


def test_agents_check_what_they_did_before(tmp_path: Path) -> None:
    options = CheckOptions(node="n", folder=tmp_path, quick=True)
    report = check_node(options)
    assert report.depth == "quick"
    assert not [each for each in report.findings if "." in each.check.split(" ")[0]]


def test_a_recorded_process_that_is_damaged_is_named(tmp_path: Path) -> None:
    (tmp_path / "process.json").write_text('{"cpus": 3}')
    with pytest.raises(ConfigError, match=r"process\.json"):
        recorded_process(tmp_path)
