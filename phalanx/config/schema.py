"""Every setting of a training job, as one tree of frozen structs.

Defaults are chosen so that a file naming a model, a corpus and a number of steps is a
complete job. Fields whose value follows from others hold ``0`` or ``"auto"`` until resolved.
The sentence below each field is what ``phalanx config explain`` prints.
"""

from __future__ import annotations

from typing import Annotated, Literal, get_args

from msgspec import Meta

from phalanx.config.backend import Backend
from phalanx.config.section import (
    Batch,
    Below1,
    Count,
    Experts,
    Fraction,
    Heads,
    Layers,
    Megabytes,
    Minutes,
    Natural,
    NaturalOrAuto,
    NonNegative,
    Positive,
    Ranks,
    RanksOrAuto,
    Seconds,
    Section,
    Seed,
    Threads,
    Vocabulary,
    Width,
)


class RopeScaling(Section, frozen=True, kw_only=True):
    """Scaling of the rotary frequencies, which extends the context."""

    kind: Literal["llama3", "linear", "yarn"] = "llama3"
    """Low frequencies by wavelength, all alike, or by rotations within the old context."""
    factor: Annotated[float, Meta(ge=1)] = 8.0
    """How many times longer the context becomes."""
    low_frequency_factor: Positive = 1.0
    """Llama 3: wavelengths above original_context / this are stretched by the whole factor."""
    high_frequency_factor: Positive = 4.0
    """Llama 3: wavelengths below original_context / this are left alone."""
    original_context: Count = 8192
    """Context length, in tokens, that the unscaled frequencies were trained for."""
    fast_rotations: Positive = 32.0
    """YaRN: dimensions that turn more often within original_context are left alone."""
    slow_rotations: Positive = 1.0
    """YaRN: dimensions that turn less often are stretched by the whole factor."""
    round_bounds: bool = True
    """YaRN: the bounds between those are whole dimensions."""
    attention_factor: NonNegative = 0.0
    """YaRN: factor on rotated queries and keys; 0: 0.1 * ln(factor) + 1."""


class Window(Section, frozen=True, kw_only=True):
    """Sliding-window attention: most layers see the nearest tokens only."""

    size: Count = 4096
    """Tokens that a token sees, itself included."""
    full_every: Natural = 0
    """Every so many layers one sees all: 4 is a pattern of 3:1, 6 of 5:1; 0: none does."""
    rope_theta: NonNegative = 0.0
    """Base of the rotary frequencies in layers with the window; 0: model.rope_theta."""
    rope_scaled: bool = True
    """Whether model.rope_scaling holds in layers with the window, too."""


class LatentAttentionShape(Section, frozen=True, kw_only=True):
    """Multi-head latent attention (DeepSeek): low-rank queries, keys and values."""

    query_rank: Natural = 1536
    """Width of the compressed queries; 0: full-rank queries."""
    key_value_rank: Count = 512
    """Width of the compressed keys and values."""
    content_head_dim: Count = 128
    """Part of a query or key head that carries no position."""
    rope_head_dim: Count = 64
    """Part of a query or key head that RoPE rotates; keys share it over all heads."""
    value_head_dim: Count = 128
    """Width of a value head."""


