"""Random jobs: a model, a recipe, and meshes that its rules accept."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

from phalanx.config import ConfigError, Job, check, job_from_table, resolve

STEPS = 4
CORPUS = "tests.parallel.random_jobs.corpus:UnevenCorpus"
TRIES = 60  # of a mesh that fits a recipe
Table = dict[str, Any]


class OnMesh(NamedTuple):
    """The job on so many ranks."""

    ranks: int
    job: Job


class Cell(NamedTuple):
    """One job, alone and on two meshes: it is saved after some steps on one, and continues."""

    seed: int
    features: tuple[str, ...]
    alone: Job
    first: OnMesh
    then: OnMesh
    saved: int


class Drawing:
    """One seed's choices."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.later = random.Random(-1 - seed)  # what came later leaves a seed's other choices
        self.features: list[str] = []
        self.table: Table = {}

    def one(self, *choices: Any) -> Any:
        return self.chance.choice(choices)

    def has(self, feature: str, share: float) -> bool:
        """Whether a feature is in; it is noted."""
        if self.chance.random() >= share:
            return False
        self.features.append(feature)
        return True

    # The model

    def model(self) -> Table:
        kv_heads = self.one(4, 4, 2, 1)
        layers = self.one(2, 2, 3, 4)
        made: Table = {
            "dim": self.one(32, 48),
            "layers": layers,
            "heads": 4,
            "vocab": self.one(64, 96),
        }
        made |= {"kv_heads": kv_heads, "ffn": self.one(64, 96, 40), "head_dim": self.one(8, 12)}
        if self.has("latent", 0.15):
            made |= self._latent()
        else:
            made |= self._attention()
        made |= self._form()
        if self.has("moe", 0.35):
            made["moe"] = self._moe()
            made["mlp"] = self.one("swiglu", "swiglu", "swiglu-clamped")
        if self.has("mtp", 0.2):
            made["mtp"] = {"layers": self.one(1, 2), "weight": self.one(0.3, 1.0)}
        if self.later.random() < 0.25:
            self.features.append("dropout")
            made["dropout"] = self.later.choice((0.05, 0.3))
        return made

    def _latent(self) -> Table:
        latent = {
            "query_rank": self.one(0, 16),
            "key_value_rank": 16,
            "content_head_dim": 8,
            "rope_head_dim": 4,
            "value_head_dim": self.one(8, 6, 16),
        }
        return {"latent": latent, "kv_heads": 4, "head_dim": 0}

    def _attention(self) -> Table:
        made: Table = {}
        if self.has("window", 0.25):
            made["window"] = {
                "size": self.one(2, 5, 8, 13),
                "full_every": self.one(0, 2),
                "rope_theta": self.one(0.0, 1e3),
                "rope_scaled": self.one(True, False),
            }
        if self.has("sinks", 0.15):
            made["attention_sinks"] = True
        if self.has("partial-rope", 0.15):
            made["rotary_fraction"] = 0.5
        if self.has("nope", 0.1):
            made["nope_every"] = 2
        if self.has("attention-bias", 0.2):
            made["attention_bias"] = True
        if self.has("out-bias", 0.15):
            made["attention_out_bias"] = True
        if self.has("qk-norm", 0.2):
            made |= {"qk_norm": True, "qk_norm_over": self.one("head", "all")}
        elif self.has("qk-clip", 0.2):
            made["qk_clip"] = self.one(0.02, 0.1)
        return made

    def _form(self) -> Table:
        made: Table = {"rope_theta": self.one(500.0, 1e4)}
        if self.has("softcap", 0.15) and "qk-clip" not in self.features:
            made["attention_softcap"] = self.one(0.5, 5.0)
        if self.has("logit-softcap", 0.15):
            made["logit_softcap"] = self.one(0.7, 5.0)
        if self.has("z-loss", 0.25):
            made["z_loss_coefficient"] = 0.1
        if self.has("tied", 0.35):
            made["tied_embedding"] = True
        elif self.has("width", 0.15):
            made["width_base"] = 16
        if self.has("rope-scaling", 0.3):
            kind = self.one("yarn", "linear", "llama3")
            made["rope_scaling"] = {"kind": kind, "factor": 4.0, "original_context": 8}
        made["norm"] = self.one("pre", "pre", "post", "sandwich")
        made["norm_offset"] = self.one(False, False, True)
        made["mlp"] = self.one("swiglu", "swiglu", "geglu", "geglu-exact", "gelu", "relu2")
        if self.has("scales", 0.2):
            made |= {"residual_scale": 0.5, "embedding_scale": 5.6, "attention_scale": 0.3}
        return made

    def _moe(self) -> Table:
        balance = self.one("auxiliary", "bias", "bias-auxiliary", "none")
        made: Table = {
            "experts": 4,
            "top_k": self.one(1, 2),
            "ffn": self.one(32, 24),
            "balance": balance,
        }
        made |= {"score": self.one("softmax", "sigmoid"), "auxiliary_coefficient": 0.1}
        made |= {"bias_rate": 0.01, "first_dense_layers": self.one(0, 1)}
        made |= {"normalize_top_k": self.one(True, False), "route_scale": self.one(1.0, 2.5)}
        self.features.append(f"moe-{balance}")
        if "auxiliary" in balance and self.has("moe-over-batch", 0.4):
            made["auxiliary_over"] = "batch"
        if self.has("moe-shared", 0.4):
            made |= {"shared_experts": self.one(1, 2), "shared_gate": self.one(True, False)}
        if self.has("moe-groups", 0.25):
            made |= {"groups": 2, "top_groups": 1}
        if self.has("moe-z-loss", 0.3):
            made["z_loss_coefficient"] = 0.1
        if self.has("moe-biases", 0.25):
            made["biases"] = True
        return made

    # The recipe

    def recipe(self) -> Table:
        """Everything but model and mesh."""
        sequence = self.one(16, 32, 24, 48)
        data: Table = {"sequence": sequence, "seed": self.chance.randrange(99)}
        data |= {"source": "module", "module": CORPUS, "validation_fraction": 0.02}
        if self.has("documents", 0.4):
            data["document_mask"] = True
        train: Table = {"steps": STEPS, "global_batch": self.one(8, 8, 6, 5, 12), "device": "cpu"}
        train["validate_samples"] = self.one(3, 8, 64)
        if self.has("ema", 0.25):
            train["ema"] = {
                "decay": 0.5,
                "every": self.one(1, 2),
                "begin_step": self.one(0, 1),
                "validate": self.one(True, False),
            }
        ramp = 0
        if self.has("ramp", 0.2):
            ramp = self.one(1, 2) * 4 * sequence
            train["batch_ramp"] = [{"until_tokens": ramp, "global_batch": 4}]
        if self.has("stages", 0.2):
            stage = {
                "after_tokens": ramp + train["global_batch"] * sequence,
                "sequence": 2 * sequence,
            }
            stage |= {"global_batch": self.one(0, 4), "micro_batch": self.one(0, 1)}
            if self.has("stage-yarn", 0.5):
                stage["rope_scaling"] = {"kind": "yarn", "factor": 2.0, "original_context": 16}
            train["sequence_stages"] = [stage]
        sections = {"data": data, "train": train, "precision": {"compute": "float32"}}
        return sections | self._optimizer() | self._adapter()

    def _optimizer(self) -> Table:
        given: Table = {"learning_rate": 3e-3, "eps": 1e-4, "clip_norm": self.one(1.0, 0.05, 0.0)}
        schedule: Table = {
            "kind": self.one("cosine", "linear", "constant"),
            "warmup_steps": self.one(0, 2),
        }
        if self.has("schedule-free", 0.15):
            given["kind"], schedule["kind"] = "schedule-free", "constant"
        elif self.has("muon", 0.2):
            given["kind"] = "muon"
        if self.has("groups", 0.2):
            given["groups"] = [
                {"pattern": "*attention*", "rate_factor": 0.5, "weight_decay": 0.3},
                {"pattern": "embed*", "freeze": self.one(True, False), "rate_factor": 2.0},
            ]
        return {"optimizer": given, "schedule": schedule}

    def _adapter(self) -> Table:
        if not self.has("adapter", 0.12):
            return {}
        kind = self.one("lora", "dora")
        self.features.append(kind)
        targets = [["q_proj", "k_proj", "v_proj", "o_proj"]]
        if kind == "lora":
            targets += [["q_proj", "v_proj"], ["k_proj", "o_proj", "up_proj", "down_proj"]]
        return {"adapter": {"kind": kind, "rank": 4, "alpha": 8.0, "targets": self.one(*targets)}}

    # The mesh

    def mesh(self, ranks: int) -> Table:
        """Sections that may differ between runs of the same job."""
        axes: Table = {}
        left = ranks
        for axis in self.chance.sample(["pipeline", "context", "tensor", "data"], 4):
            size = left if axis == "data" else self.one(*(s for s in (1, 2, 3, 4) if left % s == 0))
            if axis != "data":
                axes[axis] = size
                left //= size
        axes["data"] = left
        axes["zero"] = self.one(0, 1, 2, 3, 3)
        if axes["pipeline"] > 1:
            axes["schedule"] = self.one("1f1b", "gpipe", "interleaved", "zero-bubble")
        if axes["context"] > 1:
            axes["context_method"] = self.one("auto", "ring", "ulysses")
        if left % 2 == 0 and axes["zero"]:
            axes["replicate"] = self.one(1, 1, 2)
        axes["expert"] = self.one(1, 2, 4)
        axes["prefetch_layers"] = self.one(0, 1, 2)
        memory: Table = {"recompute": self.one("none", "none", "selective", "full")}
        memory["offload"] = self.one("none", "none", "none", "parameters")
        memory["offload_activations"] = self.one(False, False, False, True)
        # Else DDP may arrange its buckets anew after the first step.
        train: Table = {"micro_batch": self.one(1, 1, 2, 3), "deterministic": True}
        if self.chance.random() < 0.15:
            train["virtual_replicas"] = self.one(2, 4)
        data: Table = {"prefetch": self.one(0, 0, 2)}
        return {"parallel": axes, "memory": memory, "train": train, "data": data}


