"""A submission carries its plan: every expectation derived, and marked with where it is from."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from phalanx.cluster.fleet.fleet import Fleet
from phalanx.cluster.job_relations import Array
from phalanx.cluster.jobs.job import Expected, JobSpec
from phalanx.cluster.node import Node
from phalanx.cluster.plan_record import PlanInterval, PlanRecord
from phalanx.cluster.policy import Policy, PricePolicy
from phalanx.cluster.protocol.commands import Notify
from phalanx.cluster.protocol.messages import WorkerExited
from phalanx.cluster.units import SECOND_NS
from phalanx.config import Job, default_world_size, job_from_table, load_job, resolve
from phalanx.config.toml_text import parse_toml
from phalanx.control.server.http.planned_job import costs_above, planned, recent_times, site_of
from phalanx.control.server.http.submission import RequestedWork, spec_of, submission
from phalanx.control.wire.payload import TrainingWork, decode_payload
from phalanx.plan import constants_toml, shipped
from tests.cluster.drive import Drive, fleet_of

EXAMPLES = sorted(
    path for path in Path("examples").glob("*.toml") if "\n[model]\n" in path.read_text()
)
MESHES = [
    {"data": 8, "zero": 0},
    {"data": 8, "zero": 1},
    {"data": 8, "zero": 3},
    {"data": 4, "tensor": 2, "zero": 1},
    {"data": 4, "context": 2},
    {"data": 4, "pipeline": 2, "zero": 1},
    {"data": 2, "pipeline": 2, "tensor": 2, "zero": 1, "schedule": "interleaved"},
    {"data": 2, "pipeline": 4, "schedule": "gpipe", "zero": 1},
]


def spec_for(job: Job, ranks: int, node_gpus: int = 8) -> JobSpec:
    made = submission(RequestedWork(job=job, ranks=ranks), node_gpus)
    return spec_of(made.spec, made.work, job)


def plan(job: Job, ranks: int, drive: Drive | None = None, **fields: Any) -> JobSpec:
    core = (drive or Drive()).core
    spec = structs.replace(spec_for(job, ranks), **fields)
    return planned(spec, job, site_of(core, spec, job))


def job_on(axes: dict[str, Any], device: str = "cpu", **train: int) -> Job:
    table = {
        "name": "x",
        "model": {"preset": "tiny"},
        "parallel": axes,
        "data": {"sequence": 256},
        "train": {"steps": 10, "global_batch": 32, "micro_batch": 2, "device": device, **train},
    }
    return resolve(job_from_table(table), 8)


def assert_all_derived(spec: JobSpec) -> None:
    assert spec.plan is not None and spec.plan.problem == ""
    assert set(spec.plan.origins) == set(Expected.__struct_fields__)
    assert "default" not in spec.plan.origins.values()
    expected = spec.expected
    for name in Expected.__struct_fields__:
        if name not in ("exposed_ns", "bubble_ns", "micro_batches"):
            assert getattr(expected, name) > 0, name
    assert expected.exposed_ns + expected.bubble_ns <= expected.step_ns
    full = any(
        "zero-bubble" in choice for choice in spec.plan.chosen
    )  # such a pipeline never waits
    assert (expected.bubble_ns > 0) == (spec.gang.pipeline > 1 and not full)
    for interval in (spec.plan.step_ns, spec.plan.run_seconds, spec.plan.micro_dollars):
        assert interval is not None and interval.low <= interval.mid <= interval.high
    assert spec.plan.step_ns is not None and spec.plan.step_ns.mid == expected.step_ns


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_every_example_has_all_expectations_derived(path: Path) -> None:
    job = load_job(path)
    ranks = default_world_size(job, 0)
    assert_all_derived(plan(resolve(job, ranks), ranks))


@pytest.mark.parametrize("axes", MESHES, ids=str)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_mesh_has_all_expectations_derived(axes: dict[str, Any], device: str) -> None:
    found = plan(job_on(axes, device), 8)
    assert_all_derived(found)
    assert found.expected.exposed_ns > 0
    assert found.plan is not None and found.plan.device == ("cpu" if device == "cpu" else "h100")
    axis_names = {axis.axis for axis in found.gang.traffic}
    assert axis_names >= {name for name in ("tensor", "context", "pipeline") if name in axes}


@pytest.mark.parametrize(
    ("axes", "shares"),
    [
        ({"data": 8, "zero": 0}, 2),
        ({"data": 8, "zero": 1}, 2),
        ({"data": 8, "zero": 2}, 0),
        ({"data": 8, "zero": 3}, 0),
        ({"data": 4, "pipeline": 2, "zero": 1}, 0),
    ],
    ids=["ddp", "zero1", "zero2", "zero3", "pipeline"],
)
def test_a_slow_replica_is_offered_less_work_only_where_that_helps(
    axes: dict[str, int], shares: int
) -> None:
    assert plan(job_on(axes), 8).expected.micro_batches == shares


def test_a_job_on_devices_that_nobody_knows_keeps_defaults_and_says_why() -> None:
    drive = Drive(fleet=Fleet([Node(name="n0", kind="h1000")]))
    found = plan(job_on({"data": 8}, "cuda", steps=77), 8, drive)
    assert found.plan is not None and "h1000" in found.plan.problem
    assert found.plan.step_ns is None and found.expected.step_ns == Expected().step_ns
    assert found.expected.steps == 77 and found.plan.origins["steps"] == "job"


def test_why_a_job_was_not_planned_is_told_among_its_events() -> None:
    drive = Drive()
    drive.submit(plan=PlanRecord(problem="nodes name no kind of GPU"))
    told = [str(each.reason) for each in drive.bodies(Notify)]
    assert told == ["its times are defaults until they are measured: nodes name no kind of GPU"]


def test_the_plan_is_for_the_nodes_that_the_constraint_leaves() -> None:
    small = [Node(name=f"a{i}", kind="a100") for i in range(2)]
    large = [Node(name=f"h{i}", kind="h100") for i in range(8)]
    drive = Drive(fleet=Fleet([*small, *large]))
    job = job_on({"data": 8}, "cuda")
    devices = []
    for constraint in ("", "a100"):
        found = plan(job, 8, drive, constraint=constraint)
        assert found.plan is not None
        devices.append(found.plan.device)
    assert devices == ["h100", "a100"]


def test_the_sites_price_and_power_decide_what_a_job_costs() -> None:
    dear = Drive(
        policy=Policy(price=PricePolicy(micro_dollars_per_gpu_hour=5_000_000, watts_per_gpu=600))
    )
    usual, other = plan(job_on({"data": 8}), 8).plan, plan(job_on({"data": 8}), 8, dear).plan
    assert usual is not None and other is not None
    assert usual.micro_dollars and other.micro_dollars and usual.watt_hours and other.watt_hours
    assert other.micro_dollars.mid == pytest.approx(2 * usual.micro_dollars.mid, abs=2)
    assert other.watt_hours.mid == pytest.approx(usual.watt_hours.mid / 2, abs=1)


def test_constants_that_were_calibrated_at_the_site_are_used(tmp_path: Path) -> None:
    job, core = job_on({"data": 8}), Drive().core
    spec, path = spec_for(job, 8), tmp_path / "constants-cpu.toml"
    (tmp_path / "constants.toml").write_text("of GPUs: not looked at")
    before = planned(spec, job, site_of(core, spec, job, tmp_path))
    path.write_text(constants_toml(structs.replace(shipped("cpu"), step_seconds=10.0)))
    after = planned(spec, job, site_of(core, spec, job, tmp_path))
    assert after.expected.step_ns > before.expected.step_ns + 9 * SECOND_NS
    path.write_text("nonsense")
    refused = planned(spec, job, site_of(core, spec, job, tmp_path))
    assert refused.plan is not None and "constants" in refused.plan.problem


def test_slow_starts_of_earlier_jobs_are_expected_of_the_next() -> None:
    drive = Drive()
    job = drive.running(plan=PlanRecord())
    job.revised, job.measured = (
        Expected(start_ns=90 * SECOND_NS, form_ns=1),
        ("form_ns", "start_ns"),
    )
    assert recent_times([job]) == {"start_ns": 90 * SECOND_NS, "form_ns": 1}
    found = plan(job_on({"data": 8}), 8, drive)
    assert found.plan is not None
    assert (found.expected.start_ns, found.plan.origins["start_ns"]) == (90 * SECOND_NS, "measured")
    # One that was faster than is usual makes no deadline shorter.
    assert found.expected.form_ns > SECOND_NS and found.plan.origins["form_ns"] == "planned"


def test_jobs_above_the_policys_thresholds_are_named_with_them() -> None:
    cost = PlanRecord(
        run_seconds=PlanInterval(3600, 7200, 9000),
        micro_dollars=PlanInterval(1, 40_000_000, 3),
        watt_hours=PlanInterval(1, 5000, 9),
    )
    one = JobSpec(name="x", plan=cost)
    many = structs.replace(one, array=Array(count=10))
    price = PricePolicy(ask_above_hours=3, ask_above_dollars=100, ask_above_kwh=20)
    assert costs_above(price, [one]) == ""
    assert costs_above(PricePolicy(), [many]) == ""
    assert costs_above(price, [many]) == (
        "it is planned to take 400 dollars, above price.ask_above_dollars = 100 and 50 kWh, "
        "above price.ask_above_kwh = 20 of the policy"
    )
    assert "hours, above price.ask_above_hours = 1" in costs_above(
        PricePolicy(ask_above_hours=1), [one]
    )


def test_planning_a_large_job_takes_no_search() -> None:
    job = load_job(Path("examples/dense-1t.toml"))
    ranks = default_world_size(job, 0)
    job = resolve(job, ranks)
    drive = Drive(fleet=fleet_of(1024))
    plan(job, ranks, drive)
    began = time.process_time()
    plan(job, ranks, drive)
    assert time.process_time() - began < 5  # about 40 ms; of all mappings, minutes


def test_what_a_job_leaves_to_the_planner_is_chosen_and_run() -> None:
    table = {
        "name": "open",
        "model": {"preset": "llama3-70b"},
        "parallel": {"choose": True, "zero": 1},
        "data": {"sequence": 8192},
        "train": {"steps": 10, "global_batch": 64, "device": "cuda"},
    }
    job = resolve(job_from_table(table), 64)
    found = plan(job, 64)
    assert found.plan is not None and found.plan.problem == ""
    axes = found.gang
    assert axes.tensor > 1 and axes.gpus(axes.replicas) == 64  # it fits no GPU as a whole
    assert f"parallel.tensor = {axes.tensor}" in found.plan.chosen
    work = decode_payload(found.payload)
    assert isinstance(work, TrainingWork)
    run = job_from_table(parse_toml(work.toml))
    assert (run.parallel.tensor, run.parallel.data) == (axes.tensor, axes.replicas)
    assert not run.parallel.choose
    assert_all_derived(found)


def test_axes_that_a_job_sets_are_kept() -> None:
    job = job_on({"choose": True, "tensor": 2, "pipeline": 2, "zero": 1})
    found = plan(job, 8)
    assert (found.gang.tensor, found.gang.pipeline) == (2, 2)
    untouched = plan(job_on({"data": 8}), 8)
    assert untouched.plan is not None and untouched.plan.chosen == ()


def test_a_mapping_that_cannot_be_chosen_stays_as_it_was_written() -> None:
    drive = Drive(fleet=Fleet([Node(name="n0")]))
    found = plan(job_on({"choose": True}, "cuda"), 8, drive)
    assert found.plan is not None and "name no kind" in found.plan.problem
    assert found.gang.replicas == 8 and found.gang.tensor == 1


def test_a_fleet_that_was_seen_to_fail_often_has_jobs_planned_to_save_more_often() -> None:
    drive = Drive()
    running = drive.running()
    job = job_on({"data": 8})
    before = plan(job, 8, drive).expected.checkpoint_steps
    for _ in range(8):
        drive.tell(
            WorkerExited(
                node=running.placement.nodes[0],
                job=running.id,
                generation=running.generation,
                rank=0,
                cause="nccl_timeout",
                step=running.step,
            )
        )
        drive.settle(running)
        drive.run(running)
        drive.train(running, 10)
    assert plan(job, 8, drive).expected.checkpoint_steps < before
    named = structs.replace(job, checkpoint=structs.replace(job.checkpoint, failure_rate="llama3"))
    assert plan(named, 8, drive).expected.checkpoint_steps == pytest.approx(before, rel=0.001)


def test_a_job_is_planned_with_the_rate_of_the_nodes_that_it_has_or_would_get() -> None:
    """Of two models one fails: a job that may only have the other is planned as before."""
    drive = Drive(
        fleet=Fleet(
            Node(name=f"{kind}{number}", kind=kind, features=(kind,), rails=8)
            for kind in ("h100", "h200")
            for number in range(4)
        )
    )
    running = drive.running(constraint="h100", retries=99)
    for _ in range(5):
        exited = WorkerExited(
            node=running.placement.nodes[0],
            job=running.id,
            generation=running.generation,
            rank=0,
            cause="nccl_timeout",
            step=running.step,
        )
        drive.tell(exited)
        drive.settle(running)
        drive.run(running)
        drive.train(running, 1)
    job = job_on({"data": 8})
    bad, good = (
        float(site_of(drive.core, structs.replace(running.spec, constraint=kind), job).failure_rate)
        for kind in ("h100", "h200")
    )
    assert bad > 5 * good and good == pytest.approx(3.789, rel=0.01)
    anywhere = structs.replace(running.spec, constraint="")
    held = site_of(drive.core, anywhere, job, placement=running.placement)
    assert float(held.failure_rate) == pytest.approx(bad, rel=0.1)


def test_a_job_carries_mappings_for_fewer_nodes() -> None:
    job = job_on({"data": 2, "pipeline": 4, "zero": 1}, "cuda")
    spec = structs.replace(spec_for(job, 8, 2))
    drive = Drive(fleet=fleet_of(4, gpus=2))
    made = planned(spec, job, site_of(drive.core, spec, job))
    assert made.fallbacks and len(made.fallbacks) <= 3
    slots = [each.slots for each in made.fallbacks]
    assert slots == sorted(slots, reverse=True) and max(slots) < 4
    steps = [each.expected.step_ns for each in made.fallbacks if 2 * each.slots >= 4]
    assert steps == sorted(steps), "more nodes are only there if they are faster"
    for each in made.fallbacks:
        work = decode_payload(each.payload)
        assert isinstance(work, TrainingWork)
        assert each.gang.slot_gpus == 2 and work.world_size == each.gang.gpus(each.gang.replicas)
        other = resolve(job_from_table(parse_toml(work.toml)), work.world_size)
        assert (other.model, other.train.global_batch) == (job.model, job.train.global_batch)
        assert other.parallel.data == each.gang.replicas
        assert_all_derived(made.on_fewer_nodes(each))


def test_a_job_that_wants_the_same_bits_keeps_its_mapping() -> None:
    job = job_on({"data": 2, "pipeline": 4, "zero": 1}, deterministic=True)
    assert plan(job, 8).fallbacks == ()


def test_an_elastic_job_whose_nodes_hold_whole_replicas_needs_no_other_mapping() -> None:
    job = job_on({"data": 8})
    drive = Drive(fleet=fleet_of(4, gpus=2))
    elastic, fixed = (
        structs.replace(spec, gang=structs.replace(spec.gang, least_replicas=least))
        for spec, least in ((spec_for(job, 8, 2), 2), (spec_for(job, 8, 2), 0))
    )
    assert planned(elastic, job, site_of(drive.core, elastic, job)).fallbacks == ()
    assert planned(fixed, job, site_of(drive.core, fixed, job)).fallbacks
