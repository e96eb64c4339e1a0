"""Published model shapes by name, and small ones that train on a CPU."""

from __future__ import annotations

import math

from msgspec import structs

from phalanx.config.schema import LatentAttentionShape, Model, Moe, RopeScaling, Window

TINY = Model(
    preset="tiny", dim=128, layers=4, heads=8, kv_heads=4, head_dim=16, ffn=512, vocab=4096
)

TINY_MOE = Model(
    preset="tiny-moe",
    dim=128,
    layers=4,
    heads=8,
    kv_heads=4,
    head_dim=16,
    ffn=512,
    vocab=4096,
    moe=Moe(experts=8, top_k=2, ffn=256),
)

# Llama 3.2, which scales RoPE by 32. The published models tie embedding and head; here they are
# untied (model.tied_embedding = true is theirs).
LLAMA3_1B = Model(
    preset="llama3-1b",
    dim=2048,
    layers=16,
    heads=32,
    kv_heads=8,
    head_dim=64,
    ffn=8192,
    vocab=128256,
    rope_scaling=RopeScaling(factor=32.0),
)
LLAMA3_3B = Model(
    preset="llama3-3b",
    dim=3072,
    layers=28,
    heads=24,
    kv_heads=8,
    head_dim=128,
    ffn=8192,
    vocab=128256,
    rope_scaling=RopeScaling(factor=32.0),
)

# Llama 3 (April 2024): no RoPE scaling.
LLAMA3_8B = Model(
    preset="llama3-8b",
    dim=4096,
    layers=32,
    heads=32,
    kv_heads=8,
    head_dim=128,
    ffn=14336,
    vocab=128256,
)
LLAMA3_70B = Model(
    preset="llama3-70b",
    dim=8192,
    layers=80,
    heads=64,
    kv_heads=8,
    head_dim=128,
    ffn=28672,
    vocab=128256,
)

# Llama 3.1, which scales RoPE by 8.
LLAMA3_405B = Model(
    preset="llama3-405b",
    dim=16384,
    layers=126,
    heads=128,
    kv_heads=8,
    head_dim=128,
    ffn=53248,
    vocab=128256,
    rope_scaling=RopeScaling(factor=8.0),
)

LLAMA31_8B = structs.replace(LLAMA3_8B, preset="llama3.1-8b", rope_scaling=RopeScaling(factor=8.0))
LLAMA31_70B = structs.replace(
    LLAMA3_70B, preset="llama3.1-70b", rope_scaling=RopeScaling(factor=8.0)
)

# Version 0.1, the one with a window; later ones see all.
MISTRAL_7B = Model(
    preset="mistral-7b",
    dim=4096,
    layers=32,
    heads=32,
    kv_heads=8,
    head_dim=128,
    ffn=14336,
    vocab=32000,
    rope_theta=10_000.0,
    window=Window(size=4096),
)

QWEN25_7B = Model(
    preset="qwen2.5-7b",
    dim=3584,
    layers=28,
    heads=28,
    kv_heads=4,
    head_dim=128,
    ffn=18944,
    vocab=152064,
    norm_eps=1e-6,
    rope_theta=1_000_000.0,
    attention_bias=True,
)
QWEN3_8B = Model(
    preset="qwen3-8b",
    dim=4096,
    layers=36,
    heads=32,
    kv_heads=8,
    head_dim=128,
    ffn=12288,
    vocab=151936,
    norm_eps=1e-6,
    rope_theta=1_000_000.0,
    qk_norm=True,
)

SMOLLM3_3B = Model(
    preset="smollm3-3b",
    dim=2048,
    layers=36,
    heads=16,
    kv_heads=4,
    head_dim=128,
    ffn=11008,
    vocab=128256,
    norm_eps=1e-6,
    rope_theta=5_000_000.0,
    nope_every=4,
    tied_embedding=True,
)

# Every second layer has a window; scores and logits are capped.
GEMMA2_9B = Model(
    preset="gemma2-9b",
    dim=3584,
    layers=42,
    heads=16,
    kv_heads=8,
    head_dim=256,
    ffn=14336,
    vocab=256000,
    mlp="geglu",
    norm="sandwich",
    norm_eps=1e-6,
    norm_offset=True,
    rope_theta=10_000.0,
    window=Window(size=4096, full_every=2),
    attention_softcap=50.0,
    logit_softcap=30.0,
    embedding_scale=math.sqrt(3584),
    tied_embedding=True,
)

# Gemma 3's text models: five layers with a window to one without, which alone are scaled.
GEMMA3_1B = Model(
    preset="gemma3-1b",
    dim=1152,
    layers=26,
    heads=4,
    kv_heads=1,
    head_dim=256,
    ffn=6912,
    vocab=262144,
    mlp="geglu",
    norm="sandwich",
    norm_eps=1e-6,
    norm_offset=True,
    rope_theta=1_000_000.0,
    window=Window(size=512, full_every=6, rope_theta=10_000.0),
    qk_norm=True,
    embedding_scale=math.sqrt(1152),
    tied_embedding=True,
)
GEMMA3_27B = structs.replace(
    GEMMA3_1B,
    preset="gemma3-27b",
    dim=5376,
    layers=62,
    heads=32,
    kv_heads=16,
    head_dim=128,
    ffn=21504,
    vocab=262208,
    rope_scaling=RopeScaling(kind="linear", factor=8.0),
    window=Window(size=1024, full_every=6, rope_theta=10_000.0, rope_scaled=False),
    attention_scale=168**-0.5,
    embedding_scale=math.sqrt(5376),
)

