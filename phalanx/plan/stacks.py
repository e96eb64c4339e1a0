"""Training software by name: what each does on the device. Facts; nothing here is fitted."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec.structs import fields, replace

from phalanx.config import ConfigError
from phalanx.config.errors import did_you_mean
from phalanx.plan.workload import GATHERS_ONE_BY_ONE, Mapping, Software

UNNAMED = "unnamed"
# What the trainer of this project does and others do not unless somebody says so.
_OTHERS = Software(name="", remakes_narrow=False, expandable_segments=False, chunked_loss=False)
_MEGATRON = replace(
    _OTHERS,
    name="megatron",
    attention="flash3",
    fused_casts=True,  # LayerNormLinear of TransformerEngine
    narrow_gathers=True,  # fp8_param_gather, which its recipes set
    overlap_tensor=True,
    overlap_pipeline=True,
    balances_head=True,
    keeps_gathered=False,  # gathered again in backward
    routed_copies=1,  # weights are applied before the second product
    experts_together=False,  # GroupedLinear of TransformerEngine: cuBLAS on several streams
)
_MEGATRON_2021 = replace(
    _OTHERS,
    name="megatron-2021",
    attention="unfused",
    fused=True,
    sequence_parallel=False,
    keeps_gathered=False,
    least_fragmented=0.1,
    gathers_per_block=GATHERS_ONE_BY_ONE,  # DeepSpeed's ZeRO 3 of that time
    logarithmic_gathers=False,  # NCCL before 2.23
    overlap_gradients=False,
    overlap_tensor=False,
    overlap_pipeline=False,
    balances_head=False,
)
_FSDP = replace(_OTHERS, name="fsdp", attention="flash2", fused=False, reduce_bytes=2)
STACKS = {
    stack.name: stack
    for stack in (
        Software(),
        _MEGATRON,
        replace(_MEGATRON, name="nemo"),
        _MEGATRON_2021,
        # Every second matmul is kept by its selective recompute; float8 is gathered as such.
        replace(
            _FSDP,
            name="torchtitan",
            fused=True,
            narrow_gathers=True,
            reduce_bytes=4,
            selective_share=0.5,
        ),
        # Triton's kernel, norms in 16 bits, a fused loss with its gradient in 16 bits.
        replace(_FSDP, name="llm-foundry", attention="flash", eager_kept=1.0, logit_bytes=4.0),
        # Eager, with blocking sends.
        replace(_FSDP, name="nanotron", overlap_pipeline=False, reduce_bytes=4),
        _FSDP,
    )
}
TRAITS = tuple(field.name for field in fields(Software) if field.name != "name")
SWITCHES = {"yes": "true", "on": "true", "no": "false", "off": "false"}
OLD_FAMILIES = ("volta", "ampere")


def stack_of(text: str, usual: Software) -> Software:
    """Software as it is asked for: ``megatron``, ``fused=false`` or ``megatron,fused=false``.

    Traits alone change the ``usual`` one; ``unnamed`` stands for any of its kind.
    """
    name, software = "", usual
    traits: dict[str, str] = {}
    for part in filter(None, (each.strip() for each in text.split(","))):
        key, equals, value = (word.strip() for word in part.partition("="))
        if equals:
            traits[key] = value
        elif name:
            raise ConfigError(
                "stack", text, "names two", "one name, then traits: megatron,fused=false"
            )
        else:
            name = key
            software = usual if name == UNNAMED else stack_named(name)
    software = with_traits(software, traits)
    return replace(software, name="") if name == UNNAMED else software


def stack_named(name: str) -> Software:
    """One of STACKS."""
    if name not in STACKS:
        raise ConfigError("stack", name, "no such stack", did_you_mean(name, (*STACKS, UNNAMED)))
    return STACKS[name]


def with_traits(software: Software, traits: dict[str, str]) -> Software:
    """The software with some of its traits as stated."""
    table: dict[str, Any] = msgspec.to_builtins(software)
    for key, value in traits.items():
        if key not in TRAITS:
            raise ConfigError("stack", f"{key}={value}", "no such trait", did_you_mean(key, TRAITS))
        table[key] = SWITCHES.get(value.lower(), value.lower())
    try:
        return msgspec.convert(table, Software, strict=False)
    except msgspec.ValidationError as error:
        stated = ",".join(f"{key}={value}" for key, value in traits.items())
        rule, _, key = str(error).partition(" - at `$.")  # msgspec says what it expected, and where
        raise ConfigError(
            "stack", stated, f"{key.rstrip('`')}: {rule}", "e.g. fused=false"
        ) from None


def typical_software(family: str, mapping: Mapping) -> Software:
    """What software that nobody named most probably does, by its GPUs, sharding and formats."""
    old, sharded = family in OLD_FAMILIES, mapping.zero >= 2
    if old and mapping.recompute != "none" and not (sharded and mapping.precision == "bfloat16"):
        # FSDP has gathered whole blocks ahead of their use from the beginning.
        ahead = {"gathers_per_block": 1, "overlap_gradients": True, "reduce_bytes": 2}
        software = replace(_MEGATRON_2021, **ahead) if sharded else _MEGATRON_2021
    elif sharded:
        # Of memory what such software must hold, not what it may.
        kernel = "flash" if old else "flash2"
        software = replace(_FSDP, attention=kernel, eager_kept=1.0, logit_bytes=6.0)
    else:
        software = replace(_MEGATRON, attention="flash2" if old else "flash3")
    return replace(software, name="")
