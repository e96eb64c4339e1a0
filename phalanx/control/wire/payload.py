"""What a job runs. Clients describe it (``Work``); the server checks the description and writes it
into ``JobSpec.payload``, which agents read.

Whom it runs as is no part of it: that is the job's user, which the server takes from the token.
"""

from __future__ import annotations

import sys

import msgspec
from msgspec import Struct

from phalanx.cluster.fabric.verdict import FabricCheckWork
from phalanx.cluster.units import MILLION


class Work(
    Struct,
    frozen=True,
    kw_only=True,
    tag_field="kind",
    omit_defaults=True,
    forbid_unknown_fields=True,
):
    """Base of all descriptions. ``folder`` "": the agent's folder of the job."""

    folder: str = ""
    environment: dict[str, str] = {}


class CodeFile(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A Python file of the job's own. Workers write and import it; nobody else does either."""

    name: str  # as in code.files
    sha256: str
    text: str


class TrainingWork(Work, frozen=True, tag="Train"):
    """A job file of the trainer, with everything that was set beside it."""

    toml: str
    world_size: int
    files: tuple[CodeFile, ...] = ()  # all of code.files, or none: then they are on every node


class Script(Work, frozen=True, tag=True):
    """Any program that runs under torchrun; started once a rank, never through a shell."""

    argv: tuple[str, ...]


Payload = TrainingWork | Script


class PayloadError(Exception):
    """A text that describes no work."""


def encode_payload(payload: Payload) -> str:
    """The payload as it stands in a JobSpec."""
    return msgspec.json.encode(payload).decode()


def decode_payload(text: str) -> Payload:
    """The payload of a JobSpec; PayloadError where it is none."""
    try:
        table = msgspec.json.decode(text)
        if isinstance(table, dict):
            table.pop("user", None)  # once written there; it is the job's user, and nobody else's
        payload = msgspec.convert(table, Payload | FabricCheckWork)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise PayloadError(f"the order does not say what to run: {error}") from None
    return _measuring(payload) if isinstance(payload, FabricCheckWork) else payload


def _measuring(check: FabricCheckWork) -> Script:
    """The program of a check that the core wants, which no client describes: with this Python."""
    from phalanx.doctor.fabric.report import FabricRequest, program_arguments

    request = FabricRequest(
        ranks_per_node=check.ranks_per_node,
        slower=check.slower_ppm / MILLION,
        collectives=(),
        places=check.places,
    )
    return Script(argv=(sys.executable, *program_arguments(request)))
