"""The server as a page: its options, and by which variables commands find one."""

from __future__ import annotations

import typer

from docs.generator.cli import parameters, usage
from docs.generator.markdown import code, table
from phalanx.cli.cluster.up import app
from phalanx.control.trust.tls import CA_VARIABLE, FINGERPRINT_VARIABLE

# Of every command that speaks to a server (``phalanx/control/client/client.py``).
VARIABLES = {
    "PHALANX_SERVER": "Address of the server, or several with commas between them: who leads is "
    "found. Without it: the server of this machine.",
    "PHALANX_STATE": "State folder of a server of this machine, or a recording of one; without "
    "it: `~/.phalanx/server`.",
    "PHALANX_TOKEN": "Token of whoever asks.",
    "PHALANX_TOKEN_FILE": "File that has it; without it: `admin.token` of the state folder.",
    CA_VARIABLE: "File with the certificate of the authority that signed the server's.",
    FINGERPRINT_VARIABLE: "Or the fingerprint that `phalanx up` prints.",
}


def lines() -> list[str]:
    """Options and variables."""
    command = typer.main.get_command(app)
    return [
        "## Options of `phalanx up`",
        "",
        "```",
        usage(command, "phalanx up"),
        "```",
        "",
        *parameters(command),
        "## Variables of the environment",
        "",
        *table(("variable", "meaning"), [(code(name), each) for name, each in VARIABLES.items()]),
        "",
        "What jobs decide is in [the job file](job-file.md), what the site decides in "
        "[the policy file](policy-file.md), what a node decides in "
        "[the agent's file](agent-file.md); files of the state folder: "
        "[run the server](../how-to/run-the-server.md#state).",
    ]
