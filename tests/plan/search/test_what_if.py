"""A change of a running job is priced beside now, calibrated by the job's own steps."""

from __future__ import annotations

import pytest
from msgspec import structs

from phalanx.config import ConfigError, job_from_table, resolve, to_toml
from phalanx.hardware import ClusterFile, cluster, make_cluster
from phalanx.plan import plan_job
from phalanx.plan.search.fewer_nodes import on_fewer_nodes
from phalanx.plan.search.what_if import JobChange, OwnSteps, Running, WhatIf, priced

TABLE = {
    "name": "x",
    "model": {"preset": "llama3-70b"},
    "data": {"sequence": 8192},
    "parallel": {"tensor": 8, "pipeline": 4, "zero": 1},
    "memory": {"recompute": "full"},
    "train": {"steps": 1000, "global_batch": 256, "device": "cuda"},
}
STEPS = OwnSteps(seconds=60.0, spread=0.01, done=400)


def running(ranks: int = 256, steps: OwnSteps = STEPS) -> Running:
    job = resolve(job_from_table(TABLE), ranks)
    devices = cluster(f"h100-{ranks}")
    return Running(toml=to_toml(job), ranks=ranks, devices=devices, node_gpus=8, steps=steps)


def what_if(job: Running, change: JobChange) -> WhatIf:
    return priced(job, change).answer


def test_a_job_whose_nodes_fail_often_is_priced_so() -> None:
    calm, rough = (
        what_if(structs.replace(running(), failure_rate=rate, interval_seconds=1800.0), JobChange())
        for rate in ("2", "200")
    )
    assert rough.now.goodput < 0.98 * calm.now.goodput
    assert rough.now.hours.mid > calm.now.hours.mid


def test_without_a_change_it_goes_on_as_it_was_measured() -> None:
    found = what_if(running(), JobChange())
    assert found.now == found.then and found.changed == ()
    assert found.now.step_seconds.mid == pytest.approx(60.0)
    assert found.now.step_seconds.high == pytest.approx(60 * 1.0129, rel=1e-3)
    assert found.now.hours.mid == pytest.approx(600 * 60 / found.now.goodput / 3600)


def test_what_the_steps_take_over_what_is_predicted_holds_for_the_change_too() -> None:
    fast, slow = (
        what_if(running(steps=OwnSteps(seconds=seconds)), JobChange(gpus=128))
        for seconds in (30, 60)
    )
    assert slow.then.step_seconds.mid == pytest.approx(2 * fast.then.step_seconds.mid)
    assert slow.then.gpus == 128 and slow.then.step_seconds.mid > slow.now.step_seconds.mid
    # Another mapping is predicted, not measured: it is less certain.
    width = [each.step_seconds.high / each.step_seconds.mid for each in (slow.now, slow.then)]
    assert width[1] > width[0]


def test_settings_precision_spares_and_interval_change_what_they_are_about() -> None:
    whole = running()
    tensor = what_if(whole, JobChange(settings=("parallel.tensor=4",)))
    assert tensor.then.mapping.startswith("tensor 4 x pipeline 4 x data 16")
    assert tensor.changed == ("parallel.tensor = 4", "parallel.data = 16")
    narrow = what_if(whole, JobChange(precision="fp8")).then
    assert narrow.step_seconds.mid < 60 and narrow.mapping.endswith("fp8")
    spared = what_if(whole, JobChange(spares=32))  # as many GPUs again
    assert spared.then.dollars.mid == pytest.approx(2 * spared.now.dollars.mid)
    rare = what_if(whole, JobChange(interval_seconds=40_000.0))
    assert rare.then.goodput < rare.now.goodput and rare.then.hours.mid > rare.now.hours.mid


def test_the_job_that_would_run_comes_with_the_answer() -> None:
    whole = running()
    found = priced(whole, JobChange(settings=("parallel.tensor=4", "parallel.zero=2")))
    assert (found.ranks, found.job.parallel.tensor, found.job.parallel.data) == (256, 4, 16)
    assert found.answer.changed[-1] == "parallel.zero = 2"
    saves = priced(whole, JobChange(interval_seconds=300.0, spares=1))
    assert saves.job.checkpoint.every == 5, "steps of 60 s"
    assert saves.answer.changed == ("a checkpoint every 300 s", "spares = 1")
    assert priced(whole, JobChange(gpus=128)).ranks == 128


def test_cores_of_one_machine_stay_in_one_domain_however_many_they_are() -> None:
    table = {"name": "x", "model": {"preset": "tiny"}, "train": {"steps": 9, "device": "cpu"}}
    job = resolve(job_from_table({**table, "parallel": {"zero": 1}}), 1)
    described = ClusterFile(gpu="cpu", gpus=1, gpus_per_node=1, domain_gpus=1)
    one = Running(toml=to_toml(job), ranks=1, devices=make_cluster("cpu-1", described))
    two = structs.replace(described, gpus=2, domain_gpus=2)
    grown = what_if(one, JobChange(gpus=2)).then.step_seconds.mid
    whole = resolve(job_from_table({**table, "parallel": {"zero": 1}}), 2)
    assert grown == plan_job(whole, make_cluster("cpu-2", two)).step_seconds.mid


def test_the_search_proposes_nothing_slower() -> None:
    found = what_if(running(), JobChange(search=True))
    assert found.then.step_seconds.mid <= found.now.step_seconds.mid
    assert found.then.gpus == 256 and found.changed
    assert found.then.memory_bytes <= found.then.memory_limit


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (JobChange(settings=("parallel.tensor=3",)), "parallel.tensor"),
        (JobChange(settings=("parallel.tensr=4",)), "tensr"),
        (JobChange(gpus=100), "world size"),
        (JobChange(precision="int3"), "no such format"),
    ],
    ids=str,
)
def test_a_change_that_cannot_run_is_refused_as_a_job_file_would_be(
    change: JobChange, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        what_if(running(), change)


VIRTUAL = {
    **TABLE,
    "model": {"preset": "llama3-8b"},
    "parallel": {"zero": 3},
    "train": {**TABLE["train"], "virtual_replicas": 64},
}


def test_fewer_nodes_keep_virtual_replicas_and_micro_batch() -> None:
    job = resolve(job_from_table(VIRTUAL), 64)
    ways = list(on_fewer_nodes(job, cluster("h100-64"), nodes=8, node_gpus=8))
    assert [other.parallel.data for other, _ in ways] == [16, 32]  # not 48, 56
    assert all(other.train == job.train for other, _ in ways)


def test_a_change_that_would_give_other_bits_is_refused() -> None:
    job = resolve(job_from_table(VIRTUAL), 64)
    whole = Running(
        toml=to_toml(job), ranks=64, devices=cluster("h100-64"), node_gpus=8, steps=STEPS
    )
    assert priced(whole, JobChange(gpus=32)).job.train == job.train
    with pytest.raises(ConfigError, match=r"train\.micro_batch = 2: the job was trained with 1"):
        priced(whole, JobChange(settings=("train.micro_batch=2",)))
