"""A worker process under an agent: a rank with orders from the agent's socket."""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
import sys
import tomllib
from pathlib import Path

import msgspec

from phalanx.checkpoint.keeper.start import node_name
from phalanx.config import ConfigError, Job, job_from_table
from phalanx.config.own_code import place_code
from phalanx.config.toml_text import parse_toml
from phalanx.control.wire.payload import TrainingWork, decode_payload
from phalanx.control.worker.orders import AgentOrders
from phalanx.control.worker.run_owner import own_run_folder
from phalanx.observe.node.node_messages import RunRecord
from phalanx.observe.node.worker_ring import RingSink, ring_path
from phalanx.train.exits import EndReason, ExitCode, ExitInfo
from phalanx.train.rank.look import record_collectives
from phalanx.train.rank.rank import Rank
from phalanx.train.report.provenance import Provenance
from phalanx.train.report.run_folder import RunFolder

log = logging.getLogger(__name__)


def run_rank(path: str) -> int:
    """The life of a worker process; returns its exit code."""
    logging.basicConfig(
        level=logging.INFO,
        stream=sys.stderr,
        format=f"%(asctime)s {node_name()} %(levelname)s %(message)s",
    )
    record_collectives()
    # Stacks of all threads for whoever asks by a signal, wherever they hang.
    faulthandler.register(signal.SIGUSR2, file=2, all_threads=True)
    job, index = int(os.environ["PHALANX_JOB"]), int(os.environ["PHALANX_INDEX"])
    if os.environ.get("PHALANX_STANDBY"):
        make_context(index)
    orders = AgentOrders(path, job, index)
    try:
        payload, generation = orders.wait_for_place()
        work = decode_payload(payload)
        assert isinstance(work, TrainingWork)
        config = job_from_table(parse_toml(work.toml))
        if work.files:
            place_code({file.name: file.text for file in work.files}, own_folder())
    except (ConfigError, tomllib.TOMLDecodeError) as error:
        log.error("%s", error)
        orders.bye(ExitInfo(code=ExitCode.CONFIG, reason=EndReason.CONFIG, message=str(error)))
        return ExitCode.CONFIG
    ring = RingSink(ring_path(Path(path).parent, index))
    folder = RunFolder(run_path(config, job, generation), os.environ["PHALANX_OWNER"])
    recorded = os.environ.get("PHALANX_RECORDS") != "0"  # the site may not want them

    def described(provenance: Provenance) -> None:
        encoded = msgspec.json.encode(provenance).decode()
        generation = provenance.generation
        ring.describe(RunRecord(generation=generation, provenance=encoded, folder=str(folder.path)))

    sinks = [ring] if recorded else []
    rank = Rank(config, orders, folder, sinks=sinks, ask=orders.ask, described=described)
    code = rank.run()
    orders.bye(rank.info)
    orders.close()
    return code


def make_context(index: int) -> None:
    """Have CUDA ready before there is a place to take: that is most of a start's time."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.set_device(index % torch.cuda.device_count())
        one = torch.ones(64, 64, device="cuda", dtype=torch.bfloat16)
        log.info("a context stands by: %s", (one @ one).sum().item())


def own_folder() -> Path:
    """What the job may write on this node, beside its run's folder."""
    return Path(os.environ["PHALANX_FOLDER"])


def run_path(config: Job, job: int, generation: int) -> Path:
    """The folder of a submitted job's run: the same for all its generations."""
    runs = (Path(config.runs) / config.name).absolute()
    if run := os.environ.get("PHALANX_RUN"):  # an engine has a number of its own
        return runs / run
    folder = runs / f"job-{job}"
    own = own_run_folder(folder, os.environ["PHALANX_OWNER"], generation)
    if own != folder:
        log.warning("%s holds the run of another server's job: this one's is %s", folder, own)
    return own