def laid_over(*tables: Table) -> Table:
    """Sections with the keys of all tables."""
    found: Table = {}
    for table in tables:
        for section, values in table.items():
            found[section] = {**found.get(section, {}), **values}
    return found


def made(ranks: int, *tables: Table) -> Job:
    """A job that its rules accept on so many ranks, or ``ConfigError``."""
    job = resolve(job_from_table(laid_over(*tables)), ranks)
    check(job, ranks)
    return job


def draw_cell(seed: int, most_ranks: int = 8) -> Cell | None:
    """The cell of a seed; None where no mesh was found that its rules accept."""
    drawing = Drawing(seed)
    common = laid_over({"model": drawing.model()}, drawing.recipe())
    try:
        alone = made(1, common, {"train": {"micro_batch": 1}, "parallel": {"zero": 0}})
    except ConfigError:
        return None
    sizes = [n for n in (2, 2, 2, 2, 2, 2, 2, 3, 4, 4, 4, 6, 8) if n <= most_ranks]
    first = _accepted(drawing, common, sizes)
    then = _accepted(drawing, common, [1, *sizes])
    if first is None or then is None:
        return None
    return Cell(
        seed, tuple(drawing.features), alone, first, then, drawing.chance.randrange(1, STEPS)
    )


def _accepted(drawing: Drawing, common: Table, sizes: list[int]) -> OnMesh | None:
    for _ in range(TRIES):
        ranks = drawing.one(*sizes)
        try:
            return OnMesh(ranks, made(ranks, common, drawing.mesh(ranks)))
        except ConfigError:
            continue
    return None


def axes_of(place: OnMesh) -> str:
    """A mesh in words."""
    job = place.job
    p, m, t = job.parallel, job.memory, job.train
    words = [f"{place.ranks}:pp{p.pipeline}dp{p.data}cp{p.context}tp{p.tensor}ep{p.expert}"]
    words += [f"z{p.zero}r{p.replicate}mb{t.micro_batch}"]
    words += [p.schedule] * (p.pipeline > 1) + [p.context_method] * (p.context > 1)
    words += [m.recompute] * (m.recompute != "none") + [m.offload] * (m.offload != "none")
    words += ["act-offload"] * m.offload_activations
    words += [f"virtual{t.virtual_replicas}"] * (t.virtual_replicas > 0)
    return " ".join(words)
