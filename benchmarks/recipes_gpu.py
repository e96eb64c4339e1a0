"""What recipes cost on one GPU: Muon, the same bits on any number of replicas, adapters.

    python -m benchmarks.recipes_gpu [--only muon,strict,lora] [--steps 8]

Each side of a pair trains in a process of its own: the first, the second, the first again. The
other side of the adapters is PEFT over transformers, compiled, with our model, rank, matrices and
batch.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from proof.report import report

SEQUENCE, WARM_STEPS = 8192, 3
GIB = 1 << 30


@dataclass(frozen=True)
class Recipe:
    """One side of a comparison, as changes to a job."""

    preset: str
    batch: int
    micro_batch: int
    optimizer: str = "adamw"
    virtual_replicas: int = 0
    adapters: bool = False
    peft: bool = False  # not our trainer


PAIRS = {
    "muon": (Recipe("llama3-1b", 4, 4), Recipe("llama3-1b", 4, 4, optimizer="muon")),
    "strict": (Recipe("llama3-1b", 16, 4), Recipe("llama3-1b", 16, 4, virtual_replicas=4)),
    "lora": (
        Recipe("llama3-3b", 2, 2, peft=True),
        Recipe("llama3-3b", 2, 2, adapters=True),
    ),
}


def our_step(recipe: Recipe) -> Callable[[], object]:
    """A step of our trainer."""
    import torch

    from phalanx.config import PRESETS, Adapter, Data, Job, Optimizer, Schedule, Train, resolve
    from phalanx.parallel.mesh import build_mesh
    from phalanx.train.trainer import Trainer

    job = Job(
        name="recipe",
        model=PRESETS[recipe.preset],
        data=Data(source="synthetic", sequence=SEQUENCE),
        schedule=Schedule(kind="constant"),
        optimizer=Optimizer(kind=recipe.optimizer),  # type: ignore[arg-type]
        adapter=Adapter(kind="lora" if recipe.adapters else "none"),
        train=Train(
            steps=1_000_000,
            global_batch=recipe.batch,
            micro_batch=recipe.micro_batch,
            virtual_replicas=recipe.virtual_replicas,
        ),
    )
    job, device = resolve(job, 1), torch.device("cuda", 0)
    trainer = Trainer(job, build_mesh(job, device), device)

    def step() -> object:
        made = trainer.train_step()
        trainer.timer.close_step()
        return made

    return step


def peft_step(recipe: Recipe) -> Callable[[], object]:
    """A step of PEFT's adapters on the model of transformers."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoConfig, AutoModelForCausalLM

    from phalanx.config import PRESETS, Adapter, resolve_model
    from phalanx.model.hf import config_to_hf

    model = resolve_model(PRESETS[recipe.preset])
    shape = config_to_hf(model, torch.bfloat16, SEQUENCE)
    config = AutoConfig.for_model(**shape)
    make: Any = AutoModelForCausalLM.from_config
    with torch.device("cuda"):
        base = make(config, dtype=torch.bfloat16, attn_implementation="sdpa")
    ours = Adapter()
    adapters = LoraConfig(
        r=ours.rank,
        lora_alpha=int(ours.alpha),
        target_modules=list(ours.targets),
        lora_dropout=0.0,
    )
    adapted: Any = torch.compile(get_peft_model(base, adapters))
    trained = [each for each in adapted.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=3e-4, fused=True)
    tokens = torch.randint(model.vocab, (recipe.batch, SEQUENCE), device="cuda")

    def step() -> object:
        with torch.autocast("cuda", torch.bfloat16):
            loss = adapted(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss

    return step


def measure(recipe: Recipe, steps: int) -> dict[str, float]:
    """The median step, after the first ones; runs in a process of its own."""
    import torch

    step = peft_step(recipe) if recipe.peft else our_step(recipe)
    for _ in range(WARM_STEPS):
        step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    seconds = []
    for _ in range(steps):
        began = time.perf_counter()
        step()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    return {
        "step_seconds": statistics.median(seconds),
        "tokens_per_second": recipe.batch * SEQUENCE / statistics.median(seconds),
        "peak_gib": torch.cuda.max_memory_allocated() / GIB,
    }


def measured(name: str, side: int, steps: int) -> dict[str, float]:
    """One side, in a process that gives all memory back."""
    here = Path(__file__).resolve().parent.parent
    command = [sys.executable, "-m", "benchmarks.recipes_gpu", "--serve", f"{name}:{side}"]
    command += ["--steps", str(steps)]
    ran = subprocess.run(command, cwd=here, stdout=subprocess.PIPE, text=True, check=False)
    if ran.returncode:
        raise SystemExit(f"{name} {side} ended with {ran.returncode}; see its output above")
    found: dict[str, float] = json.loads(ran.stdout.splitlines()[-1])
    print(json.dumps({"pair": name, "side": side, **found}), flush=True)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="pairs by name, comma-separated")
    parser.add_argument("--steps", type=int, default=8, help="timed steps of a side")
    parser.add_argument("--serve", default="", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.serve:
        name, side = asked.serve.split(":")
        print(json.dumps(measure(PAIRS[name][int(side)], asked.steps)))
        return 0
    figures: dict[str, float] = {}
    for name in asked.only.split(",") if asked.only else PAIRS:
        first, second, third = (measured(name, side, asked.steps) for side in (0, 1, 0))
        before = (first["step_seconds"] + third["step_seconds"]) / 2
        speed = before / second["step_seconds"]
        figures[f"{name}_step" if name == "muon" else f"{name}_speed"] = (
            1 / speed if name == "muon" else speed
        )
        figures[f"{name}_tokens_per_second"] = second["tokens_per_second"]
    return report("recipes-gpu", figures)


if __name__ == "__main__":
    sys.exit(main())
