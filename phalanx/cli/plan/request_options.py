"""The options that say what is to be planned, shared by the commands of ``phalanx plan``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import typer

from phalanx.cli.option_struct import option, with_options
from phalanx.config import STATE_FORMATS
from phalanx.plan.question.request import OBJECTIVES, PlanRequest
from phalanx.plan.stacks import STACKS, UNNAMED
from phalanx.plan.workload import OFFLOADS, PRECISIONS, RECOMPUTES, ROUTING_SKEW, SCHEDULES

PIN = "Fix a part of the mapping"


def _words(words: tuple[str, ...]) -> str:
    return ", ".join(words)


def _option(*names: str, help: str, panel: str | None = None, **more: Any) -> Any:
    return typer.Option(*names, help=help, rich_help_panel=panel, **more)


# Field of Request -> type with its option, and default.
OPTIONS: dict[str, tuple[Any, Any]] = {
    "model": (Annotated[str, _option("--model", help="A preset, or a job file (*.toml).")], ""),
    "cluster": (
        Annotated[str, _option("--cluster", help="E.g. h100-16k, gb200-nvl72-4608, or *.toml.")],
        "",
    ),
    "tokens": (Annotated[str, _option("--tokens", help="Tokens to train on, e.g. 15T.")], ""),
    "sequence": (Annotated[str, _option("--sequence", help="Tokens in a sample, e.g. 8k.")], ""),
    "batch": (Annotated[str, _option("--batch", help="Tokens in a step, e.g. 16M.")], ""),
    "objective": (Annotated[str, _option("--objective", help=_words(OBJECTIVES))], "tokens"),
    "robust": (
        Annotated[
            bool,
            _option(
                "--robust/--expected",
                help="Optimise for the 90th percentile of the error model, or for the mean.",
            ),
        ],
        True,
    ),
    "price": (Annotated[float | None, _option("--price", help="Dollars a GPU-hour.")], None),
    "failure_rate": (
        Annotated[
            str,
            _option(
                "--failure-rate",
                help="llama3, rsc-1, rsc-2, a number per 1000 node-days, or fleet: as seen.",
            ),
        ],
        "",
    ),
    "recovery_seconds": (
        Annotated[
            float | None,
            _option("--recovery-seconds", help="Seconds from a failure to the next step."),
        ],
        None,
    ),
    "constants": (
        Annotated[str, _option("--constants", help="File made by plan calibrate.")],
        "",
    ),
    "stack": (
        Annotated[
            str,
            _option(
                "--stack",
                help=f"Training software: {_words((*STACKS, UNNAMED))}; or traits, fused=false.",
            ),
        ],
        "",
    ),
    "routing": (
        Annotated[
            str,
            _option(
                "--routing", help=f"Of tokens to experts: {_words(tuple(ROUTING_SKEW))} (forced)."
            ),
        ],
        "",
    ),
    "tensor": (Annotated[int | None, _option("--tp", help="Tensor.", panel=PIN)], None),
    "pipeline": (Annotated[int | None, _option("--pp", help="Pipeline.", panel=PIN)], None),
    "data": (Annotated[int | None, _option("--dp", help="Replicas.", panel=PIN)], None),
    "context": (Annotated[int | None, _option("--cp", help="Context.", panel=PIN)], None),
    "expert": (Annotated[int | None, _option("--ep", help="Experts.", panel=PIN)], None),
    "zero": (Annotated[int | None, _option("--zero", help="ZeRO, 0 to 3.", panel=PIN)], None),
    "micro_batch": (
        Annotated[int | None, _option("--micro-batch", help="Samples at once.", panel=PIN)],
        None,
    ),
    "virtual_stages": (
        Annotated[int | None, _option("--virtual-stages", help="Stages a rank.", panel=PIN)],
        None,
    ),
    "recompute": (
        Annotated[str, _option("--recompute", help=_words(RECOMPUTES), panel=PIN)],
        "",
    ),
    "schedule": (Annotated[str, _option("--schedule", help=_words(SCHEDULES), panel=PIN)], ""),
    "precision": (
        Annotated[str, _option("--precision", help=_words(PRECISIONS), panel=PIN)],
        "",
    ),
    "offload": (Annotated[str, _option("--offload", help=_words(OFFLOADS), panel=PIN)], ""),
    "optimizer_state": (
        Annotated[str, _option("--optimizer-state", help=_words(STATE_FORMATS), panel=PIN)],
        "",
    ),
}


def takes_request(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options above; it receives them as its first argument, a Request.

    Six commands with the same twenty-five parameters would otherwise repeat them six times.
    """
    declared = [option(name, kind, default) for name, (kind, default) in OPTIONS.items()]
    return with_options(command, declared, PlanRequest)
