"""Writes a checkpoint with Megatron-core itself on the CPU, and the logits of its model.

    python megatron_writer.py dense|mixture|dense-split|mixture-alone FOLDER

``split``: saved by four ranks, each matrix in two and the layers in two stages; ``alone``: each
layer and expert in a tensor of its own.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import distributed, multiprocessing
from torch._C._distributed_c10d import TCPStore

SHAPE = {"dim": 64, "layers": 2, "heads": 4, "kv_heads": 2, "ffn": 128, "vocab": 256}
EXPERTS = {"experts": 4, "top_k": 2, "ffn": 96}


def without_cuda() -> None:
    """Megatron asks for a device where it needs none."""
    torch.cuda.synchronize = lambda *_: None
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]


class NoGenerators:
    """Stands in for the generators of CUDA devices: dropout is off."""

    def fork(self, *_: object) -> nullcontext[None]:
        return nullcontext()


def gpt(kind: str, **split: int) -> Any:
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.moe import moe_utils
    from megatron.core.transformer.transformer_config import TransformerConfig

    tensor_parallel.get_cuda_rng_tracker = NoGenerators
    moe_utils.te_general_gemm = None
    experts = EXPERTS["experts"] if kind.startswith("mixture") else None
    routed = {
        "num_moe_experts": experts,
        "moe_router_topk": EXPERTS["top_k"],
        "moe_ffn_hidden_size": EXPERTS["ffn"],
        "moe_token_dispatcher_type": "allgather",
    }
    config = TransformerConfig(
        num_layers=SHAPE["layers"],
        hidden_size=SHAPE["dim"],
        num_attention_heads=SHAPE["heads"],
        num_query_groups=SHAPE["kv_heads"],
        ffn_hidden_size=SHAPE["ffn"],
        use_cpu_initialization=True,
        pipeline_dtype=torch.float32,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        normalization="RMSNorm",
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bias_activation_fusion=False,
        **split,
        **(routed if experts else {}),
    )
    return GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(
            num_experts=experts, moe_grouped_gemm=False, normalization="RMSNorm"
        ),
        vocab_size=SHAPE["vocab"],
        max_sequence_length=64,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        position_embedding_type="rope",
        rotary_base=10_000,
        share_embeddings_and_output_weights=False,
    ).eval()


def join(rank: int, ranks: int, port: int, tensor: int, pipeline: int) -> None:
    from megatron.core import parallel_state

    without_cuda()
    store = TCPStore("127.0.0.1", port, ranks, is_master=rank == 0)
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    parallel_state.initialize_model_parallel(tensor, pipeline)
    torch.manual_seed(rank)


def save(rank: int, ranks: int, port: int, kind: str, folder: Path) -> None:
    from megatron.core import dist_checkpointing

    tensor, pipeline = (2, 2) if ranks > 1 else (1, 1)
    join(rank, ranks, port, tensor, pipeline)
    model = gpt(kind, tensor_model_parallel_size=tensor, pipeline_model_parallel_size=pipeline)
    metadata = {"singleton_local_shards": True} if kind.endswith("alone") else None
    dist_checkpointing.save(model.sharded_state_dict(metadata=metadata), str(folder))
    distributed.destroy_process_group()


def compute(port: int, kind: str, folder: Path) -> None:
    """Logits of the model that Megatron itself reads from the checkpoint, on one rank."""
    from megatron.core import dist_checkpointing

    join(0, 1, port, 1, 1)
    model = gpt(kind)
    metadata = {"singleton_local_shards": True} if kind.endswith("alone") else None
    wanted = model.sharded_state_dict(metadata=metadata)
    model.load_state_dict(dist_checkpointing.load(wanted, str(folder / "checkpoint")))
    tokens = torch.randint(SHAPE["vocab"], (1, 16))
    later = torch.ones(1, 1, 16, 16, dtype=torch.bool).triu(1)
    with torch.no_grad():
        logits = model(tokens, torch.arange(16)[None], later)
    torch.save({"tokens": tokens, "logits": logits}, folder / "logits.pt")


def free_port() -> int:
    return int(TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False).port)


def main() -> None:
    kind, folder = sys.argv[1], Path(sys.argv[2])
    checkpoint = folder / "checkpoint"
    checkpoint.mkdir()
    ranks = 4 if kind.endswith("split") else 1
    os.environ["OMP_NUM_THREADS"] = "1"
    start = multiprocessing.get_context("spawn")
    port = free_port()
    members = [
        start.Process(target=save, args=(rank, ranks, port, kind, checkpoint))
        for rank in range(ranks)
    ]
    for member in members:
        member.start()
    for member in members:
        member.join()
        assert member.exitcode == 0
    compute(free_port(), kind, folder)
    shape: dict[str, Any] = {**SHAPE, "rope_theta": 10_000.0}
    if kind.startswith("mixture"):
        shape["moe"] = EXPERTS
    (folder / "shape.json").write_text(json.dumps(shape))


if __name__ == "__main__":
    main()
