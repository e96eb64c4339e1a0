"""Options that say how a job that runs is to change: for the estimate, and to carry it out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import typer

from phalanx.cli.options import JobNumber, Set
from phalanx.config import ConfigError, StageEdit
from phalanx.plan.search.what_if import JobChange


@dataclass(frozen=True, kw_only=True)
class ChangeOptions:
    """A job, and what is to be otherwise."""

    job: JobNumber
    overrides: Set = None
    gpus: Annotated[int, typer.Option(min=0, help="GPUs; 0: as many as now.")] = 0
    interval: Annotated[
        float, typer.Option(min=0, help="Seconds between checkpoints; 0: as now.")
    ] = 0.0
    spares: Annotated[int, typer.Option(min=-1, help="Spare nodes; -1: as now.")] = -1
    precision: Annotated[
        Literal["", "float32", "float16", "bfloat16", "fp8"], typer.Option(help="Number format.")
    ] = ""
    search: Annotated[bool, typer.Option("--search", help="Search for the best mapping.")] = False
    after_step: Annotated[
        int,
        typer.Option(
            metavar="STEP",
            min=0,
            help="Step after which a stage begins, for the next options; 0: as soon as is safe.",
        ),
    ] = 0
    weight: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SOURCE=SHARE",
            help="Weight of a source of the blend (repeatable); others are not drawn from.",
        ),
    ] = None
    sequence: Annotated[int, typer.Option(min=0, help="Tokens in a sample.")] = 0
    global_batch: Annotated[int, typer.Option(min=0, help="Samples in a step.")] = 0
    micro_batch: Annotated[int, typer.Option(min=0, help="Samples in one forward pass.")] = 0
    rope_scaling: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="Setting of model.rope_scaling (repeatable)."),
    ] = None
    remove: Annotated[
        bool, typer.Option("--remove", help="Remove the stages that begin after that step.")
    ] = False
    undo: Annotated[
        bool, typer.Option("--undo", help="Put back the stages of before they were changed last.")
    ] = False

    def change(self) -> JobChange:
        """What is asked for; ``ConfigError`` where a weight is none."""
        return JobChange(
            settings=tuple(self.overrides or ()),
            gpus=self.gpus,
            interval_seconds=self.interval,
            spares=self.spares,
            precision=self.precision,
            search=self.search,
            stage=self._stage(),
            undo=self.undo,
        )

    def _stage(self) -> StageEdit | None:
        edit = StageEdit(
            after_step=self.after_step,
            weights=dict(_weight(each) for each in self.weight or ()),
            sequence=self.sequence,
            global_batch=self.global_batch,
            micro_batch=self.micro_batch,
            rope_scaling=tuple(self.rope_scaling or ()),
            remove=self.remove,
        )
        return None if edit == StageEdit(after_step=0) else edit


def _weight(text: str) -> tuple[str, float]:
    name, _, share = text.partition("=")
    try:
        return name, float(share)
    except ValueError:
        fix = "e.g. --weight code=0.3 --weight web=0.7"
        raise ConfigError("--weight", text, "must be SOURCE=SHARE", fix) from None
