"""torchtitan's own Trainer as one side of the speed comparison, fed with random tokens."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import sys
import tempfile
import types
from collections.abc import Iterator
from typing import Any

import torch
from speed_shape import Row, State
from torch import Tensor

from phalanx.config import Model
from phalanx.plan.memory.model_counts import parameters

MISSING = """torchtitan cannot be imported: {error}
Install torchtitan==0.2.2 (and torchao for --fp8), or name a folder that holds the unpacked
packages: PHALANX_TITAN=/path/to/folder"""


def load_titan() -> None:
    """Make torchtitan importable, or end with what to do."""
    if folder := os.environ.get("PHALANX_TITAN"):
        sys.path.insert(0, folder)
    if importlib.util.find_spec("datasets") is None:
        # Only its text loader wants this package, and the loader is replaced below.
        root, distributed = types.ModuleType("datasets"), types.ModuleType("datasets.distributed")
        root.Dataset = root.load_dataset = distributed.split_dataset_by_node = object  # type: ignore[attr-defined]
        sys.modules |= {"datasets": root, "datasets.distributed": distributed}
    try:
        import torchtitan.train  # noqa: F401
    except ImportError as error:
        raise SystemExit(MISSING.format(error=error)) from error


class RandomTokens:
    """Endless batches in torchtitan's form."""

    def __init__(self, row: Row) -> None:
        generator = torch.Generator().manual_seed(0)
        size = (4, row.batch, row.sequence + 1)
        self.pool = torch.randint(row.model.vocab, size, generator=generator)

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        while True:
            for tokens in self.pool:
                yield {"input": tokens[:, :-1].contiguous()}, tokens[:, 1:].contiguous()


def job_config(row: Row) -> Any:
    """torchtitan's defaults but for: compile on, least recompute, this shape, no logging."""
    from torchtitan.config import JobConfig

    job = JobConfig()
    job.job.dump_folder = tempfile.mkdtemp()
    job.model.name, job.model.flavor = "phalanx_speed", row.name
    job.training.local_batch_size, job.training.seq_len = row.batch, row.sequence
    job.compile.enable = True
    job.activation_checkpoint.mode = row.titan_recompute
    job.metrics.log_freq = 1_000_000
    job.lr_scheduler.warmup_steps = 1
    if row.fp8:
        job.model.converters = ["quantize.linear.float8"]
        job.quantize.linear.float8.filter_fqns = ["output"]
    return job


def llama(model: Model) -> tuple[Any, Any]:
    """torchtitan's Llama 3 and the arguments that make it this model."""
    from torchtitan.models import llama3

    arguments = llama3.TransformerModelArgs(
        dim=model.dim,
        n_layers=model.layers,
        n_heads=model.heads,
        n_kv_heads=model.kv_heads,
        vocab_size=model.vocab,
        rope_theta=model.rope_theta,
        multiple_of=256,
        ffn_dim_multiplier=model.ffn / (8 * model.dim / 3),
    )
    return llama3.get_train_spec(), arguments


def qwen(model: Model) -> tuple[Any, Any]:
    """torchtitan's Qwen3 mixture of experts, likewise."""
    from torchtitan.models import qwen3
    from torchtitan.models.moe import MoEArgs

    assert model.moe is not None
    experts = MoEArgs(
        num_experts=model.moe.experts,
        num_shared_experts=0,
        top_k=model.moe.top_k,
        score_func="softmax",
        route_norm=True,
        score_before_experts=False,
    )
    arguments = qwen3.Qwen3ModelArgs(
        dim=model.dim,
        n_layers=model.layers,
        n_heads=model.heads,
        n_kv_heads=model.kv_heads,
        head_dim=model.head_dim,
        hidden_dim=model.ffn,
        vocab_size=model.vocab,
        rope_theta=model.rope_theta,
        norm_eps=model.norm_eps,
        qk_norm=True,
        moe_enabled=True,
        moe_inter_dim=model.moe.ffn,
        moe_args=experts,
    )
    return qwen3.get_train_spec(), arguments


class TitanSide:
    """Steps of torchtitan's Trainer."""

    def __init__(self, row: Row) -> None:
        load_titan()
        import torchtitan.components.quantization.float8  # noqa: F401  (registers the converter)
        from torchtitan.protocols.train_spec import register_train_spec
        from torchtitan.train import Trainer

        single = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
        os.environ.update(single | {"MASTER_PORT": "29411"})
        published, arguments = llama(row.model) if row.model.moe is None else qwen(row.model)
        spec = dataclasses.replace(
            published,
            model_args={row.name: arguments},
            build_tokenizer_fn=None,
            build_dataloader_fn=lambda **_: RandomTokens(row),
            state_dict_adapter=None,
        )
        register_train_spec("phalanx_speed", spec)
        self.trainer = Trainer(job_config(row))
        (self.model,) = self.trainer.model_parts
        theirs = sum(parameter.numel() for parameter in self.model.parameters())
        ours = parameters(row.model).total
        assert theirs == ours, f"torchtitan's model has {theirs:,} parameters, ours {ours:,}"
        self.batches = self.trainer.batch_generator(self.trainer.dataloader)

    def step(self) -> None:
        self.trainer.step += 1
        self.trainer.train_step(self.batches)

    def finish(self) -> None:
        """Gradients of the last step, dropped so that they are not parked."""
        self.trainer.optimizers.zero_grad()

    def state(self) -> State:
        (optimizer,) = self.trainer.optimizers.optimizers
        moments = [s[name] for s in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
        return State([p.detach() for p in self.model.parameters()], [], moments)
