"""Accounting of a private Slurm: a MariaDB of its own and slurmdbd in front of it."""

from __future__ import annotations

import getpass
import os
import socket
import subprocess
import time
from contextlib import suppress

from phalanx.testing.slurm.files import SandboxOptions, find_program

START_SECONDS = 60.0
SLURMDBD_CONF = """\
AuthType=auth/munge
AuthInfo=socket={root}/run/munge.sock
DbdHost=localhost
DbdAddr=127.0.0.1
DbdPort={port}
SlurmUser={user}
PidFile={root}/run/slurmdbd.pid
LogFile={root}/log/slurmdbd.log
StorageType=accounting_storage/mysql
StorageHost=127.0.0.1
StoragePort={database_port}
StorageUser=slurm
StoragePass=sandbox
StorageLoc=slurm_acct_db
"""


class DatabaseError(Exception):
    """No accounting here, and why."""


class Database:
    """The database server and slurmdbd of one sandbox."""

    def __init__(self, options: SandboxOptions) -> None:
        self.options, self.root = options, options.root
        self.port = options.port - 2

    def start(self) -> None:
        """Start both; the cluster, an account and this user are registered."""
        if not all(map(find_program, ("mariadbd", "mariadb-install-db", "slurmdbd"))):
            raise DatabaseError(
                "accounting needs Debian's packages mariadb-server and slurmdbd; leave "
                "--accounting away to do without"
            )
        data, user = self.root / "database", getpass.getuser()
        if not data.exists():
            self._run("mariadb-install-db", f"--datadir={data}", f"--user={user}", "--no-defaults")
        self._start_database(user)
        conf = self.root / "etc" / "slurmdbd.conf"
        conf.touch(mode=0o600)
        conf.write_text(
            SLURMDBD_CONF.format(
                root=self.root, port=self.options.port - 1, user=user, database_port=self.port
            )
        )
        self._run("slurmdbd")
        self._wait_for_port(self.options.port - 1)

    def register(self) -> None:
        """The cluster, an account and this user, so that associations are enforced as at a site."""
        user = getpass.getuser()
        for words in (
            ["cluster", "sandbox"],
            ["account", "research", "Cluster=sandbox"],
            ["user", user, "Account=research", "Cluster=sandbox"],
        ):
            with suppress(DatabaseError):  # it is there already
                self._run("sacctmgr", "--immediate", "add", *words)

    def _start_database(self, user: str) -> None:
        command = [
            find_program("mariadbd"),
            "--no-defaults",
            f"--datadir={self.root}/database",
            f"--user={user}",
            f"--socket={self.root}/run/mariadb.sock",
            f"--pid-file={self.root}/run/mariadbd.pid",
            f"--port={self.port}",
            "--bind-address=127.0.0.1",
            "--innodb-buffer-pool-size=32M",
        ]
        with (self.root / "log" / "mariadb.log").open("ab") as log:
            subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        grant = "grant all on *.* to slurm@'127.0.0.1' identified by 'sandbox'"
        deadline = time.monotonic() + START_SECONDS
        while True:
            with suppress(DatabaseError):
                self._run("mariadb", f"--socket={self.root}/run/mariadb.sock", "--execute", grant)
                return
            if time.monotonic() > deadline:
                raise DatabaseError(f"MariaDB does not start: see {self.root}/log/mariadb.log")
            time.sleep(0.2)

    def _wait_for_port(self, port: int) -> None:
        """slurmctld ends at once where slurmdbd, which makes its tables first, does not listen."""
        deadline = time.monotonic() + START_SECONDS
        while True:
            with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
                return
            if time.monotonic() > deadline:
                raise DatabaseError(f"slurmdbd does not listen: see {self.root}/log/slurmdbd.log")
            time.sleep(0.1)

    def _run(self, program: str, *arguments: str) -> None:
        done = subprocess.run(
            [find_program(program), *arguments],
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
            env={**os.environ, "SLURM_CONF": str(self.options.conf)},
        )
        if done.returncode:
            raise DatabaseError(f"{program}: {(done.stderr or done.stdout).strip()}")
