"""Plans of fault: from a TOML file, or drawn from a seed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from msgspec import Struct

from phalanx.config import ConfigError, Job
from phalanx.control.host.toml_file import read_struct

Kind = Literal[
    "kill_worker",  # SIGKILL of a slot's first worker
    "stop_worker",  # SIGSTOP; it goes on after ``seconds``, if it still lives
    "deadlock_worker",  # its main thread waits for ever
    "slow_worker",  # it gets half of its time for ``seconds``
    "kill_keeper",
    "kill_agent",  # and started again after ``seconds``
    "kill_zygote",  # and all that was forked from it but the keeper; see kill_node
    "kill_node",  # everything on it; started again after ``seconds``
    "freeze_node",  # everything on it stands still for ``seconds``
    "partition",  # its network is cut for ``seconds``; needs namespaces
    "corrupt_replica",  # bytes of what a keeper holds of its neighbour, whose node then dies
    "flip_bit",  # one bit of one weight of a replica
    "fill_disk",  # where checkpoints go, for ``seconds``; needs root
    "kill_controller",  # and started again after ``seconds``
]
# What a random plan may draw, and how often. Every one of them must leave the result as it was.
WEIGHTS: dict[Kind, int] = {
    "kill_worker": 6,
    "stop_worker": 2,
    "slow_worker": 1,
    "deadlock_worker": 1,
    "kill_keeper": 2,
    "kill_agent": 3,
    "kill_zygote": 1,
    "kill_node": 3,
    "freeze_node": 1,
    "corrupt_replica": 1,
    "kill_controller": 3,
}
# What only some jobs and places bear: see ``also_drawn``.
MORE_WEIGHTS: dict[Kind, int] = {"flip_bit": 2, "partition": 2, "fill_disk": 1}
MOST_ACTIONS = 4


class Action(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One fault, done when a step is committed."""

    do: Kind
    at_step: int
    slot: int = 0  # of the gang; whoever holds it by then
    seconds: float = 1.0

    def __str__(self) -> str:
        return f"{self.do} at step {self.at_step}, slot {self.slot}, {self.seconds:g} s"


class ChaosPlan(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is done to a job, in the order of steps."""

    name: str = ""
    actions: tuple[Action, ...] = ()


def read_plan(path: Path, slots: int, steps: int) -> ChaosPlan:
    """The plan in a file; ConfigError where it does not fit a job of so many steps."""
    plan = read_struct(path, ChaosPlan, "--plan")
    for number, action in enumerate(plan.actions):
        key = f"actions[{number}]"
        if not 0 <= action.slot < slots:
            rule = f"the job has {slots} slots"
            raise ConfigError(f"{key}.slot", action.slot, rule, f"0 to {slots - 1}")
        if not 0 < action.at_step < steps:
            rule = f"the job makes {steps} steps"
            raise ConfigError(f"{key}.at_step", action.at_step, rule, f"1 to {steps - 1}")
        if not 0 <= action.seconds <= 600:
            raise ConfigError(f"{key}.seconds", action.seconds, "0 to 600", "choose less")
    ordered = tuple(sorted(plan.actions, key=lambda action: action.at_step))
    return ChaosPlan(name=plan.name or path.stem, actions=ordered)


def also_drawn(job: Job, *, namespaces: bool = False) -> tuple[Kind, ...]:
    """What a random plan may do to this (resolved) job beside what every job bears.

    A flipped bit is undone where replicas compare every step; networks are cut and disks filled
    where nodes have networks of their own, which takes root as well.
    """
    copies = job.parallel.replicate > 1  # with ZeRO 0 it is all of them
    flips: tuple[Kind, ...] = ("flip_bit",) if copies and job.train.compare_every == 1 else ()
    return (*flips, "partition", "fill_disk") if namespaces else flips


def random_plan(seed: int, slots: int, steps: int, also: Sequence[Kind] = ()) -> ChaosPlan:
    """A plan of one to four faults; the same seed (and ``also``) draws the same plan."""
    chance = random.Random(seed)
    drawn = WEIGHTS | {kind: MORE_WEIGHTS[kind] for kind in also}
    kinds, weights = zip(*drawn.items(), strict=True)
    last = max(2, steps * 3 // 4)  # so that there is something left to recover for
    actions = [
        Action(
            do=chance.choices(kinds, weights)[0],
            at_step=chance.randint(2, last),
            slot=chance.randrange(slots),
            seconds=round(chance.uniform(0.2, 3.0), 1),
        )
        for _ in range(chance.randint(1, MOST_ACTIONS))
    ]
    ordered = tuple(sorted(actions, key=lambda action: action.at_step))
    return ChaosPlan(name=f"random, seed {seed}", actions=ordered)