class Moe(Section, frozen=True, kw_only=True):
    """Mixture-of-experts layers: routing, shared experts, balancing."""

    experts: Experts
    """Routed experts in a layer."""
    top_k: Experts
    """Routed experts that each token visits."""
    ffn: Annotated[int, Meta(ge=1, le=10_000_000)]
    """Hidden width of one routed expert."""
    shared_experts: Natural = 0
    """Experts that every token visits."""
    shared_ffn: Natural = 0
    """Hidden width of all shared experts together; 0: shared_experts * ffn."""
    shared_gate: bool = False
    """What shared experts add is scaled by a learned gate of each token (Qwen2-MoE)."""
    first_dense_layers: Natural = 0
    """Layers at the bottom that have a dense MLP instead of experts."""
    score: Literal["softmax", "sigmoid"] = "softmax"
    """How router logits become scores: against each other, or each on its own."""
    normalize_top_k: bool = True
    """Divide the chosen scores by their sum."""
    route_scale: Positive = 1.0
    """Factor on the weights of the routed experts."""
    balance: Literal["auxiliary", "bias", "bias-auxiliary", "none"] = "auxiliary"
    """What keeps experts equally busy: a loss, a selection bias, both (DeepSeek-V3), or nothing."""
    auxiliary_coefficient: NonNegative = 0.01
    """Weight of the balance loss; beside a bias it is small: 0.0001 in DeepSeek-V3."""
    auxiliary_over: Literal["sequence", "batch"] = "sequence"
    """What the balance loss evens out: each sequence, or the global batch as the last one was."""
    bias_rate: NonNegative = 0.001
    """Step of the selection bias after each optimizer step."""
    groups: Experts = 1
    """Groups of neighbouring experts, of which a token visits some (DeepSeek-V3)."""
    top_groups: Experts = 1
    """Groups that a token visits: those whose two best experts score highest together."""
    z_loss_coefficient: NonNegative = 0.0
    """Weight of the loss on large router logits: the square of their log-sum-exp."""
    biases: bool = False
    """Biases on the router and on the matrices of routed experts (gpt-oss)."""


class MultiTokenPrediction(Section, frozen=True, kw_only=True):
    """Layers behind the last that predict tokens further on, in training alone (DeepSeek-V3)."""

    layers: Annotated[int, Meta(ge=1, le=64)] = 1
    """Such layers: the first predicts the token after the next, each other one token further."""
    weight: NonNegative = 0.3
    """Weight of their losses' mean beside the loss of the next token; steps report only that."""


class Model(Section, frozen=True, kw_only=True):
    """Shape of the transformer. ``preset`` fills every field that is not given."""

    preset: str = ""
    """Named shape to start from; keys given beside it win."""
    module: str = ""
    """Class of your own for the layers, or for the whole model: "package:Class"; "": ours."""
    loss: str = ""
    """Class of your own that makes a loss of logits: "package:Class"; "": cross-entropy."""
    dim: Width = 0
    """Width of the residual stream."""
    layers: Layers = 0
    """Transformer blocks."""
    heads: Heads = 0
    """Query heads."""
    kv_heads: Heads = 0
    """Key and value heads; 0: as many as heads."""
    head_dim: Width = 0
    """Width of a head; 0: dim / heads."""
    ffn: Width = 0
    """Hidden width of the dense MLP."""
    width_base: Width = 0
    """dim at which rate and initial values were found; they are scaled from it (µP); 0: off."""
    vocab: Vocabulary = 0
    """Rows of the embedding and of the output head."""
    mlp: Literal[
        "swiglu", "swiglu-clamped", "geglu", "geglu-exact", "gelu", "gelu-exact", "relu2"
    ] = "swiglu"
    """Form of the MLP: gated (three matrices) or plain (two); GELU is tanh's or exact."""
    norm: Literal["pre", "post", "sandwich"] = "pre"
    """Where RMSNorm stands: before a branch, on its result, or both."""
    norm_eps: Positive = 1e-5
    """Added to the mean square inside RMSNorm."""
    norm_offset: bool = False
    """RMSNorm multiplies by one plus its weight, which starts at zero (Gemma)."""
    rope_theta: Positive = 500_000.0
    """Base of the rotary frequencies."""
    rope_scaling: RopeScaling | None = None
    """Scaling of the rotary frequencies; "none": off."""
    rotary_fraction: Annotated[float, Meta(gt=0, le=1)] = 1.0
    """Leading share of a head that RoPE rotates."""
    nope_every: Natural = 0
    """Every so many layers one has no positions at all (NoPE); 0: all have."""
    window: Window | None = None
    """Sliding-window attention; "none": every layer sees all earlier tokens."""
    qk_norm: bool = False
    """RMSNorm on queries and keys."""
    qk_norm_over: Literal["head", "all"] = "head"
    """What such a norm is taken over: each head, or all heads together."""
    attention_bias: bool = False
    """Biases on queries, keys and values."""
    attention_out_bias: bool = False
    """A bias on the output of attention."""
    attention_sinks: bool = False
    """A learned logit a head takes part in the softmax of its scores and is dropped (gpt-oss)."""
    attention_scale: NonNegative = 0.0
    """Factor on the scores of attention; 0: 1 / sqrt(head_dim)."""
    attention_softcap: NonNegative = 0.0
    """Scores of attention stay below this by a tanh (Gemma 2); 0: no cap."""
    logit_softcap: NonNegative = 0.0
    """Logits of the output head stay below this by a tanh (Gemma 2); 0: no cap."""
    z_loss_coefficient: NonNegative = 0.0
    """Weight of the loss on large logits of the output head: the square of their log-sum-exp."""
    qk_clip: NonNegative = 0.0
    """A head whose largest score exceeds this has queries and keys scaled down; 0: off."""
    embedding_scale: Positive = 1.0
    """Factor on token vectors."""
    residual_scale: Positive = 1.0
    """Factor on what each branch adds to the residual stream."""
    dropout: Below1 = 0.0
    """Share of values that training drops: of token vectors, and of what each branch adds."""
    tied_embedding: bool = False
    """One matrix serves as embedding and as output head."""
    latent: LatentAttentionShape | None = None
    """Latent attention instead of grouped-query attention; "none": off."""
    moe: Moe | None = None
    """Mixture-of-experts layers; "none": all layers dense."""
    mtp: MultiTokenPrediction | None = None
    """Multi-token prediction; "none": only the next token is learnt."""


