"""Variables that a job is given with ``phalanx submit --env`` and ``--env-file``."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from phalanx.config import ConfigError
from phalanx.config.errors import plain_reason

VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


# What is this shell's, this machine's or this person's, and wrong on a node.
NOT_EXPORTED = re.compile(
    r"_|PWD|OLDPWD|SHLVL|HOSTNAME|HOME|USER|LOGNAME|SHELL|MAIL|TERM|COLORTERM|LINES|COLUMNS|DISPLAY"
    r"|(BASH_|SSH_|XDG_|DBUS_|TMUX|STY|WINDOWID|PHALANX_|SLURM_|CUDA_VISIBLE_DEVICES).*"
)


def variables(given: Sequence[str], files: Sequence[Path], exported: str = "") -> dict[str, str]:
    """What ``--export``, files and options say, the later the stronger; bare names: from here."""
    environment = _exported(exported)
    for path in files:
        environment |= _of_file(path)
    for text in given:
        name, separator, value = text.partition("=")
        _check_name("--env", name, text)
        if not separator:
            if name not in os.environ:
                rule = "is not set here, so there is no value to send"
                raise ConfigError("--env", text, rule, f"--env {name}=VALUE")
            value = os.environ[name]
        environment[name] = _checked("--env", name, value)
    return environment


def _exported(names: str) -> dict[str, str]:
    """Variables as they are here: all that make sense elsewhere, or these."""
    if names.upper() == "ALL":
        return {
            name: value
            for name, value in os.environ.items()
            if VARIABLE.fullmatch(name) and not NOT_EXPORTED.fullmatch(name)
        }
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    missing = [name for name in wanted if name not in os.environ]
    if missing:
        rule = f"{', '.join(missing)} is not set here, so there is no value to send"
        raise ConfigError("--export", names, rule, "name what is set, or use --env NAME=VALUE")
    return {name: os.environ[name] for name in wanted}


def _of_file(path: Path) -> dict[str, str]:
    """NAME=VALUE a line, as Docker and systemd have them: blank lines and # lines are left out."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        rule, fix = f"cannot be read: {plain_reason(error)}", "give a text file that you may read"
        raise ConfigError("--env-file", str(path), rule, fix) from None
    variables_read: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        name, separator, value = text.removeprefix("export ").partition("=")
        where = f"{path}:{number}"
        _check_name(where, name, text)
        if not separator:
            raise ConfigError(where, text, "is no NAME=VALUE", f"{name}=VALUE")
        if len(value) > 1 and value[0] == value[-1] and value[0] in "\"'":
            value = value[1:-1]
        variables_read[name] = _checked(where, name, value)
    return variables_read


def _check_name(where: str, name: str, text: str) -> None:
    if not VARIABLE.fullmatch(name):
        rule = "does not begin with the name of a variable (letters, digits, _)"
        raise ConfigError(where, text, rule, "NAME=VALUE")


def _checked(where: str, name: str, value: str) -> str:
    if "\0" in value:
        raise ConfigError(where, name, "has a NUL in its value, which no variable can hold", "")
    return value
