"""What a machine cannot give a job is said before any rank starts."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from msgspec import structs

from phalanx.config import ConfigError, Job, Model, Optimizer, resolve
from phalanx.config.schema import SequenceStage
from phalanx.data import ShardWriter
from phalanx.data.corpus.index import HASH_SPAN
from phalanx.model.hf.config import config_to_hf
from phalanx.train.exits import ExitInfo
from phalanx.train.measure.step_metrics import Validation
from phalanx.train.rank.diagnose import classify
from phalanx.train.rank.gang import ForkedRanks
from phalanx.train.report.run_folder import create
from phalanx.train.resume import refusal
from phalanx.train.resume.refusal import (
    refuse,
    refuse_device,
    refuse_files,
    refuse_state_of,
    refuse_trained_mean,
    refuse_weights,
)
from phalanx.train.stages import RunStages
from tests.train.forked_runs import small_job

NOTHING_HELD_OUT = r"validation side .* raise data\.validation_fraction"


def weights(folder: Path, model: Model, files: bool = True) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config_to_hf(model, torch.float32)))
    if files:
        (folder / "model.safetensors").touch()
    return folder


def refused(folder: Path, tmp_path: Path, **overrides: Any) -> list[str]:
    try:
        refuse_weights(small_job(tmp_path, 1, checkpoint__load_hf=folder, **overrides))
    except ConfigError as error:
        return [str(found) for found in error.problems]
    return []


def test_weights_of_the_same_model_are_accepted(tmp_path: Path) -> None:
    folder = weights(tmp_path / "hf", small_job(tmp_path, 1).model)
    assert refused(folder, tmp_path) == []


def test_weights_of_another_shape_name_every_key_and_its_value(tmp_path: Path) -> None:
    folder = weights(tmp_path / "hf", small_job(tmp_path, 1).model)
    first, second = refused(folder, tmp_path, model__layers=3, model__vocab=128)
    assert first.startswith("model.layers = 3: ") and first.endswith("set it to 2")
    assert second.startswith("model.vocab = 128: ") and second.endswith("set it to 64")


def test_weights_of_another_function_are_refused_unless_that_is_wanted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = weights(tmp_path / "hf", small_job(tmp_path, 1).model)
    other = {"model__rope_theta": 1e6, "model__norm_eps": 1e-6}
    eps, theta = refused(folder, tmp_path, **other)
    assert theta.startswith("model.rope_theta = 1000000.0: ") and "set it to 500000.0" in theta
    assert eps.startswith("model.norm_eps = 1e-06: ") and "allow_other_model = true" in eps
    assert refused(folder, tmp_path, **other, checkpoint__allow_other_model="true") == []
    assert "model.rope_theta = 1000000.0" in caplog.text and "500000.0" in caplog.text
    assert "model.norm_eps = 1e-06" in caplog.text
    (tied,) = refused(
        folder,
        tmp_path,
        model__tied_embedding="true",
        checkpoint__allow_other_model="true",
    )
    assert tied.startswith("model.tied_embedding = true: ") and tied.endswith("set it to false")


@pytest.mark.parametrize("text", [None, "{", "{}", '{"model_type": "bert"}'])
def test_a_folder_that_is_no_model_is_refused(tmp_path: Path, text: str | None) -> None:
    folder = tmp_path / "hf"
    folder.mkdir()
    if text is not None:
        (folder / "config.json").write_text(text)
    (found,) = refused(folder, tmp_path)
    assert found.startswith("checkpoint.load_hf = ") and "config.json" in found


def test_a_model_without_its_weights_is_refused(tmp_path: Path) -> None:
    folder = weights(tmp_path / "hf", small_job(tmp_path, 1).model, files=False)
    (found,) = refused(folder, tmp_path)
    assert "holds no weights" in found


def test_overlapped_tensor_parallelism_is_refused_where_auto_means_a_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = small_job(tmp_path, 2, parallel__async_tensor="true", train__device="auto")
    monkeypatch.setattr(refusal, "count_cuda", lambda: 2)
    refuse_device(job)
    monkeypatch.setattr(refusal, "count_cuda", lambda: 0)
    with pytest.raises(ConfigError, match=r"parallel\.async_tensor = true: .*no CUDA device"):
        refuse(job)


def test_drafts_of_reports_do_not_outlive_the_run(tmp_path: Path) -> None:
    folder = create(small_job(tmp_path, 1))
    folder.write_exit(ExitInfo(code=0, reason="done", message="all"))
    draft = folder.path / "exit_info.4711.tmp"  # its rank was killed while it wrote
    draft.write_bytes(b"{")
    assert ForkedRanks(folder).verdict().reason == "done"
    assert not draft.exists()


def test_device_memory_advice_offers_nothing_that_may_be_used_up_already() -> None:
    assert "micro_batch" not in classify(torch.OutOfMemoryError("CUDA out of memory")).advice


def test_another_system_than_linux_is_refused_before_any_fork(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.platform", "darwin")
    with pytest.raises(ConfigError, match=r'platform = "darwin": .*WSL'):
        refuse(small_job(tmp_path, 1))


@pytest.mark.parametrize("rate", ["lama3", "-1", "nan"])
def test_a_failure_rate_is_proved_before_the_run_needs_it(tmp_path: Path, rate: str) -> None:
    with pytest.raises(ConfigError, match=r"checkpoint\.failure_rate"):
        refuse(small_job(tmp_path, 1, checkpoint__failure_rate=rate))


@pytest.mark.parametrize(
    ("theirs", "ours", "refused"),
    [("float32", "bfloat16", False), ("float32", "int8", True), ("int8", "bfloat16", True)],
)
def test_moments_that_cannot_be_converted_are_refused(
    theirs: str, ours: str, refused: bool
) -> None:
    job = resolve(Job(optimizer=Optimizer(state=ours)), 1)  # type: ignore[arg-type]
    described = {"optimizer": {"state": theirs}}
    if not refused:
        refuse_state_of(job, described, "step-4")
        return
    with pytest.raises(ConfigError) as caught:
        refuse_state_of(job, described, "step-4")
    (found,) = caught.value.problems
    assert found.key == "optimizer.state" and f'"{theirs}"' in found.fix


def test_weights_of_schedule_free_are_taken_by_their_mean() -> None:
    with pytest.raises(ConfigError, match=r"there are those that .* export-hf.*load_hf"):
        refuse_trained_mean({"optimizer": {"kind": "schedule-free"}}, "there")
    refuse_trained_mean({"optimizer": {"kind": "muon"}}, "there")


def test_schedule_free_goes_on_with_the_mean_that_its_weights_are_of() -> None:
    described = {"optimizer": {"kind": "schedule-free", "beta1": 0.9}}
    job = resolve(Job(optimizer=Optimizer(kind="schedule-free", beta1=0.95)), 1)
    with pytest.raises(ConfigError, match=r"optimizer\.beta1 = 0\.95: .* set it to 0\.9"):
        refuse_state_of(job, described, "step-4")
    refuse_state_of(resolve(Job(optimizer=Optimizer(beta1=0.95)), 1), {"optimizer": {}}, "step-4")


@pytest.mark.parametrize(
    ("ours", "theirs", "key", "fix"),
    [
        (Optimizer(kind="muon"), {}, "kind", r'set it to "adamw", or .*weights_only = true'),
        (Optimizer(), {"kind": "muon"}, "kind", r'set it to "muon", or .*weights_only = true'),
        (Optimizer(), {"kind": "schedule-free"}, "kind", "an export of their mean .* by load_hf"),
        (Optimizer(module="a:B"), {}, "module", 'set it to "", or'),
        (Optimizer(module="a:B"), {"module": "a:C"}, "module", 'set it to "a:C", or'),
    ],
)
def test_the_state_of_one_optimizer_is_not_given_to_another(
    ours: Optimizer, theirs: dict[str, str], key: str, fix: str
) -> None:
    job, described = resolve(Job(optimizer=ours), 1), {"optimizer": theirs}
    with pytest.raises(ConfigError, match=rf"optimizer\.{key} = .*no other optimizer.*{fix}"):
        refuse_state_of(job, described, "step-4")
    refuse_state_of(job, {"optimizer": {"kind": ours.kind, "module": ours.module}}, "step-4")
    refuse_state_of(job, {}, "step-0")  # imported weights


@pytest.mark.parametrize("stages", [(), (SequenceStage(after_tokens=64, sequence=64),)], ids=len)
def test_a_validation_without_samples_is_refused_before_the_first_step(
    tmp_path: Path, stages: tuple[SequenceStage, ...]
) -> None:
    held_out = 0 if not stages else 40  # tokens: of a sample of 32, and none of a longer one
    job = with_held_out(tmp_path, held_out)
    job = structs.replace(job, train=structs.replace(job.train, sequence_stages=stages))
    run = SimpleNamespace(job=job, trainer=SimpleNamespace(stages=RunStages(job, 0, pin=False)))
    with pytest.raises(ConfigError, match=NOTHING_HELD_OUT):
        refuse_files(job)
    with pytest.raises(ConfigError, match=NOTHING_HELD_OUT):
        Validation().begin(cast(Any, run))
    never = structs.replace(job, train=structs.replace(job.train, validate_every=0))
    refuse_files(never)


def with_held_out(folder: Path, tokens: int) -> Job:
    """A job on a corpus of which so many tokens are held out."""
    with ShardWriter(folder / "corpus", 64, 0, "there") as writer:
        for number, count in ((HASH_SPAN - 1, 400), (0, tokens)):
            if count:
                writer.append([1] * count, [0], [number])
        writer.finish()
    return small_job(
        folder,
        1,
        data__source="shards",
        data__path=folder / "corpus",
        data__sequence=32,
        data__validation_fraction=0.5,
        train__validate_every=1,
    )