class BlendSource(Section, frozen=True, kw_only=True):
    """One source of a blend, under a name of your choice."""

    path: str
    """Corpus of this source: a folder, or a URL such as s3://bucket/folder."""
    weight: NonNegative = 1.0
    """Share of the samples, relative to the other weights; 0: none until a stage says so."""


class Stage(Section, frozen=True, kw_only=True):
    """Weights that hold from a token count on, until the next stage."""

    tokens: Natural
    """Tokens of the run after which this stage begins."""
    weights: dict[str, NonNegative]
    """Weight of each source by name; sources left out are not drawn from."""


class Store(Section, frozen=True, kw_only=True):
    """How object stores are read; credentials and endpoint come from the environment."""

    cache: str = ""
    """Node-local folder that holds what was fetched; "": a folder in the system's temporary."""
    cache_gb: Positive = 64.0
    """Largest size of the cache, in 10^9 bytes."""
    parallel_reads: Count = 16
    """Ranges of 4 MiB that one process fetches at once."""
    retry_seconds: NonNegative = 300.0
    """How long a failing read is tried again before the run ends."""
    hedge_factor: NonNegative = 4.0
    """A read that takes so many times the usual is asked for a second time; 0: never."""


class Data(Section, frozen=True, kw_only=True):
    """Which tokens, in which order."""

    source: Literal["synthetic", "shards", "module"] = "synthetic"
    """Generated tokens, a folder written by `phalanx data tokenize`, or a class of your own."""
    module: str = ""
    """Class of your own that has the samples: "package:Class"; for source = "module"."""
    path: str = ""
    """Folder of token shards, or a URL such as s3://bucket/folder."""
    blend: dict[str, BlendSource] = {}
    """Several sources instead of one path, each as a table [data.blend.NAME]."""
    stages: tuple[Stage, ...] = ()
    """Curriculum: tables [[data.stages]] that change the weights of the blend at token counts."""
    sequence: Batch = 2048
    """Tokens in a sample."""
    seed: Seed = 0
    """Seed of the sample order."""
    shuffle: Literal["global", "blocked"] = "global"
    """Over all samples (local files), or over long blocks within windows (object stores)."""
    block_tokens: Count = 1 << 23
    """Blocked shuffle: tokens that are read in one piece."""
    window_blocks: Count = 32
    """Blocked shuffle: blocks whose samples are mixed with each other."""
    epochs: Natural = 0
    """Passes over any source before the data is exhausted; 0: as many as the steps need."""
    document_mask: bool = False
    """Documents packed into one sample do not attend to each other."""
    pairs: bool = False
    """Documents are pairs, a preferred answer and a rejected one (`phalanx data preferences`)."""
    validation_fraction: Below1 = 0.0
    """Share of the documents held out for validation, by their hash."""
    prefetch: Natural = 4
    """Steps read ahead by the loader thread."""
    on_damage: Literal["error", "weightless"] = "error"
    """A missing or damaged block ends the run, or its samples count nothing and are logged."""
    check_blocks: bool = False
    """Compare checksums before reading, at a cost; blocked or weightless: always done."""
    allow_other_data: bool = False
    """Resume although corpus, blend, seed or sequence differ from the checkpoint's."""
    store: Store = Store()


