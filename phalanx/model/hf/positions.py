"""Positions and windows as Hugging Face writes them in config.json, and back."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from phalanx.config import Model, RopeScaling, Window, has_window
from phalanx.model.hf.families import FAMILIES, ModelFamily

FULL, SLIDING = "full_attention", "sliding_attention"
NOPE_EVERY = 4  # no_rope_layer_interval where a file leaves it out


def read_positions(config: dict[str, Any]) -> dict[str, Any]:
    """Settings of ours about positions and windows; ValueError says what has no place in them."""
    family = FAMILIES[config["model_type"]]
    full, local = _rope_tables_of(config, family)
    theta, scaling = _theta(full, family.theta), _scaling(config, full)
    return {
        "rope_theta": theta,
        "rope_scaling": scaling,
        "window": _window(config, family, theta, scaling, local),
        "nope_every": _nope(config) if family.nope else 0,
    }


def write_positions(model: Model, family: ModelFamily) -> dict[str, Any]:
    """The keys of config.json for transformers 5, and for 4 beside them."""
    scaling = _written_scaling(model.rope_scaling)
    full = {**scaling, "rope_theta": model.rope_theta}
    written: dict[str, Any] = {
        "rope_parameters": full,
        "rope_theta": model.rope_theta,
        "rope_scaling": scaling if model.rope_scaling is not None else None,
    }
    window = model.window
    if family.nope:
        every = model.nope_every
        rotated = [int(not every or (i + 1) % every != 0) for i in range(model.layers)]
        written["no_rope_layers"] = rotated
    if family.window == "all":
        written["sliding_window"] = None if window is None else window.size
    if family.window == "pattern":
        windowed = [has_window(model, layer) for layer in range(model.layers)]
        written["layer_types"] = [SLIDING if near else FULL for near in windowed]
        # Theirs asks for a size also where no layer has a window.
        written["sliding_window"] = (window or Window()).size
    if family.window == "pattern" and not family.one_rope:
        theta = (window.rope_theta if window is not None else 0.0) or model.rope_theta
        scaled = window is None or window.rope_scaled
        local = {**(scaling if scaled else {"rope_type": "default"}), "rope_theta": theta}
        written["rope_parameters"] = {FULL: full, SLIDING: local}
        written["rope_local_base_freq"] = theta
    return written


def _rope_tables_of(
    config: dict[str, Any], family: ModelFamily
) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Keys about positions, of all layers and of those with a window (None: not given)."""
    rope, old = config.get("rope_parameters") or {}, config.get("rope_scaling") or {}
    if family.scaled and not rope and not old:
        raise ValueError("there are neither rope_parameters nor rope_scaling")
    apart = FULL in rope or SLIDING in rope
    _refuse_two_scalings(config, rope.get(FULL) or {} if apart else rope, old)
    if apart:
        tables = rope.get(FULL) or {}, rope.get(SLIDING) or {}
        if not all("rope_theta" in table for table in tables):
            raise ValueError(f"rope_parameters need a rope_theta for {FULL} and for {SLIDING}")
        return tables
    theta = {"rope_theta": config["rope_theta"]} if "rope_theta" in config else {}
    full = {**theta, **(rope or old)}
    if family.one_rope:
        return full, full
    if family.window != "pattern" or rope:
        return full, None
    near = config.get("rope_local_base_freq", family.local_theta or _theta(full, family.theta))
    return full, {"rope_theta": near}


def _refuse_two_scalings(config: dict[str, Any], rope: dict[str, Any], old: dict[str, Any]) -> None:
    """Files for both versions of transformers have both, and the same in them."""
    if rope and old and _scaling(config, rope) != _scaling(config, old):
        raise ValueError(
            "rope_scaling and rope_parameters scale positions differently, and which of them holds"
            " depends on who reads it; keep one of them"
        )


def _theta(rope: dict[str, Any], default: float) -> float:
    theta = float(rope.get("rope_theta", default))
    if theta <= 0:
        raise ValueError(f"rope_theta = {theta:g} is not above 0")
    return theta


def _scaling(config: dict[str, Any], rope: dict[str, Any]) -> RopeScaling | None:
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    if rope_type == "default":
        return None
    if rope_type not in ("llama3", "linear", "yarn"):
        known = "only 'llama3', 'linear' and 'yarn'"
        raise ValueError(f"RoPE scaling of type {rope_type!r} is not supported, {known}")
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError("partial_rotary_factor is not supported in this layout, only 1.0")
    factor = float(_required(rope, "factor"))
    if rope_type == "linear":
        return RopeScaling(kind="linear", factor=factor)
    if rope_type == "yarn":
        return _yarn(config, rope, factor)
    return RopeScaling(
        factor=factor,
        low_frequency_factor=float(_required(rope, "low_freq_factor")),
        high_frequency_factor=float(_required(rope, "high_freq_factor")),
        original_context=_original_context(config, rope)
        or _required(rope, "original_max_position_embeddings"),
    )


