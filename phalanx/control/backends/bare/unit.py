"""The systemd unit of an agent, and the script that installs it on a host."""

from __future__ import annotations

import shlex

from msgspec import Struct

UNIT = """\
[Unit]
Description=Phalanx agent
After=network-online.target
Wants=network-online.target

[Service]
Environment=PHALANX_TOKEN_FILE={folder}/join.token
{ca}ExecStart={folder}/venv/bin/python -m phalanx agent --join {url} --name {name} \\
  --state {folder}/agent {options}
# SIGTERM leaves workers running for a lease: an upgrade of the agent stops no job.
KillMode=process
KillSignal=SIGTERM
Restart=always
RestartSec=2
LimitNOFILE=1048576
LimitMEMLOCK=infinity
LimitNPROC=infinity
TasksMax=infinity
OOMScoreAdjust=-500

[Install]
WantedBy=multi-user.target
"""

# Each part is done again only where it is not done already: a run that broke off goes on.
INSTALL = """\
set -eu
folder={folder}
command -v {python} >/dev/null || {{ echo "install Python 3.11 or newer" >&2; exit 10; }}
umask 077
mkdir -p "$folder"
if [ "$(cat "$folder/version" 2>/dev/null)" != {version} ]; then
  [ -x "$folder/venv/bin/python" ] || {python} -m venv "$folder/venv" || exit 11
  {install} || exit 12
  printf %s {version} > "$folder/version"
fi
cat > "$folder/join.token.new" <<'TOKEN'
{token}
TOKEN
mv "$folder/join.token.new" "$folder/join.token"
cat > "$folder/phalanx-agent.service" <<'UNIT'
{unit}UNIT
if [ -d /run/systemd/system ] && [ "$(id -u)" = 0 ]; then
  cp "$folder/phalanx-agent.service" /etc/systemd/system/phalanx-agent.service
  systemctl daemon-reload
  systemctl enable --quiet phalanx-agent
  systemctl restart phalanx-agent
else
  # Without systemd: a loop of its own, in a session of its own.
  [ ! -f "$folder/agent.pid" ] || kill "$(cat "$folder/agent.pid")" 2>/dev/null || true
  {trust}PHALANX_TOKEN_FILE="$folder/join.token" setsid nohup \\
    "$folder/venv/bin/python" -m phalanx agent \\
    --join {url} --name {name} --state "$folder/agent" {options} \\
    > "$folder/agent.log" 2>&1 < /dev/null &
  echo $! > "$folder/agent.pid"
fi
"""


class InstallOptions(Struct, frozen=True, kw_only=True):
    """How agents are installed."""

    url: str
    token: str
    version: str
    folder: str = "/opt/phalanx"
    python: str = "python3"
    install: str = ""  # command; "": pip from the site's package index
    ca: str = ""  # file of the authority, on the hosts
    fingerprint: str = ""  # of the server's own authority
    options: str = ""  # more options of the agent
    ssh: str = "ssh"  # program and its options, e.g. for a jump host


def unit_of(name: str, options: InstallOptions) -> str:
    """The systemd unit of one host."""
    ca = "".join(f"Environment={name}={value}\n" for name, value in _trust(options).items())
    return UNIT.format(
        folder=options.folder, url=options.url, name=name, ca=ca, options=options.options
    )


def _trust(options: InstallOptions) -> dict[str, str]:
    """By what the agents know the server."""
    given = {"PHALANX_CA": options.ca, "PHALANX_FINGERPRINT": options.fingerprint}
    return {name: value for name, value in given.items() if value}


def script_of(name: str, options: InstallOptions) -> str:
    """What bash runs on the host."""
    package = f"'phalanx[train]=={options.version}'"
    install = options.install or f'"$folder/venv/bin/python" -m pip install -q {package}'
    trust = "".join(f"{key}={shlex.quote(value)} " for key, value in _trust(options).items())
    return INSTALL.format(
        trust=trust,
        folder=shlex.quote(options.folder),
        python=shlex.quote(options.python),
        version=shlex.quote(options.version),
        install=install,
        token=options.token,
        unit=unit_of(name, options),
        url=shlex.quote(options.url),
        name=shlex.quote(name),
        options=options.options,
    )