class Parallel(Section, frozen=True, kw_only=True):
    """The mesh. World size = pipeline * data * context * tensor."""

    choose: bool = False
    """`phalanx submit` has the planner choose what is left at 1, `micro_batch` too, and `data`."""
    data: RanksOrAuto = 0
    """Replicas that read different samples; 0: whatever the world size leaves."""
    replicate: Ranks = 1
    """Of these, groups that hold a full copy of the shards (HSDP)."""
    tensor: Ranks = 1
    """Ranks that split each matrix, and the sequence between the matrices."""
    pipeline: Ranks = 1
    """Ranks that split the layers."""
    context: Ranks = 1
    """Ranks that split the sequence inside attention."""
    expert: Ranks = 1
    """Ranks that split the experts; divides (data / replicate) * context * tensor."""
    zero: Literal[0, 1, 2, 3] = 3
    """Sharded over the replicas: nothing (DDP), optimizer, + gradients, + weights."""
    schedule: Literal["gpipe", "1f1b", "interleaved", "zero-bubble"] = "1f1b"
    """Order of the micro-batches in the pipeline."""
    virtual_stages: Layers = 0
    """Stages per pipeline rank; 0: the schedule's usual number (1 or 2)."""
    context_method: Literal["auto", "ring", "ulysses"] = "auto"
    """Pass keys and values around a ring, or exchange heads for sequence (Ulysses)."""
    ddp_bucket_mb: Megabytes = 25.0
    """zero = 0: megabytes of gradients reduced at once; small starts early, large is efficient."""
    prefetch_layers: Layers = 1
    """zero = 3: layers gathered ahead of the one that runs; more hides more and holds more."""
    reduce_dtype: Literal["float32", "compute"] = "float32"
    """Format in which gradients are summed over the replicas."""
    async_tensor: bool = False
    """Overlap tensor-parallel gathers with matmuls (CUDA with symmetric memory)."""


class Precision(Section, frozen=True, kw_only=True):
    """Number formats. Master weights are fp32 in every mode."""

    compute: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    """Format of forward and backward."""
    fp8: bool = False
    """Linear layers multiply in fp8 (Hopper or newer)."""
    initial_loss_scale: Annotated[float, Meta(ge=1, le=1e30)] = 65536.0
    """float16: the loss scale at the first step."""
    loss_scale_growth_steps: Count = 2000
    """float16: finite steps in a row before the loss scale doubles."""


class Memory(Section, frozen=True, kw_only=True):
    """What is recomputed or moved instead of kept on the device."""

    recompute: Literal["none", "selective", "full"] = "none"
    """Activations rebuilt in backward: none, the cheap ones, or whole layers."""
    offload: Literal["none", "optimizer", "parameters"] = "none"
    """State that lives in host memory between its uses."""
    offload_folder: str = ""
    """For "optimizer": folder on each node's NVMe in place of host memory (variables count)."""
    offload_activations: bool = False
    """Keep the activations of a layer in host memory until its backward."""


StateFormat = Literal["float32", "bfloat16", "int8"]  # of the optimizer's moments
STATE_FORMATS: tuple[StateFormat, ...] = get_args(StateFormat)
STATE_BLOCK = 128  # neighbours in a row whose 8-bit moments share a scale


class ParameterGroup(Section, frozen=True, kw_only=True):
    """Parameters that are updated otherwise than the rest, or not at all."""

    pattern: str
    """Names, with * for any part: "layers.*.attention.*"; the first group that fits counts."""
    rate_factor: NonNegative = 1.0
    """Factor on the learning rate."""
    weight_decay: NonNegative | None = None
    """Decay of these parameters; "none": as without a group."""
    freeze: bool = False
    """They stay as they are, and do not count in the gradient norm."""


