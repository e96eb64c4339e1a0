"""What the server makes of a change before it orders it: the changed submission, or a refusal."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from phalanx.cluster.gang.formation import SKIPS_KEPT, leave_out
from phalanx.cluster.jobs.job import ClusterJob, FallbackMapping, GangShape, JobSpec
from phalanx.cluster.protocol.events import Replan
from phalanx.config import StageEdit, job_from_table, stage_rows
from phalanx.config.toml_text import parse_toml
from phalanx.control.server.http import replanned_job as module
from phalanx.control.server.http.endpoints import ApiError
from phalanx.control.server.http.live_change import left_out
from phalanx.control.wire.api_types import Done, Replicas
from phalanx.control.wire.payload import Script, TrainingWork, decode_payload, encode_payload
from phalanx.observe.store.metric_store import MetricStore
from phalanx.plan.search.what_if import JobChange
from tests.cluster.drive import Drive

TOML = """
name = "x"
[model]
preset = "llama3-8b"
[data]
source = "synthetic"
[memory]
recompute = "full"
[train]
steps = 1000
global_batch = 32
device = "cuda"
"""
GANG = GangShape(replicas=16, slot_gpus=8)


class Asked:
    """A request about the job of a core, as far as a change looks at it."""

    class token:  # noqa: N801
        name = "ada"

    def __init__(self, drive: Drive, job: ClusterJob, folder: Path) -> None:
        self._job, self.ordered = job, []
        self.leading: Any = type("Leading", (), {"core": drive.core})
        self.server: Any = self
        self.options: Any = type("Options", (), {"state": folder})
        self.metrics = MetricStore(folder / "metrics.sqlite")

    def job(self) -> ClusterJob:
        return self._job

    async def read(self, function: Any, *given: Any) -> Any:
        return function(*given)

    helped = read

    async def order(self, body: Any) -> Done:
        self.ordered.append(body)
        return Done(accepted=True, message="", sequence=1)


@pytest.fixture
def asked(tmp_path: Path) -> Any:
    drive = Drive()
    work = TrainingWork(toml=TOML, world_size=16, environment={"A": "1"})
    job = drive.running(gang=GANG, payload=encode_payload(work), user="ada", spares=1)
    return Asked(drive, job, tmp_path)


def carry_out(asked: Any, change: JobChange) -> Replan:
    asyncio.run(module.carry_out(asked, change))
    (order,) = asked.ordered
    assert isinstance(order, Replan)
    return order


def test_the_order_holds_the_changed_submission_and_what_is_expected(asked: Any) -> None:
    order = carry_out(asked, JobChange(settings=("parallel.tensor=4",), spares=0))
    spec, before = order.change.spec, asked.job().spec
    assert (spec.gang.tensor, spec.gang.replicas, spec.gang.slot_gpus) == (4, 4, 8)
    assert spec.user == before.user and spec.spares == 0 and spec.retries == before.retries
    work = decode_payload(spec.payload)
    assert (
        isinstance(work, TrainingWork) and work.world_size == 16 and work.environment == {"A": "1"}
    )
    assert "tensor = 4" in work.toml
    assert order.change.by == "ada" and order.change.before.startswith("data 16")
    assert order.change.settings == ("parallel.tensor = 4", "parallel.data = 4", "spares = 0")
    step = order.change.step_ns
    assert step is not None and step.low < step.mid < step.high
    assert spec.expected.step_ns == step.mid, "calibrated by steps of 5 s"
    assert spec.expected.exposed_ns + spec.expected.bubble_ns <= step.mid
    assert spec.plan is not None and spec.plan.mapping.startswith("tensor 4 x data 4")
    assert {axis.axis for axis in spec.gang.traffic} == {"data", "tensor"}


def test_fewer_ranks_take_the_part_of_a_node_that_they_need(asked: Any) -> None:
    order = carry_out(asked, JobChange(gpus=4))
    assert (order.change.spec.gang.replicas, order.change.spec.gang.slot_gpus) == (4, 4)


@pytest.mark.parametrize(
    ("change", "code", "words"),
    [
        (JobChange(settings=("model.layers=2",)), "another_run", "model.layers would make it"),
        (JobChange(settings=("train.seed=2",)), "another_run", "train.seed would make it"),
        (JobChange(settings=("parallel.tensor=3",)), "bad_change", "parallel.tensor"),
        (JobChange(settings=("memory.recompute=none",), gpus=1), "too_large", "GiB of 8"),
    ],
    ids=str,
)
def test_what_cannot_run_is_refused_before_it_is_ordered(
    asked: Any, change: JobChange, code: str, words: str
) -> None:
    with pytest.raises(ApiError, match=words) as refused:
        asyncio.run(module.carry_out(asked, change))
    assert refused.value.code == code and not asked.ordered


def test_a_size_is_said_in_replicas_or_in_gpus(asked: Any) -> None:
    job = asked.job()
    wide = structs.replace(job, spec=structs.replace(job.spec, gang=GangShape(tensor=4)))
    assert module.wanted_replicas(wide, Replicas(replicas=3)) == 3
    assert module.wanted_replicas(wide, Replicas(gpus=12)) == 3
    for bad in (Replicas(), Replicas(replicas=1, gpus=4), Replicas(gpus=6)):
        with pytest.raises(ApiError):
            module.wanted_replicas(wide, bad)


def test_only_a_trainers_job_beyond_its_bounds_is_changed(asked: Any) -> None:
    spec = asked.job().spec
    elastic = structs.replace(GANG, least_replicas=8)

    def needs(replicas: int, **fields: object) -> bool:
        job = structs.replace(asked.job(), spec=structs.replace(spec, **fields))
        return module.needs_replan(job, replicas)

    assert needs(8) and needs(32) and not needs(16)
    assert not needs(8, gang=elastic) and needs(4, gang=elastic)
    program = encode_payload(Script(argv=("true",)))
    assert not needs(8, payload=program, reports_steps=False)


STAGED = TOML.replace(
    'source = "synthetic"',
    """source = "shards"
