"""Whether transformers computes the same logits from an exported folder as we do."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from phalanx.config import Model
from phalanx.model.hf.config import config_from_hf
from phalanx.model.hf.exchange import load_hf
from phalanx.model.hf.files import HfError
from phalanx.model.transformer import Transformer
from phalanx.plan import parameters

SAMPLES, TOKENS = 2, 32
TOLERANCE = 1e-4  # of the largest logit, in fp32
BYTES = 8  # a parameter: fp32 here, and there
MEMORY_SHARE = 0.5  # of what is free


def compare_logits(folder: Path) -> str:
    """What came out, or why nothing was compared; HfError where logits differ."""
    try:
        import transformers
    except ImportError:
        return "not compared: transformers is not installed"
    model = config_from_hf(folder)
    needed = BYTES * parameters(model).total
    if needed > MEMORY_SHARE * os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"):
        return f"not compared: that takes {needed / 1e9:.0f} GB of memory"
    chance = torch.Generator().manual_seed(0)
    tokens = torch.randint(model.vocab, (SAMPLES, TOKENS), generator=chance)
    with torch.no_grad():
        ours = _ours(folder, model, tokens)
        theirs = _theirs(folder, transformers, tokens)
    difference = float((ours - theirs).abs().max() / ours.abs().max().clamp(min=1e-12))
    if not difference <= TOLERANCE:
        problem = f"transformers computes other logits from it: {difference:.1e} of the largest"
        raise HfError(folder, f"{problem}, at most {TOLERANCE:.0e} is rounding; do not use it")
    return f"those of transformers, to {difference:.0e}"


def _ours(folder: Path, model: Model, tokens: Tensor) -> Tensor:
    built = Transformer(model).float().eval()
    built.load_state_dict({name: tensor.float() for name, tensor in load_hf(folder)}, strict=False)
    built.prepare(torch.arange(tokens.shape[1]))
    logits: Tensor = built(tokens)
    return logits


def _theirs(folder: Path, transformers: Any, tokens: Tensor) -> Tensor:
    shown = transformers.utils.logging
    verbosity, bars = shown.get_verbosity(), shown.is_progress_bar_enabled()
    shown.set_verbosity_error()
    shown.disable_progress_bar()
    try:
        loaded = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, use_safetensors=True
        )
    finally:
        shown.set_verbosity(verbosity)
        if bars:
            shown.enable_progress_bar()
    logits: Tensor = loaded.eval()(tokens).logits
    return logits
