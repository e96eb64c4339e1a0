"""Tasks of lm-evaluation-harness on a checkpoint: its scores, and what is missing in words."""

from __future__ import annotations

import importlib.util
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from phalanx.checkpoint.tools.convert import complete_export, export_checkpoint
from phalanx.config import ConfigError
from phalanx.train.evaluate.score import ModelScorer
from phalanx.train.evaluate.tasks import HarnessTasks
from phalanx.train.evaluate.text import TextCodec
from tests.train.evaluate.small_checkpoint import opened
from tests.train.evaluate.small_tasks import KINDS, write_tasks

needs_harness = pytest.mark.skipif(
    importlib.util.find_spec("lm_eval") is None,
    reason="lm_eval is not installed: pip install 'phalanx[eval]'",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tasks(tmp_path_factory.mktemp("harness"))


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path_factory.getbasetemp() / "datasets"))


def test_a_missing_harness_is_named_with_its_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"not installed here; pip install 'phalanx\[eval\]'"):
        HarnessTasks(["animals"])


@needs_harness
def test_an_unknown_task_is_refused_with_the_nearest(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import lm_eval.tasks

    # The harness reads thousands of its own files otherwise.
    own = partial(lm_eval.tasks.TaskManager, include_defaults=False)
    monkeypatch.setattr(lm_eval.tasks, "TaskManager", own)
    with pytest.raises(ConfigError, match='no such task; did you mean "animals"'):
        HarnessTasks(["animal"], str(folder))


@needs_harness
def test_a_task_whose_data_cannot_be_had_is_refused(tmp_path: Path) -> None:
    tasks = write_tasks(tmp_path)
    (tmp_path / "questions.jsonl").unlink()
    with pytest.raises(ConfigError, match=r"animals: cannot be loaded: .*HF_HOME"):
        HarnessTasks(["animals"], str(tasks))


@needs_harness
def test_scores_have_the_names_of_tasks_and_metrics(folder: Path, checkpoint: Path) -> None:
    loaded = opened(checkpoint)
    assert loaded.codec is not None
    tasks = HarnessTasks(list(KINDS), str(folder))
    assert tasks.writing() == ["endings"]
    scorer = ModelScorer(loaded)
    scores = tasks.scores("animals", scorer, loaded.codec)
    assert set(scores) == {"animals.acc", "animals.acc_norm"}
    assert tasks.scores("animals", scorer, loaded.codec) == scores
    limited = tasks.scores("animals", scorer, loaded.codec, limit=1)
    assert limited["animals.acc"] in (0.0, 1.0)


def hugging_face(folder: Path) -> Any:
    """The harness's own model of an exported folder."""
    from lm_eval.models.huggingface import HFLM

    return HFLM(pretrained=str(folder), dtype="float32", device="cpu", batch_size=1)


def answers(lm: Any, folder: Path) -> dict[str, list[Any]]:
    """What a model answers to each request of each task."""
    from lm_eval.tasks import TaskManager

    found = {}
    for name, (kind, _) in KINDS.items():
        manager = TaskManager(include_path=str(folder), include_defaults=False)
        task = manager.load([name])["tasks"][name]
        task.set_config(key="num_fewshot", value=0)
        task.build_all_requests(rank=0, world_size=1)
        asked = "loglikelihood" if kind == "multiple_choice" else kind
        found[name] = getattr(lm, asked)(task.instances)
    return found


@pytest.mark.soak
@needs_harness
def test_answers_are_those_of_hugging_face_for_the_exported_folder(
    folder: Path, checkpoint: Path, tmp_path: Path
) -> None:
    from phalanx.train.evaluate.harness import HarnessModel

    export_checkpoint(checkpoint, tmp_path / "hf", torch.float32, 10**9)
    complete_export(checkpoint, tmp_path / "hf")
    loaded = opened(checkpoint)
    codec: TextCodec | None = loaded.codec
    assert codec is not None
    ours = answers(HarnessModel(ModelScorer(loaded), codec), folder)
    theirs = answers(hugging_face(tmp_path / "hf"), folder)
    assert ours["endings"] == theirs["endings"]
    assert any(ours["endings"])
    assert ours["fables"] == pytest.approx(theirs["fables"], abs=1e-3)
    for (one, greedy), (other, expected) in zip(ours["animals"], theirs["animals"], strict=True):
        assert one == pytest.approx(other, abs=1e-4) and greedy == expected
