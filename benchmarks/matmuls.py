"""Times what cuBLASLt offers for the models' matmuls under sustained load, and writes the table.

The power limit decides which algorithm is fastest, and shows only after a while: the best of a
short look take turns for seconds each. What is found belongs into `phalanx/model/cuda/tables`.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from phalanx.config import PRESETS
from phalanx.model.cuda import cublaslt, matmul_table
from phalanx.model.cuda.cublaslt import Algorithm, MatmulPlan, MatmulProblem
from phalanx.model.cuda.matmul_table import Tuned
from phalanx.model.loss import chunk_tokens

SHAPES = {"llama3-1b": 32_768, "llama3-3b": 16_384, "llama3-8b": 8192}  # tokens of a micro-batch
IN_FP8 = ("llama3-3b", "llama3-8b")
OFFERED = 64  # algorithms that the library is asked for
LONG = 8  # of those that take turns
TURN_SECONDS = 0.03
MARGIN = 1.01  # by which another one must be faster than the library's choice
BF16, E4M3, E5M2 = torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2


class Result(NamedTuple):
    """Of one problem: seconds by algorithm, the library's choice first."""

    problem: MatmulProblem
    seconds: dict[int, float]

    @property
    def best(self) -> int:
        fastest = min(self.seconds, key=self.seconds.__getitem__)
        return fastest if self.seconds[0] > MARGIN * self.seconds[fastest] else 0

    @property
    def gain(self) -> float:
        return self.seconds[0] / self.seconds[self.best]


def problems() -> list[MatmulProblem]:
    """The matmuls of all models, each once: inside blocks, and of the head's chunks."""
    found: dict[MatmulProblem, None] = {}
    for preset, tokens in SHAPES.items():
        for outputs, inputs in matrices(preset):
            found |= dict.fromkeys(in_bf16(tokens, outputs, inputs))
            if preset in IN_FP8:
                found |= dict.fromkeys(in_fp8(tokens, outputs, inputs))
        vocab, dim = PRESETS[preset].vocab, PRESETS[preset].dim
        found |= dict.fromkeys(in_bf16(min(tokens, chunk_tokens(vocab, 2)), vocab, dim))
    return list(found)


def matrices(preset: str) -> list[tuple[int, int]]:
    """Rows and columns of a block's weights."""
    model = PRESETS[preset]
    heads, pairs = model.heads * model.head_dim, 2 * model.kv_heads * model.head_dim
    return [
        (heads + pairs, model.dim),
        (model.dim, heads),
        (2 * model.ffn, model.dim),
        (model.dim, model.ffn),
    ]


def in_bf16(tokens: int, outputs: int, inputs: int) -> Iterator[MatmulProblem]:
    """A linear layer's output, and the gradients of its input and weight."""
    yield MatmulProblem(tokens, outputs, inputs, False, True, BF16, BF16, False)
    yield MatmulProblem(tokens, inputs, outputs, False, False, BF16, BF16, False)
    yield MatmulProblem(outputs, inputs, tokens, True, False, BF16, BF16, False)


def in_fp8(tokens: int, outputs: int, inputs: int) -> Iterator[MatmulProblem]:
    """The same; both operands lie along the sum."""
    yield MatmulProblem(tokens, outputs, inputs, False, True, E4M3, E4M3, True)
    yield MatmulProblem(tokens, inputs, outputs, False, True, E5M2, E4M3, False)
    yield MatmulProblem(outputs, inputs, tokens, False, True, E5M2, E4M3, False)


class Operands(NamedTuple):
    """Numbers as a model has them: ones would draw less power."""

    a: Tensor
    b: Tensor
    out: Tensor
    scales: tuple[Tensor, Tensor] | None


def operands(problem: MatmulProblem) -> Operands:
    """On the device."""
    p, device = problem, "cuda"
    a = torch.randn((p.inner, p.rows) if p.turn_a else (p.rows, p.inner), device=device)
    b = torch.randn((p.columns, p.inner) if p.turn_b else (p.inner, p.columns), device=device)
    out = torch.empty(p.rows, p.columns, dtype=BF16, device=device)
    one = torch.ones((), device=device)
    return Operands(a.to(p.a), b.to(p.b), out, None if p.a == BF16 else (one, one.clone()))


def time_all(
    count: int, seconds_of: Callable[[int, int], float], budget: float, clock: Callable[[], float]
) -> dict[int, float]:
    """Median seconds of the best ones, which take turns until the budget is spent.

    ``seconds_of(number, runs)``: of one run among so many in a row.
    """
    end = clock() + budget
    short = [seconds_of(number, 3) for number in range(count)]
    order = sorted(range(1, count), key=short.__getitem__)[: LONG - 1]
    turns: dict[int, list[float]] = {number: [] for number in (0, *order)}
    while clock() < end or not all(len(each) >= 3 for each in turns.values()):
        for number, found in turns.items():
            runs = max(1, round(TURN_SECONDS / max(short[number], 1e-6)))
            found.append(seconds_of(number, runs))
    # The first turns came before the clocks settled.
    return {number: statistics.median(each[len(each) // 3 :]) for number, each in turns.items()}


def measure(problem: MatmulProblem, budget: float) -> tuple[Result, Tuned]:
    """One problem on the device."""
    plan, given = MatmulPlan(problem, 0), operands(problem)
    plan.scale(given.scales)
    candidates = plan.ask(OFFERED)

    def seconds_of(number: int, runs: int) -> float:
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record()
        for _ in range(runs):
            plan.launch(candidates[number], given.a, given.b, given.out)
        after.record()
        after.synchronize()
        return float(before.elapsed_time(after)) / runs / 1e3

    seconds_of(0, 3)  # the first run of all loads code
    result = Result(problem, time_all(len(candidates), seconds_of, budget, time.perf_counter))
    return result, tuned(candidates[result.best], result.seconds[result.best])


def tuned(candidate: Algorithm, seconds: float) -> Tuned:
    """As tables have it."""
    return Tuned(tuple(candidate.algorithm), candidate.workspace, seconds * 1e6)


def line(result: Result) -> str:
    """Of the printed table."""
    p = result.problem
    flops = 2 * p.rows * p.columns * p.inner
    seconds = result.seconds[result.best]
    rate = flops / seconds / 1e12
    return f"{p.text:64} {seconds * 1e6:9.1f} us {rate:7.1f} TFLOP/s {result.gain:6.3f}x"


def main() -> int:
    """All problems in turn; the table is written after each, whatever ends the run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=8.0, help="for all problems together")
    parser.add_argument("--out", type=Path, help="file of the table; else beside the shipped ones")
    chosen = parser.parse_args()
    device, version = torch.cuda.get_device_name(0), cublaslt.table(0).version
    name = f"{device.lower().replace(' ', '-')}-{version}.toml"
    shipped = Path(matmul_table.__file__).parent / matmul_table.SHIPPED
    out = chosen.out or shipped / name
    out.parent.mkdir(parents=True, exist_ok=True)
    todo = problems()
    end, found = time.perf_counter() + 60 * chosen.minutes, dict[str, Tuned]()
    for number, problem in enumerate(todo):
        budget = max(0.5, (end - time.perf_counter()) / (len(todo) - number))
        result, found[problem.text] = measure(problem, budget)
        print(line(result), flush=True)
        out.write_text(matmul_table.written(device, version, found))
    print(f"written: {out}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
