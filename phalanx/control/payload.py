"""What a job runs: the text in ``JobSpec.payload``, written by the server, read by agents."""

from __future__ import annotations

import msgspec
from msgspec import Struct


class Work(Struct, frozen=True, kw_only=True, tag_field="kind", omit_defaults=True):
    """Base of all payloads. ``user``: whom it runs as where the agent is root; "": the agent's."""

    user: str = ""
    folder: str = ""  # working folder; "": the agent's folder of the job
    environment: dict[str, str] = {}


class Train(Work, frozen=True, tag=True):
    """A job file of the trainer, with everything that was set beside it."""

    toml: str
    world_size: int


class Script(Work, frozen=True, tag=True):
    """Any program that runs under torchrun; started once a rank, never through a shell."""

    argv: tuple[str, ...]


Payload = Train | Script


def encode_payload(payload: Payload) -> str:
    """The payload as it stands in a JobSpec."""
    return msgspec.json.encode(payload).decode()


def decode_payload(text: str) -> Payload:
    """The payload of a JobSpec."""
    payload: Payload = msgspec.json.decode(text, type=Payload)
    return payload
