"""What the detectors see at full size: a slow rank, a week of nothing, a flipped bit.

    python -m benchmarks.detection                     # 100,000 ranks, a week; minutes on one core
    python -m benchmarks.detection --days 1 --trials 4 --processes 16

Records of 98,304 ranks (TP8 x PP16 x DP768), a step every 12.8 s, go through ``StepWatch`` as they
do in the server. The noise: devices differ by 0.4 % (standard deviation), drift by 0.5 % within an
hour, jitter by 1 % from step to step; one rank and step in a thousand takes up to four times as
long; and now and then a whole node does. Exits with 1 when a bar is missed: the slow rank within
20 steps, its kind, nobody else; at most one alarm a week of clean noise; the node of a flipped bit.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from phalanx.cluster.detectors import told_wrong, vote
from phalanx.cluster.jobs.job import GangShape, Placement
from phalanx.cluster.protocol.events import EventBody, SlowRank
from phalanx.cluster.protocol.step_watch import GangRecord, StepWatch
from phalanx.cluster.protocol.timeouts import fixed_limits
from proof.report import report

SHAPE = GangShape(replicas=768, tensor=8, pipeline=16, slot_gpus=8)
STEP_SECONDS = 12.8
DAY_STEPS = round(86_400 / STEP_SECONDS)
WITHIN_STEPS = 20
ONSET = 40
SLOWDOWNS = (1.06, 1.08, 1.12, 1.25, 2.0)
DRIFT_STEPS = 3600 / STEP_SECONDS


class Noise:
    """What the ranks of a healthy gang take, step by step."""

    def __init__(self, ranks: int, seed: int, usual_ns: float) -> None:
        self.rng = np.random.default_rng(seed)
        self.base = (usual_ns * (1 + 0.004 * self._normal(ranks))).astype(np.float32)
        self.drift = 0.005 * self._normal(ranks)

    def step(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Nanoseconds by rank."""
        ranks = len(self.base)
        keep = np.float32(np.exp(-1 / DRIFT_STEPS))
        self.drift = keep * self.drift
        self.drift += np.float32(0.005 * np.sqrt(1 - keep**2)) * self._normal(ranks)
        times = self.base * (1 + self.drift + np.float32(0.01) * self._normal(ranks))
        strays = self.rng.integers(0, ranks, self.rng.poisson(ranks / 1000))
        times[strays] *= 1 + 3 * self.rng.random(len(strays), np.float32)
        if self.rng.random() < 0.1:  # something else runs on a node for a moment
            node = int(self.rng.integers(0, ranks // 8)) * 8
            times[node : node + 8] *= 1 + self.rng.random()
        found: np.ndarray[Any, np.dtype[np.int64]] = times.astype(np.int64)
        return found

    def _normal(self, count: int) -> np.ndarray[Any, np.dtype[np.float32]]:
        return self.rng.standard_normal(count, np.float32)


class Gang:
    """A healthy gang under watch; something may be slow in it."""

    def __init__(self, shape: GangShape, seed: int) -> None:
        self.shape = shape
        self.ranks = shape.gpus(shape.replicas)
        self.watch = StepWatch()
        nodes = tuple(range(shape.slots(shape.replicas)))
        placement = Placement(nodes, (), replicas=shape.replicas)
        self.watch.begin(1, 1, shape, placement, fixed_limits(10**18), now_ns=0)
        self.compute = Noise(self.ranks, 2 * seed, 9e9)
        self.transfer = Noise(self.ranks, 2 * seed + 1, 1.5e9)
        self.luck = np.random.default_rng(seed)
        self.made = 0

    def step(self, slow: dict[str, tuple[int, float]]) -> list[EventBody]:
        """One step; ``slow``: by part, a rank and how much longer it takes."""
        self.made += 1
        times = {"compute": self.compute.step(), "communication": self.transfer.step()}
        for part, (rank, factor) in slow.items():
            times[part][rank] = int(times[part][rank] * factor)
        loss = 2 + 6 / (1 + self.made / 500) + 0.02 * self.luck.standard_normal()
        record = GangRecord(
            job=1,
            generation=1,
            step=self.made,
            step_ns=int(STEP_SECONDS * 1e9 * (1 + 0.01 * abs(self.luck.standard_normal()))),
            loss=float(loss),
            has_loss=True,
            data_wait_ns=int(1e7 * self.luck.random()),
            compute_ns=times["compute"],
            transfer_ns=times["communication"],
        )
        return self.watch.record(record, self.made * round(STEP_SECONDS * 1e9))


def find(shape: GangShape, seed: int, part: str, factor: float) -> dict[str, Any]:
    """One rank becomes slow: after how many steps it is named, and who else is."""
    gang = Gang(shape, seed)
    culprit = int(gang.luck.integers(0, gang.ranks))
    for _ in range(ONSET):
        gang.step({})
    others = 0
    for late in range(1, WITHIN_STEPS + 1):
        for event in gang.step({part: (culprit, factor)}):
            right = isinstance(event, SlowRank) and (event.rank, event.part) == (culprit, part)
            if right:
                return {"part": part, "factor": factor, "steps": late, "others": others}
            others += 1
    return {"part": part, "factor": factor, "steps": None, "others": others}


def clean(shape: GangShape, seed: int, steps: int) -> list[str]:
    """Alarms of a gang that nothing ails."""
    gang = Gang(shape, seed)
    return [str(event) for _ in range(steps) for event in gang.step({})]


def flipped_bits(shape: GangShape, trials: int) -> int:
    """Of gangs with one flipped bit, in how many exactly the right rank is named."""
    luck, right = np.random.default_rng(3), 0
    inner = shape.tensor * shape.context
    for trial in range(trials):
        prints = luck.integers(0, 1 << 62, shape.pipeline * inner)
        replicas = shape.replicas if trial % 2 else 2  # two: nobody has the majority
        shards: dict[int, list[tuple[int, int]]] = {}
        for shard, usual in enumerate(prints.tolist()):
            stage, within = divmod(shard, inner)
            first = stage * shape.replicas * inner + within
            shards[shard] = [(first + inner * copy, usual) for copy in range(replicas)]
        shard, copy = int(luck.integers(0, len(shards))), int(luck.integers(0, replicas))
        rank, usual = shards[shard][copy]
        shards[shard][copy] = (rank, usual ^ 1 << int(luck.integers(0, 62)))
        wrong = vote(shards).wrong
        if not wrong:  # both insist; then a third makes the step in the place of one of them
            stays, third = shards[shard][int(luck.integers(0, 2))], (-1, usual)
            wrong = told_wrong([*shards[shard], *shards[shard], stays, third])
        right += wrong == (rank,)
    return right


def main() -> int:
    """Runs all three; prints and stores what was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--days", type=int, default=7)
    parser.add_argument("--trials", type=int, default=2, help="of each slowdown and part")
    parser.add_argument("--processes", type=int, default=1)
    asked = parser.parse_args()
    began = time.perf_counter()
    with ProcessPoolExecutor(asked.processes) as pool:
        days = [pool.submit(clean, SHAPE, 1000 + day, DAY_STEPS) for day in range(asked.days)]
        hunts = [
            pool.submit(find, SHAPE, 10 + trial, part, factor)
            for trial in range(asked.trials)
            for part in ("compute", "communication")
            for factor in SLOWDOWNS
        ]
        found = [hunt.result() for hunt in hunts]
        alarms = [alarm for day in days for alarm in day.result()]
    bits = flipped_bits(SHAPE, 20)
    for factor in SLOWDOWNS:
        steps = [one["steps"] for one in found if one["factor"] == factor]
        named = [each for each in steps if each is not None]
        print(
            f"{factor:.2f} x slow: {len(named)} of {len(steps)} named, after {sorted(named)} steps"
        )
    wrong = sum(one["others"] for one in found)
    print(f"others accused beside it: {wrong}")
    print(
        f"alarms in {asked.days} days of clean noise ({asked.days * DAY_STEPS:,} steps): {alarms}"
    )
    print(f"flipped bits localised: {bits} of 20; {time.perf_counter() - began:.0f} s in all")
    slow = [one for one in found if one["factor"] >= 1.12]
    named_share = sum(one["steps"] is not None for one in slow) / max(1, len(slow))
    details = {"found": found, "days": asked.days, "alarms": alarms, "bits": bits}
    folder = Path("runs/benchmarks")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "detection.json").write_text(json.dumps(details, indent=2) + "\n")
    figures = {
        "named_share": named_share,
        "others_accused": wrong,
        "alarms": len(alarms),
        "bits_localised": bits,
    }
    return report("detection", figures)


if __name__ == "__main__":
    sys.exit(main())
