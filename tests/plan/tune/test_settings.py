"""What may be tuned of a job, and how a file is changed."""

from __future__ import annotations

import pytest

from phalanx.config import Job, job_from_table, resolve
from phalanx.config.toml_text import parse_toml
from phalanx.hardware import ClusterFile, make_cluster
from phalanx.plan import shipped
from phalanx.plan.tune.job_text import tuned_text
from phalanx.plan.tune.predictions import MeasuredJob, predictor, refit
from phalanx.plan.tune.settings import TunedMachine, changed, settings_of, value_of

TEXT = """\
# why this job is
name = "one"

[model]
preset = "tiny"

[train]
global_batch = 16
micro_batch = 2  # as before
device = "cpu"

[parallel]
data = 2
"""
CPU = TunedMachine(cuda=False, cores=4, ranks=2)


def job(**train: object) -> Job:
    table = parse_toml(TEXT)
    table["train"] |= train
    return job_from_table(table)


def keys(asked: Job, on: TunedMachine) -> dict[str, tuple[object, ...]]:
    return {setting.key: setting.values for setting in settings_of(asked, on)}


def test_micro_batches_divide_what_a_replica_has_and_the_global_batch_is_no_setting() -> None:
    found = keys(job(), CPU)
    assert found["train.micro_batch"] == (1, 2, 4, 8)
    assert found["train.cpu_threads"] == (1, 2)
    assert "train.global_batch" not in found and "train.compile" not in found


def test_a_job_that_asks_for_the_same_bits_keeps_its_micro_batch() -> None:
    assert "train.micro_batch" not in keys(job(virtual_replicas=2), CPU)


def test_nccl_is_tuned_on_several_gpus_only() -> None:
    one, two = (TunedMachine(cuda=True, cores=8, ranks=ranks) for ranks in (1, 2))
    variable = "backend.environment.NCCL_ALGO"
    assert variable in keys(job(), two)
    assert variable not in keys(changed(job(), {"parallel.data": 1}), one)


def test_changes_reach_sections_and_variables_and_can_be_taken_back() -> None:
    variable = "backend.environment.NCCL_PROTO"
    there = changed(job(), {"train.micro_batch": 8, variable: "LL"})
    assert there.train.micro_batch == 8 and there.backend.environment == {"NCCL_PROTO": "LL"}
    assert value_of(there, variable) == "LL"
    assert changed(there, {"train.micro_batch": 2, variable: ""}) == job()


@pytest.mark.parametrize(
    "changes",
    [
        {"train.micro_batch": 8, "memory.recompute": "full"},
        {"parallel.prefetch_layers": 2, "backend.environment.NCCL_ALGO": "Tree"},
        {},
    ],
)
def test_a_written_file_is_the_job_that_was_found_with_its_comments(changes: dict) -> None:
    wanted = changed(job(), changes)
    text = tuned_text(TEXT, changes, wanted, ["evidence"])
    assert job_from_table(parse_toml(text)) == wanted
    assert text.startswith("# evidence\n# why this job is\n")


def test_a_file_that_overrides_changed_is_written_whole() -> None:
    wanted = changed(job(), {"train.global_batch": 32, "train.micro_batch": 8})
    text = tuned_text(TEXT, {"train.micro_batch": 8}, wanted, [])
    assert job_from_table(parse_toml(text)) == wanted


def test_constants_are_fitted_to_measured_steps() -> None:
    """Steps of a machine with slower products and kernels than the shipped constants say."""
    on = make_cluster("cpu-2", ClusterFile(gpu="cpu", gpus=2, gpus_per_node=1, domain_gpus=2))
    settings = settings_of(job(), CPU)
    say = predictor(job(), settings, 2, on, shipped("cpu"))
    measured = []
    for batch in (1, 2, 4, 8):
        for recompute in ("none", "full"):
            values = {"train.micro_batch": batch, "memory.recompute": recompute}
            asked = changed(job(), values)
            found = say(tuple(value_of(asked, setting.key) for setting in settings))
            assert found is not None and found.seconds > 0
            measured.append(MeasuredJob(resolve(asked, 2), 2.0 * found.seconds))
    fitted = refit(measured, on, shipped("cpu"))
    assert fitted is not None
    assert fitted.error_before == pytest.approx(0.5, abs=0.01)
    assert fitted.error_after < 0.1
    assert refit(measured[:2], on, shipped("cpu")) is None
