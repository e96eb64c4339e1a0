"""One job that everything happens to for twenty minutes, and whether anything of that can be seen.

    python -m benchmarks.endurance [--minutes 20] [--kills 200] [--kinds worker,node,…] [--json]

Four workers, two pipeline stages on two replicas each, one node a worker, and two spares. Kinds of
harm take turns, slots too; each is done when the job has settled after the last one, spread over
its steps. Hangs are found after a few seconds, since the steps are short; otherwise the shipped
policy holds, but for nodes, which may die as often as they like. In the end the job must be done,
with the losses and weights of an undisturbed run of as many steps, and server, agents and keepers
must be as large as they were in the beginning. Exit code 1: it is not so.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.recovery import CPU, Bench, step_seconds
from benchmarks.recovery_kinds import KINDS, Struck, Target, summary
from phalanx.testing.chaos.verdict import compare
from phalanx.testing.local_cluster import TrialCluster
from phalanx.testing.local_processes import keeper_pid
from proof.report import report

ORDER = ("worker", "keeper", "agent", "worker", "node", "controller", "worker", "stopped", "zygote")
WORLD, SPARES = 4, 2
# A job of short steps, so that twenty minutes are many of them.
SMALL = {
    **CPU,
    "model": 'preset = "tiny"\ndim = 64\nlayers = 2\nffn = 128\nvocab = 512',
    "sequence": "32",
}
CALIBRATION_STEPS = 60
STRIKE_SECONDS = 2.0  # after a fault in which no step is made, about
LEAST_STEPS_BETWEEN = 8
GROWTH = 0.05  # of memory, that is no leak yet
END_SECONDS = 600.0
WARM_UP = 0.1  # of all faults; memory is measured from there on


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--kinds", default=",".join(dict.fromkeys(ORDER)), help="with commas")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    kinds = [kind for kind in ORDER if kind in options.kinds.split(",")]
    if unknown := set(options.kinds.split(",")) - KINDS.keys():
        parser.error(f"there is no kind {', '.join(sorted(unknown))}: {', '.join(KINDS)}")
    with tempfile.TemporaryDirectory(
        prefix="phalanx-endurance-", ignore_cleanup_errors=True
    ) as folder:
        run = Endurance(Path(folder), kinds, options.kills, 60 * options.minutes, options.json)
        found = run.measure()
    if options.json:
        print(json.dumps(found, indent=2))
        return 0 if found["good"] else 1
    show(found)
    return report("endurance", figures(found)) or int(not found["good"])


def figures(found: dict[str, Any]) -> dict[str, float]:
    """What the registry of claims asks for."""
    worst = max(each["worst"] for each in found["kinds"].values())
    return {
        "kills": found["kills"],
        "done": float(found["state"] == "done"),
        "differences": len(found["differences"]),
        "growth": max(found["growth"].values(), default=0.0),
        "worst": worst,
    }


class Endurance:
    """The job, what is done to it, and the same without."""

    def __init__(
        self, root: Path, kinds: list[str], kills: int, seconds: float, quiet: bool
    ) -> None:
        self.bench = Bench(root, SMALL, WORLD)
        self.root, self.kinds, self.kills, self.seconds = root, kinds, kills, seconds
        self.quiet = quiet
        self.memory: list[dict[str, float]] = []

    def say(self, words: str) -> None:
        if not self.quiet:
            print(words, flush=True)

    def measure(self) -> dict[str, Any]:
        """Harm the job, then compare it with one that nothing happened to."""
        began = time.monotonic()
        steps = self._steps()
        self.say(f"{steps} steps, {self.kills} faults")
        with self.bench.cluster(self.root, SPARES) as cluster:
            job = cluster.submit(str(self.bench.job(self.root, "endured", steps)))
            target = Target(cluster, job, WORLD)
            struck = [self._strike(target, number, steps) for number in range(self.kills)]
            target.wait(lambda: target.ended, "the end of the job", END_SECONDS + self.seconds)
            state, took = target.state, time.monotonic() - began
            folder = self.root / "runs" / "endured" / f"job-{job}"
        differences = compare(folder, self._undisturbed(steps)) if state == "done" else [state]
        growth = self._growth()
        return {
            "state": state,
            "steps": steps,
            "kills": len(struck),
            "minutes": took / 60,
            "differences": differences,
            "kinds": {
                kind: summary([each for each in struck if each.kind == kind])
                for kind in dict.fromkeys(self.kinds)
                if any(each.kind == kind for each in struck)
            },
            "memory": self.memory,
            "growth": growth,
            "good": not differences and all(each <= GROWTH for each in growth.values()),
        }

    def _strike(self, target: Target, number: int, steps: int) -> Struck:
        """One fault, when its turn has come."""
        at = max(1, number * (steps - LEAST_STEPS_BETWEEN) // self.kills)
        target.wait(
            lambda: (new := target.commits.newest()) and new.step >= at, f"step {at}", self.seconds
        )
        if number in (int(self.kills * WARM_UP), self.kills // 2, self.kills - 1):
            target.settle()
            self.memory.append(memory_of(target.cluster, target.job))
        struck = target.strike(self.kinds[number % len(self.kinds)], number % WORLD)
        words = f"{number + 1:4}  {struck.kind:<11} slot {struck.slot}  at step {struck.step}: "
        self.say(f"{words}next committed step after {struck.seconds:.2f} s")
        return struck

    def _steps(self) -> int:
        """As many as fit into the time beside what is done to the job."""
        seconds = step_seconds(self._train("calibration", CALIBRATION_STEPS))
        left = max(0.0, self.seconds - self.kills * STRIKE_SECONDS)
        return max(int(left / max(seconds, 0.01)), self.kills * LEAST_STEPS_BETWEEN)

    def _undisturbed(self, steps: int) -> Path:
        self.say("an undisturbed run of as many steps")
        return self._train("undisturbed", steps)

    def _train(self, name: str, steps: int) -> Path:
        job = self.bench.job(self.root, name, steps)
        command = [sys.executable, "-m", "phalanx", "train", str(job), "--world-size", str(WORLD)]
        subprocess.run(command, cwd=self.root, check=True, capture_output=True)
        return max((self.root / "runs" / name).iterdir(), key=lambda path: path.stat().st_mtime)

    def _growth(self) -> dict[str, float]:
        """By role, how much larger the last measurement is than the first."""
        if len(self.memory) < 2:
            return {}
        first, last = self.memory[0], self.memory[-1]
        return {role: last[role] / first[role] - 1 for role in first}


def memory_of(cluster: TrialCluster, job: int) -> dict[str, float]:
    """Megabytes of the server, and the medians of agents and of the job's keepers."""
    nodes = cluster.local.nodes
    assert cluster.server is not None
    keepers = [pid for node in nodes if (pid := keeper_pid(node, job)) is not None]
    agents = [node.agent.pid for node in nodes if node.agent is not None]
    return {
        "server": resident(cluster.server.pid),
        "agents": statistics.median(map(resident, agents)),
        "keepers": statistics.median(map(resident, keepers)),
    }


def resident(pid: int) -> float:
    """Megabytes of a process that are in memory."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS:"))


def show(found: dict[str, Any]) -> None:
    for kind, each in found["kinds"].items():
        words = f"median {each['median']:.2f} s, worst {each['worst']:.2f} s"
        print(f"{kind:<11} {each['recovered']:4} times: {words}")
    for role, growth in found["growth"].items():
        sizes = ", ".join(f"{sample[role]:.0f}" for sample in found["memory"])
        print(f"{role:<11} {sizes} MB: {100 * growth:+.1f} %")
    same = "the same" if not found["differences"] else f"differ: {found['differences'][:3]}"
    words = f"{found['kills']} faults in {found['minutes']:.1f} min"
    verdict = "GOOD" if found["good"] else "BAD"
    print(f"{verdict}: {words}; the job is {found['state']}; losses and weights {same}")


if __name__ == "__main__":
    sys.exit(main())
