"""What follows from settings: those that a job leaves open, and what each layer is made of."""

from __future__ import annotations

from fnmatch import fnmatchcase

from msgspec import structs

from phalanx.config.errors import ConfigError, did_you_mean
from phalanx.config.load import load_job, unknown_preset
from phalanx.config.presets import PRESETS
from phalanx.config.schema import Job, Model, Moe, Optimizer, Parallel, ParameterGroup

PLAIN_MLPS = ("gelu", "gelu-exact", "relu2")  # two matrices; the others have a gate as well
LEAST_VERIFIED_ZERO = 2  # below, gradients of several micro-batches are reduced together
VERIFY_EVERY = 200  # a micro-batch more in so many steps: half a percent at most
VIRTUAL_STAGES = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zero-bubble": 2}


def resolve(job: Job, world_size: int) -> Job:
    """The same job with every derived field filled in; ``check`` says whether it can run."""
    model = resolve_model(job.model)
    return structs.replace(job, model=model, parallel=_parallel(job, model, world_size))


def resolve_model(model: Model) -> Model:
    """The model with its preset, key/value heads, head width and shared experts filled in."""
    model = _fill_preset(model)
    kv_heads = model.kv_heads or model.heads
    head_dim = model.head_dim or (model.dim // model.heads if model.heads else 0)
    if model.latent is not None:
        head_dim = model.latent.content_head_dim + model.latent.rope_head_dim
    moe = model.moe
    if moe is not None and moe.shared_experts and not moe.shared_ffn:
        moe = structs.replace(moe, shared_ffn=moe.shared_experts * moe.ffn)
    return structs.replace(model, kv_heads=kv_heads, head_dim=head_dim, moe=moe)


def verification_interval(job: Job, device: str) -> int:
    """Steps between recomputations of gradients; 0: none. ``job`` is resolved.

    Replicas compare their weights: where nothing else is said, it is for those who have none. On
    CUDA somebody has to ask for it: no card has shown yet that its kernels repeat themselves.
    """
    axes, every = job.parallel, job.train.verify_every
    if job.train.virtual_replicas:
        return 0  # its sums are made where the recomputed ones would be compared
    split = max(axes.tensor, axes.pipeline, axes.context, axes.expert) > 1
    sharded = axes.data > 1 and axes.replicate == 1 and axes.zero >= LEAST_VERIFIED_ZERO
    if every < 0:
        return VERIFY_EVERY if sharded and not split and device == "cpu" else 0
    return every


def default_world_size(job: Job, devices: int) -> int:
    """How many ranks to start when nobody says: the product of the axes where it is known,
    otherwise one for each of this machine's devices.
    """
    axes = job.parallel
    fixed = axes.pipeline * axes.context * axes.tensor
    if axes.data or not devices or job.train.device == "cpu":
        return fixed * max(1, axes.data)
    return devices


def named_model(text: str) -> Model:
    """The resolved model of a preset's name, or of a job file (``*.toml``)."""
    if text.endswith(".toml"):
        return model_of_job(load_job(text), text)
    if text not in PRESETS:
        fix = did_you_mean(text.casefold(), list(PRESETS)) + " (or a job file, *.toml)"
        raise ConfigError("model", f'"{text}"', "no such model", fix)
    return resolve_model(PRESETS[text])


def model_of_job(job: Job, path: str) -> Model:
    """The resolved model of a job that was read from ``path``; an error where it names none."""
    model = resolve_model(job.model)
    if not (model.dim and model.layers and model.heads and model.vocab):
        raise ConfigError("model", path, "gives no model shape", "set model.preset in it")
    return model


def _fill_preset(model: Model) -> Model:
    # A model from a file is complete already; one made in code may name a preset and a few
    # fields, and then a field left at its default takes the preset's value.
    if not model.preset or (model.dim and model.layers and model.heads and model.vocab):
        return model
    if model.preset not in PRESETS:
        raise ConfigError.of([unknown_preset(model.preset)])
    preset, default = PRESETS[model.preset], Model()
    left_out = {
        name: getattr(preset, name)
        for name in Model.__struct_fields__
        if getattr(model, name) == getattr(default, name)
    }
    return structs.replace(model, **left_out)


def _parallel(job: Job, model: Model, world_size: int) -> Parallel:
    axes = job.parallel
    data = axes.data or max(1, world_size // (axes.pipeline * axes.context * axes.tensor))
    stages = VIRTUAL_STAGES[axes.schedule] if axes.pipeline > 1 else 1
    return structs.replace(
        axes,
        data=data,
        # zero = 0 shards nothing: every replica holds a full copy.
        replicate=data if axes.zero == 0 and axes.replicate == 1 else axes.replicate,
        virtual_stages=axes.virtual_stages or stages,
        context_method=_context_method(job, model),
    )


def _context_method(job: Job, model: Model) -> str:
    """Ulysses moves less and needs whole heads on each rank; the ring has no such limit."""
    axes = job.parallel
    if axes.context_method != "auto":
        return axes.context_method
    heads = model.heads if model.latent is not None else model.kv_heads
    fits = heads % (axes.tensor * axes.context) == 0
    return "ulysses" if axes.context > 1 and (fits or not ring_computes(model)) else "ring"


def parameter_group(optimizer: Optimizer, name: str) -> ParameterGroup | None:
    """The first group that a parameter belongs to, if any."""
    return next((g for g in optimizer.groups if fnmatchcase(name, g.pattern)), None)


def is_gated(model: Model) -> bool:
    """Whether the dense MLP has a gate: three matrices, not two."""
    return model.mlp not in PLAIN_MLPS


def has_window(model: Model, layer: int) -> bool:
    """Whether a layer sees the nearest tokens only."""
    window = model.window
    return window is not None and not _is_each(layer, window.full_every)


def shares_embedding(model: Model) -> bool:
    """Whether the embedding serves beside the head: a pipeline's last stage has a copy of it."""
    return model.tied_embedding or model.mtp is not None


def ring_computes(model: Model) -> bool:
    """Whether ring attention can: it has neither windows nor scores of another form."""
    return model.window is None and not reforms_scores(model)


def reforms_scores(model: Model) -> bool:
    """Whether attention is more than the softmax of scaled scores that fused kernels know."""
    return model.attention_softcap > 0 or model.attention_sinks or model.qk_clip > 0


def has_expert_bias(moe: Moe | None) -> bool:
    """Whether a bias takes part in the choice of experts."""
    return moe is not None and moe.balance in ("bias", "bias-auxiliary")


def has_balance_loss(moe: Moe | None) -> bool:
    """Whether a loss keeps experts equally busy."""
    return moe is not None and moe.balance in ("auxiliary", "bias-auxiliary")


def rotated_width(model: Model, layer: int) -> int:
    """Leading dimensions of a head that RoPE rotates in a layer; latent heads have their own."""
    return 0 if _is_each(layer, model.nope_every) else int(model.head_dim * model.rotary_fraction)


def _is_each(layer: int, every: int) -> bool:
    return every > 0 and (layer + 1) % every == 0
