"""Verdicts on a burn-in, from made-up rates and looks at GPUs."""

from __future__ import annotations

import pytest

from phalanx.cluster.causes import Cause
from phalanx.doctor.acceptance.judge import judge
from phalanx.doctor.acceptance.loads import LoadSample, plan_loads
from phalanx.doctor.acceptance.ranking import rank, stragglers
from phalanx.doctor.acceptance.report import (
    AcceptanceReport,
    AcceptanceRequest,
    GpuSoak,
    LoadFigures,
)
from phalanx.doctor.acceptance.soak import LoadSeries, SoakSeries


def series(rates: list[float], every: float = 1.0) -> LoadSeries:
    made = LoadSeries()
    made.take(LoadSample(999.0), 0.0, counts=False)  # before all loads worked
    for number, rate in enumerate(rates):
        made.take(LoadSample(rate), number * every, counts=True)
    return made


def figures(device: str, median: float, first: float = 0.0, last: float = 0.0) -> LoadFigures:
    return LoadFigures(
        load="gemm",
        device=device,
        unit="flop_per_second",
        samples=10,
        first=first or median,
        last=last or median,
        worst=median,
        median=median,
        best=median,
    )


def test_the_first_minute_is_compared_with_the_last() -> None:
    found = series([100.0] * 100 + [90.0] * 100).figures("gemm", "cuda:0", 200.0)
    assert (found.first, found.last, found.worst, found.best) == (100.0, 90.0, 90.0, 100.0)
    assert found.samples == 200


def test_a_short_burn_in_compares_thirds() -> None:
    found = series([10.0, 10.0, 8.0, 8.0, 6.0, 6.0]).figures("gemm", "cpu", 6.0)
    assert (found.first, found.last, found.median) == (10.0, 6.0, 8.0)


@pytest.mark.parametrize(
    ("device", "last", "verdict"),
    [("cuda:0", 94.0, "pass"), ("cuda:0", 92.0, "fail"), ("cpu", 92.0, "warn")],
)
def test_a_rate_that_falls_is_a_finding(device: str, last: float, verdict: str) -> None:
    found = judge([figures(device, 100.0, 100.0, last)], [])
    assert found[0].verdict == verdict


def test_a_fall_of_a_hot_gpu_is_thermal() -> None:
    soak = GpuSoak(index=0, samples=9, most_celsius=88.0, throttle_reasons=0x40)
    load, gpu = judge([figures("cuda:0", 100.0, 100.0, 80.0)], [soak])
    assert (load.verdict, load.cause) == ("fail", Cause.THERMAL)
    assert (gpu.verdict, gpu.cause) == ("fail", Cause.THERMAL)


def test_a_load_that_hangs_before_the_end_is_no_pass() -> None:
    """A GPU that answers no more tells no rates: those from before it hung are as good as any."""
    hung = series([100.0] * 600).figures("gemm", "cuda:0", 3600.0, ended_at=3600.0)
    assert "no sign of life for the last 3001 s" in hung.problem
    (finding, _) = judge([hung], [])
    assert finding.verdict == "fail"
    late = series([100.0] * 3600).figures("gemm", "cuda:0", 3600.0, ended_at=3600.0)
    assert not late.problem
    short = series([100.0] * 2).figures("gemm", "cuda:0", 2.4, ended_at=20.0)
    assert not short.problem  # of so short a burn-in nobody can say


def test_wrong_bits_and_broken_loads_fail() -> None:
    wrong = LoadSeries()
    wrong.take(LoadSample(5.0, 1), 1.0, counts=True)
    broken = LoadSeries()
    broken.take(LoadSample(0.0, 0, "RuntimeError: CUDA error"), 1.0, counts=True)
    loads = [
        wrong.figures("memory", "cpu", 10.0),
        broken.figures("gemm", "cuda:0", 10.0),
    ]
    first, second, _ = judge(loads, [])
    assert (first.verdict, first.cause) == ("fail", Cause.SILENT_CORRUPTION)
    assert second.verdict == "fail" and "CUDA error" in str(second.measured["problem"])