class Optimizer(Section, frozen=True, kw_only=True):
    """Update rule, the format of its state, clipping and the guard against bad steps."""

    kind: Literal["adamw", "muon", "schedule-free"] = "adamw"
    """Update rule: AdamW, Muon for hidden matrices and AdamW for the rest, Schedule-Free AdamW."""
    module: str = ""
    """Class of your own in place of kind: "package:Class"; its update is elementwise."""
    groups: tuple[ParameterGroup, ...] = ()
    """Tables [[optimizer.groups]]: other rates and decays by name, and frozen parameters."""
    state: StateFormat = "float32"
    """Format of AdamW's moments: 8, 4 or about 2 bytes a parameter; masters stay fp32."""
    learning_rate: Positive = 3e-4
    """Peak learning rate of AdamW."""
    beta1: Below1 = 0.9
    """Decay of the first moment."""
    beta2: Below1 = 0.95
    """Decay of the second moment."""
    eps: Positive = 1e-8
    """Added to the root of the second moment."""
    weight_decay: NonNegative = 0.1
    """Decoupled decay of the matrices."""
    clip_norm: NonNegative = 1.0
    """Largest norm of the global gradient; 0: no clipping."""
    skip_non_finite: bool = True
    """Leave weights and optimizer untouched when the gradient is not finite."""
    spike_factor: NonNegative = 0.0
    """Skip the step when the norm exceeds this many running means; 0: off."""
    muon_momentum: Below1 = 0.95
    """Decay of Muon's momentum."""
    muon_learning_rate: Positive = 0.02
    """Peak learning rate of Muon."""


RateShape = Literal["cosine", "linear", "wsd", "constant"]
DecayShape = Literal["linear", "cosine", "sqrt"]


class ScheduleExtension(Section, frozen=True, kw_only=True):
    """A curve that follows another one, up to the next or to the end of the run."""

    at_step: Count
    """Steps of the run that come before it."""
    kind: RateShape = "cosine"
    """Shape after its warmup."""
    warmup_steps: Natural = 0
    """Steps of linear growth from the rate before it."""
    peak_fraction: Positive = 1.0
    """Its peak, as a share of optimizer.learning_rate."""
    decay_steps: Natural = 0
    """wsd: length of the final decay."""
    decay_shape: DecayShape = "linear"
    """wsd: how the rate falls in the final decay; sqrt: by the root of its progress."""
    final_fraction: Fraction = 0.1
    """Learning rate of its last step, as a share of its peak."""


class Schedule(Section, frozen=True, kw_only=True):
    """Learning rate over the run, as a factor of ``optimizer.learning_rate``."""

    kind: RateShape = "cosine"
    """Shape after the warmup; wsd: stable, then a final decay."""
    warmup_steps: Natural = 0
    """Steps of linear growth from zero."""
    decay_steps: Natural = 0
    """wsd: length of the final decay."""
    decay_shape: DecayShape = "linear"
    """wsd: how the rate falls in the final decay; sqrt: by the root of its progress."""
    final_fraction: Fraction = 0.1
    """Learning rate of the last step, as a share of the peak."""
    steps: Natural = 0
    """Steps that the curve spans, after which its last rate stays; 0: up to what follows."""
    extensions: tuple[ScheduleExtension, ...] = ()
    """Curves that follow: tables [[schedule.extensions]], for runs that go on after their end."""


class BatchStage(Section, frozen=True, kw_only=True):
    """A batch of the beginning of a run, before train.global_batch."""

    until_tokens: Count
    """Tokens of the run after which the next batch holds."""
    global_batch: Batch
    """Samples in a step until then."""


