"""Training speed on one GPU, beside torchtitan.

Two processes, one for each trainer, take turns in windows of steps; while one measures, the
other has given its memory back. Prints one table and writes JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
SIDES = ("torchtitan", "phalanx")
WARM_STEPS = 1  # at the start of a window, not measured
GIB = 1 << 30


# ---------------------------------------------------------------- the measuring processes


def serve(side: str, name: str, steps: int) -> None:
    """Answer "window" and "ceiling" on standard input with a line of JSON each."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever libraries print is not an answer
    import torch
    from speed_shape import row

    compared = row(name)
    if side == "torchtitan":
        from speed_titan import TitanSide as Side
    else:
        from speed_phalanx import PhalanxSide as Side
    trainer: Any = None
    state: Any = None
    for line in sys.stdin:
        if line.strip() == "ceiling":
            answer = {"matmul_tflops": matmul_ceiling()}
        else:
            if trainer is None:  # not before its turn: the other side may need the memory
                trainer = Side(compared)
            if state is not None:
                state.unpark()
            answer = measure(trainer, steps, compared.tokens)
            state = trainer.state()
            state.park()
        torch.cuda.empty_cache()
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def measure(trainer: Any, steps: int, tokens: int) -> dict[str, float]:
    """Tokens per second over ``steps`` steps with no wait between them, and the peak memory."""
    import torch

    for _ in range(WARM_STEPS):
        trainer.step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    begun = time.perf_counter()
    for _ in range(steps):
        trainer.step()
    torch.cuda.synchronize()
    seconds = (time.perf_counter() - begun) / steps
    trainer.finish()
    return {
        "tokens_per_second": tokens / seconds,
        "step_seconds": seconds,
        "peak_bytes": torch.cuda.max_memory_allocated(),
    }


def matmul_ceiling() -> float:
    """TFLOP/s of a bf16 8192^3 matmul on random values."""
    import torch

    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    for _ in range(10):
        a @ b
    torch.cuda.synchronize()
    begun = time.perf_counter()
    for _ in range(100):
        a @ b
    torch.cuda.synchronize()
    return 100 * 2 * 8192**3 / (time.perf_counter() - begun) / 1e12


# ---------------------------------------------------------------- the comparison


class Process:
    """One side, measuring when asked."""

    def __init__(self, side: str, row: str, steps: int) -> None:
        command = [sys.executable, __file__, "--serve", side, "--row", row, "--steps", str(steps)]
        environment = os.environ | {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
        environment["PYTHONPATH"] = os.pathsep.join(
            [str(HERE), str(HERE.parent), os.environ.get("PYTHONPATH", "")]
        )
        self.side = side
        self.process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def ask(self, what: str) -> dict[str, float]:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(what + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.side} ended with {self.process.wait()}; see its output above")
        answer: dict[str, float] = json.loads(line)
        return answer

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def compare(row: str, windows: int, steps: int) -> dict[str, Any]:
    """Alternate the two sides; the first window of each is discarded as warm-up."""
    sides = [Process(side, row, steps) for side in SIDES]
    found: dict[str, Any] = {"row": row}
    samples: dict[str, list[dict[str, float]]] = {side.side: [] for side in sides}
    for window in range(windows + 1):
        for side in sides:
            answer = side.ask("window")
            print(f"  {row} {side.side} window {window}: {answer}", file=sys.stderr, flush=True)
            if window:
                samples[side.side].append(answer)
    found["matmul_tflops"] = sides[1].ask("ceiling")["matmul_tflops"]
    for side in sides:
        side.close()
    for name, answers in samples.items():
        rates = [a["tokens_per_second"] for a in answers]
        found[name] = {
            "tokens_per_second": statistics.median(rates),
            "windows": rates,
            "peak_bytes": max(a["peak_bytes"] for a in answers),
            "mfu": mfu(row, statistics.median(rates)),
        }
    return found


def mfu(name: str, tokens_per_second: float) -> float:
    """Share of the bf16 peak, attention counted causally; also for fp8, so that rows compare."""
    from speed_shape import row

    from phalanx.hardware import lookup
    from phalanx.plan.memory.model_counts import flops_per_token

    gpu = lookup("NVIDIA H200")
    assert gpu is not None
    compared = row(name)
    flops = flops_per_token(compared.model, compared.sequence, "causal").model_flops
    return tokens_per_second * flops / gpu.peak_flops["bfloat16"]


def table(results: list[dict[str, Any]]) -> str:
    """One row for each model and trainer."""
    lines = [
        "| row | trainer | tokens/s (median) | windows min-max | MFU causal, bf16 peak | "
        "peak GiB | ratio | matmul TFLOP/s |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for result in results:
        base = result[SIDES[0]]["tokens_per_second"]
        for side in SIDES:
            s = result[side]
            low, high = min(s["windows"]), max(s["windows"])
            lines.append(
                f"| {result['row']} | {side} "
                f"| {s['tokens_per_second']:,.0f} | {low:,.0f}-{high:,.0f} "
                f"| {s['mfu']:.1%} | {s['peak_bytes'] / GIB:.1f} "
                f"| {s['tokens_per_second'] / base:.3f} | {result['matmul_tflops']:.0f} |"
            )
    return "\n".join(lines)


def judge(result: dict[str, Any]) -> int:
    """The row's figures, for whoever measures its claim."""
    from proof.report import report

    ours, theirs = result[SIDES[1]], result[SIDES[0]]
    figures = {
        "tokens_per_second": ours["tokens_per_second"],
        "ratio": ours["tokens_per_second"] / theirs["tokens_per_second"],
        "mfu": ours["mfu"],
        "peak_gib": ours["peak_bytes"] / GIB,
    }
    return report(f"speed-{result['row']}", figures)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    sys.path[:0] = [str(HERE), str(HERE.parent)]
    from speed_shape import ROWS

    parser.add_argument(
        "--row", action="append", choices=ROWS, help="what to compare; may be given several times"
    )
    parser.add_argument("--all", action="store_true", help="every row")
    parser.add_argument("--windows", type=int, default=5)
    parser.add_argument("--steps", type=int, default=5, help="measured steps in a window")
    parser.add_argument("--json", type=Path, help="where to write the results")
    parser.add_argument("--serve", choices=SIDES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve(arguments.serve, arguments.row[0], arguments.steps)
        return 0
    results = []
    for name in ROWS if arguments.all else arguments.row or ["1b"]:
        results.append(compare(name, arguments.windows, arguments.steps))
        print(table(results), flush=True)
        if arguments.json:
            arguments.json.write_text(json.dumps(results, indent=2))
    return max(judge(result) for result in results)


if __name__ == "__main__":
    sys.exit(main())
