"""The transformer and its MoE layers as plain modules; nothing here knows of parallelism."""

from phalanx.model.attention import CausalAttention, GroupedQueryAttention, LatentAttention
from phalanx.model.block import Block
from phalanx.model.declare import (
    REPLICATED,
    RESIDUAL,
    ROWS,
    SCALE,
    Declaration,
    declarations,
    declare,
    declared,
    is_orthogonalized,
)
from phalanx.model.init import draw, fill, key_of, width_factors
from phalanx.model.layer import Layer
from phalanx.model.layers import Dropout, ForwardContext, RMSNorm
from phalanx.model.loss import TokenLoss, VocabSlice, linear_cross_entropy
from phalanx.model.moe import Experts, MoeLayer, Router
from phalanx.model.mtp import PredictionLayer
from phalanx.model.post_training import prepare_post_training
from phalanx.model.score_peaks import ScorePeaks
from phalanx.model.transformer import Embedding, Head, Transformer, make_model

__all__ = [
    "REPLICATED",
    "RESIDUAL",
    "ROWS",
    "SCALE",
    "Block",
    "CausalAttention",
    "Declaration",
    "Dropout",
    "Embedding",
    "Experts",
    "ForwardContext",
    "GroupedQueryAttention",
    "Head",
    "LatentAttention",
    "Layer",
    "MoeLayer",
    "PredictionLayer",
    "RMSNorm",
    "Router",
    "ScorePeaks",
    "TokenLoss",
    "Transformer",
    "VocabSlice",
    "declarations",
    "declare",
    "declared",
    "draw",
    "fill",
    "is_orthogonalized",
    "key_of",
    "linear_cross_entropy",
    "make_model",
    "prepare_post_training",
    "width_factors",
]