OLMO2_7B = Model(
    preset="olmo2-7b",
    dim=4096,
    layers=32,
    heads=32,
    kv_heads=32,
    head_dim=128,
    ffn=11008,
    vocab=100352,
    norm="post",
    norm_eps=1e-6,
    qk_norm=True,
    qk_norm_over="all",
)

# As it was trained at 8k; to 64k it went with YaRN (factor 8) in the layers that see all.
OLMO3_7B = structs.replace(
    OLMO2_7B,
    preset="olmo3-7b",
    vocab=100278,
    window=Window(size=4096, full_every=4),
)

# The shape of GPT-3 with this project's blocks: RoPE, RMSNorm, no biases, untied head. The
# vocabulary of 50257 is padded to a multiple of 128.
GPT3_175B = Model(
    preset="gpt3-175b",
    dim=12288,
    layers=96,
    heads=96,
    kv_heads=96,
    head_dim=128,
    ffn=49152,
    vocab=50304,
    mlp="gelu",
    rope_theta=10_000.0,
)

# Balance losses of published models are theirs times experts of a token, by layers: ours is each
# layer's own (phalanx/model/hf/config.py).
MIXTRAL_8X7B = Model(
    preset="mixtral-8x7b",
    dim=4096,
    layers=32,
    heads=32,
    kv_heads=8,
    head_dim=128,
    ffn=14336,
    vocab=32000,
    rope_theta=1_000_000.0,
    moe=Moe(experts=8, top_k=2, ffn=14336, auxiliary_coefficient=0.02 * 2 / 32),
)

# The published files hold the experts in MXFP4; the shape is that of the 16-bit model.
GPT_OSS_20B = Model(
    preset="gpt-oss-20b",
    dim=2880,
    layers=24,
    heads=64,
    kv_heads=8,
    head_dim=64,
    ffn=2880,
    vocab=201088,
    mlp="swiglu-clamped",
    rope_theta=150_000.0,
    rope_scaling=RopeScaling(kind="yarn", factor=32.0, original_context=4096, round_bounds=False),
    window=Window(size=128, full_every=2),
    attention_bias=True,
    attention_out_bias=True,
    attention_sinks=True,
    moe=Moe(experts=32, top_k=4, ffn=2880, biases=True),
)
GPT_OSS_120B = structs.replace(
    GPT_OSS_20B,
    preset="gpt-oss-120b",
    layers=36,
    moe=Moe(experts=128, top_k=4, ffn=2880, biases=True),
)

QWEN2_MOE_57B_A14B = Model(
    preset="qwen2-moe-57b-a14b",
    dim=3584,
    layers=28,
    heads=28,
    kv_heads=4,
    head_dim=128,
    ffn=18944,
    vocab=151936,
    norm_eps=1e-6,
    rope_theta=1_000_000.0,
    attention_bias=True,
    moe=Moe(
        experts=64,
        top_k=8,
        ffn=2560,
        shared_experts=1,
        shared_ffn=20480,
        shared_gate=True,
        normalize_top_k=False,
        auxiliary_coefficient=0.001 * 8 / 28,
    ),
)

QWEN3_MOE_30B_A3B = Model(
    preset="qwen3-moe-30b-a3b",
    dim=2048,
    layers=48,
    heads=32,
    kv_heads=4,
    head_dim=128,
    ffn=6144,
    vocab=151936,
    norm_eps=1e-6,
    rope_theta=1_000_000.0,
    qk_norm=True,
    moe=Moe(experts=128, top_k=8, ffn=768, auxiliary_coefficient=0.001 * 8 / 48),
)

# The shape of DeepSeek-V3 without its multi-token prediction (add model.mtp.layers = 1), its
# group-limited routing (add model.moe.groups = 8 and top_groups = 4) and its YaRN scaling.
DEEPSEEK_V3 = Model(
    preset="deepseek-v3",
    dim=7168,
    layers=61,
    heads=128,
    kv_heads=128,
    head_dim=192,
    ffn=18432,
    vocab=129280,
    norm_eps=1e-6,
    rope_theta=10_000.0,
    latent=LatentAttentionShape(),
    moe=Moe(
        experts=256,
        top_k=8,
        ffn=2048,
        shared_experts=1,
        shared_ffn=2048,
        first_dense_layers=3,
        score="sigmoid",
        route_scale=2.5,
        balance="bias",
    ),
)

# A dense model of 1.006e12 parameters whose layers, heads and MLP divide by 16, 8 and 64.
DENSE_1T = Model(
    preset="dense-1t",
    dim=25600,
    layers=128,
    heads=200,
    kv_heads=8,
    head_dim=128,
    ffn=83968,
    vocab=128256,
)

PRESETS: dict[str, Model] = {
    model.preset: model
    for model in (
        TINY,
        TINY_MOE,
        LLAMA3_1B,
        LLAMA3_3B,
        LLAMA3_8B,
        LLAMA3_70B,
        LLAMA31_8B,
        LLAMA31_70B,
        LLAMA3_405B,
        MISTRAL_7B,
        QWEN25_7B,
        QWEN3_8B,
        SMOLLM3_3B,
        GEMMA2_9B,
        GEMMA3_1B,
        GEMMA3_27B,
        OLMO2_7B,
        OLMO3_7B,
        GPT3_175B,
        MIXTRAL_8X7B,
        GPT_OSS_20B,
        GPT_OSS_120B,
        QWEN2_MOE_57B_A14B,
        QWEN3_MOE_30B_A3B,
        DEEPSEEK_V3,
        DENSE_1T,
    )
}
