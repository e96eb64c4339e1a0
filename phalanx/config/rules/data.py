"""Rules of the [data] section: sources, blends, curricula and the order."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from phalanx.config.errors import ConfigProblem, did_you_mean, problem
from phalanx.config.schema import Data, Job

SMALLEST_SHARE = 1 / (1 << 16)  # of a blend: one sample in a cycle of 2^16
_NAME = re.compile(r"[A-Za-z0-9_-]+")


def data_problems(job: Job) -> Iterator[ConfigProblem]:
    """Everything in [data] that contradicts itself or the rest of the job."""
    data = job.data
    yield from _where(data)
    yield from _blend(data)
    yield from _stages(data)
    yield from _shuffle(data)
    if job.train.validate_every and not data.validation_fraction:
        yield problem(
            "train.validate_every",
            job.train.validate_every,
            "validation needs samples that are held out",
            "set data.validation_fraction, e.g. to 0.01",
        )


def _where(data: Data) -> Iterator[ConfigProblem]:
    if data.source == "shards" and not data.path and not data.blend:
        yield problem(
            "data.path",
            '""',
            'data.source = "shards" needs a folder of token shards, or tables [data.blend.NAME]',
            "make one with `phalanx data tokenize`",
        )
    if data.source != "shards" and (data.path or data.blend):
        key, value = ("data.path", f'"{data.path}"') if data.path else ("data.blend", "")
        rule = f'data.source = "{data.source}" reads no files'
        yield problem(key, value, rule, 'set data.source = "shards"')
    elif data.path and data.blend:
        rule = "a corpus is either one path or a blend"
        yield problem("data.path", f'"{data.path}"', rule, "make it a source of the blend")


def _blend(data: Data) -> Iterator[ConfigProblem]:
    for name, source in data.blend.items():
        if not _NAME.fullmatch(name):
            rule = "a source's name is made of letters, digits, _ and -"
            yield problem(f"data.blend.{name}", "", rule, "rename it")
        if not source.path:
            yield problem(f"data.blend.{name}.path", '""', "names no corpus", "give its folder")
    if data.blend:
        weights = {name: source.weight for name, source in data.blend.items()}
        yield from _weights(weights, "data.blend", ".weight")


def _weights(weights: Mapping[str, float], key: str, end: str = "") -> Iterator[ConfigProblem]:
    total = sum(weights.values())
    if total <= 0:
        yield problem(key, "", "every weight is zero", "give one source a weight above 0")
        return
    for name, weight in weights.items():
        if 0 < weight < total * SMALLEST_SHARE:
            yield problem(
                f"{key}.{name}{end}",
                weight,
                f"is less than 1 in {1 << 16} of the blend, the smallest share that can be kept",
                f"nearest: {total * SMALLEST_SHARE:.3g}, or 0",
            )


def _stages(data: Data) -> Iterator[ConfigProblem]:
    if data.stages and not data.blend:
        rule = "stages change the weights of a blend, and there is none"
        yield problem("data.stages", "", rule, "add tables [data.blend.NAME]")
        return
    before = 0
    for number, stage in enumerate(data.stages):
        key = f"data.stages[{number}]"
        if stage.tokens <= before:
            yield problem(
                f"{key}.tokens",
                stage.tokens,
                f"must be above {before}, where the weights before it begin",
                "sort the stages by tokens; data.blend holds the weights of the start",
            )
        before = max(before, stage.tokens)
        for name in stage.weights:
            if name not in data.blend:
                rule = "is no source of data.blend"
                yield problem(f"{key}.weights.{name}", "", rule, did_you_mean(name, [*data.blend]))
        yield from _weights(stage.weights, f"{key}.weights")


def _shuffle(data: Data) -> Iterator[ConfigProblem]:
    if data.shuffle == "blocked" and data.block_tokens < data.sequence:
        yield problem(
            "data.block_tokens",
            data.block_tokens,
            f"a block must hold a sample of data.sequence ({data.sequence}) tokens",
            f"nearest: {data.sequence}; 8388608 is usual",
        )
    stores = [path for path in [data.path, *(s.path for s in data.blend.values())] if "://" in path]
    if stores and data.shuffle == "global":
        yield problem(
            "data.shuffle",
            '"global"',
            f"{stores[0]} is an object store: each sample would be a small read of its own",
            'set it to "blocked", or copy the corpus with `phalanx data stage`',
        )
