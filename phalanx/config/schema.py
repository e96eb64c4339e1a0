"""Every setting of a training job, as one tree of frozen structs.

Defaults are chosen so that a file naming a model, a corpus and a number of steps is a
complete job. Fields whose value follows from others hold ``0`` or ``"auto"`` until resolved.
"""

from __future__ import annotations

from typing import Literal

import msgspec


class Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of all sections: immutable, keyword-only, unknown keys refused."""


class RopeScaling(Section):
    """Llama-3 frequency scaling: stretches low frequencies to extend the context."""

    factor: float = 8.0
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    original_context: int = 8192


class LatentAttention(Section):
    """Multi-head latent attention (DeepSeek): low-rank queries, keys and values."""

    query_rank: int = 1536  # 0: full-rank queries
    key_value_rank: int = 512
    content_head_dim: int = 128
    rope_head_dim: int = 64
    value_head_dim: int = 128


class Moe(Section):
    """Mixture-of-experts layers: routing, shared experts, balancing."""

    experts: int
    top_k: int
    ffn: int  # hidden width of one expert
    shared_experts: int = 0
    shared_ffn: int = 0  # width of all shared experts together; 0: shared_experts * ffn
    first_dense_layers: int = 0
    score: Literal["softmax", "sigmoid"] = "softmax"
    normalize_top_k: bool = True
    route_scale: float = 1.0
    balance: Literal["auxiliary", "bias", "none"] = "auxiliary"
    auxiliary_coefficient: float = 0.01
    bias_rate: float = 0.001


class Model(Section):
    """Shape of the transformer. ``preset`` fills every field that is not given."""

    preset: str = ""
    dim: int = 0
    layers: int = 0
    heads: int = 0
    kv_heads: int = 0  # 0: as many as heads
    head_dim: int = 0  # 0: dim / heads
    ffn: int = 0
    vocab: int = 0
    mlp: Literal["swiglu", "gelu"] = "swiglu"
    norm_eps: float = 1e-5
    rope_theta: float = 500_000.0
    rope_scaling: RopeScaling | None = None
    qk_norm: bool = False
    tied_embedding: bool = False
    latent: LatentAttention | None = None
    moe: Moe | None = None


class Data(Section):
    """Which tokens, in which order."""

    source: Literal["synthetic", "shards"] = "synthetic"
    path: str = ""  # folder of token shards
    sequence: int = 2048
    seed: int = 0
    epochs: int = 0  # 0: as many as the steps need
    document_mask: bool = False  # packed documents do not attend to each other
    validation_fraction: float = 0.0  # share of the samples held out, from the corpus' end
    prefetch: int = 4  # steps read ahead by the loader thread


class Parallel(Section):
    """The mesh. World size = pipeline * data * context * tensor."""

    data: int = 0  # 0: whatever the world size leaves; replicas that read different samples
    replicate: int = 1  # of these, groups that hold a full copy of the shards (HSDP)
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1  # divides (data / replicate) * context * tensor
    zero: Literal[0, 1, 2, 3] = 3
    schedule: Literal["gpipe", "1f1b", "interleaved", "zero-bubble"] = "1f1b"
    virtual_stages: int = 0  # per pipeline rank; 0: the schedule's usual number (1 or 2)
    context_method: Literal["auto", "ring", "ulysses"] = "auto"
    ddp_bucket_mb: float = 25.0
    prefetch_layers: int = 1  # FSDP: layers gathered ahead of the one that runs
    reduce_dtype: Literal["float32", "compute"] = "float32"
    async_tensor: bool = False  # overlap TP gathers with matmuls (CUDA with symmetric memory)


class Precision(Section):
    """Number formats. Master weights and optimizer state are fp32 in every mode."""

    compute: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    fp8: bool = False  # fp8 linear layers (Hopper or newer)
    initial_loss_scale: float = 65536.0  # float16 only
    loss_scale_growth_steps: int = 2000


class Memory(Section):
    """What is recomputed or moved instead of kept on the device."""

    recompute: Literal["none", "selective", "full"] = "none"
    offload: Literal["none", "optimizer", "parameters"] = "none"
    offload_activations: bool = False


class Optimizer(Section):
    """Update rule, clipping and the guard against bad steps."""

    kind: Literal["adamw", "muon"] = "adamw"
    learning_rate: float = 3e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip_norm: float = 1.0  # 0: no clipping
    skip_non_finite: bool = True
    spike_factor: float = 0.0  # skip when the norm exceeds this many running means; 0: off
    muon_momentum: float = 0.95
    muon_learning_rate: float = 0.02


class Schedule(Section):
    """Learning rate over the run, as a factor of ``optimizer.learning_rate``."""

    kind: Literal["cosine", "wsd", "constant"] = "cosine"
    warmup_steps: int = 0
    decay_steps: int = 0  # wsd: length of the final decay
    final_fraction: float = 0.1


class Train(Section):
    """Length, batch and behaviour of the loop."""

    steps: int = 100
    global_batch: int = 8  # samples a step, whatever the number of replicas
    micro_batch: int = 1
    seed: int = 0
    deterministic: bool = False
    compile: Literal["auto", "on", "off"] = "auto"  # auto: on CUDA only
    device: Literal["auto", "cpu", "cuda"] = "auto"
    cpu_threads: int = 1  # intra-op threads of one rank on CPU
    validate_every: int = 0  # steps; 0: never
    validate_samples: int = 64
    max_non_finite: int = 10  # consecutive non-finite steps before the run ends
    collective_timeout_seconds: float = 600.0


class Checkpoint(Section):
    """When state is saved, and what a run starts from."""

    every: int = 0  # steps; 0: only at the end
    keep: int = 2  # newest checkpoints kept; 0: all
    at_end: bool = True
    resume: str = ""  # "": fresh; "auto": newest of this run's name; or a checkpoint's path
    load_hf: str = ""  # folder of Hugging Face safetensors to start from


class Log(Section):
    """Where measurements go."""

    every: int = 10  # steps between host reads of device values
    tensorboard: bool = True
    wandb: bool = False
    mlflow: bool = False
    mfu: Literal["causal", "palm"] = "causal"  # attention FLOPs counted halved, or in full
    profile_steps: tuple[int, int] | None = None  # [first, last) traced into logs/


class Job(Section):
    """One training job: the root of the tree."""

    name: str = "run"
    runs: str = "runs"  # folder that receives <name>/<id>/
    model: Model = Model()
    data: Data = Data()
    parallel: Parallel = Parallel()
    precision: Precision = Precision()
    memory: Memory = Memory()
    optimizer: Optimizer = Optimizer()
    schedule: Schedule = Schedule()
    train: Train = Train()
    checkpoint: Checkpoint = Checkpoint()
    log: Log = Log()