[data.blend.web]
path = "/web"
[data.blend.code]
path = "/code"
""",
)


def restage(asked: Any, change: JobChange) -> Replan:
    """The order, carried out as the core would."""
    order = carry_out(asked, change)
    asked.ordered.clear()
    job = asked.job()
    job.spec, job.stages_before = order.change.spec, order.change.stages_before
    return order


@pytest.fixture
def staged(asked: Any) -> Any:
    work = TrainingWork(toml=STAGED, world_size=16, environment={"A": "1"})
    asked.job().spec = structs.replace(asked.job().spec, payload=encode_payload(work))
    return asked


def stages_of(order: Replan) -> list[tuple[int, int, int, dict[str, float]]]:
    work = decode_payload(order.change.spec.payload)
    assert isinstance(work, TrainingWork) and work.environment == {"A": "1"}
    job = job_from_table(parse_toml(work.toml))
    return [(r.after_step, r.sequence, r.global_batch, r.weights) for r in stage_rows(job)]


def test_stages_are_changed_and_nothing_else_is(staged: Any) -> None:
    before = staged.job().spec
    edit = StageEdit(after_step=500, sequence=4096, global_batch=16, weights={"code": 1.0})
    order = restage(staged, JobChange(stage=edit))
    assert order.change.made_before == 500 and order.change.by == "ada"
    assert order.change.settings == ("after step 500: samples of 4,096 tokens, 16 a step; code=1",)
    assert structs.replace(order.change.spec, payload="") == structs.replace(before, payload="")
    both = {"web": 1.0, "code": 1.0}
    assert stages_of(order) == [(0, 2048, 32, both), (500, 4096, 16, {"code": 1.0})]
    again = restage(staged, JobChange(stage=StageEdit(after_step=700, weights=both)))
    assert len(stages_of(again)) == 3 and again.change.made_before == 700
    undone = restage(staged, JobChange(undo=True))
    assert stages_of(undone) == stages_of(order) and undone.change.made_before == 700
    redone = restage(staged, JobChange(undo=True))
    assert stages_of(redone) == stages_of(again)


def test_a_stage_without_a_step_begins_when_the_gang_will_have_stopped(staged: Any) -> None:
    order = restage(staged, JobChange(stage=StageEdit(after_step=0, weights={"web": 1.0})))
    assert order.change.made_before == staged.job().step + 2, "10 s are two steps of 5 s"


def test_fallbacks_and_the_own_mapping_read_the_same(staged: Any) -> None:
    job = staged.job()
    small = structs.replace(GANG, replicas=8)
    work = decode_payload(job.spec.payload)
    payload = encode_payload(structs.replace(work, world_size=8))
    fallback = FallbackMapping(gang=small, expected=job.spec.expected, payload=payload)
    job.own = structs.replace(job.spec, fallbacks=(fallback,))
    job.spec = job.own.on_fewer_nodes(fallback)
    order = carry_out(staged, JobChange(stage=StageEdit(after_step=500, sequence=4096))).change
    payloads = [order.spec.payload, order.own.payload, order.own.fallbacks[0].payload]
    works = [decode_payload(each) for each in payloads]
    assert [each.world_size for each in works] == [8, 16, 8]
    assert all("sequence = 4096" in each.toml for each in works)


def test_a_mapping_and_stages_change_together(staged: Any) -> None:
    edit = StageEdit(after_step=500, sequence=8192)
    order = restage(staged, JobChange(settings=("parallel.context=2",), stage=edit)).change
    assert order.spec.gang.context == 2 and order.made_before == 500
    assert order.settings[0] == "parallel.context = 2" and order.settings[-1].startswith("after")


def test_stages_may_be_given_whole(staged: Any) -> None:
    value = "[{tokens = 40_000_000, weights = {web = 1.0}}]"
    order = restage(staged, JobChange(settings=(f"data.stages={value}",)))
    assert order.change.made_before == 610 and order.change.settings == (
        "after step 610: samples of 2,048 tokens, 32 a step; web=1",
    )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (JobChange(undo=True), "the stages of this job were never changed"),
        (JobChange(stage=StageEdit(after_step=500)), "nothing is to change there"),
        (JobChange(stage=StageEdit(after_step=500, remove=True)), "no stage begins there"),
        (JobChange(stage=StageEdit(after_step=2000, sequence=64)), "below train.steps"),
        (JobChange(stage=StageEdit(after_step=500, weights={"cod": 1.0})), 'did you mean "code"'),
        (JobChange(stage=StageEdit(after_step=500, global_batch=8)), "exceeds the 8 samples"),
    ],
    ids=str,
)
def test_stages_that_cannot_be_are_refused_by_name(
    staged: Any, change: JobChange, words: str
) -> None:
    with pytest.raises(ApiError, match=words):
        asyncio.run(module.carry_out(staged, change))
    assert not staged.ordered


def test_stages_whose_samples_do_not_fit_are_refused(staged: Any) -> None:
    edit = StageEdit(after_step=500, sequence=1 << 20)
    with pytest.raises(ApiError, match="GiB of 8") as refused:
        asyncio.run(module.carry_out(staged, JobChange(stage=edit)))
    assert refused.value.code == "too_large"


def test_samples_left_out_are_known_from_the_first_on() -> None:
    job = ClusterJob(id=1, spec=JobSpec(name="x"), submitted_ns=0)
    for number in range(SKIPS_KEPT + 2):
        leave_out(job, 100 * number, 100 * number + 8)
    assert len(job.skipped) == SKIPS_KEPT and job.skipped_before == 16
    assert left_out(job)[:2] == ((0, 16), (200, 208))
    leave_out(job, 1704, 1716)
    assert left_out(job)[0] == (0, 24) and left_out(job)[-1] == (1700, 1716)
    assert sum(past - first for first, past in left_out(job)) == (SKIPS_KEPT + 2) * 8 + 8