class SequenceStage(Section, frozen=True, kw_only=True):
    """Samples of another length from a token count on, until the next stage."""

    after_tokens: Count
    """Tokens of the run after which it holds."""
    sequence: Batch
    """Tokens in a sample."""
    global_batch: Natural = 0
    """Samples in a step; 0: train.global_batch."""
    micro_batch: Natural = 0
    """Samples in one forward pass of one replica; 0: train.micro_batch."""
    rope_scaling: RopeScaling | None = None
    """Scaling of the rotary frequencies; "none": that of the stage before."""


class Ema(Section, frozen=True, kw_only=True):
    """A moving average of the weights, kept in fp32 beside them and saved with them."""

    decay: Below1 = 0.999
    """Share of the average that an update keeps; the rest is the weights."""
    every: Count = 1
    """Steps between updates."""
    begin_step: Natural = 0
    """Step up to which the average is the weights."""
    validate: bool = False
    """Validation takes the average in place of the weights."""


class Train(Section, frozen=True, kw_only=True):
    """Length, batch and behaviour of the loop."""

    steps: Count = 100
    """Optimizer steps of the whole run."""
    global_batch: Batch = 8
    """Samples in a step, whatever the number of replicas."""
    batch_ramp: tuple[BatchStage, ...] = ()
    """Other batches at the start: tables [[train.batch_ramp]], each until a token count."""
    micro_batch: Batch = 1
    """Samples in one forward pass of one replica."""
    sequence_stages: tuple[SequenceStage, ...] = ()
    """Longer samples later in the run: tables [[train.sequence_stages]], each from tokens on."""
    virtual_replicas: Natural = 0
    """Sums follow so many, a power of two: same bits on each number of replicas; 0: off."""
    ema: Ema | None = None
    """A moving average of the weights; "none": none is kept."""
    seed: Seed = 0
    """Seed of the initial weights."""
    deterministic: bool = False
    """Bit-identical from run to run, at some cost in speed."""
    compile: Literal["auto", "on", "off"] = "auto"
    """torch.compile of each block; auto: on CUDA, for blocks without kernels of our own."""
    kernel_cache: str = "auto"
    """Folder whose compiled kernels each start finds again; auto: .kernels in runs; "off": none."""
    kernel_cache_gb: Positive = 4.0
    """Most GB of it; what was not used for longest goes first."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the ranks compute; auto: CUDA where there is one."""
    cpu_threads: Threads = 1
    """Intra-op threads of one rank on CPU."""
    validate_every: Natural = 0
    """Steps between validations; 0: never."""
    validate_samples: Batch = 64
    """Samples in one validation."""
    max_non_finite: Count = 10
    """Consecutive non-finite steps before the run ends."""
    in_process_restart: bool = False
    """On CUDA too, survivors of a broken gang keep their processes (NCCL: not verified)."""
    compare_every: Natural = 1
    """Steps between comparisons of replicated weights, under an agent; 0: never."""
    verify_every: NaturalOrAuto = -1
    """Under an agent, steps until all recompute a rank's gradient; 0: never, -1: 200, on CPU."""
    collective_timeout_seconds: Seconds = 600.0
    """How long a collective may wait before the peer counts as lost."""
    first_step_minutes: Minutes = 0.0
    """Under an agent: allowance for the first step of a start; 0: timeouts.first_step_ns."""
    hang_minutes: Minutes = 0.0
    """Under an agent: a later step that is missing so long is a hang; 0: derived from steps."""


# As Hugging Face and PEFT call the matrices of a layer.
AdapterTarget = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
ADAPTER_TARGETS: tuple[AdapterTarget, ...] = get_args(AdapterTarget)
MLP_TARGETS: tuple[AdapterTarget, ...] = ("gate_proj", "up_proj", "down_proj")


class Adapter(Section, frozen=True, kw_only=True):
    """Low-rank adapters: the model's own weights are frozen, and these are trained instead."""

    kind: Literal["none", "lora", "dora"] = "none"
    """No adapters, LoRA, or DoRA, which also trains the length of each row."""
    rank: Annotated[int, Meta(ge=1, le=65536)] = 16
    """Columns of an adapter's matrices."""
    alpha: Positive = 32.0
    """What an adapter adds is multiplied by alpha / rank."""
    targets: tuple[AdapterTarget, ...] = ADAPTER_TARGETS
    """Matrices that have an adapter, in every layer, by their Hugging Face names."""


