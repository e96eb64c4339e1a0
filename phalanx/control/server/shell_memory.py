"""What the shell remembers beside the core: answers given, where jobs ran, what people were told.

It is filled from events and their commands alone, so a replay of the log rebuilds it; snapshots
keep it for the part of the log before them.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec import Struct, structs

from phalanx.cluster.protocol.commands import Accept, Command, Form, Level, Notify, Proposal, Refuse
from phalanx.cluster.protocol.events import Event
from phalanx.cluster.reasons import Reason, reason

ANSWERS_KEPT = 10_000
PLACES_KEPT = 10_000
NOTICES_KEPT = 500


_CONTENT = "#"  # between a request's name and what stands for its content; no name has it


def named(request: str, asked: str) -> str:
    """A request as events carry it."""
    return f"{request}{_CONTENT}{asked}" if asked else request


class Outcome(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the core said to an order."""

    accepted: bool
    reason: Reason
    sequence: int  # of the event
    jobs: tuple[int, ...] = ()
    moves: tuple[tuple[int, int, int], ...] = ()
    asked: str = ""  # what stands for the request's content


class Notice(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Something that a person wants to know."""

    sequence: int
    time_ns: int
    level: Level
    reason: Reason
    job: int = 0
    node: int = -1


class ShellMemory(Struct, kw_only=True):
    """The newest of each kind; dictionaries are in order of arrival."""

    answers: dict[str, Outcome] = {}  # by request
    placed: dict[int, tuple[int, ...]] = {}  # nodes by slot, by job
    notices: list[Notice] = []

    def note(self, event: Event, commands: Sequence[Command]) -> Outcome:
        """Takes in an event that was handled; returns the answer to it, were it an order."""
        outcome = Outcome(accepted=True, reason=reason("accepted"), sequence=event.sequence)
        jobs: list[int] = []
        for command in commands:
            body = command.body
            match body:
                case Accept(reason=why, job=job):
                    jobs += [job] if job else []
                    outcome = Outcome(
                        accepted=True, reason=why, sequence=event.sequence, jobs=tuple(jobs)
                    )
                case Refuse(reason=why, job=job):
                    outcome = Outcome(
                        accepted=False,
                        reason=why,
                        sequence=event.sequence,
                        jobs=(job,) if job else (),
                    )
                case Proposal(reason=why, moves=moves):
                    outcome = Outcome(
                        accepted=True, reason=why, sequence=event.sequence, moves=moves
                    )
                case Notify(reason=why, job=job, node=node, level=level):
                    self.notices.append(
                        Notice(
                            sequence=event.sequence,
                            time_ns=event.time_ns,
                            level=level,
                            reason=why,
                            job=job,
                            node=node,
                        )
                    )
                case Form(job=job, nodes=nodes):
                    self.placed.pop(job, None)
                    self.placed[job] = nodes
        request = getattr(event.body, "request", "")
        if request:
            request, _, asked = request.partition(_CONTENT)
            self.answers[request] = structs.replace(outcome, asked=asked)
        self._forget()
        return outcome

    def _forget(self) -> None:
        while len(self.answers) > ANSWERS_KEPT:
            del self.answers[next(iter(self.answers))]
        while len(self.placed) > PLACES_KEPT:
            del self.placed[next(iter(self.placed))]
        del self.notices[:-NOTICES_KEPT]

    def dump(self) -> bytes:
        """As a snapshot keeps it."""
        return msgspec.msgpack.encode(self)

    @classmethod
    def load(cls, data: bytes) -> ShellMemory:
        """What ``dump`` kept."""
        return msgspec.msgpack.decode(data, type=cls)
