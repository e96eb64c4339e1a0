"""What a node may speak of: itself, and the gangs that it is in.

An agent may be in the wrong hands, with everything that its node has. Whatever it says of others
is refused here, before any machine takes it in; ``Gather``, ``LastReports`` and the records of
steps look again at the nodes of the very generation that a message names, which may be over.
"""

from __future__ import annotations

from enum import StrEnum
from functools import cache

from msgspec import Struct

from phalanx.cluster.jobs.job import ClusterJob
from phalanx.cluster.protocol.messages import Inventory
from phalanx.cluster.state import View

MOST_HOLDINGS = 1_024  # jobs that one node runs or keeps snapshots of
MOST_WORD = 256  # letters of a cause, a check or a phase
MOST_TEXT = 65_536  # of a detail, such as the end of a stack
MOST_LISTED = 65_536  # checkpoints, ranks or fingerprints in one message


class MessageRefusal(StrEnum):
    """Why a message of an agent is not taken in."""

    UNKNOWN_JOB = "it names a job that is not there"
    NOT_A_MEMBER = "the node is not in that job's gang"
    OVER = "it is about a generation that is over, in which the node is not"
    NO_SUCH_GENERATION = "there is no such generation yet"
    TOO_LARGE = "it is larger than anything that is meant"
    TOO_MANY = "the node says too much"


def refusal(view: View, node: int, message: Struct, *, last_word: bool) -> MessageRefusal | None:
    """Why a node may not say this; None: it may. ``last_word``: such a message may come late."""
    if _too_large(message):
        return MessageRefusal.TOO_LARGE
    number = getattr(message, "job", 0)
    if not number:
        return None
    fleet = view.fleet
    job = view.jobs.get(number)
    if job is None:
        return MessageRefusal.UNKNOWN_JOB
    generation = getattr(message, "generation", job.generation)
    if generation > job.generation:
        return MessageRefusal.NO_SUCH_GENERATION
    if number in fleet.held[node] or fleet.spare_for(node) == number or _kept_there(job, node):
        return None
    # A last word may come from a node that the job has left: whoever gathers those knows which
    # nodes took part.
    if last_word:
        return None
    over = generation < job.generation or job.placement is None
    return MessageRefusal.OVER if over else MessageRefusal.NOT_A_MEMBER


def _kept_there(job: ClusterJob, node: int) -> bool:
    """Whether a node that the job has left may still hold something of it."""
    gang, kept = job.gang, job.kept
    if gang is not None and (node in gang.keepers or node in gang.leftover):
        return True
    return kept is not None and node in kept.nodes


def _too_large(message: Struct) -> bool:
    for name, most in _limits_of(type(message)):
        value = getattr(message, name)
        if isinstance(value, Inventory):
            if max(len(value.jobs), len(value.snapshots)) > most:
                return True
        elif value is not None and len(value) > most:
            return True
    return False


@cache
def _limits_of(kind: type[Struct]) -> tuple[tuple[str, int], ...]:
    """What is measured of a kind of message: most have nothing that could be large."""
    return tuple((name, most) for name, most in _LIMITS if name in kind.__struct_fields__)


_LIMITS = (
    ("inventory", MOST_HOLDINGS),
    ("cause", MOST_WORD),
    ("check", MOST_WORD),
    ("what", MOST_WORD),
    ("detail", MOST_TEXT),
    ("not_archived", MOST_TEXT),
    ("result", MOST_TEXT),
    ("folder", MOST_TEXT),
    ("there", MOST_LISTED),
    ("copies", MOST_LISTED),
    ("changed", MOST_LISTED),
    ("ranks", MOST_LISTED),
)
