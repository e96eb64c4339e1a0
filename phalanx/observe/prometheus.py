"""Numbers for Prometheus, in its text format.

Names and units follow its conventions: base units, ``_total`` for what only rises. Cardinality is
bounded: labels are states, kinds and buckets, and at most ``MOST_JOBS`` running jobs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

from msgspec import Struct

MOST_JOBS = 200  # with series of their own
JOB_GAUGES = {
    "loss": ("phalanx_job_loss", "Loss of the newest step."),
    "validation_loss": ("phalanx_job_validation_loss", "Newest loss on held-out samples."),
    "grad_norm": ("phalanx_job_gradient_norm", "Gradient norm of the newest step."),
    "learning_rate": ("phalanx_job_learning_rate", "Learning rate of the newest step."),
    "step_seconds": ("phalanx_job_step_seconds", "Duration of the newest step."),
    "data_seconds": ("phalanx_job_data_wait_seconds", "Wait for data within the newest step."),
    "tokens_per_second": ("phalanx_job_tokens_per_second", "Tokens a second, whole job."),
    "mfu": ("phalanx_job_mfu_ratio", "Model FLOPs utilisation."),
    "scaling_efficiency": (
        "phalanx_job_scaling_efficiency_ratio",
        "Tokens a second and GPU against the smallest world size seen.",
    ),
    "plan_efficiency": (
        "phalanx_job_plan_efficiency_ratio",
        "Planned over measured duration of the newest step.",
    ),
    "tokens_per_second_per_gpu": (
        "phalanx_job_tokens_per_second_per_gpu",
        "Tokens a second of one rank.",
    ),
    "peak_memory_bytes": ("phalanx_job_peak_memory_bytes", "Most memory of any rank."),
    "joules_per_million_tokens": (
        "phalanx_job_joules_per_million_tokens",
        "Energy of a million tokens.",
    ),
    "co2_grams_per_million_tokens": (
        "phalanx_job_co2_grams_per_million_tokens",
        "CO2 of a million tokens.",
    ),
    "dollars_per_million_tokens": (
        "phalanx_job_dollars_per_million_tokens",
        "Price of a million tokens.",
    ),
    "own_seconds_most": (
        "phalanx_job_slowest_rank_seconds",
        "Own work of the slowest rank in the newest step.",
    ),
    "own_seconds_middle": (
        "phalanx_job_middle_rank_seconds",
        "Own work of the middle rank in the newest step.",
    ),
}

Kind = Literal["gauge", "counter"]
Labels = Mapping[str, str]


class Family(Struct):
    """A metric and its samples."""

    name: str
    kind: Kind
    help: str
    samples: Sequence[tuple[Labels, float]]


class JobSample(Struct, frozen=True, kw_only=True):
    """A running job and its newest row."""

    job: int
    name: str
    team: str
    step: int | None  # None: it reports none
    generation: int
    row: Mapping[str, float | int | None]


def job_families(jobs: Iterable[JobSample]) -> list[Family]:
    """Series of running jobs; of too many, those with the lowest numbers."""
    chosen = sorted(jobs, key=lambda job: job.job)[:MOST_JOBS]
    # Not "job": that is the scrape's own label, and Prometheus would rename ours.
    labels = {j.job: {"job_id": str(j.job), "name": j.name, "team": j.team} for j in chosen}
    families = [
        Family(
            "phalanx_job_step",
            "gauge",
            "Newest completed step.",
            [(labels[j.job], float(j.step)) for j in chosen if j.step is not None],
        ),
        Family(
            "phalanx_job_generations_total",
            "counter",
            "Formations of the gang.",
            [(labels[j.job], float(j.generation)) for j in chosen],
        ),
    ]
    for column, (name, text) in JOB_GAUGES.items():
        samples = [
            (labels[j.job], float(value))
            for j in chosen
            if (value := j.row.get(column)) is not None
        ]
        families.append(Family(name, "gauge", text, samples))
    return families


def render(families: Iterable[Family]) -> bytes:
    """The text that Prometheus reads."""
    lines: list[str] = []
    for family in families:
        lines.append(f"# HELP {family.name} {_escape_help(family.help)}")
        lines.append(f"# TYPE {family.name} {family.kind}")
        for labels, value in family.samples:
            inside = ",".join(f'{key}="{_escape(text)}"' for key, text in labels.items())
            lines.append(
                f"{family.name}{{{inside}}} {value!r}" if inside else f"{family.name} {value!r}"
            )
    return ("\n".join(lines) + "\n").encode()


def _escape(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _escape_help(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n")
