"""Published model shapes by name, and small ones that train on a CPU."""

from __future__ import annotations

from phalanx.config.schema import LatentAttention, Model, Moe, RopeScaling

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
# untied, so that pipeline stages need not share a weight.
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

# Llama 3 (April 2024): no RoPE scaling. For 3.1's 8B and 70B add [model.rope_scaling].
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
    moe=Moe(experts=8, top_k=2, ffn=14336, auxiliary_coefficient=0.02),
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
    moe=Moe(experts=128, top_k=8, ffn=768, auxiliary_coefficient=0.001),
)

# The shape of DeepSeek-V3 without its multi-token prediction layer, its group-limited routing
# (experts are chosen among all) and its YaRN scaling.
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
    latent=LatentAttention(),
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
        LLAMA3_405B,
        GPT3_175B,
        MIXTRAL_8X7B,
        QWEN3_MOE_30B_A3B,
        DEEPSEEK_V3,
        DENSE_1T,
    )
}
