"""A rank as a process of its own under ``torchrun -m phalanx.train.rank.worker``."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence

from phalanx.config import ConfigError, load_job
from phalanx.train.callback import Callback
from phalanx.train.exits import ExitCode
from phalanx.train.rank.formation import prepare
from phalanx.train.rank.local_orders import LocalOrders
from phalanx.train.rank.rank import Rank
from phalanx.train.report.progress import print_exit, print_refusal

REFUSAL_SECONDS = 30.0  # ample for a rank that only reads a file; usually cut short by torchrun


def main(arguments: Sequence[str] | None = None, callbacks: Sequence[Callback] = ()) -> int:
    """Entry point under ``torchrun``: reads the job and runs this process's rank of it."""
    parser = argparse.ArgumentParser(prog="torchrun -m phalanx.train.rank.worker")
    parser.add_argument("job", help="the job's TOML file")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    options = parser.parse_args(arguments)
    if "RANK" not in os.environ:
        parser.error("RANK is not set: start it with torchrun, or use: phalanx train JOB.toml")
    try:
        job = prepare(load_job(options.job, options.set), int(os.environ["WORLD_SIZE"]))
    except ConfigError as error:
        return _refused(error)
    orders = LocalOrders()
    orders.stop.install()
    rank = Rank(job, orders, callbacks=callbacks)
    code = rank.run()
    _say_ended(rank)
    return code


def _say_ended(rank: Rank) -> None:
    """Under torchrun nobody else says the last word; failures are in the rank's output."""
    if os.environ["RANK"] != "0" or rank.folder is None:
        return
    info = rank.folder.read_exit()
    if info is not None and info.code == ExitCode.DONE:
        print_exit("plain", info, rank.folder)


def _refused(error: ConfigError) -> int:
    """One rank of each node, whose files may differ from other nodes', says what is wrong."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print_refusal(error)
    else:
        # torchrun ends all ranks of a node with the first: that must be the one that speaks.
        time.sleep(REFUSAL_SECONDS)
    return ExitCode.CONFIG


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # Not sys.exit: teardown of a group that lost a peer may wait for it for minutes.
    os._exit(code)
