"""Weights serve a job only where its model is theirs: no setting of a model is forgotten."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import msgspec
import pytest
import torch

from phalanx.config import (
    LatentAttentionShape,
    Model,
    Moe,
    MultiTokenPrediction,
    RopeScaling,
    Section,
    Window,
    job_from_table,
    model_differences,
    resolve_model,
)
from phalanx.config.rules.same_model import FUNCTION, HARMLESS, SHAPE
from phalanx.config.tree import fields, section_in
from phalanx.model.hf.config import HfError, config_from_hf, config_to_hf

PLAIN = Model(
    dim=32,
    layers=4,
    heads=4,
    kv_heads=2,
    head_dim=8,
    ffn=64,
    vocab=64,
    rope_scaling=RopeScaling(),
    rotary_fraction=0.5,
    window=Window(),
    moe=Moe(
        experts=4, top_k=2, ffn=32, first_dense_layers=1, shared_ffn=16, balance="bias", groups=2
    ),
    mtp=MultiTokenPrediction(),
)
LATENT = msgspec.structs.replace(
    PLAIN,
    kv_heads=4,
    head_dim=0,
    latent=LatentAttentionShape(),
    rope_scaling=RopeScaling(kind="yarn"),
)


def keys(section: type[Section] = Model, prefix: str = "") -> Iterator[str]:
    """Every setting below a section; also those that hold a section or "none"."""
    for name, hint in fields(section).items():
        yield prefix + name
        if (inner := section_in(hint)) is not None:
            yield from keys(inner, f"{prefix}{name}.")


def changed(section: Any, key: str) -> Any:
    """The section with one setting at another value."""
    name, _, below = key.partition(".")
    old = getattr(section, name)
    if below:
        return msgspec.structs.replace(section, **{name: changed(old, below)})
    hint = fields(type(section))[name]
    new: Any
    if section_in(hint) is not None:
        new = None if old is not None else section_in(hint)()  # type: ignore[misc]
    elif get_origin(hint) is Literal:
        new = next(value for value in get_args(hint) if value != old)
    elif isinstance(old, bool):
        new = not old
    elif isinstance(old, str):
        new = old + "x"
    else:
        new = old * 2 or 1
    return msgspec.structs.replace(section, **{name: new})


def test_every_setting_of_a_model_is_compared_or_said_to_be_harmless() -> None:
    found = list(keys())
    for key in found:
        named = [key in SHAPE, key in FUNCTION, key in HARMLESS]
        assert sum(named) == 1, f"model.{key}: name it in one list of config/rules/same_model.py"
    assert set(found) == SHAPE | FUNCTION | HARMLESS


def test_every_setting_that_is_not_harmless_makes_a_difference() -> None:
    seen = set()
    for base in (PLAIN, LATENT):
        for key in keys():
            if "." in key and getattr(base, key.partition(".")[0]) is None:
                continue
            for each in model_differences(changed(base, key), base):
                seen.add(each.key.removeprefix("model."))
                assert each.is_shape == (key in SHAPE)
    assert seen == SHAPE | FUNCTION


def test_what_has_no_effect_is_no_difference() -> None:
    assert PLAIN.moe is not None
    sparse = msgspec.structs.replace(
        PLAIN, moe=msgspec.structs.replace(PLAIN.moe, first_dense_layers=0)
    )
    assert model_differences(changed(sparse, "ffn"), sparse) == []
    assert model_differences(changed(LATENT, "qk_norm"), LATENT) == []
    for key in HARMLESS:
        assert model_differences(changed(PLAIN, key), PLAIN) == []


def test_a_selection_bias_may_begin_and_may_not_be_dropped_unsaid() -> None:
    assert PLAIN.moe is not None
    by_loss = msgspec.structs.replace(
        PLAIN, moe=msgspec.structs.replace(PLAIN.moe, balance="auxiliary")
    )
    assert model_differences(PLAIN, by_loss) == []
    (found,) = model_differences(by_loss, PLAIN)
    assert (found.key, found.ours, found.theirs) == ("model.moe.balance", '"auxiliary"', '"bias"')


def test_the_other_value_is_written_so_that_a_job_accepts_it() -> None:
    for base in (PLAIN, LATENT):
        for key in keys():
            if "." in key and getattr(base, key.partition(".")[0]) is None:
                continue
            for each in model_differences(base, changed(base, key)):
                table = {"model": msgspec.to_builtins(base)}
                job_from_table(table, [f"{each.key}={each.theirs}"])


NEXT_TOKEN = msgspec.structs.replace(PLAIN, mtp=None)
EXPRESSIBLE = {
    "qwen2_moe": msgspec.structs.replace(
        NEXT_TOKEN,
        attention_bias=True,
        rotary_fraction=1.0,
        window=None,
        moe=Moe(experts=4, top_k=2, ffn=32, shared_experts=1, shared_ffn=48, shared_gate=True),
    ),
    "qwen3_moe": msgspec.structs.replace(
        NEXT_TOKEN,
        qk_norm=True,
        rotary_fraction=1.0,
        window=None,
        moe=Moe(experts=4, top_k=2, ffn=32, first_dense_layers=1),
    ),
    "gemma3_text": msgspec.structs.replace(
        NEXT_TOKEN,
        layers=8,
        norm="sandwich",
        norm_offset=True,
        qk_norm=True,
        rotary_fraction=1.0,
        window=Window(size=8, full_every=3, rope_theta=1e4, rope_scaled=False),
        rope_scaling=RopeScaling(kind="yarn"),
        embedding_scale=32**0.5,
        moe=None,
    ),
    "gemma2": msgspec.structs.replace(
        NEXT_TOKEN,
        norm="sandwich",
        norm_offset=True,
        rotary_fraction=1.0,
        window=Window(size=8, full_every=2),
        rope_scaling=RopeScaling(kind="yarn", round_bounds=False),
        embedding_scale=32**0.5,
        attention_softcap=50.0,
        logit_softcap=30.0,
        moe=None,
    ),
    "gpt_oss": msgspec.structs.replace(
        NEXT_TOKEN,
        mlp="swiglu-clamped",
        rotary_fraction=1.0,
        window=Window(size=8, full_every=2),
        attention_bias=True,
        attention_out_bias=True,
        attention_sinks=True,
        moe=Moe(experts=4, top_k=2, ffn=64, biases=True),
    ),
    "deepseek_v3": resolve_model(
        msgspec.structs.replace(
            LATENT,
            norm_eps=1e-6,
            rotary_fraction=1.0,
            window=None,
            moe=Moe(
                experts=8,
                top_k=2,
                ffn=32,
                shared_experts=1,
                first_dense_layers=1,
                score="sigmoid",
                balance="bias",
                groups=2,
            ),
        )
    ),
}
COMPARED = [
    (kind, key)
    for kind, model in EXPRESSIBLE.items()
    for key in keys()
    if key not in HARMLESS and ("." not in key or getattr(model, key.partition(".")[0]) is not None)
    # A model without the section cannot have one of its settings changed, nor experts be guessed.
    if not (key == "moe" and model.moe is None)
]


@pytest.mark.parametrize(("kind", "key"), COMPARED)
def test_a_setting_survives_config_json_or_is_refused_there(
    kind: str, key: str, tmp_path: Path
) -> None:
    base = EXPRESSIBLE[kind]
    assert config_to_hf(base, torch.float32)["model_type"] == kind
    model = changed(base, key)
    if not model_differences(model, base):
        return  # has no effect on this model
    try:
        written = config_to_hf(model, torch.float32)
    except HfError:
        return
    (tmp_path / "config.json").write_text(json.dumps(written))
    assert model_differences(config_from_hf(tmp_path), model) == []
    assert model_differences(config_from_hf(tmp_path), base) != []