class PlayedGpus:
    """Two GPUs, the second of which grows hot and counts errors."""

    def __init__(self) -> None:
        self._looks = 0

    def look(self) -> dict[str, tuple[float, ...]]:
        self._looks += 1
        return {
            "gpu_temperature_celsius": (60.0, 60.0 + 10 * self._looks),
            "gpu_sm_clock_megahertz": (1980.0, 1980.0 - 100 * self._looks),
            "gpu_throttle_reasons": (0.0, 0x4 if self._looks == 2 else 0.0),
            "gpu_ecc_uncorrected": (3.0, float(self._looks)),
            "gpu_ecc_corrected": (float("nan"), float("nan")),
        }


def test_gpus_are_watched_over_the_whole_time() -> None:
    soak = SoakSeries(PlayedGpus())  # type: ignore[arg-type]
    for second in (0.0, 0.5, 1.0, 2.0):
        soak.look(second)
    first, second_gpu = soak.figures()
    assert (first.samples, first.uncorrected_errors, first.most_celsius) == (3, 0, 60.0)
    assert second_gpu == GpuSoak(
        index=1,
        samples=3,
        first_celsius=70.0,
        most_celsius=90.0,
        most_sm_megahertz=1880.0,
        least_sm_megahertz=1680.0,
        throttle_reasons=0x4,
        uncorrected_errors=2,
    )
    well, ill = judge([], [first, second_gpu])
    assert well.verdict == "pass"
    assert (ill.verdict, ill.cause) == ("fail", Cause.HBM_ECC)  # a power cap (0x4) is no fault


def test_a_slow_sibling_is_named_and_noise_is_not() -> None:
    rates = {f"cuda:{n}": 600.0 + n for n in range(8)}
    assert not stragglers(rates)
    loads = [figures(name, rate) for name, rate in (rates | {"cuda:3": 540.0}).items()]
    named = [f.check for f in judge(loads, []) if f.check.startswith("siblings")]
    assert named == ["siblings gemm cuda:3"]


def test_ranks_of_nodes() -> None:
    assert [each.name for each in rank({"a": 3.0, "b": 1.0, "c": 2.0})] == ["b", "c", "a"]
    assert not stragglers({"a": 100.0, "b": 1.0})  # of two nobody knows which one is off
    assert [e.name for e in stragglers({"a": 100.0, "b": 1.0, "c": 99.0})] == ["b"]
    # Where all stray alike, nobody is a straggler.
    assert not stragglers({"a": 100.0, "b": 80.0, "c": 60.0, "d": 90.0, "e": 70.0})
    # One that claims an absurd rate does not hide who is slow.
    claimed = {"a": 100.0, "b": 101.0, "c": 50.0, "d": 1e20}
    assert [each.name for each in stragglers(claimed)] == ["c"]
    assert rank({}) == [] and not stragglers({"a": 0.0, "b": 0.0, "c": 0.0})


def test_loads_leave_cores_to_each_other() -> None:
    request = AcceptanceRequest(node="n", folder="/tmp")
    on_cpu = plan_loads(request, gpus=0, cpus=16)
    assert [(o.load, o.device, o.threads) for o in on_cpu] == [
        ("memory", "cpu", 1),
        ("collective", "2 x gloo", 1),
        ("collective", "2 x gloo", 1),
        ("disk", "disk", 1),
        ("gemm", "cpu", 12),
    ]
    assert plan_loads(request, gpus=0, cpus=1)[-1].threads == 1
    on_gpus = [o.device for o in plan_loads(request, gpus=2, cpus=16)]
    assert on_gpus.count("2 x nccl") == 2 and on_gpus[-2:] == ["cuda:0", "cuda:1"]


@pytest.mark.parametrize(
    ("seconds", "fails", "outcome"),
    [(60.0, False, "accepted"), (59.0, False, "incomplete"), (60.0, True, "rejected")],
)
def test_the_outcome(seconds: float, fails: bool, outcome: str) -> None:
    wrong = LoadFigures(load="disk", device="disk", unit="bytes_per_second", wrong=int(fails))
    report = AcceptanceReport(
        node="n",
        began_ns=0,
        seconds=seconds,
        wanted_seconds=60.0,
        loads=[wrong],
        gpus=[],
        findings=judge([wrong], []),
    )
    assert report.outcome == outcome
