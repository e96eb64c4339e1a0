"""The typed tree of every setting: TOML in, model shapes and presets, exact errors out."""

from __future__ import annotations

from phalanx.config.backend import Backend, Kubernetes, Ray, Slurm
from phalanx.config.errors import ConfigError, ConfigProblem, problem
from phalanx.config.explain import KeyDoc, explain
from phalanx.config.load import job_from_table, load_job
from phalanx.config.presets import PRESETS
from phalanx.config.ramp import BatchRamp, batch_ramp, constant_batch
from phalanx.config.resolve import (
    default_world_size,
    has_window,
    is_gated,
    parameter_group,
    reforms_scores,
    resolve,
    resolve_model,
    ring_computes,
    rotated_width,
    verification_interval,
)
from phalanx.config.rules.job import check
from phalanx.config.rules.mesh import micro_batches, takes_unequal_shares
from phalanx.config.rules.program import program_backend
from phalanx.config.rules.same_model import ModelDifference, model_differences
from phalanx.config.schema import (
    STATE_BLOCK,
    STATE_FORMATS,
    BatchStage,
    BlendSource,
    Checkpoint,
    Data,
    Job,
    LatentAttention,
    Log,
    Memory,
    Model,
    Moe,
    Optimizer,
    OwnCode,
    Parallel,
    ParameterGroup,
    Precision,
    RopeScaling,
    Schedule,
    Stage,
    StateFormat,
    Store,
    Train,
    Window,
    gate_up_groups,
)
from phalanx.config.section import Section
from phalanx.config.show import to_toml
from phalanx.config.virtual_replicas import (
    VirtualReplicas,
    reduces_once,
    refuse_other_sums,
    virtual_replicas,
)

__all__ = [
    "PRESETS",
    "STATE_BLOCK",
    "STATE_FORMATS",
    "Backend",
    "BatchRamp",
    "BatchStage",
    "BlendSource",
    "Checkpoint",
    "ConfigError",
    "ConfigProblem",
    "Data",
    "Job",
    "KeyDoc",
    "Kubernetes",
    "LatentAttention",
    "Log",
    "Memory",
    "Model",
    "ModelDifference",
    "Moe",
    "Optimizer",
    "OwnCode",
    "Parallel",
    "ParameterGroup",
    "Precision",
    "Ray",
    "RopeScaling",
    "Schedule",
    "Section",
    "Slurm",
    "Stage",
    "StateFormat",
    "Store",
    "Train",
    "VirtualReplicas",
    "Window",
    "batch_ramp",
    "check",
    "constant_batch",
    "default_world_size",
    "explain",
    "gate_up_groups",
    "has_window",
    "is_gated",
    "job_from_table",
    "load_job",
    "micro_batches",
    "model_differences",
    "parameter_group",
    "problem",
    "program_backend",
    "reduces_once",
    "reforms_scores",
    "refuse_other_sums",
    "resolve",
    "resolve_model",
    "ring_computes",
    "rotated_width",
    "takes_unequal_shares",
    "to_toml",
    "verification_interval",
    "virtual_replicas",
]