def _original_context(config: dict[str, Any], rope: dict[str, Any]) -> int | None:
    """What the unscaled positions were trained for, where a file says so."""
    own, above = (table.get("original_max_position_embeddings") for table in (rope, config))
    if own and above and own != above:
        raise ValueError(f"original_max_position_embeddings is {above} there and {own} in its RoPE")
    context: int | None = own or above
    return context


def _yarn(config: dict[str, Any], rope: dict[str, Any], factor: float) -> RopeScaling:
    attention = rope.get("attention_factor") or 0.0
    if rope.get("attention_factor") == 0:
        raise ValueError("attention_factor = 0 is not above 0")
    above, below = rope.get("mscale"), rope.get("mscale_all_dim")
    if not attention and above and below:
        logarithm = 0.1 * math.log(factor)
        attention = (above * logarithm + 1) / (below * logarithm + 1)
    old = _original_context(config, rope) or config.get("max_position_embeddings")
    return RopeScaling(
        kind="yarn",
        factor=factor,
        original_context=old or _required(rope, "original_max_position_embeddings"),
        fast_rotations=float(rope.get("beta_fast") or 32),
        slow_rotations=float(rope.get("beta_slow") or 1),
        round_bounds=rope.get("truncate", True),
        attention_factor=float(attention),
    )


def _required(rope: dict[str, Any], key: str) -> Any:
    if rope.get(key) is None:
        raise ValueError(f"the rotary positions have no {key}")
    return rope[key]


def _window(
    config: dict[str, Any],
    family: ModelFamily,
    theta: float,
    scaling: RopeScaling | None,
    local: dict[str, Any] | None,
) -> Window | None:
    size = config.get("sliding_window", family.window_size or None)
    if family.window == "none" or size is None:
        return None
    if family.window == "all":
        return Window(size=size)
    every = _full_every(config, family)
    if every is None:
        return None
    if local is None:
        raise ValueError(f"rope_parameters need a table for {FULL} and one for {SLIDING}")
    near = _theta(local, family.local_theta or theta)
    own = _scaling(config, local)
    if own is not None and own != scaling:
        raise ValueError("layers with a window scale RoPE otherwise than the others")
    return Window(
        size=size,
        full_every=every,
        rope_theta=0.0 if near == theta else near,
        rope_scaled=own == scaling,
    )


def _full_every(config: dict[str, Any], family: ModelFamily) -> int | None:
    """The pattern of layers that see all; None where all do."""
    types = config.get("layer_types")
    if types is None:
        return int(config.get("sliding_window_pattern") or family.full_every)
    unknown = set(types) - {FULL, SLIDING}
    if unknown:
        raise ValueError(f"layer_types names {', '.join(sorted(unknown))}, which is not supported")
    if set(types) == {FULL}:
        return None
    return _every_of("layer_types", [kind == FULL for kind in types])


def _nope(config: dict[str, Any]) -> int:
    rotated = config.get("no_rope_layers")
    if not rotated:
        return int(config.get("no_rope_layer_interval") or NOPE_EVERY)
    return _every_of("no_rope_layers", [not each for each in rotated])


def _every_of(key: str, chosen: Sequence[bool]) -> int:
    """n where every n-th layer is chosen; 0 where none is."""
    if True not in chosen:
        return 0
    every = chosen.index(True) + 1
    if any(here != ((layer + 1) % every == 0) for layer, here in enumerate(chosen)):
        raise ValueError(f"{key} follows no pattern of one layer in every so many")
    return every


def _written_scaling(scaling: RopeScaling | None) -> dict[str, Any]:
    if scaling is None:
        return {"rope_type": "default"}
    written: dict[str, Any] = {"rope_type": scaling.kind, "factor": scaling.factor}
    if scaling.kind == "linear":
        return written
    written["original_max_position_embeddings"] = scaling.original_context
    if scaling.kind == "llama3":
        written["low_freq_factor"] = scaling.low_frequency_factor
        written["high_freq_factor"] = scaling.high_frequency_factor
        return written
    written["beta_fast"] = scaling.fast_rotations
    written["beta_slow"] = scaling.slow_rotations
    written["truncate"] = scaling.round_bounds
    if scaling.attention_factor:
        written["attention_factor"] = scaling.attention_factor
    return written
