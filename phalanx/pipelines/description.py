"""A pipeline as people write it: a TOML file of steps."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Meta

from phalanx.config import ConfigError, Section
from phalanx.config.load import read_table
from phalanx.config.section import Minutes, Positive, RanksOrAuto
from phalanx.config.tree import build, mistakes

Kind = Literal[
    "program",
    "data",
    "train",
    "eval",
    "export",
    "best",
    "gate",
    "approval",
    "register",
    "notify",
]
Scalar = bool | int | float | str
Retries = Annotated[int, Meta(ge=0, le=1000)]
Backoff = Annotated[float, Meta(ge=0, le=86_400)]


class PipelineStep(Section, frozen=True, kw_only=True):
    """What a step runs, what it reads and what it makes."""

    kind: Kind = "program"
    """What it does; see docs/how-to/pipelines.md."""
    command: tuple[str, ...] = ()
    """program: its words; data, eval: those after `phalanx data` or `eval`; export: options."""
    job: str = ""
    """train: the job file."""
    settings: dict[str, Scalar] = {}
    """train: settings over those of the job file, by dotted key, e.g. "train.seed" = "{seed}"."""
    inputs: dict[str, str] = {}
    """What it reads, by name: STEP.OUTPUT, or a file, folder or pattern such as "text/*.txt"."""
    outputs: dict[str, str] = {}
    """What it makes, by name: a path in the pipeline's folder."""
    scores: tuple[str, ...] = ()
    """Metrics that its output `scores` holds, a JSON file {"scores": {metric: number}}."""
    after: tuple[str, ...] = ()
    """Steps that it waits for besides: STEP, STEP:any (it ended) or STEP:fail."""
    when: tuple[str, ...] = ()
    """Conditions; it is skipped unless all hold."""
    require: tuple[str, ...] = ()
    """gate: conditions such as "eval.mmlu >= 0.55" or "eval.loss <= released + 0.5 %"."""
    by: str = ""
    """best: the metric, STEP.METRIC."""
    better: Literal["lower", "higher"] = "lower"
    """best: which value of it is the better one."""
    for_each: dict[str, tuple[Scalar, ...]] = {}
    """Run it once for each value (each combination, of several names); {NAME} stands for it."""
    retries: Retries = 0
    """Further attempts after a failure."""
    backoff_seconds: Backoff = 10.0
    """Before the second attempt; doubled with each."""
    timeout_minutes: Minutes = 0.0
    """Most time that an attempt may take; 0: no limit."""
    gpus: RanksOrAuto = 0
    """GPUs that it holds while it runs, for the budget; on a server, its ranks."""
    environment: dict[str, str] = {}
    """Variables that it gets besides."""
    question: str = ""
    """approval: what a person is asked."""
    model: str = ""
    """Name in the registry: of what is registered, or whose release conditions mean."""
    url: str = ""
    """notify: address that is posted to."""


class PipelineBudget(Section, frozen=True, kw_only=True):
    """What all steps of a run may use together; a step that uses it up is stopped."""

    hours: Positive | None = None
    """Hours of steps, side by side or not."""
    gpu_hours: Positive | None = None
    """Hours times the `gpus` of steps."""


class PipelineFile(Section, frozen=True, kw_only=True):
    """A pipeline: its steps by name."""

    name: str
    """Of the pipeline."""
    folder: str = ""
    """Where it keeps everything; "": runs/pipelines/NAME."""
    registry: str = "runs/models"
    """Folder of the registry of models."""
    parallel: Annotated[int, Meta(ge=1, le=10_000)] = 1
    """Steps that run at a time."""
    budget: PipelineBudget = PipelineBudget()
    steps: dict[str, PipelineStep]
    """Steps by name."""

    @property
    def place(self) -> Path:
        """Its folder."""
        return Path(self.folder or Path("runs") / "pipelines" / self.name)


def pipeline_from_table(table: dict[str, Any]) -> PipelineFile:
    """The pipeline a table describes; ConfigError with every wrong key and type."""
    if problems := mistakes(PipelineFile, table):
        raise ConfigError.of(problems)
    return build(PipelineFile, table)


def read_pipeline(path: Path) -> tuple[PipelineFile, dict[str, Any]]:
    """The pipeline in a file, and the table that it was read from."""
    table = read_table(path)
    return pipeline_from_table(table), table
