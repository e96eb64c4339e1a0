"""Options of commands that load a checkpoint's model, and its place made of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from phalanx.cli.output import fail
from phalanx.train.rank.threads import keep_single_threaded

if TYPE_CHECKING:
    from phalanx.train.evaluate.run import ModelPlace


class ComputeDevice(StrEnum):
    """What a model computes on."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


class ComputeDtype(StrEnum):
    """Number formats that a model computes in."""

    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


@dataclass(frozen=True)
class ModelOptions:
    """Which model, and where it computes."""

    checkpoint: Annotated[
        str, typer.Argument(help="A checkpoint or its address, a run, runs of a name: the newest.")
    ]
    device: Annotated[ComputeDevice, typer.Option(help="auto: CUDA where there is one.")] = (
        ComputeDevice.auto
    )
    dtype: Annotated[ComputeDtype, typer.Option(help="auto: float32 on CPU, bfloat16 on CUDA.")] = (
        ComputeDtype.auto
    )
    ranks: Annotated[int, typer.Option(min=1, max=64, help="Processes on this machine.")] = 1
    tensor: Annotated[
        int, typer.Option(min=1, max=64, help="Tensor-parallel ranks among them.")
    ] = 1
    sequence: Annotated[
        int, typer.Option(min=0, help="Context length in tokens; 0: as it was trained.")
    ] = 0
    tokenizer: Annotated[
        Path | None,
        typer.Option(help="tokenizer.json or its folder (default: that of the run's corpus)."),
    ] = None
    ema: Annotated[
        bool, typer.Option("--ema", help="The moving average of the weights, not the weights.")
    ] = False
    batch: Annotated[int, typer.Option(min=1, help="Batch size per process.")] = 8

    def place(self) -> ModelPlace:
        """What the model is loaded onto; torch is imported now, ready for ranks to be forked."""
        if self.ranks > 1:
            keep_single_threaded()
        from phalanx.train.evaluate.run import ModelPlace

        return ModelPlace(
            checkpoint=self.checkpoint,
            device=self.device.value,
            dtype=self.dtype.value,
            ranks=self.ranks,
            tensor=self.tensor,
            sequence=self.sequence,
            tokenizer=str(self.tokenizer or ""),
            rows=self.batch,
            average=self.ema,
        )


@contextmanager
def exit_on_evaluation_error(json: bool) -> Iterator[None]:
    """Print why there is no answer, and end with the exit code of checkpoints."""
    from phalanx.train.evaluate.run import EvaluationError
    from phalanx.train.exits import ExitCode

    try:
        yield
    except EvaluationError as error:
        shown = {"error": str(error), "code": ExitCode.CHECKPOINT} if json else None
        fail(error, ExitCode.CHECKPOINT, shown)
