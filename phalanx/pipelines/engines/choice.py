"""Which engine runs the processes of steps."""

from __future__ import annotations

from phalanx.cluster.pipelines.description import PipelineFile
from phalanx.config import ConfigError
from phalanx.config.errors import did_you_mean
from phalanx.control.backends.slurm.programs import require
from phalanx.pipelines.engines.ray_steps import RayExecutor
from phalanx.pipelines.engines.slurm_steps import SlurmExecutor
from phalanx.pipelines.run.attempts import Executor
from phalanx.pipelines.run.processes import LocalExecutor

LOCAL = "local"
ENGINES = (LOCAL, "slurm", "ray")


def executor(engine: str, pipeline: PipelineFile) -> Executor:
    """What runs the steps of a pipeline; ConfigError where no engine has that name."""
    match engine:
        case "local":
            return LocalExecutor()
        case "slurm":
            require("sbatch")
            return SlurmExecutor(pipeline.slurm)
        case "ray":
            return RayExecutor(pipeline.ray_address)
        case "kubernetes":
            rule = "runs pods, which share no folder with this process"
            fix = "phalanx submit --backend kubernetes -- phalanx pipeline run …, or --server"
            raise ConfigError("--engine", engine, rule, fix)
    raise ConfigError("--engine", engine, "is no engine", did_you_mean(engine, ENGINES))
