"""Secrets of jobs: references that a node resolves, and what others see instead of a value.

A variable that is named like a secret is shown to nobody. Its value, where it was sent as it is,
still stands in the server's log; ``secret-file:/path`` stands for a file that only the job's user
can read, on the node, when the process starts.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

import msgspec

REFERENCE = "secret-file:"
HIDDEN = "(secret)"
MOST_BYTES = 64 << 10
LEAST_HIDDEN = 4  # characters of a value that is looked for in other texts
NAMES = re.compile(r"(^|_)(TOKEN|KEY|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIALS?)S?(_|$)|SECRET")


class SecretError(Exception):
    """A secret cannot be read where the process starts."""


def looks_secret(name: str, value: str) -> bool:
    """Whether a variable's value is to be shown to nobody; a reference says nothing."""
    return NAMES.search(name.upper()) is not None and not value.startswith(REFERENCE)


def plain_secrets(environment: Mapping[str, str]) -> list[str]:
    """Names of secrets that were sent as they are."""
    return sorted(name for name, value in environment.items() if looks_secret(name, value))


def secrets_note(environment: Mapping[str, str]) -> str:
    """What whoever submits a job is told of secrets that were sent as they are; "": none were."""
    names = plain_secrets(environment)
    if not names:
        return ""
    return (
        f"{', '.join(names)}: shown to nobody, and kept in the server's log as sent; "
        f'"{REFERENCE}/path" has the node read it from a file instead'
    )


def shown_payload(payload: str) -> str:
    """What a job runs, without the values of its secrets, wherever else they stand in it."""
    try:
        work = msgspec.json.decode(payload)
        environment: dict[str, str] = work.get("environment") or {}
        hidden = plain_secrets(environment)
    except (msgspec.MsgspecError, AttributeError, TypeError):
        return payload  # nothing that anybody runs
    if not hidden:
        return payload
    values = sorted((environment[name] for name in hidden), key=len, reverse=True)
    shown = _without(work, [value for value in values if len(value) >= LEAST_HIDDEN])
    shown["environment"] |= dict.fromkeys(hidden, HIDDEN)
    return msgspec.json.encode(shown).decode()


def _without(value: Any, secrets: list[str]) -> Any:
    if isinstance(value, str):
        for secret in secrets:
            value = value.replace(secret, HIDDEN)
        return value
    if isinstance(value, list):
        return [_without(each, secrets) for each in value]
    if isinstance(value, dict):
        return {name: _without(each, secrets) for name, each in value.items()}
    return value


def shown_address(url: str) -> str:
    """An address whose path may be a secret, as others may see it: its host alone."""
    return f"{urlsplit(url).scheme}://{urlsplit(url).hostname}/{HIDDEN}" if url else ""


SHOWN = {"payload": shown_payload, "webhook": shown_address}  # by the field's name


def shown_body(body: Any) -> Any:
    """An event's body, as built-in types, with all in it that may be secret as it may be shown."""
    if isinstance(body, dict):
        return {
            name: SHOWN[name](each) if name in SHOWN and isinstance(each, str) else shown_body(each)
            for name, each in body.items()
        }
    if isinstance(body, list | tuple):
        return [shown_body(each) for each in body]
    return body


def resolved(environment: Mapping[str, str]) -> dict[str, str]:
    """Variables with what their references stand for; called as the job's user."""
    return {
        name: _read(name, value.removeprefix(REFERENCE)) if value.startswith(REFERENCE) else value
        for name, value in environment.items()
    }


def _read(name: str, path: str) -> str:
    try:
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
        try:
            if not stat.S_ISREG(os.fstat(file).st_mode):
                raise SecretError(f"the secret {name}: {path} is not a regular file")
            data = os.read(file, MOST_BYTES + 1)
        finally:
            os.close(file)
        if len(data) > MOST_BYTES:
            raise SecretError(f"the secret {name}: {path} has more than {MOST_BYTES} bytes")
        text = data.decode().removesuffix("\n")
    except OSError as error:
        raise SecretError(f"the secret {name} cannot be read: {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise SecretError(f"the secret {name}: {path} is not text") from None
    if "\0" in text:
        raise SecretError(f"the secret {name}: {path} is not text")
    return text
