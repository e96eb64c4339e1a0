"""Plans from end to end: the best mapping, what is left of it, what it costs, what would help."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from phalanx.config import ConfigError, check, load_job
from phalanx.plan.cost.predict import predict
from phalanx.plan.question.request import PlanRequest, changed, understand
from phalanx.plan.search.explain import WORDS, best_changes, explain_plan
from phalanx.plan.search.proposal import (
    PlanProposal,
    describe,
    emitted,
    idle_sentence,
    picture,
    propose,
)
from phalanx.plan.search.sweep import counts_of, sweep
from phalanx.plan.show.plot import check_path
from phalanx.plan.workload import Mapping, Software


def plan(**changes: Any) -> PlanProposal:
    given = {"model": "llama3-8b", "cluster": "h100-64", "tokens": "1T"}
    return propose(understand(PlanRequest(**(given | changes))))


@pytest.fixture(scope="module")
def small() -> PlanProposal:
    return plan()


def test_a_plan_uses_its_cluster_and_fits(small: PlanProposal) -> None:
    assert small.prediction.mapping.gpus == small.gpus == 64
    assert small.prediction.fits
    assert 0 < small.prediction.mfu < 1


def test_days_follow_from_speed_and_goodput(small: PlanProposal) -> None:
    speed = small.prediction.tokens_per_second * small.failures.goodput
    assert small.bill.days.mid == pytest.approx(1e12 / speed / 86400)
    assert small.bill.days.low < small.bill.days.mid < small.bill.days.high


def test_the_checkpoint_interval_is_whole_steps(small: PlanProposal) -> None:
    seconds = small.checkpoint_steps * small.prediction.step_seconds
    assert abs(seconds - small.failures.interval_seconds) <= small.prediction.step_seconds


def test_gpus_that_divide_badly_stay_idle_where_a_step_is_shorter_without_them() -> None:
    found = plan(model="deepseek-v3", cluster="h100-1000")
    assert found.idle is not None and found.idle.step_seconds is not None
    assert found.gpus + found.idle.gpus == 1000
    assert found.prediction.mapping.gpus == found.gpus
    assert found.prediction.step_seconds < 0.8 * found.idle.step_seconds
    assert found.idle.mapping is not None and found.idle.mapping.gpus == 1000
    sentence = idle_sentence(found)
    assert sentence.startswith(f"{found.idle.gpus} of 1,000 GPUs, which serve as spares: on all")


def test_gpus_that_bring_nothing_are_not_paid_for() -> None:
    """On 264 a step takes what it takes on 256, to a thousandth."""
    found = plan(cluster="h100-264")
    assert found.gpus == 256 and found.idle is not None and found.idle.step_seconds is not None
    assert found.prediction.step_seconds <= found.idle.step_seconds * 1.001
    assert found.bill.dollars.mid == pytest.approx(plan(cluster="h100-256").bill.dollars.mid)


def test_all_gpus_are_used_where_the_last_ones_help(small: PlanProposal) -> None:
    assert small.idle is None and idle_sentence(small) == ""
    assert plan(cluster="h100-56").gpus == 56
    pinned = plan(model="deepseek-v3", cluster="h100-1000", pipeline=25, data=40)
    assert pinned.gpus == 1000 and pinned.idle is None


def test_where_no_mapping_works_on_all_gpus_one_on_fewer_is_proposed() -> None:
    found = plan(cluster="h100-1016", batch="800k")  # 127 replicas of 100 samples
    assert found.idle is not None and found.idle.mapping is None
    assert found.gpus < 1016 and "no mapping works on all of them" in idle_sentence(found)


def test_pins_are_kept() -> None:
    mapping = plan(tensor=2, pipeline=4, recompute="full", precision="fp8").prediction.mapping
    assert (mapping.tensor, mapping.pipeline) == (2, 4)
    assert (mapping.recompute, mapping.precision) == ("full", "fp8")


@pytest.mark.parametrize(
    ("pins", "said"),
    [
        ({"tensor": 16}, "without tensor 16 this would: "),  # eight key/value heads
        ({"data": 4, "pipeline": 16, "schedule": "zero-bubble", "recompute": "selective"},
         r"without (recompute selective|schedule zero-bubble) this would: "),
        ({"tensor": 1, "pipeline": 1, "zero": 0, "offload": "none"}, "without zero 0 this would: "),
    ],
)  # fmt: skip
def test_the_pin_that_stands_in_the_way_is_named(pins: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        plan(model="llama3-70b" if "zero" in pins else "llama3-8b", **pins)


def test_the_memory_objective_takes_less_memory(small: PlanProposal) -> None:
    least = plan(objective="memory")
    assert least.prediction.memory_bytes < small.prediction.memory_bytes
    assert least.prediction.step_seconds >= small.prediction.step_seconds


def test_fewer_gpus_can_finish_sooner_where_recovery_is_slow() -> None:
    all_of_them = plan(model="dense-1t", cluster="h100-100k", tokens="15T")
    best = plan(model="dense-1t", cluster="h100-100k", tokens="15T", objective="days")
    assert best.gpus < all_of_them.gpus
    assert best.bill.days.mid < all_of_them.bill.days.mid


def test_a_model_that_cannot_fit_says_the_least_that_would() -> None:
    with pytest.raises(ConfigError, match=r"the least that would: [0-9,]+ GPUs"):
        plan(model="llama3-405b", cluster="h200-8", offload="none")


def test_state_goes_to_host_memory_only_where_the_hosts_can_hold_it() -> None:
    with pytest.raises(ConfigError, match="of host memory"):
        plan(model="llama3-405b", cluster="h100-16", offload="parameters")
    roomy = plan(model="llama3-405b", cluster="h100-64", offload="parameters").prediction
    assert 0 < roomy.host_bytes <= roomy.host_limit


def test_the_least_that_would_fit_does_fit() -> None:
    with pytest.raises(ConfigError) as refused:
        plan(model="llama3-70b", cluster="h100-8", offload="none", zero=3)
    gpus = int(refused.value.problems[0].fix.split(":")[1].split()[0].replace(",", ""))
    assert gpus > 8
    assert plan(model="llama3-70b", cluster=f"h100-{gpus}", offload="none", zero=3).prediction.fits


@pytest.mark.parametrize(
    ("model", "cluster"),
    [("llama3-8b", "h100-64"), ("mixtral-8x7b", "h100-64"), ("llama3-70b", "gb200-nvl72-144")],
)
def test_an_emitted_plan_is_a_job_that_the_trainer_accepts(
    model: str, cluster: str, tmp_path: Path
) -> None:
    found = plan(model=model, cluster=cluster)
    path = tmp_path / "job.toml"
    path.write_text(emitted(found, "a command"), encoding="utf-8")
    job = load_job(path)
    check(job, found.gpus)
    assert job.train.global_batch == found.prediction.workload.global_batch


def test_a_mapping_in_words_names_every_axis() -> None:
    mapping = Mapping(tensor=8, pipeline=4, data=2, context=2, expert=4, recompute="full")
    text = describe(mapping)
    for word in ("tensor 8", "pipeline 4", "data 2", "context 2", "experts over 4", "full"):
        assert word in text


def test_the_picture_shows_the_chosen_plan(small: PlanProposal, tmp_path: Path) -> None:
    check_path(tmp_path / "a.png")
    drawn = picture(small)
    chosen = [point for point in drawn.front if point.chosen]
    assert [point.y for point in chosen] == [small.prediction.tokens_per_second_per_gpu]
    assert all(kernel.flops_per_second < drawn.peak_flops for kernel in drawn.kernels)
    for kernel in drawn.kernels:  # nothing above its roof
        roof = min(drawn.peak_flops, kernel.flops_per_byte * drawn.memory_bandwidth)
        assert kernel.flops_per_second <= roof


def test_recompute_that_is_needed_says_what_less_of_it_would_hold(small: PlanProposal) -> None:
    found = plan(model="deepseek-v3", cluster="h100-2k")
    assert found.prediction.mapping.recompute == "full"
    why = explain_plan(found.prediction, found.cluster, found.constants, found.software)
    assert why.less_recompute is not None
    assert why.less_recompute.memory_bytes > found.prediction.memory_limit
    assert small.prediction.mapping.recompute == "none"
    why = explain_plan(small.prediction, small.cluster, small.constants, small.software)
    assert why.less_recompute is None


def test_an_explanation_adds_up(small: PlanProposal) -> None:
    found = explain_plan(small.prediction, small.cluster, small.constants)
    assert sum(found.waterfall.values()) == pytest.approx(small.prediction.step_seconds)
    assert set(small.prediction.parts) <= set(WORDS)
    assert len(found.changes) <= 3
    gains = [change.gain for change in found.changes]
    assert gains == sorted(gains, reverse=True) and all(gain > 0 for gain in gains)


def test_a_poor_mapping_is_told_how_to_become_better(small: PlanProposal) -> None:
    poor = Mapping(tensor=8, pipeline=2, data=4, zero=1, recompute="full")
    prediction = predict(small.prediction.workload, poor, small.cluster)
    changes = best_changes(prediction, small.cluster, small.constants, Software())
    better = [change for change in changes if change.kind == "mapping"]
    assert any(change.what.startswith("recompute") for change in better)
    assert any("tensor 4" in change.what for change in better)


def test_a_request_is_changed_by_name() -> None:
    asked = PlanRequest(model="llama3-8b", cluster="h100-64")
    other = changed(asked, "tp=8, cluster=h200-64,micro-batch=2")
    assert (other.tensor, other.cluster, other.micro_batch) == (8, "h200-64", 2)
    assert changed(asked, "") == asked
    for wrong, said in (("tp", "option=value"), ("tokenz=8", '"tokens"'), ("tp=x", "int")):
        with pytest.raises(ConfigError, match=said):
            changed(asked, wrong)


def test_a_sweep_shows_each_size_and_why_some_have_none() -> None:
    question = understand(
        PlanRequest(model="llama3-70b", cluster="h100-64", tokens="1T", offload="none")
    )
    found = sweep(question, (1, 32, 64))
    assert [proposal.gpus for proposal in found.plans] == [32, 64]
    assert found.failed[0][0] == 1 and "GiB" in found.failed[0][1]
    first, second = (p.prediction.tokens_per_second for p in found.plans)
    assert first < second


def test_counts_of_a_sweep() -> None:
    question = understand(PlanRequest(model="llama3-8b", cluster="h100-1k", tokens="1T"))
    assert counts_of("", question.cluster) == (32, 64, 128, 256, 512, 1024)
    assert counts_of("1k, 24", question.cluster) == (1024, 24)
    smaller = structs.replace(question.cluster, gpus=8)
    assert counts_of("", smaller) == (8,)
    for wrong in ("x", "12", "-8", "0"):
        with pytest.raises(ConfigError, match="gpus"):
            counts_of(wrong, question.cluster)


def test_moments_in_fewer_bits_make_smaller_checkpoints_and_need_less_memory() -> None:
    pins = {"cluster": "h200-8", "zero": 1, "micro_batch": 1}
    full, eight = (
        plan(model="llama3-8b", optimizer_state=state, **pins) for state in ("float32", "int8")
    )
    assert eight.failures.checkpoint_bytes == pytest.approx(
        full.failures.checkpoint_bytes * (4 + 2 + 8 / 128) / 12
    )
    assert eight.prediction.memory_bytes < full.prediction.memory_bytes
    with pytest.raises(ConfigError, match="no such format"):
        plan(model="llama3-8b", cluster="h200-8", optimizer_state="int4")
