"""The transformer and its MoE layers as plain modules; nothing here knows of parallelism."""

from phalanx.model.attention import CausalAttention, GroupedQueryAttention, LatentAttention
from phalanx.model.init import fill, initial_std, key_of
from phalanx.model.layers import ForwardContext, RMSNorm
from phalanx.model.loss import VocabSlice, linear_cross_entropy
from phalanx.model.moe import Experts, MoeLayer, Router
from phalanx.model.transformer import Block, Embedding, Head, Transformer

__all__ = [
    "Block",
    "CausalAttention",
    "Embedding",
    "Experts",
    "ForwardContext",
    "GroupedQueryAttention",
    "Head",
    "LatentAttention",
    "MoeLayer",
    "RMSNorm",
    "Router",
    "Transformer",
    "VocabSlice",
    "fill",
    "initial_std",
    "key_of",
    "linear_cross_entropy",
]
