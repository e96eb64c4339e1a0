"""What ``phalanx tune`` prints and writes: trials as they end, before and after, the job file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from phalanx.cli.tables import add_row, counted, print_table, span, table
from phalanx.config import ConfigError, Job
from phalanx.config.errors import plain_reason, written
from phalanx.plan.tune.job_text import tuned_text
from phalanx.plan.tune.settings import Value, changed
from phalanx.plan.tune.trials import Trial

if TYPE_CHECKING:
    from phalanx.train.tune.session import TuneReport


def print_trial(trial: Trial) -> None:
    """One line, as the trial ends."""
    measured = trial.reason if trial.failure else f"{trial.seconds * 1e3:.1f} ms"
    print(f"{trial.number + 1:3} {trial.phase:8} {measured:>10}  {_settings(trial.values)}")


def print_report(report: TuneReport) -> None:
    """The trials from fast to slow, before and after, and what became of the planner."""
    made = table("settings", "trials", "step", "predicted")
    for trials in _by_settings(report):
        ran = sorted(trial.seconds for trial in trials if not trial.failure)
        failed = next((trial for trial in trials if trial.failure), None)
        seconds = f"{ran[len(ran) // 2] * 1e3:.1f} ms" if ran else ""
        step = f"failed: {failed.failure}" if failed is not None else seconds
        predicted = trials[0].predicted_seconds
        planned = f"{predicted * 1e3:.1f} ms" if predicted else ""
        add_row(made, _settings(trials[0].values, report.before), len(trials), step, planned)
    print_table(made)
    for line in _summary(report):
        print(line)


def _by_settings(report: TuneReport) -> list[list[Trial]]:
    groups: dict[str, list[Trial]] = {}
    for trial in report.trials:
        groups.setdefault(_settings(trial.values), []).append(trial)
    return sorted(groups.values(), key=lambda trials: _order(trials))


def _order(trials: list[Trial]) -> float:
    ran = sorted(trial.seconds for trial in trials if not trial.failure)
    return ran[len(ran) // 2] if ran else float("inf")


def _settings(values: dict[str, Value], before: dict[str, Value] | None = None) -> str:
    """All, or those that differ from what was before."""
    shown = {k: v for k, v in values.items() if before is None or before[k] != v}
    words = (f"{key.rpartition('.')[2]}={value}" for key, value in shown.items() if value != "")
    return " ".join(words) or "as the job file has it"


def _summary(report: TuneReport) -> list[str]:
    outcome = report.outcome
    trials = counted(len(report.trials), "trial")
    lines = [f"{trials} in {span(report.spent_seconds)}: {outcome.reason}"]
    if outcome.comparison is not None:
        lines.append(evidence(report))
    lines += [
        f"  {key}: {written(report.before[key])} -> {written(value)}"
        for key, value in report.changes.items()
    ]
    if not outcome.changed:
        lines.append("the settings stay as they are")
    if report.error_after is not None and report.error_before is not None:
        lines.append(
            f"planner: off by {report.error_before:.0%} on these steps, {report.error_after:.0%} "
            f"with constants fitted to them: {report.constants}"
        )
    return lines


def evidence(report: TuneReport) -> str:
    """Before and after, in a sentence."""
    comparison = report.outcome.comparison
    if (
        comparison is None
        or report.step_seconds_before is None
        or report.step_seconds_after is None
    ):
        return report.outcome.reason
    return (
        f"step {report.step_seconds_before * 1e3:.1f} -> {report.step_seconds_after * 1e3:.1f} ms: "
        f"{comparison.speedup:.2f} times as fast, {comparison.low:.2f} to {comparison.high:.2f} "
        f"(98 %, {comparison.pairs} pairs in turn)"
    )


def write_job(source: Path, target: Path, job: Job, report: TuneReport) -> None:
    """The job file with what was found, and the evidence above it."""
    comments = [f"phalanx tune: {evidence(report)}"] if report.outcome.changed else []
    text = source.read_text(encoding="utf-8-sig")
    wanted = changed(job, report.outcome.values)
    try:
        target.write_text(tuned_text(text, report.changes, wanted, comments), encoding="utf-8")
    except OSError as error:
        rule = f"cannot be written: {plain_reason(error)}"
        fix = "give a path in a folder where you may write"
        raise ConfigError("--write", str(target), rule, fix) from None
