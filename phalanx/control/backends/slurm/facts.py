"""Slurm's facts about nodes: names, switches, states, from its variables and programs."""

from __future__ import annotations

import re
from collections.abc import Mapping

from msgspec import Struct

from phalanx.control.backends.slurm.programs import SlurmCommands, SlurmError

# States that mean: an administrator (or a health check) wants the node empty, or it is gone.
UNWANTED = ("DRAIN", "DRAINING", "DRAINED", "MAINTENANCE", "REBOOT", "FAIL", "FAILING")
RANGE = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?")
LIMIT = re.compile(r"(?:(\d+)-)?(\d+):(\d+):(\d+)")  # of time; others have none
POLL_SECONDS = 10.0  # that a running job waits for an answer: a warning may come meanwhile
MOST_NODES = 65_536  # that a Slurm can have
NODE_FIELD = re.compile(r"(\w+)=(.*?)(?=\s+\w+=|\s*$)")


class Switch(Struct, frozen=True, kw_only=True):
    """One line of ``scontrol show topology``."""

    name: str
    level: int
    nodes: tuple[str, ...]


def expand(nodes: str) -> tuple[str, ...]:
    """``n[1-3,7],login`` as single names; widths are kept (``n[01-03]``).

    SlurmError where it is no such list.
    """
    names: list[str] = []
    for pattern in _split(nodes):
        begin, bracket, rest = pattern.partition("[")
        if not bracket:
            names.append(pattern)
            continue
        ranges, closed, end = rest.partition("]")
        if not closed:
            raise SlurmError(f"{pattern} has no ]")
        tails = expand(end) if end else ("",)
        for each in ranges.split(","):
            numbers, width = _range(each, pattern)
            if len(names) + len(numbers) * len(tails) > MOST_NODES:
                raise SlurmError(f"{pattern} is more than {MOST_NODES} nodes")
            names += [f"{begin}{number:0{width}d}{tail}" for number in numbers for tail in tails]
    return tuple(names)


def _range(text: str, names: str) -> tuple[range, int]:
    """The numbers of ``01-03`` and their width."""
    if not (given := RANGE.fullmatch(text)):
        raise SlurmError(f"[{text}] of {names} is no number and no range")
    first, last = int(given[1]), int(given[2] or given[1])
    if last < first:
        raise SlurmError(f"[{text}] of {names} ends before it begins")
    return range(first, last + 1), len(given[1])


def _split(nodes: str) -> list[str]:
    """Parts between commas that stand outside of brackets."""
    parts, depth, begin = [], 0, 0
    for at, char in enumerate(nodes):
        depth += (char == "[") - (char == "]")
        if char == "," and not depth:
            parts.append(nodes[begin:at])
            begin = at + 1
        if depth not in (0, 1):
            raise SlurmError(f"{nodes} has a ] without a [, or brackets in brackets")
    return [part for part in (*parts, nodes[begin:]) if part]


def topology(text: str) -> list[Switch]:
    """Switches of ``scontrol show topology``, leaves first; nothing where there is no tree."""
    switches = []
    for line in text.splitlines():
        fields = dict(NODE_FIELD.findall(line.strip()))
        if "SwitchName" in fields and fields.get("Nodes"):
            switch = Switch(
                name=fields["SwitchName"],
                level=int(fields.get("Level", 0)),
                nodes=expand(fields["Nodes"]),
            )
            switches.append(switch)
    return sorted(switches, key=lambda switch: (switch.level, switch.name))


def leaves_needed(switches: list[Switch], nodes: int) -> int:
    """Fewest leaf switches that so many nodes can stand below; 0: there is no tree."""
    sizes = sorted((len(switch.nodes) for switch in switches if not switch.level), reverse=True)
    taken = 0
    for count, size in enumerate(sizes, start=1):
        taken += size
        if taken >= nodes:
            return count
    return 0


def longest_hours(shown: str, partitions: str) -> float:
    """The shortest limit of these partitions ("": the default one); 0: none has a limit.

    ``shown``: what ``scontrol --oneliner show partition`` says.
    """
    limits = []
    for line in shown.splitlines():
        fields = dict(NODE_FIELD.findall(line.strip()))
        meant = fields.get("Default") == "YES"
        if partitions:
            meant = fields.get("PartitionName") in partitions.split(",")
        limit = LIMIT.fullmatch(fields.get("MaxTime", ""))
        if meant and limit:
            days, hours, minutes, seconds = (int(part or 0) for part in limit.groups())
            limits.append(days * 24 + hours + minutes / 60 + seconds / 3600)
    return min(limits, default=0.0)


def unwanted_nodes(text: str) -> dict[str, str]:
    """Of ``scontrol --oneliner show node``: those that somebody wants empty, and why."""
    unwanted = {}
    for line in text.splitlines():
        fields = dict(NODE_FIELD.findall(line.strip()))
        states = fields.get("State", "").rstrip("*").split("+")
        if any(state in UNWANTED for state in states):
            reason = fields.get("Reason", "").partition(" [")[0]
            unwanted[fields.get("NodeName", "")] = reason or fields["State"].lower()
    return unwanted


class SlurmSite:
    """An allocation, by the variables of its batch script."""

    def __init__(
        self, environment: Mapping[str, str], programs: SlurmCommands | None = None
    ) -> None:
        self._list = environment.get("SLURM_JOB_NODELIST", "")
        self.job = environment.get("SLURM_JOB_ID", "")
        self._programs = programs or SlurmCommands()

    def nodes(self) -> tuple[str, ...]:
        """The nodes of the allocation."""
        return expand(self._list)

    def unwanted(self) -> dict[str, str]:
        """Nodes that the administrator drains. One query for all of them."""
        shown = self._programs.run(
            *("scontrol", "--oneliner", "show", "node", self._list), within_seconds=POLL_SECONDS
        )
        return unwanted_nodes(shown)

    def over(self) -> bool:
        """Whether Slurm is ending the job: cancelled, or past its limit or grace."""
        said = self._programs.run(
            *("squeue", "--noheader", f"--jobs={self.job}", "--format=%T"),
            within_seconds=POLL_SECONDS,
        )
        return said.strip() not in ("RUNNING", "SUSPENDED")