class Preference(Section, frozen=True, kw_only=True):
    """Training on pairs of answers, of which one is preferred (data.pairs)."""

    kind: Literal["none", "dpo"] = "none"
    """Off, or direct preference optimization against the model without its adapters."""
    beta: Positive = 0.1
    """Worth of a change in an answer's log-probability: higher stays nearer to the start."""


class HandOff(Section, frozen=True, kw_only=True):
    """Weights that a running engine takes over while training goes on."""

    every: Natural = 0
    """Steps between exports; 0: none."""
    folder: str = ""
    """Folder, seen by the engine too, that receives a Hugging Face model (step-00000100)."""
    url: str = ""
    """Address that is then sent {"model_path": folder} by POST; "": nobody is told."""
    keep: Annotated[int, Meta(ge=1, le=1000)] = 2
    """Newest exports that are kept."""


class Archive(Section, frozen=True, kw_only=True):
    """A second place for checkpoints, which copies are made to asynchronously."""

    url: str = ""
    """Folder, or address such as s3://bucket/prefix, that receives copies; "": none."""
    every: Count = 1
    """Every how many-th checkpoint is copied."""
    keep: Natural = 0
    """Newest copies kept; 0: all."""
    keep_every: Natural = 0
    """Also copies whose step is a multiple of this are kept; 0: no such rule."""
    keep_best: Natural = 0
    """Also so many copies with the lowest validation loss are kept."""
    quota_gb: NonNegative = 0.0
    """Most GB that everything below url, a team's address, may take; 0: no limit."""
    retry_seconds: Positive = 3600.0
    """How long a copy is tried again while the place does not answer."""


class Local(Section, frozen=True, kw_only=True):
    """Each node's own disk, which is written before the run's folder and read before it."""

    path: str = ""
    """Folder on every node's own disk, such as /scratch/$USER (variables count); "": none."""
    every: Natural = 0
    """Steps between saves to it; 0: with every checkpoint of the run's folder."""
    keep: Count = 3
    """Newest ones kept, at least one more than checkpoint.buffers."""
    keep_every: Natural = 0
    """Also those whose step is a multiple of this are kept; 0: no such rule."""
    keep_best: Natural = 0
    """Also so many with the lowest validation loss are kept."""
    quota_gb: NonNegative = 0.0
    """Most GB that this name's runs may take on one node; 0: no limit."""


class Checkpoint(Section, frozen=True, kw_only=True):
    """When state is saved, and what a run starts from."""

    interval: Literal["auto", "off"] = "auto"
    """When every = 0: "auto" finds the interval that loses least, "off" saves only at the end."""
    every: Natural = 0
    """Steps between checkpoints; 0: by interval."""
    failure_rate: str = "auto"
    """For interval: failures per 1000 node-days, a site's ("llama3"), or "auto": the fleet's."""
    memory_every: Natural = 0
    """Steps between snapshots kept in memory; 0: by cost under agents, else only those written."""
    memory_share: Fraction = 0.03
    """By cost: most of the step time that snapshots may take on CUDA; 0: each step has one."""
    memory_at_most: Count = 64
    """By cost: most steps between snapshots, which a failure then costs."""
    keep: Natural = 2
    """Newest checkpoints kept; 0: all."""
    keep_every: Natural = 0
    """Also checkpoints whose step is a multiple of this are kept; 0: no such rule."""
    keep_best: Natural = 0
    """Also so many checkpoints with the lowest validation loss are kept."""
    quota_gb: NonNegative = 0.0
    """Most GB that all checkpoints below runs, a team's folder, may take; 0: no limit."""
    local: Local = Local()
    archive: Archive = Archive()
    at_end: bool = True
    """Save after the last step."""
    mode: Literal["async", "sync"] = "async"
    """Periodic saves are written asynchronously by a keeper, or stop it ("sync")."""
    buffers: Literal[1, 2] = 2
    """Snapshots in host memory; with 1 a save waits until the one before is written."""
    write_limit: NonNegative = 0.0
    """Most GB/s that one rank writes to disk; 0: as fast as it can."""
    stagger_seconds: NonNegative = 0.0
    """Time over which the ranks spread the start of their writing."""
    replicas: Literal[0, 1] = 0
    """Nodes that hold a copy of another node's newest snapshot in memory."""
    keeper_lease: Positive = 300.0
    """Seconds that a keeper holds the snapshots of workers that were killed."""
    resume: str = ""
    """Start from "auto" (the newest of this run's name) or a checkpoint's path; "": fresh."""
    weights_only: bool = False
    """Take only the weights of the checkpoint: optimizer, step and data start afresh."""
    load_hf: str = ""
    """Folder of Hugging Face safetensors to start from."""
    allow_other_model: bool = False
    """Start although settings differ that make the same weights compute something else."""


