"""Tasks of lm-evaluation-harness: find, load and score them; errors come with a fix."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Sequence
from contextlib import redirect_stderr
from io import StringIO
from typing import Any

from phalanx.config import ConfigError
from phalanx.config.errors import near
from phalanx.train.evaluate.score import Scorer
from phalanx.train.evaluate.text import TextCodec

FEW_SHOT_SEED = 1234  # the harness's own, so that its examples are drawn as it draws them
WITHOUT_FILTER = "none"  # what the harness calls it


class HarnessTasks:
    """Tasks by name, their data loaded."""

    def __init__(self, names: Sequence[str], folder: str = "", few_shot: int | None = None) -> None:
        """``folder`` has task files of one's own; ``few_shot``: None: as each task says."""
        refuse_missing_harness(names)
        manager = _manager(names, folder)
        self._few_shot = few_shot
        self._loaded = {name: _load(manager, name) for name in names}

    def writing(self) -> list[str]:
        """Names of the tasks that need text generation."""
        return [
            name
            for name, loaded in self._loaded.items()
            if any(t.get_config("output_type") == "generate_until" for t in _each(loaded))
        ]

    def scores(
        self, name: str, scorer: Scorer, codec: TextCodec, limit: int = 0
    ) -> dict[str, float]:
        """Scores by ``task.metric`` of a task or a group's tasks; ``limit``: number of samples."""
        from lm_eval.evaluator import evaluate

        from phalanx.train.evaluate.harness import HarnessModel

        loaded = self._loaded[name]
        for task in _each(loaded):
            self._set_examples(task)
        with redirect_stderr(StringIO()):  # its bars would run through our own lines
            outcome = evaluate(
                HarnessModel(scorer, codec),
                loaded,
                limit=limit or None,
                bootstrap_iters=0,
                log_samples=False,
            )
        return _numbers({**outcome["results"], **outcome.get("groups", {})})

    def _set_examples(self, task: Any) -> None:
        """Set the number of few-shot examples, chosen with a fixed seed."""
        said = task.get_config("num_fewshot")
        if self._few_shot is not None and said != 0:
            task.set_config(key="num_fewshot", value=self._few_shot)
        elif said is None:
            task.set_config(key="num_fewshot", value=0)
        task.set_fewshot_seed(seed=FEW_SHOT_SEED)


def refuse_missing_harness(names: Sequence[str]) -> None:
    """Raise an error with the fix if lm-evaluation-harness is not installed."""
    if importlib.util.find_spec("lm_eval") is None:
        rule = "needs lm-evaluation-harness, which is not installed here"
        raise ConfigError("tasks", ", ".join(names), rule, "pip install 'phalanx[eval]'")


def _manager(names: Sequence[str], folder: str) -> Any:
    """The task manager of the folder, with the harness's own tasks if others are named."""
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    from lm_eval.tasks import TaskManager

    if folder:
        own = TaskManager(include_path=folder, include_defaults=False)
        if set(names) <= set(own.all_tasks):
            return own
    manager = TaskManager(include_path=folder or None)
    known = list(manager.all_tasks)
    for name in names:
        if name not in known:
            nearest = near(name, known)
            guess = f'did you mean "{nearest}"? ' if nearest else ""
            fix = f"{guess}`lm_eval ls tasks` lists them; --task-folder names a folder of your own"
            raise ConfigError("tasks", name, "there is no such task", fix)
    return manager


def _load(manager: Any, name: str) -> Any:
    try:
        return manager.load([name])
    except Exception as error:  # whatever data sets and their hosts may raise
        said = str(error).strip().splitlines() or [""]
        rule = f"cannot be loaded: {type(error).__name__}: {said[0]}"
        fix = "load it once where its data can be fetched, and share HF_HOME; or correct its file"
        raise ConfigError("tasks", name, rule, fix) from error


def _each(loaded: Any) -> list[Any]:
    return list(loaded["tasks"].values())


def _numbers(results: dict[str, dict[str, Any]]) -> dict[str, float]:
    """The harness's ``metric,filter`` of each task as ``task.metric``."""
    found: dict[str, float] = {}
    for task, metrics in results.items():
        for key, value in metrics.items():
            metric, _, chosen = key.partition(",")
            if not chosen or isinstance(value, bool) or not isinstance(value, int | float):
                continue
            suffix = "" if chosen == WITHOUT_FILTER else f"@{chosen}"
            found[f"{task}.{metric}{suffix}"] = float(value)
    return found
