"""Between checkpoints and Hugging Face folders, or other divisions into shards.

One tensor is in memory at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor

from phalanx.checkpoint.format.folder import latest
from phalanx.checkpoint.format.manifest import CheckpointError, Extra, Manifest
from phalanx.checkpoint.format.source import NamedSource, rng_of
from phalanx.checkpoint.format.tier import open_source
from phalanx.checkpoint.read.load import StoredTensors
from phalanx.checkpoint.tools.merged_tensors import MergedTensors, adapter_layouts
from phalanx.checkpoint.tools.rewrite import SHARD_BYTES, write_whole
from phalanx.config import Job, Model, has_expert_bias, resolve_model, stage_at
from phalanx.data import Cursor
from phalanx.data.corpus.manifest import read_manifest as read_corpus
from phalanx.model.hf import config_from_hf, export_hf, load_hf
from phalanx.model.hf.tokenizer import (
    TOKENIZER_FILE,
    TOKENIZER_FILES,
    set_end_of_text,
    write_generation_config,
    write_tokenizer,
)

MODEL_PREFIX = "model."  # of the weights among a checkpoint's tensors
AVERAGE_PREFIX = "ema."  # of their average
FAST_PREFIX = "optimizer.fast."  # of the weights that Schedule-Free AdamW steps with
ROUTER_SUFFIX = ".router.weight"

Report = Callable[[int], None]  # bytes done


class LazyTensors(Mapping[str, Tensor]):
    """A checkpoint's tensors, each read and proved when it is asked for, and not kept.

    They are called by what follows a prefix; one of a later prefix takes the place of another.
    """

    def __init__(
        self, stored: StoredTensors, *prefixes: str, report: Report = lambda _: None
    ) -> None:
        self._stored, self._report = stored, report
        kinds = stored.tensors()
        self._full_names = {
            name.removeprefix(prefix): name
            for prefix in prefixes
            for name in kinds
            if name.startswith(prefix)
        }
        self._known = {name: kinds[full] for name, full in self._full_names.items()}

    def __getitem__(self, name: str) -> Tensor:
        shape, dtype = self._known[name]
        whole = torch.empty(shape, dtype=dtype)
        self._stored.fill({self._full_names[name]: whole})
        self._report(whole.numel() * whole.element_size())
        return whole

    def shapes(self) -> dict[str, torch.Size]:
        """Without reading anything."""
        return {name: shape for name, (shape, _) in self._known.items()}

    def outlines(self) -> dict[str, Tensor]:
        """Tensors of the right shapes and types without bytes."""
        return {
            name: torch.empty(shape, dtype=dtype, device="meta")
            for name, (shape, dtype) in self._known.items()
        }

    def bytes(self) -> int:
        """Of all tensors."""
        return sum(shape.numel() * dtype.itemsize for shape, dtype in self._known.values())

    def __iter__(self) -> Iterator[str]:
        return iter(self._known)

    def __len__(self) -> int:
        return len(self._known)


class EvaluatedTensors(LazyTensors):
    """Weights of Schedule-Free AdamW as they are evaluated: from trained and fast ones."""

    def __init__(self, stored: StoredTensors, report: Report, beta1: float) -> None:
        super().__init__(stored, MODEL_PREFIX, report=report)
        self._fast = LazyTensors(stored, FAST_PREFIX)
        self._beta1 = beta1

    def __getitem__(self, name: str) -> Tensor:
        trained = super().__getitem__(name)
        if name not in self._fast:
            return trained
        return evaluated_weights(trained, self._fast[name], self._beta1)


def evaluated_weights(trained: Tensor, fast: Tensor, beta1: float) -> Tensor:
    """The mean of the fast ones; trained ones lie ``beta1`` of the way from fast to mean."""
    return torch.lerp(trained, fast, 1 - 1 / beta1)


def export_checkpoint(
    path: Path | str,
    folder: Path,
    dtype: torch.dtype,
    max_shard_bytes: int,
    report: Report = lambda _: None,
    *,
    average: bool = False,
) -> int:
    """Write a checkpoint's weights, or their average, as a Hugging Face folder.

    Adapters are merged into the weights that they belong to. Returns the number of parameters.
    """
    source = open_source(path)
    manifest = source.manifest
    if "model" not in manifest.config:
        problem = "its manifest does not say which model this is"
        raise CheckpointError(path, problem, "as DCP (--to dcp) it needs to say none")
    config = trained_config(manifest)
    model = resolve_model(msgspec.convert(config["model"], Model))
    stored = StoredTensors(source)
    if average:
        refuse_without_average(stored)
    prefixes = (MODEL_PREFIX, AVERAGE_PREFIX) if average else (MODEL_PREFIX,)
    stored_weights = LazyTensors(stored, *prefixes, report=report)
    if config.get("optimizer", {}).get("kind") == "schedule-free":
        stored_weights = EvaluatedTensors(stored, report, config["optimizer"]["beta1"])
    state = MergedTensors(stored_weights, adapter_layouts(config))
    context = config.get("data", {}).get("sequence", 0)
    export_hf(state, model, folder, dtype, max_shard_bytes, context)
    return sum(shape.numel() for shape in state.shapes().values())


def refuse_without_average(stored: StoredTensors) -> None:
    """Raise ``CheckpointError`` where there are the weights alone."""
    if not any(name.startswith(AVERAGE_PREFIX) for name in stored.tensors()):
        problem = "holds no average of the weights"
        fix = "leave --ema out and take the weights: it was trained without train.ema"
        raise CheckpointError(stored.path, problem, fix)


def trained_config(manifest: Manifest) -> dict[str, Any]:
    """The settings of a checkpoint's run, as they were in the stage of its last step."""
    config = manifest.config
    if not config.get("train", {}).get("sequence_stages"):
        return config
    last = stage_at(msgspec.convert(config, Job), max(0, manifest.cursor.seen - 1))
    made: dict[str, Any] = msgspec.to_builtins(last)
    return made