class Evaluate(Section, frozen=True, kw_only=True):
    """Scores of the model while it trains, by the gang itself: tasks, perplexity by domain."""

    every: Natural = 0
    """Steps between evaluations; 0: never."""
    tasks: tuple[str, ...] = ()
    """Tasks of lm-evaluation-harness that score likelihoods; those that write text are refused."""
    task_folder: str = ""
    """Folder of task files of your own; "": none."""
    few_shot: NaturalOrAuto = -1
    """Solved samples before each; -1: as a task says."""
    perplexity: dict[str, str] = {}
    """Domains by name: token shards, or text, that is scored token by token."""
    limit: Natural = 100
    """Samples of a task, and documents of a domain, that are scored; 0: all."""
    minutes: Annotated[float, Meta(gt=0, le=5_000_000)] = 10.0
    """Most time of one evaluation; what is not scored by then is said to be missing."""


class Log(Section, frozen=True, kw_only=True):
    """Where measurements go."""

    every: Count = 10
    """Steps between host reads of device values."""
    tensorboard: bool = True
    """Write TensorBoard events beside the JSONL."""
    wandb: bool = False
    """Send records to Weights & Biases."""
    mlflow: bool = False
    """Send records to MLflow."""
    tags: tuple[str, ...] = ()
    """Tags of the tracker's run: a word, or in MLflow "key=value"."""
    artifacts: tuple[Literal["config", "metrics", "checkpoint"], ...] = ()
    """Folders of the run that trackers get at its end; checkpoint: the newest one."""
    mfu: Literal["causal", "palm"] = "causal"
    """Attention FLOPs counted halved (causal), or in full (PaLM)."""
    profile_steps: tuple[int, int] | None = None
    """Steps [first, last) traced into logs/; "none": no trace."""


class OwnCode(Section, frozen=True, kw_only=True):
    """Python of your own, which ranks import and nothing else does."""

    files: tuple[str, ...] = ()
    """Python files, in this order, from the folder that the job runs in; sent with a submission."""
    callbacks: tuple[str, ...] = ()
    """Classes that attach to the loop, callbacks or metrics: "package:Class", or a plug-in."""


class Job(Section, frozen=True, kw_only=True):
    """One training job: the root of the tree."""

    name: str = "run"
    """Name of the run; its folder is runs/<name>/<id>/."""
    runs: str = "runs"
    """Folder that receives <name>/<id>/."""
    model: Model = Model()
    data: Data = Data()
    parallel: Parallel = Parallel()
    precision: Precision = Precision()
    memory: Memory = Memory()
    optimizer: Optimizer = Optimizer()
    schedule: Schedule = Schedule()
    train: Train = Train()
    adapter: Adapter = Adapter()
    preference: Preference = Preference()
    hand_off: HandOff = HandOff()
    checkpoint: Checkpoint = Checkpoint()
    evaluate: Evaluate = Evaluate()
    log: Log = Log()
    code: OwnCode = OwnCode()
    backend: Backend = Backend()


def gate_up_groups(ffn: int) -> int:
    """Row groups of a fused gate_up weight; tensor parallelism must divide them.

    The largest power of two up to 64 that divides ``ffn`` into groups of at least 16 rows.
    """
    groups = 64
    while groups > 1 and (ffn % groups or ffn // groups < 16):
        groups //= 2
    return groups
