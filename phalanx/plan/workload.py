"""What is to be trained, how it is laid over the GPUs, and what the software can do."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from phalanx.config import STATE_BLOCK, Adapter, Model, StateFormat

SCHEDULES = ("1f1b", "gpipe", "interleaved", "zb-h1", "zero-bubble", "dualpipe")
RECOMPUTES = ("none", "selective", "full")
_STATE = ("none", "optimizer", "parameters", "optimizer-nvme", "parameters-nvme")
_ACTIVATIONS = ("none", "activations", "activations-nvme")
# What leaves the device, for host memory or local NVMe, e.g. "parameters-nvme+activations"
OFFLOADS = tuple(
    "+".join(part for part in (state, kept) if part != "none") or "none"
    for kept in _ACTIVATIONS
    for state in _STATE
)
# Both moments of one element; in 8 bits neighbours share two scales.
MOMENT_BYTES: dict[str, float] = {"float32": 8.0, "bfloat16": 4.0, "int8": 2 + 8 / STATE_BLOCK}
PRECISIONS = ("float32", "float16", "bfloat16", "fp8", "mxfp8", "nvfp4")

Schedule = Literal["1f1b", "gpipe", "interleaved", "zb-h1", "zero-bubble", "dualpipe"]
Recompute = Literal["none", "selective", "full"]
Precision = Literal["float32", "float16", "bfloat16", "fp8", "mxfp8", "nvfp4"]
AttentionKernel = Literal["unfused", "flash", "flash2", "flash3"]


# Beyond these a trait is a slip of the pen.
Share = Annotated[float, Meta(ge=0, le=4)]
Width = Annotated[int, Meta(ge=1, le=8)]  # bytes of one number

GATHERS_ONE_BY_ONE = 12  # ZeRO 3: of a block, where every parameter is gathered by itself

# Spread of the experts' loads over their mean, by how tokens are routed: as they want, or forced.
ROUTING_SKEW = {"real": 0.6, "balanced": 0.0}


class Workload(Struct, frozen=True, kw_only=True):
    """A model and one step's data. ``model`` must be resolved (no zeros to fill in)."""

    model: Model
    sequence: int  # tokens in a sample
    global_batch: int  # samples in a step
    routing_skew: float = ROUTING_SKEW["real"]
    trains: Literal["all", "adapters"] = "all"  # adapters: no gradients of the weights themselves
    state: StateFormat = "float32"  # of the optimizer's moments
    averaged: bool = False  # an average of the weights is kept as well
    adapter: Adapter | None = None  # what is trained, where that is known, of "adapters"
    divided_by: int = 0  # length of the samples that stages were balanced for; 0: these

    @property
    def tokens(self) -> int:
        """Tokens in a step."""
        return self.sequence * self.global_batch

    @property
    def kind(self) -> Literal["dense", "moe"]:
        """Which runs it is compared with."""
        return "moe" if self.model.moe is not None else "dense"

    @property
    def moment_bytes(self) -> float:
        """Of both moments of one element, and of its average where one is kept."""
        return MOMENT_BYTES[self.state] + 4.0 * self.averaged


class Mapping(Struct, frozen=True, kw_only=True):
    """How a workload is laid over GPUs: GPUs = tensor * pipeline * data * context."""

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    context: int = 1
    expert: int = 1
    zero: int = 1  # sharded over data * context: nothing, optimizer, + gradients, + weights
    replicate: int = 1  # of the data axis, groups with a full set of shards each (HSDP)
    micro_batch: int = 1
    recompute: Recompute = "none"
    schedule: Schedule = "1f1b"
    virtual_stages: int = 1
    precision: Precision = "bfloat16"
    offload: str = "none"  # one of OFFLOADS

    @property
    def gpus(self) -> int:
        """GPUs that the mapping occupies."""
        return self.tensor * self.pipeline * self.data * self.context

    def micro_batches(self, global_batch: int) -> int:
        """Micro-batches of a step on each replica, the last one padded where it must be."""
        return -(-global_batch // (self.data * self.micro_batch))


class Software(Struct, frozen=True, kw_only=True):
    """What the training software does on the device; the defaults are this project's trainer."""

    name: str = "phalanx"  # one of STACKS; "" where nobody named it
    attention: AttentionKernel = "flash3"  # flash3 stands for cuDNN's fused kernels as well
    fused: bool = True  # elementwise work is compiled into few passes over memory
    fused_casts: bool = False  # norms write what the next product reads in its narrow format
    remakes_narrow: bool = True  # narrow inputs of products are made again, not kept
    narrow_gathers: bool = False  # weights travel in the narrow format that multiplies them
    sequence_parallel: bool = True  # the tensor axis also splits what lies between the matmuls
    keeps_gathered: bool = True  # what is gathered for a branch stays for backward, whole
    routed_copies: Annotated[int, Meta(ge=0, le=8)] = (
        2  # of routed tokens that stay: as they arrive, and as they return
    )
    gathers_per_block: Annotated[int, Meta(ge=1, le=1000)] = (
        1  # ZeRO 3: collectives for a block's weights
    )
    logarithmic_gathers: bool = True  # all-gathers in log n steps (PAT), where rings are too long
    overlap_gradients: bool = True  # gradients (and gathered weights) travel during compute
    overlap_tensor: bool = False  # gathers of the tensor axis run beside their matmuls
    overlap_pipeline: bool = True  # sends between stages run beside compute
    overlap_expert: bool = False  # the all-to-all of one micro-batch runs beside another's compute
    experts_together: bool = True  # one kernel multiplies for all experts, not a launch for each
    fused_experts: bool = False  # one kernel for all experts, with their activation and casts in it
    overlap_offload: bool = False  # activations go to the host and back beside compute
    chunked_loss: bool = True  # logits never exist for the whole micro-batch
    logit_bytes: Annotated[float, Meta(ge=1, le=64)] = (
        10.0  # of one logit at its worst, where they exist whole: 16 bits, fp32 twice
    )
    eager_kept: Share = 1.35  # activations that unfused blocks keep, over those of fused ones
    expandable_segments: bool = True  # of the allocator: they grow, and next to nothing is lost
    fragmented: Share = 0.18  # what it holds beyond what is in use, with segments of fixed sizes
    least_fragmented: Share = 0.04  # of it, that it cannot give back, and with those that grow
    activation_share: Share = 1.0  # of activations and buffers, over what the terms count
    in_network_reduction: bool = False  # sums in the network's switches (SHARP), where they can
    selective_share: Share = 1.0  # of matmul results that selective recompute keeps
    gradient_bytes: Width = 4  # of one gradient while it accumulates
    reduce_bytes: Width = 4  # of one gradient while it travels
    balances_head: bool = True  # stages with the head get fewer layers
    counts_ends: bool = False  # stages are cut as if embedding and head were a layer each


def usual_software(family: str) -> Software:
    """This project's trainer on a family of devices."""
    if family != "cpu":
        return Software()
    # Blocks are not compiled there, and who moves bytes takes the core that computes.
    return Software(
        attention="flash2",
        fused=False,
        logarithmic_gathers=False,
        overlap_gradients=False,
        overlap_pipeline=False,
    )