class FoundTokenizer(NamedTuple):
    """The tokenizer that a run's tokens were made with."""

    path: Path  # its file, or a model's folder
    end: int | None  # the token that ends documents; None: the folder's own files say it


def complete_export(path: Path | str, folder: Path, given: Path | None = None) -> str:
    """Add to exported weights the tokenizer (of the run's corpus, or the one given) and how to
    generate; says which tokenizer that is, or why there is none."""
    config = trained_config(open_source(path).manifest)
    tokenizer = FoundTokenizer(given, None) if given is not None else find_tokenizer(config)
    end = tokenizer.end if tokenizer is not None else None
    if tokenizer is not None:
        context = config.get("data", {}).get("sequence", 0)
        write_tokenizer(tokenizer.path, folder, end, context)
    write_generation_config(folder, end)
    if end is not None:
        set_end_of_text(folder, end)
    if tokenizer is None:
        return "no tokenizer: the run names none that can be read here; give --tokenizer"
    return f"tokenizer: {tokenizer.path}"


def find_tokenizer(config: dict[str, Any]) -> FoundTokenizer | None:
    """Beside the run's token shards, or in the folder that its weights came from."""
    data = config.get("data", {})
    corpora = [
        data.get("path", ""),
        *(each.get("path", "") for each in data.get("blend", {}).values()),
    ]
    for corpus in corpora:
        corpus_folder = Path(corpus)
        if corpus and "://" not in corpus and (corpus_folder / TOKENIZER_FILE).exists():
            if (corpus_folder / "tokenizer_config.json").exists():  # a chat's, with its template
                return FoundTokenizer(corpus_folder, None)
            return FoundTokenizer(
                corpus_folder / TOKENIZER_FILE, read_corpus(corpus_folder).end_of_document
            )
    origin = config.get("checkpoint", {}).get("load_hf", "")
    if origin and any((Path(origin) / name).exists() for name in TOKENIZER_FILES):
        return FoundTokenizer(Path(origin), None)
    return None


def import_checkpoint(
    folder: Path,
    out: Path,
    shard_bytes: int = SHARD_BYTES,
    report: Report = lambda _: None,
) -> Path:
    """Write a Hugging Face folder's weights as the checkpoint of step 0, without optimizer."""
    if latest(out) is not None:
        raise CheckpointError(out, "holds a checkpoint already", "name another folder")
    model = config_from_hf(folder)
    extra = Extra(
        tokens=0,
        cursor=Cursor(),
        mesh={},
        config_hash="",
        config={"model": msgspec.to_builtins(model)},
    )
    weights = reported(with_expert_biases(load_hf(folder), has_expert_bias(model.moe)), report)
    return write_whole(
        out, 0, weights, extra, shard_bytes, origin=f"the Hugging Face folder {folder}"
    )


def reported(tensors: Iterator[tuple[str, Tensor]], report: Report) -> Iterator[tuple[str, Tensor]]:
    """Tensors as they come, their bytes told once they were used."""
    for name, tensor in tensors:
        yield name, tensor
        report(tensor.numel() * tensor.element_size())


def with_expert_biases(
    weights: Iterator[tuple[str, Tensor]], has_bias: bool
) -> Iterator[tuple[str, Tensor]]:
    """Our names, and for each router the selection bias that a trainer has.

    Folders whose layout has one (``has_bias``) hold it themselves.
    """
    for fqn, tensor in weights:
        yield MODEL_PREFIX + fqn, tensor
        if fqn.endswith(ROUTER_SUFFIX) and not has_bias:
            bias = MODEL_PREFIX + fqn.removesuffix("weight") + "expert_bias"
            yield bias, torch.zeros(len(tensor), dtype=torch.float32)


def reshard(path: Path | str, out: Path, shards: int, report: Report = lambda _: None) -> Path:
    """Write a checkpoint anew in about so many shards, one of them in memory at a time."""
    source = open_source(path)
    state = LazyTensors(StoredTensors(source), "", report=report)
    manifest: Manifest = source.manifest
    return write_whole(
        out,
        manifest.step,
        ((name, state[name]) for name in state),
        extra_of(manifest),
        -(-state.bytes() // shards),
        generators=generators_of(source),
        origin=manifest.origin,
    )


def extra_of(manifest: Manifest) -> Extra:
    """What the trainer added to its tensors."""
    return Extra(
        tokens=manifest.tokens,
        cursor=manifest.cursor,
        mesh=manifest.mesh,
        config_hash=manifest.config_hash,
        generation=manifest.generation,
        config=manifest.config,
    )


def generators_of(source: NamedSource) -> list[bytes]:
    """The random generators of every rank of the run, as far as they are known."""
    return [rng_of(source, rank) for rank in range(source.manifest.run_ranks)]
