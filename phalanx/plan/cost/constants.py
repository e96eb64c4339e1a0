"""The efficiency constants of the step model: few, physical, with shipped values."""

from __future__ import annotations

import tomllib
from functools import cache
from importlib import resources

from msgspec import Struct, convert, structs

from phalanx.plan.workload import Software


class Constants(Struct, frozen=True, kw_only=True):
    """Fractions of what the data sheet promises, and times that no data sheet gives."""

    matmul: dict[str, float]  # "family:precision" -> sustained share of peak in large matmuls
    attention: dict[str, float]  # "family:kernel", or with ":head width": share of the peak
    attention_backward: float  # rate of backward over that of forward
    attention_backward_of: dict[str, float] = {}  # the same by "family:kernel:head width", measured
    attention_depth: float = 0.0  # tokens of the sequence that the diagonal and ends of rows cost
    boost: float = 0.0  # how much faster products run while other kernels leave them the power
    memory: float  # share of HBM bandwidth in elementwise passes
    eager: float  # passes over memory without fusion, over those with it
    link: float  # share of NVLink bandwidth in large collectives
    network: float  # share of the NIC's
    latency: float = 1.0  # of a hop and of a collective's start, over NCCL's
    misaligned: float  # share of matmul speed left where a side is no multiple of 64
    matmul_depth: float  # depth of K, in elements, that starting and ending a tile costs
    kernel_seconds: float  # start and drain of one kernel
    launch_seconds: float = 0.0  # of the host, to start one kernel
    interference: float  # slowdown of compute while communication runs beside it
    hidden: float  # share of overlappable communication that is hidden in practice
    tensor_hidden: float  # the same for gathers inside a layer
    straggler: float  # spread of one rank's step time over its mean
    step_seconds: float  # host work between steps
    unmodelled: float  # share of a step that goes to what no term counts
    power: float  # exponent of the power cap's effect on matmul speed
    expert_matmul: float  # speed of grouped products over that of one large product
    expert_seconds: float  # routing, sorting and counting in one layer and direction
    expert_launch_seconds: float = 0.0  # of the host, for one expert's product launched by itself
    expert_exchange: float  # speed of the all-to-all over that of the model; above 1 part is hidden
    error: dict[str, float]  # spread of log(measured / predicted), by group
    pace: dict[str, float] = {}  # "stack:kind" -> a step over what the terms say
    activation_share: dict[str, float] = {}  # stack -> activations over what the terms count
    runs: dict[str, int] = {}  # "stack:kind" -> runs that this was seen in
    seen: dict[str, int] = {}  # schedule, offload or "kind:family:precision" -> runs that had it


def read_constants(text: str) -> Constants:
    """Constants of a TOML file, as ``plan calibrate`` writes it."""
    return convert(tomllib.loads(text), Constants)


@cache
def shipped(family: str = "") -> Constants:
    """The constants fitted on the published runs in ``data/``; of CPU cores, on steps of the demo.

    These are too far from a GPU's to share a file: kernels start slowly, and nothing overlaps.
    """
    name = "constants_cpu.toml" if family == "cpu" else "constants.toml"
    return read_constants(
        resources.files("phalanx.plan").joinpath(f"data/{name}").read_text("utf-8")
    )


def calibrated(software: Software, constants: Constants) -> Software:
    """The software with what runs have shown of its memory."""
    share = constants.activation_share.get(software.name, 1.0)
    return software if share == 1.0 else structs.replace(software, activation_share=share)


def constants_toml(constants: Constants) -> str:
    """Constants in the form of ``data/constants.toml``."""
    tables = [name for name in Constants.__struct_fields__ if _is_table(constants, name)]
    lines = [
        f"{name} = {getattr(constants, name):.6g}"
        for name in Constants.__struct_fields__
        if name not in tables
    ]
    for table in filter(lambda name: getattr(constants, name), tables):
        lines += ["", f"[{table}]"]
        lines += [f'"{key}" = {value:.5g}' for key, value in getattr(constants, table).items()]
    return "\n".join(lines) + "\n"


def _is_table(constants: Constants, name: str) -> bool:
    return isinstance(getattr(constants, name), dict)
