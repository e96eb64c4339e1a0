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
from speed_shape import SEQUENCE, Shape, State
from torch import Tensor

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

    def __init__(self, shape: Shape) -> None:
        generator = torch.Generator().manual_seed(0)
        size = (4, shape.batch, SEQUENCE + 1)
        self.pool = torch.randint(shape.model.vocab, size, generator=generator)

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        while True:
            for tokens in self.pool:
                yield {"input": tokens[:, :-1].contiguous()}, tokens[:, 1:].contiguous()


def job_config(shape: Shape, fp8: bool, fp8_head: bool) -> Any:
    """torchtitan's defaults but for: compile on, no recompute, this shape, no logging."""
    from torchtitan.config import JobConfig

    job = JobConfig()
    job.job.dump_folder = tempfile.mkdtemp()
    job.model.name, job.model.flavor = "phalanx_speed", shape.name
    job.training.local_batch_size, job.training.seq_len = shape.batch, SEQUENCE
    job.compile.enable = True
    job.activation_checkpoint.mode = "none"
    job.metrics.log_freq = 1_000_000
    job.lr_scheduler.warmup_steps = 1
    if fp8:
        job.model.converters = ["quantize.linear.float8"]
        job.quantize.linear.float8.filter_fqns = [] if fp8_head else ["output"]
    return job


class TitanSide:
    """Steps of torchtitan's Trainer."""

    def __init__(self, shape: Shape, fp8: bool, fp8_head: bool = False) -> None:
        load_titan()
        import torchtitan.components.quantization.float8  # noqa: F401  (registers the converter)
        from torchtitan.models import llama3
        from torchtitan.protocols.train_spec import register_train_spec
        from torchtitan.train import Trainer

        single = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
        os.environ.update(single | {"MASTER_PORT": "29411"})
        model = shape.model
        arguments = llama3.TransformerModelArgs(
            dim=model.dim, n_layers=model.layers, n_heads=model.heads, n_kv_heads=model.kv_heads,
            vocab_size=model.vocab, rope_theta=model.rope_theta, multiple_of=256,
            ffn_dim_multiplier=model.ffn / (8 * model.dim / 3),
        )  # fmt: skip
        spec = dataclasses.replace(
            llama3.get_train_spec(),
            model_args={shape.name: arguments},
            build_tokenizer_fn=None,
            build_dataloader_fn=lambda **_: RandomTokens(shape),
            state_dict_adapter=None,
        )
        register_train_spec("phalanx_speed", spec)
        self.trainer = Trainer(job_config(shape, fp8, fp8_head))
        (self.model,) = self.trainer.model_parts
        hidden = self.model.layers["0"].feed_forward.w1.weight.shape[0]
        assert hidden == model.ffn, f"torchtitan rounds ffn {model.ffn} to {hidden}"
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
