"""What a person asks: understood exactly, or refused with a way out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from phalanx.config import ConfigError
from phalanx.plan.question.request import PlanQuestion, PlanRequest, understand


def ask(**changes: Any) -> PlanQuestion:
    given = {"model": "llama3-405b", "cluster": "h100-16k", "tokens": "15T"}
    return understand(PlanRequest(**(given | changes)))


def test_a_question_is_complete_and_says_what_it_assumed() -> None:
    question = ask()
    assert question.tokens == 15 * 10**12
    assert question.workload.tokens == 16 * 2**20
    assert [text.split()[0] for text in question.assumed] == ["sequence", "batch"]


def test_nothing_is_assumed_that_was_said() -> None:
    question = ask(sequence="4k", batch="4M", tensor=8, recompute="full", price=1.75)
    assert question.assumed == ()
    assert (question.workload.sequence, question.workload.global_batch) == (4096, 1024)
    assert question.pins == {"tensor": 8, "recompute": "full"}
    assert question.cluster.price_per_gpu_hour == 1.75


def test_a_budget_that_nobody_gave_follows_from_the_model() -> None:
    question = ask(model="llama3-8b", cluster="h100-64", tokens="")
    assert question.tokens == pytest.approx(20 * 8.03e9, rel=0.01)


def test_routing_is_a_stated_assumption_of_mixtures_of_experts() -> None:
    question = ask(model="deepseek-v3", sequence="4k", batch="16M")
    assert question.workload.routing_skew == 0.6 and "loads spread" in question.assumed[0]
    forced = ask(model="deepseek-v3", sequence="4k", batch="16M", routing="balanced")
    assert forced.workload.routing_skew == 0 and forced.assumed == ()
    for model, routing in (("deepseek-v3", "random"), ("llama3-405b", "real")):
        with pytest.raises(ConfigError, match="routing"):
            ask(model=model, routing=routing)


def test_a_gpu_without_bfloat16_computes_in_float16() -> None:
    question = ask(cluster="v100-1024")
    assert question.pins == {"precision": "float16"}
    assert "float16" in question.assumed[-1]


def test_a_job_file_gives_model_sequence_and_batch(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text(
        'name = "mine"\n[model]\npreset = "llama3-8b"\n[data]\nsequence = 4096\n'
        "[train]\nglobal_batch = 96\n",
        encoding="utf-8",
    )
    question = ask(model=str(path), cluster="h100-8")
    assert question.name == "mine"
    assert (question.workload.sequence, question.workload.global_batch) == (4096, 96)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model": "lama3-405b"}, '"llama3-405b"'),
        ({"cluster": "h10-16k"}, '"h100-16k"'),
        ({"tokens": "-4T"}, "positive"),
        ({"tokens": "1e30"}, "between"),
        ({"sequence": "64M"}, "between"),
        ({"batch": "100"}, "at least one sample"),
        ({"tensor": 7}, "nearest: 8"),
        ({"tensor": 8, "pipeline": 3}, "nearest: 2"),
        ({"tensor": 8, "pipeline": 16, "context": 2, "data": 32}, "follows as 64"),
        ({"pipeline": 256}, "126 layers"),
        ({"expert": 8}, "no experts"),
        ({"model": "deepseek-v3", "expert": 48}, "256 experts"),
        ({"zero": 4}, "0 to 3"),
        ({"micro_batch": 0}, "1 to 4,096"),
        ({"precision": "fp9"}, '"fp8"'),
        ({"precision": "fp8", "cluster": "a100-1024"}, "lacks it"),
        ({"precision": "nvfp4"}, "lacks it"),
        ({"schedule": "interleave"}, '"interleaved"'),
        ({"objective": "token"}, "tokens"),
        ({"price": -1.0}, "dollars"),
        ({"failure_rate": "lama3"}, '"llama3"'),
        ({"recovery_seconds": -1.0}, "above 0"),
    ],
)
def test_a_wrong_request_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        ask(**changes)
