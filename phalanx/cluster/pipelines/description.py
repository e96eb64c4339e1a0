"""The pipeline file: TOML with steps."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Meta

from phalanx.config import ConfigError, Section
from phalanx.config.load import read_table
from phalanx.config.section import Minutes, Positive, RanksOrAuto
from phalanx.config.tree import build, file_mistakes

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
    """Kind of step; see docs/how-to/pipelines.md."""
    command: tuple[str, ...] = ()
    """program: command line; data, eval: arguments of `phalanx data` or `eval`; export: options."""
    job: str = ""
    """train: the job file."""
    settings: dict[str, Scalar] = {}
    """train: settings over those of the job file, by dotted key, e.g. "train.seed" = "{seed}"."""
    inputs: dict[str, str] = {}
    """Inputs by name: STEP.OUTPUT, or a file, folder or pattern such as "text/*.txt"."""
    outputs: dict[str, str] = {}
    """Outputs by name: paths in the pipeline's folder."""
    scores: tuple[str, ...] = ()
    """Metrics in its output `scores`, a JSON file {"scores": {metric: number}}."""
    after: tuple[str, ...] = ()
    """Further steps to wait for: STEP (success), STEP:any (any end) or STEP:fail (failure)."""
    when: tuple[str, ...] = ()
    """Conditions; the step is skipped unless all hold."""
    require: tuple[str, ...] = ()
    """gate: conditions such as "eval.mmlu >= 0.55" or "eval.loss <= released + 0.5 %"."""
    by: str = ""
    """best: metric to choose by, STEP.METRIC."""
    better: Literal["lower", "higher"] = "lower"
    """best: whether a smaller or a larger value is better."""
    for_each: dict[str, tuple[Scalar, ...]] = {}
    """Run the step once for each value (each combination, if several names); {NAME} is replaced."""
    retries: Retries = 0
    """Number of retries after a failure."""
    backoff_seconds: Backoff = 10.0
    """Delay before the first retry; doubled with each further one."""
    timeout_minutes: Minutes = 0.0
    """Time limit of an attempt; 0: none."""
    gpus: RanksOrAuto = 0
    """GPUs used while it runs, for the budget; on a server, its number of ranks."""
    environment: dict[str, str] = {}
    """Additional environment variables."""
    question: str = ""
    """approval: question for the person."""
    model: str = ""
    """Model name in the registry: to register as, or whose release conditions refer to."""
    url: str = ""
    """notify: address to send a POST request to."""


class PipelineBudget(Section, frozen=True, kw_only=True):
    """Budget of all steps of a run; a step that exhausts it is stopped."""

    hours: Positive | None = None
    """Sum of the hours of all steps, parallel ones included."""
    gpu_hours: Positive | None = None
    """Sum of hours times `gpus` of all steps."""


class SlurmSteps(Section, frozen=True, kw_only=True):
    """Slurm resources of a step, with --engine slurm."""

    partition: str = ""
    """Slurm partition."""
    account: str = ""
    """Slurm account."""
    time: str = ""
    """Time limit in sbatch's format."""
    options: tuple[str, ...] = ()
    """Additional options of sbatch."""


class PipelineFile(Section, frozen=True, kw_only=True):
    """A pipeline: its steps by name."""

    name: str
    """Of the pipeline."""
    folder: str = ""
    """Working folder of the pipeline; "": runs/pipelines/NAME."""
    registry: str = "runs/models"
    """Folder of the registry of models."""
    parallel: Annotated[int, Meta(ge=1, le=10_000)] = 1
    """Maximum number of steps running at a time."""
    ray_address: str = "auto"
    """Ray cluster, with --engine ray: HOST:6379, or the one of this machine."""
    slurm: SlurmSteps = SlurmSteps()
    budget: PipelineBudget = PipelineBudget()
    steps: dict[str, PipelineStep]
    """Steps by name."""

    @property
    def place(self) -> Path:
        """Its folder."""
        return Path(self.folder or Path("runs") / "pipelines" / self.name)


def pipeline_from_table(table: dict[str, Any]) -> PipelineFile:
    """Decode a pipeline from a TOML table; ConfigError with every wrong key and type."""
    if problems := file_mistakes(PipelineFile, table):
        raise ConfigError.of(problems)
    return build(PipelineFile, table)


def read_pipeline(path: Path) -> tuple[PipelineFile, dict[str, Any]]:
    """The pipeline in a file, and the table that it was read from."""
    table = read_table(path)
    return pipeline_from_table(table), table
