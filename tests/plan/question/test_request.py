"""What a person asks: understood exactly, or refused with a way out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from phalanx.config import ConfigError
from phalanx.plan import predict
from phalanx.plan.question.emit import job_of
from phalanx.plan.question.request import PlanQuestion, PlanRequest, understand
from phalanx.plan.workload import Mapping


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


def test_a_job_file_says_what_is_trained_and_kept(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    job = '[model]\npreset = "llama3-8b"\n[data]\nsequence = 8192\n[train]\nglobal_batch = 64\n'
    adapter = '[adapter]\nkind = "lora"\nrank = 8\n'
    averaged = "[train.ema]\ndecay = 0.9\n"
    stages = "[[train.sequence_stages]]\nafter_tokens = 10000000\nsequence = 32768\n"
    needed = {}
    for name, added in {"": "", "adapter": adapter, "averaged": averaged}.items():
        path.write_text(job + added, encoding="utf-8")
        question = ask(model=str(path), cluster="h100-8")
        job_of("again", question.workload, Mapping(data=8, zero=3), 10**9, 0)
        step = predict(question.workload, Mapping(data=8, zero=3), question.cluster)
        needed[name] = step.memory_bytes
        assert (question.workload.adapter is not None) == (name == "adapter")
    assert needed["adapter"] < needed[""] < needed["averaged"]
    path.write_text(job + stages, encoding="utf-8")
    assert "samples as long as the first" in ask(model=str(path), cluster="h100-8").assumed[0]


def test_a_job_file_whose_model_cannot_be_built_is_not_planned(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    shape = "[model]\ndim = 256\nlayers = 2\nheads = 4\nvocab = 1000\n"
    path.write_text(shape + "[model.moe]\nexperts = 4\ntop_k = 8\nffn = 512\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"at most model\.moe\.experts \(4\); nearest: 4"):
        ask(model=str(path))
    path.write_text(shape, encoding="utf-8")
    with pytest.raises(ConfigError, match=r"model\.ffn = 0"):
        ask(model=str(path))


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
        ({"precision": "float32", "cluster": "tpu-v4-64"}, "lacks it"),
        ({"schedule": "interleave"}, '"interleaved"'),
        ({"schedule": "interleaved", "pipeline": 1}, "needs a pipeline"),
        ({"virtual_stages": 4, "pipeline": 1}, "needs a pipeline"),
        ({"objective": "token"}, "tokens"),
        ({"price": -1.0}, "dollars"),
        ({"failure_rate": "lama3"}, '"llama3"'),
        ({"recovery_seconds": -1.0}, "above 0"),
    ],
)
def test_a_wrong_request_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        ask(**changes)
