"""What a site decides about a node: the file of ``phalanx agent --config``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal
from urllib.parse import urlsplit

from msgspec import Struct, field, structs

from phalanx.config import ConfigError
from phalanx.control.host.toml_file import read_struct
from phalanx.control.host.users import own_name
from phalanx.observe.node.dcgm import EXPORTER

if TYPE_CHECKING:
    from phalanx.checkpoint.keeper.channel import ReplicaOptions


class AgentSection(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all parts; unknown keys are refused."""


class FaultOptions(AgentSection, frozen=True):
    """Where faults are heard of; "" or nothing: not there."""

    kernel_log: str = "/dev/kmsg"  # "": not read
    sysfs: str = "/sys/class"  # network cards and their counters
    cgroup: str = "/sys/fs/cgroup"  # counts of kills for memory
    mounts: tuple[str, ...] = ()  # folders that must answer, beside all network mounts
    notice_file: str = ""  # the site takes the node away when it is there
    notice_command: tuple[str, ...] = ()  # or when this program prints something
    notice_url: str = ""  # or when this address answers 200
    poll_seconds: float = 10.0  # between looks at mounts and notices


class TelemetryOptions(AgentSection, frozen=True):
    """What is read of the node beside what the system and NVML tell."""

    steps: bool = True  # records of every rank's steps; without them only progress is known
    dcgm: str = EXPORTER  # its dcgm-exporter: activity of GPUs, if it answers; "": not asked


class HookOptions(AgentSection, frozen=True):
    """Programs that run on the node before a job's workers start and after they have ended."""

    prolog: tuple[str, ...] = ()  # program and arguments, before the first worker
    epilog: tuple[str, ...] = ()  # program and arguments, after the last one
    prolog_seconds: float = 60.0  # time limit
    epilog_seconds: float = 60.0  # time limit


class BindingOptions(AgentSection, frozen=True):
    """How workers are bound. none: not at all; cores: each to its own; numa: near its GPU too."""

    policy: Literal["none", "cores", "numa"] = "numa"  # of all workers


class ReplicaChannel(AgentSection, frozen=True):
    """The channel between keepers."""

    interface: str = ""  # of the network; "": the one that the node's address is on
    encrypt: bool = False  # AES-256-GCM between the keepers
    bytes_per_second: int = 0  # 0: not limited

    def resolved(self) -> ReplicaOptions:
        """As keepers want it; ConfigError where it cannot be had here."""
        # Imported here: an agent that only waits for work starts in half the time without it.
        from phalanx.checkpoint.keeper.channel import (
            ReplicaOptions,
            interface_address,
        )

        address = ""
        try:
            if self.interface:
                address = interface_address(self.interface)
        except OSError as error:
            rule = error.strerror or str(error)
            raise ConfigError("replicas.interface", self.interface, rule, "name another") from None
        return ReplicaOptions(address, self.encrypt, self.bytes_per_second)


class EnvironmentOptions(AgentSection, frozen=True):
    """What jobs find of the agent's own environment, beside what all of them do."""

    pass_: tuple[str, ...] = field(default=(), name="pass")  # names or patterns: "AWS_*"


class ContainmentOptions(AgentSection, frozen=True):
    """What holds jobs in. Bounds of memory and processes need a control group of the site's."""

    no_new_privileges: bool = True  # false: set-user-ID programs (sudo, ping) work in jobs
    core_bytes: int = 0  # of a core dump
    cgroup: str = ""  # folder of a group of version 2 without processes; "": nothing is bounded
    memory: Literal["share", "none"] = "share"  # a job's GPUs' part of the node's memory
    processes: int = 32768  # of a job on this node, threads too
    cpu_weight: int = 100  # of a job's control group


class UserOptions(AgentSection, frozen=True):
    """Whom a root agent runs jobs as: users of people, unless the operator names others."""

    least_uid: int = 1000  # of users that jobs may run as
    also: tuple[str, ...] = ()  # names of users below it


class DescribeOptions(AgentSection, frozen=True):
    """How the node is described: its GPUs, network and where it stands."""

    site_file: str = ""  # the site's word about its nodes: leaf, pod, rack, power, ...
    labels_file: str = ""  # labels of the Kubernetes node; "": the API is asked, where there is one
    hardware: str = ""  # folder of recorded hardware that stands for this machine
    program_seconds: float = 10.0  # time limit of nvidia-smi, ibstat, lldpctl
    poll_seconds: float = 60.0  # between looks for what has changed
    join_seconds: float = 3.0  # an agent that is ready to join waits so long for its description
    settings_after_seconds: float = 60.0  # until versions and settings are read, after the start
    settings_every_seconds: float = 3600.0  # between two such readings; 0: never


class AgentConfig(AgentSection, frozen=True):
    """Everything about one node."""

    faults: FaultOptions = FaultOptions()
    telemetry: TelemetryOptions = TelemetryOptions()
    hooks: HookOptions = HookOptions()
    binding: BindingOptions = BindingOptions()
    replicas: ReplicaChannel = ReplicaChannel()
    environment: EnvironmentOptions = EnvironmentOptions()
    containment: ContainmentOptions = ContainmentOptions()
    users: UserOptions = UserOptions()
    describe: DescribeOptions = DescribeOptions()


def with_own_user(config: AgentConfig, urls: tuple[str, ...]) -> AgentConfig:
    """Beside a server on one's own machine, jobs may run as the agent's own user."""
    if not all(urlsplit(url).hostname in ("127.0.0.1", "localhost", "::1") for url in urls):
        return config
    users = structs.replace(config.users, also=(*config.users.also, own_name()))
    return structs.replace(config, users=users)


def read_agent_config(path: Path) -> AgentConfig:
    """The file; ConfigError names what is wrong with it."""
    return read_struct(path, AgentConfig, "--config")
