"""A copy of a job that is small enough to be trained on many meshes, and has every form of it."""

from __future__ import annotations

from msgspec import structs

from phalanx.config import (
    Checkpoint,
    Data,
    Evaluate,
    Job,
    LatentAttentionShape,
    Log,
    Model,
    Moe,
    Schedule,
    resolve_model,
)

# Whatever a mesh of four ranks may split has so many parts.
DIM, HEADS, HEAD_DIM, FFN, VOCAB, LAYERS = 32, 4, 8, 64, 64, 4
EXPERTS, EXPERT_FFN = 4, 32
SEQUENCE, GLOBAL_BATCH = 32, 8
NEAR = 8  # tokens: less than a sequence, so that windows and scaled positions have an effect
ADAM_EPS = 1e-6  # above the rounding of gradients that cancel out, which Adam would enlarge


def shrunken(job: Job, steps: int) -> Job:
    """The job's model, optimizer and memory settings at the size of a test, in fp32 on CPUs."""
    train = structs.replace(
        job.train,
        steps=steps,
        global_batch=GLOBAL_BATCH,
        batch_ramp=(),
        sequence_stages=(),
        virtual_replicas=0,
        compile="off",
        device="cpu",
        cpu_threads=1,
        validate_every=0,
        verify_every=0,
    )
    return structs.replace(
        job,
        model=shrunken_model(resolve_model(job.model)),
        data=Data(sequence=SEQUENCE, seed=job.data.seed, prefetch=0),
        precision=structs.replace(job.precision, compute="float32", fp8=False),
        memory=structs.replace(job.memory, offload="none", offload_activations=False),
        optimizer=structs.replace(job.optimizer, state="float32", eps=ADAM_EPS),
        schedule=Schedule(kind="constant"),
        train=train,
        checkpoint=Checkpoint(interval="off", mode="sync"),
        evaluate=Evaluate(),
        log=Log(tensorboard=False),
    )


def shrunken_model(model: Model) -> Model:
    """A resolved model of the same form with a few thousand parameters."""
    grouped = model.kv_heads < model.heads
    scaling, window, mtp = model.rope_scaling, model.window, model.mtp
    return structs.replace(
        model,
        preset="",
        dim=DIM,
        layers=min(LAYERS, model.layers),
        heads=2 * HEADS if grouped else HEADS,
        kv_heads=HEADS,
        head_dim=HEAD_DIM,
        ffn=FFN,
        vocab=VOCAB,
        rotary_fraction=max(1, round(4 * model.rotary_fraction)) / 4,
        nope_every=min(model.nope_every, 2),
        rope_scaling=scaling and structs.replace(scaling, original_context=NEAR),
        window=window and structs.replace(window, size=NEAR, full_every=min(window.full_every, 2)),
        latent=model.latent and _latent(model.latent),
        moe=model.moe and _moe(model.moe),
        mtp=mtp and structs.replace(mtp, layers=min(mtp.layers, 2)),
    )


def _latent(latent: LatentAttentionShape) -> LatentAttentionShape:
    return LatentAttentionShape(
        query_rank=16 if latent.query_rank else 0,
        key_value_rank=16,
        content_head_dim=8,
        rope_head_dim=4,
        value_head_dim=8,
    )


def _moe(moe: Moe) -> Moe:
    grouped = moe.groups > 1
    return structs.replace(
        moe,
        experts=EXPERTS,
        top_k=min(moe.top_k, 2),
        ffn=EXPERT_FFN,
        shared_experts=min(moe.shared_experts, 1),
        shared_ffn=EXPERT_FFN if moe.shared_ffn or moe.shared_experts else 0,
        first_dense_layers=min(moe.first_dense_layers, 1),
        groups=2 if grouped else 1,
        top_groups=1,
    )
