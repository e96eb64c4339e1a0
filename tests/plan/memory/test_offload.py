"""Offload: what leaves the device needs room elsewhere and costs time; emit knows the limits."""

from __future__ import annotations

import pytest
from msgspec import structs

from phalanx.config import PRESETS, ConfigError
from phalanx.hardware import ClusterFile, cluster, make_cluster
from phalanx.plan import Mapping, Prediction, Workload, predict, search
from phalanx.plan.question.emit import job_of, mapping_of
from phalanx.plan.search.space import Pins
from phalanx.plan.workload import OFFLOADS

WORKLOAD = Workload(model=PRESETS["llama3-70b"], sequence=4096, global_batch=64)
MAPPING = Mapping(data=16, zero=3, recompute="full")


def priced(offload: str, mapping: Mapping = MAPPING, on: str = "h100-16") -> Prediction:
    return predict(WORKLOAD, structs.replace(mapping, offload=offload), cluster(on))


@pytest.mark.parametrize("offload", OFFLOADS[1:])
def test_offload_frees_the_device_takes_room_elsewhere_and_costs_time(offload: str) -> None:
    kept, away = priced("none"), priced(offload)
    assert away.memory_bytes < kept.memory_bytes
    assert away.step_seconds > kept.step_seconds
    assert away.parts["offload"] > 0 == kept.parts["offload"]
    assert (away.nvme_bytes > 0) == ("nvme" in offload)
    assert kept.host_bytes == kept.nvme_bytes == 0


def test_state_away_is_what_the_device_no_longer_holds() -> None:
    kept, away = priced("none").memory[0], priced("parameters").memory[0]
    assert (away.weight_bytes, away.optimizer_bytes, away.gradient_bytes) == (0, 0, 0)
    state = kept.weight_bytes + kept.optimizer_bytes + kept.gradient_bytes
    assert priced("parameters").host_bytes == state


def test_nvme_is_slower_than_host_memory_and_faster_drives_help() -> None:
    assert priced("optimizer-nvme").step_seconds > priced("optimizer").step_seconds
    assert priced("activations-nvme").step_seconds > priced("activations").step_seconds
    quick = make_cluster(
        "quick",
        ClusterFile(gpu="h100", gpus=16, nvme_read_gb_per_second=200, nvme_write_gb_per_second=200),
    )
    mapping = structs.replace(MAPPING, offload="optimizer-nvme")
    faster = predict(WORKLOAD, mapping, quick)
    assert faster.step_seconds < priced("optimizer-nvme").step_seconds


def test_fetched_parameters_cost_more_with_more_micro_batches() -> None:
    few = priced("parameters", structs.replace(MAPPING, micro_batch=4)).parts["offload"]
    many = priced("parameters").parts["offload"]
    assert many > few


def test_the_search_goes_to_the_host_then_to_nvme_then_gives_up() -> None:
    question = Workload(model=PRESETS["llama3-405b"], sequence=8192, global_batch=64)
    roomy = search(question, cluster("h100-64")).best
    assert "nvme" not in roomy.mapping.offload and roomy.mapping.offload != "none"
    tight = search(question, cluster("h100-16")).best
    assert "nvme" in tight.mapping.offload and tight.nvme_bytes <= tight.nvme_limit
    bare = make_cluster("bare", ClusterFile(gpu="h100", gpus=16, nvme_terabytes=0))
    with pytest.raises(ConfigError, match="of host memory"):
        search(question, bare, pins=Pins(offload="parameters"))
    with pytest.raises(ConfigError, match="of NVMe"):
        search(question, bare, pins=Pins(offload="parameters-nvme"))


def test_offload_is_left_out_where_everything_fits() -> None:
    result = search(
        Workload(model=PRESETS["llama3-8b"], sequence=8192, global_batch=256), cluster("h100-64")
    )
    assert result.best.mapping.offload == "none"


@pytest.mark.parametrize("offload", OFFLOADS)
def test_emit_writes_what_the_trainer_offloads_and_refuses_the_rest(offload: str) -> None:
    mapping = structs.replace(MAPPING, offload=offload)
    if "nvme" in offload.replace("optimizer-nvme", ""):
        with pytest.raises(ConfigError, match="optimizer's state on NVMe, and nothing else; plan"):
            job_of("plan", WORKLOAD, mapping, 10**9, 0)
        return
    job = job_of("plan", WORKLOAD, mapping, 10**9, 0)
    state = offload.replace("+activations", "").replace("activations", "none")
    assert job.memory.offload == state.removesuffix("-nvme")
    assert bool(job.memory.offload_folder) == state.endswith("-nvme")
    assert job.memory.offload_activations == ("activations" in offload)
    assert mapping_of(job).offload == offload


def test_drives_without_a_speed_are_refused() -> None:
    with pytest.raises(ConfigError, match="speed of the drives"):
        make_cluster("odd", ClusterFile(gpu="tpu-v4", gpus=16, nvme_terabytes=2))
