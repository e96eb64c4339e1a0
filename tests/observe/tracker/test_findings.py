"""Findings: each kind says where, how much, and what to do; and the ledger over time is exact."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.cluster.protocol.events import DataStarved, LossSpike, SlowRank, Tick
from phalanx.cluster.protocol.messages import DeviceError, WorkerExited
from phalanx.observe.store.journal import Journal
from phalanx.observe.tracker.findings import SUGGESTIONS, RunFinding, Trends, from_event
from phalanx.observe.tracker.ledger_time import slices

SECOND = 1_000_000_000


@pytest.mark.parametrize(
    ("body", "kind", "words"),
    [
        (
            SlowRank(job=1, generation=1, node=3, rank=7, part="compute", slowdown_ppm=200_000),
            "straggler",
            "rank 7 takes 20 %",
        ),
        (DataStarved(job=1, generation=1, share_ppm=310_000), "data_starvation", "31 %"),
        (LossSpike(job=1, generation=1, step=9, not_finite=True), "loss_spike", "step 9"),
        (DeviceError(node=3, cause="hbm_ecc", gpu=2), "ecc_growth", "hbm ecc"),
        (DeviceError(node=3, cause="thermal"), "throttling", "thermal"),
        (
            WorkerExited(job=1, generation=1, node=3, rank=2, cause="worker_killed"),
            "worker_exited",
            "rank 2 ended: worker killed",
        ),
    ],
)
def test_an_event_becomes_a_finding_with_evidence_and_advice(
    body: object, kind: str, words: str
) -> None:
    found = from_event(body, 5 * SECOND, {3: "node-3"})  # type: ignore[arg-type]
    assert found is not None
    assert found.kind == kind
    assert words in found.sentence
    assert found.evidence
    assert found.picture
    assert found.suggestion.split("`")[0] == SUGGESTIONS[kind].split("`")[0]
    assert "{" not in found.suggestion
    if kind == "worker_exited":
        assert "`phalanx logs 1 --rank 2`" in found.suggestion
    assert found.node == ("node-3" if getattr(body, "node", None) == 3 else "")


def test_an_everyday_event_is_no_finding() -> None:
    assert from_event(Tick(), 0, {}) is None


def steps(trends: Trends, count: int, **more: object) -> list[str]:
    kinds: list[str] = []
    for step in range(1, count + 1):
        values = {
            "seconds": 1.0,
            "planned_seconds": 0.0,
            "memory_bytes": 1 << 30,
            "grad_norm": 1.0,
        } | {key: value(step) if callable(value) else value for key, value in more.items()}
        found = trends.step(1, step, step * SECOND, **values)  # type: ignore[arg-type]
        kinds += [each.kind for each in found]
    return kinds


def test_a_steady_run_has_no_trend() -> None:
    assert steps(Trends(), 600) == []


def test_memory_that_creeps_up_is_found_once() -> None:
    assert steps(Trends(), 400, memory_bytes=lambda s: (1 << 30) + s * (1 << 20)) == [
        "memory_creep"
    ]


def test_a_gradient_that_explodes_is_found_at_its_step() -> None:
    trends = Trends()
    assert steps(trends, 60, grad_norm=lambda s: 50.0 if s == 60 else 1.0) == ["gradient_explosion"]


def test_steps_behind_the_plan_are_found() -> None:
    assert "behind_plan" in steps(Trends(), 40, planned_seconds=0.5)


def test_saves_that_take_longer_are_found() -> None:
    trends, kinds = Trends(), list[str]()
    for step in range(1, 14):
        found = trends.saved(1, step, step * SECOND, 1.0 if step < 10 else 5.0)
        kinds += [each.kind for each in found]
    assert kinds == ["checkpoint_slowdown"]


def test_findings_are_kept_and_read_in_order(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "runs.sqlite")
    for number in range(5):
        journal.add_finding(RunFinding(time=float(number), kind="straggler", job=number % 2))
    assert [each.time for each in journal.findings()] == [0, 1, 2, 3, 4]
    assert [each.time for each in journal.findings(job=1)] == [1, 3]
    assert [each.time for each in journal.findings(limit=2)] == [3, 4]


amounts = st.dictionaries(st.sampled_from("abc"), st.integers(0, 1 << 70))


@given(st.lists(st.tuples(st.integers(1, 1000), amounts), min_size=1), st.integers(1, 20))
def test_slices_of_the_ledger_sum_to_the_whole(
    added: list[tuple[int, dict[str, int]]], bins: int
) -> None:
    at, sums, rows = 0, dict[str, int](), list[tuple[int, dict[str, int]]]()
    for after, more in added:
        at += after
        sums = {name: sums.get(name, 0) + more.get(name, 0) for name in {*sums, *more}}
        rows.append((at, sums))
    found = slices(rows, 0, at, bins)
    total: dict[str, int] = {}
    for _, _, part in found:
        assert all(amount > 0 for amount in part.values())
        for name, amount in part.items():
            total[name] = total.get(name, 0) + amount
    assert total == {name: amount for name, amount in sums.items() if amount}


def test_time_that_moves_between_buckets_is_never_taken_back() -> None:
    rows = [(1, {"a": 10}), (2, {"a": 4, "b": 6}), (3, {"a": 5, "b": 7})]
    found = slices(rows, 0, 3, 3)
    assert [part for *_, part in found] == [{"a": 4}, {"b": 6}, {"a": 1, "b": 1}]
