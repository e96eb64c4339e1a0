"""What a rank makes ready for a formation: its job, its device, its environment, its group."""

from __future__ import annotations

import logging
import os
import time
from datetime import timedelta

import msgspec
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed import distributed_c10d

from phalanx.config import ConfigError, Job, check, resolve
from phalanx.train.measure.sends import time_sends
from phalanx.train.rank.orders import BACKUP_KEY, Formation
from phalanx.train.resume.refusal import refuse

BACKUP_SECONDS = 5.0  # for a spare's keeper to come up; it starts with the ranks

log = logging.getLogger(__name__)


def prepare(job: Job, world_size: int, *, begins: bool = True) -> Job:
    """The job made explicit for a world size and refused if anything about it cannot work."""
    check(job, world_size)
    job = resolve(job, world_size)
    refuse(job, begins=begins)
    return job


def with_replicas(job: Job, formation: Formation) -> Job:
    """The job with as many replicas as the generation has."""
    if not formation.replicas or job.parallel.data == formation.replicas:
        return job
    parallel = msgspec.structs.replace(job.parallel, data=formation.replicas)
    return msgspec.structs.replace(job, parallel=parallel)


def choose_device(job: Job, local_rank: int) -> torch.device:
    """The device of this rank, made current."""
    wanted = job.train.device
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        torch.set_num_threads(job.train.cpu_threads)
        return torch.device("cpu")
    visible = torch.cuda.device_count()
    if local_rank >= visible:
        rule = f"needs one CUDA device a rank, {visible} are visible"
        raise ConfigError("train.device", wanted, rule, 'start fewer ranks or use "cpu"')
    # Threads that are the first to need torch's pool in a forked process would break it.
    torch.set_num_threads(torch.get_num_threads())
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


def set_environment(formation: Formation) -> None:
    """What scripts and libraries expect of a launcher, and our own rooms ask."""
    os.environ |= {
        "RANK": str(formation.rank),
        "LOCAL_RANK": str(formation.local_rank),
        "WORLD_SIZE": str(formation.world_size),
        "MASTER_ADDR": formation.host,
        "MASTER_PORT": str(formation.port),
    }


def join_group(formation: Formation, job: Job, device: torch.device) -> None:
    """Meet the other ranks of the generation at its store."""
    cuda = device.type == "cuda"
    backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
    if cuda and job.parallel.pipeline > 1:
        time_sends()
    timeout = timedelta(seconds=job.train.collective_timeout_seconds)
    meeting = TCPStore(formation.host, formation.port, is_master=False, timeout=timeout)
    # torch names groups by a counter that only a complete group sets back: ranks that failed to
    # form the last generation would look for each other under another name than new ones.
    distributed_c10d._world.group_count = 0
    dist.init_process_group(
        backend,
        store=PrefixStore(formation.prefix, meeting),
        rank=formation.rank,
        world_size=formation.world_size,
        timeout=timeout,
        device_id=device if cuda else None,
    )


def spare_keeper(formation: Formation) -> str:
    """host:port of the spare's keeper that holds our snapshots too; "": none does, or not in time.

    Only the first rank asks.
    """
    if not formation.backed_up or formation.rank:
        return ""
    return find_spare_keeper(formation.host, formation.port, formation.prefix)


def find_spare_keeper(host: str, port: int, prefix: str) -> str:
    """The same, as the spare's node says it at a generation's store."""
    timeout = timedelta(seconds=BACKUP_SECONDS)
    try:
        meeting = TCPStore(host, port, is_master=False, timeout=timeout)
        return PrefixStore(prefix, meeting).get(BACKUP_KEY).decode()
    except dist.DistError as error:
        log.warning("the spare node keeps no snapshots: its keeper is not there (%s)", error)
        return ""


class FormationTimes:
    """What a formation spends its time on."""

    def __init__(self) -> None:
        self._since = time.monotonic()
        self._seconds: dict[str, float] = {}

    def end(self, name: str) -> None:
        """A part is over."""
        now = time.monotonic()
        self._seconds[name] = self._seconds.get(name, 0.0) + now - self._since
        self._since = now

    def __str__(self) -> str:
        return ", ".join(f"{name} {seconds:.2f}" for name, seconds in self._seconds.items())
