"""Sweeps that cannot run are refused before a trial is submitted, each with its fix."""

from __future__ import annotations

from pathlib import Path

import pytest

from phalanx.config import ConfigError
from phalanx.plan.sweeps.rules import check_sweep, checked_trials

JOB = """
name = "base"
[model]
preset = "tiny"
[train]
steps = 90
device = "cpu"
[precision]
compute = "float32"
"""
RATES = '[parameters."optimizer.learning_rate"]\nlog_range = [1e-4, 1e-2]\n'
HEAD = 'name = "rates"\njob = "job.toml"\nranks = 1\n'


def written(folder: Path, text: str, job: str = JOB) -> Path:
    (folder / "job.toml").write_text(job)
    path = folder / "sweep.toml"
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (HEAD + "[parameters]", "parameters: there are none"),
        (HEAD + '[parameters."optimizer.rate"]\nvalues = [1.0]', "parameters.optimizer.rate"),
        (HEAD + '[parameters."optimizer.lerning_rate"]\nvalues = [1.0]', '"learning_rate"?'),
        (HEAD + '[parameters."train.seed"]\nvalues = []', "has no values; give values"),
        (HEAD + '[parameters."train.seed"]\nvalues = [1, 1]', "contains a value twice"),
        (HEAD + '[parameters."train.seed"]\nrange = [3, 3]', "range = [3, 3]: is empty"),
        (HEAD + '[parameters."train.seed"]\nrange = [9, 1]', "e.g. [1, 9]"),
        (
            HEAD + '[parameters."train.seed"]\nlog_range = [0, 1]',
            "use a lower bound above 0, or range",
        ),
        (HEAD + '[parameters."train.seed"]\nvalues = [1]\nrange = [1, 2]', "values and range"),
        (HEAD + '[parameters."train.seed"]\nvalues = ["x"]', "must be an integer"),
        (HEAD + "[parameters.name]\nvalues = ['a']", "each trial has its own"),
        (HEAD + RATES + "[budget]\nsteps = 0", "budget.steps = 0.0: allows no trial"),
        (HEAD + RATES + "[budget]\ngpu_hours = -1", "allows no trial; give more than 0"),
        (HEAD + RATES + "[budget]\nsteps = 9\ndollars = 1", "give one of them"),
        (HEAD + RATES + "[budget]\nsteps = 449", "5 x 90 = 450 steps; try about 4 trials"),
        (HEAD + RATES + '[method]\nkind = "random"', "random draws 1 to 100,000 trials"),
        (HEAD + RATES + "[method]\ntrials = 6", "the grid has 5 trials; give 5"),
        (
            HEAD
            + RATES
            + 'points = 9999\n[parameters."train.seed"]\nrange = [1, 9999]\npoints = 99',
            "makes 989,901 trials",
        ),
        (HEAD + RATES + "[method]\nfirst_steps = 6", 'set method.kind = "asha"'),
        (HEAD + RATES + '[method]\nkind = "asha"\ntrials = 9', "e.g. 10"),
        (
            HEAD + RATES + '[method]\nkind = "asha"\ntrials = 9\nfirst_steps = 31',
            "at most a 3th of the job's 90 steps",
        ),
        (
            HEAD
            + '[parameters."train.steps"]\nvalues = [9]\n'
            + '[method]\nkind = "asha"\ndraw = "grid"\nfirst_steps = 9',
            "rungs set it",
        ),
        ('metric = "validation_loss"\n' + HEAD + RATES, "set train.validate_every"),
        ('metric = "mmlu"\n' + HEAD + RATES, "no trial reports it: evaluate.every is 0"),
        ('metrik = "loss"\n' + HEAD + RATES, 'did you mean "metric"?'),
        (HEAD.replace("job.toml", "jobs.toml") + RATES, 'did you mean "job.toml"?'),
        (HEAD.replace("rates", "a b") + RATES, "must be letters, digits"),
    ],
)
def test_what_cannot_run_is_named_with_its_fix(tmp_path: Path, text: str, problem: str) -> None:
    with pytest.raises(ConfigError) as refused:
        check_sweep(written(tmp_path, text))
    assert problem in str(refused.value)


def test_a_base_job_that_does_not_validate_is_named_with_its_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"job job.toml: train.stepz.*did you mean"):
        check_sweep(written(tmp_path, HEAD + RATES, JOB.replace("steps = 90", "stepz = 90")))


def test_a_metric_that_comes_at_other_steps_than_rungs_is_refused(tmp_path: Path) -> None:
    job = JOB.replace("steps = 90", "steps = 90\nvalidate_every = 15")
    job += "[data]\nvalidation_fraction = 0.1\n"
    method = '[method]\nkind = "asha"\ntrials = 9\nfirst_steps = 10\n'
    text = 'metric = "validation_loss"\n' + HEAD + RATES + method
    with pytest.raises(ConfigError, match=r"judged after 10; set train.validate_every to 10"):
        check_sweep(written(tmp_path, text, job))
    plan = check_sweep(written(tmp_path, text, job.replace("= 15", "= 10")))
    assert plan.arithmetic == "9 x 10 + 3 x 20 + 1 x 60 = 210 steps"


def test_rungs_are_one_run_with_the_learning_rate_of_the_whole(tmp_path: Path) -> None:
    method = '[method]\nkind = "asha"\ntrials = 9\nfirst_steps = 10\n'
    plan = check_sweep(written(tmp_path, HEAD + RATES + method))
    first, last = plan.job_of(3, 0), plan.job_of(3, 2)
    assert (first.train.steps, last.train.steps) == (10, 90)
    assert first.schedule == last.schedule and first.schedule.steps == 90
    assert first.name == last.name == plan.name_of(3) and first.checkpoint.resume == "auto"
    assert first.checkpoint.at_end and first.optimizer == last.optimizer


def test_another_range_is_another_sweep_and_another_budget_is_not(tmp_path: Path) -> None:
    plan = check_sweep(written(tmp_path, HEAD + RATES))
    same = check_sweep(written(tmp_path, HEAD + "at_once = 9\n" + RATES + "[budget]\nsteps = 1e6"))
    other = check_sweep(written(tmp_path, HEAD + RATES + "points = 4"))
    assert plan.key == same.key != other.key


def test_of_many_trials_each_value_is_checked_once() -> None:
    settings = [{"a": a, "b": b} for a in range(40) for b in range(40)]
    found = checked_trials(settings)  # type: ignore[arg-type]
    assert len(found) < 100
    assert {settings[trial]["b"] for trial in found} == set(range(40))
