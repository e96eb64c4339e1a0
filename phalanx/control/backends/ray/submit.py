"""A job onto Ray: two placement groups, an actor in each bundle, and who leads the job."""

from __future__ import annotations

import importlib
import os
import secrets
import socket
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from phalanx.config import Backend, ConfigError, Ray
from phalanx.config.errors import plain_reason
from phalanx.control.backends.lead import BatchLeader, LeadError, options_in
from phalanx.control.backends.need import Need, need_of
from phalanx.control.client.client import TLS_FILE
from phalanx.control.server.http.submission import RequestedWork

PLACE_SECONDS = 60.0  # for Ray to find room
PORTS = 20_000


class RayError(Exception):
    """Ray refused, and what to change."""


class RayRun(Struct, frozen=True, kw_only=True):
    """How a job came out."""

    code: int
    run: str


def connect(address: str) -> Any:
    """The ray module, connected to an existing cluster."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        ray: Any = importlib.import_module("ray")  # typed in some releases only
    except ImportError:
        raise RayError("ray is not installed: pip install 'phalanx[ray]'") from None
    cluster = _last_cluster() if address == "auto" else address
    no_cluster = RayError(
        f"no Ray cluster at {cluster or address!r}: start one with `ray start --head`, or set "
        "backend.ray.address (or RAY_ADDRESS) to its head"
    )
    if ":" in cluster and not _answers(cluster):  # Ray itself tries for minutes
        raise no_cluster
    try:
        ray.init(address=address, namespace="phalanx", log_to_driver=False, logging_level="warning")
    except ConnectionError:
        raise no_cluster from None
    except ValueError as error:
        rule = f"backend.ray.address = {address!r} is no address of a Ray: {error}"
        raise RayError(f'{rule}\nnearest: "auto", or "HOST:6379"') from None
    except RuntimeError as error:
        if "ersion" in str(error):
            raise RayError(f"{error}\ninstall the cluster's version of ray here") from None
        raise RayError(str(error)) from None
    return ray


def _last_cluster() -> str:
    """What Ray takes for this machine's cluster, also where that is long gone; "": none."""
    if told := os.environ.get("RAY_ADDRESS"):
        return told
    folder = os.environ.get("RAY_TMPDIR") or tempfile.gettempdir()
    with suppress(OSError):
        return "" if raylet_runs() else Path(folder, "ray", "ray_current_cluster").read_text()
    return ""


def raylet_runs() -> bool:
    """Whether this machine is part of a cluster: Ray then asks that one."""
    for path in Path("/proc").glob("[0-9]*/comm"):
        with suppress(OSError):
            if path.read_text().strip() == "raylet":
                return True
    return False


def _answers(address: str) -> bool:
    host, _, port = address.rpartition("://")[2].rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=3).close()
    except (OSError, ValueError):
        return False
    return True


class RaySite:
    """The agents' nodes, as Ray sees them."""

    def __init__(self, ray: Any, actors: list[Any]) -> None:
        self._ray, self._actors = ray, actors
        self._names: dict[int, str] = {}

    def nodes(self) -> tuple[str, ...]:
        """Names of agents whose actors live; one that was started again elsewhere has another."""
        waiting = {actor.name.remote(): number for number, actor in enumerate(self._actors)}
        done, _ = self._ray.wait(list(waiting), num_returns=len(waiting), timeout=5.0)
        for answer in done:
            with suppress(self._ray.exceptions.RayError):
                self._names[waiting[answer]] = self._ray.get(answer)
        return tuple(dict.fromkeys(self._names.values()))

    def unwanted(self) -> dict[str, str]:
        """Nodes that Ray has lost or is draining."""
        gone = {}
        for node in self._ray.nodes():
            if not node["Alive"]:
                gone[f"ray-{node['NodeID'][:12]}"] = "Ray lost the node"
        return {name: why for name, why in gone.items() if name in self._names.values()}

    def over(self) -> bool:
        """Ray takes nothing back."""
        return False


class RayBackend:
    """Holds nodes for one job, from its start to its end; nothing stays behind."""

    def __init__(self, wanted: RequestedWork) -> None:
        self.wanted = wanted
        self.backend = wanted.backend
        self.need = need_of(wanted)
        self.key = time.strftime("%Y%m%d-%H%M%S-") + secrets.token_hex(2)

    def run(self, policy: Path | None = None) -> RayRun:
        """Place, start, lead, and give everything back."""
        runtime_env_of(self.backend.ray)  # refused before nodes are taken
        ray = connect(self.backend.ray.address)
        groups: list[Any] = []
        actors: list[Any] = []
        folder = Path(self.wanted.folder or ".")
        runs = Path(folder, self.wanted.job.runs if self.wanted.job else "runs", self.wanted.title)
        run = runs.absolute() / f"ray-{self.key}"
        try:
            bundle = self._bundle(ray)
            groups.append(self._group(ray, bundle, self.need.slots))
            if self.need.spares:
                groups.append(self._group(ray, bundle, self.need.spares))
            self._refuse_shared(ray, groups)
            port = self.backend.port or 20_000 + int.from_bytes(secrets.token_bytes(2)) % PORTS
            scheme = "https" if self.backend.tls else "http"
            url = f"{scheme}://{ray.util.get_node_ip_address()}:{port}"
            token_of = _Tokens(run / "control")
            lead = BatchLeader(options_in(run, url, self.wanted, self.need, policy))
            lead.start()
            trusted = (run / "control" / TLS_FILE).read_text() if self.backend.tls else ""
            actors += self._actors(ray, groups, url, token_of(), trusted)
            lead.site = self._site(ray, actors)
            return RayRun(code=lead.finish(), run=str(run))
        finally:
            self._give_back(ray, groups, actors)

    def _bundle(self, ray: Any) -> dict[str, float]:
        """What an agent takes of a node: all its CPUs, unless told otherwise."""
        known = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        alive = [node for node in known if node.get("CPU")]  # a head may offer nothing
        if len(alive) < self.need.nodes:
            raise RayError(
                f"the Ray cluster has {len(alive)} nodes and the job needs {self.need.slots} and "
                f"{self.need.spares} spares: add nodes, or lower the mesh or backend.spares"
            )
        cpus = self.backend.ray.cpus_per_node or min(node["CPU"] for node in alive)
        bundle = {"CPU": float(cpus)}
        if self.need.wants_gpus and any(node.get("GPU") for node in alive):
            bundle["GPU"] = float(self.need.gpus_per_node)
        return bundle

    def _group(self, ray: Any, bundle: dict[str, float], count: int) -> Any:
        from ray.util.placement_group import placement_group, remove_placement_group

        group = placement_group([dict(bundle)] * count, strategy="STRICT_SPREAD")
        if not group.wait(PLACE_SECONDS):
            remove_placement_group(group)
            raise RayError(
                f"Ray found no {count} nodes with {bundle} free within {PLACE_SECONDS:.0f} s: see "
                "`ray status`"
            )
        return group

    def _refuse_shared(self, ray: Any, groups: list[Any]) -> None:
        """A spare on a node of the gang would die with it."""
        from ray.util.placement_group import placement_group_table

        nodes = [
            node
            for group in groups
            for node in placement_group_table(group)["bundles_to_node_id"].values()
        ]
        if len(set(nodes)) < len(nodes):
            raise RayError(
                "a spare would share a node with the gang: leave backend.ray.cpus_per_node at 0 "
                "(all CPUs of a node), or above half of them"
            )

    def _actors(self, ray: Any, groups: list[Any], url: str, token: str, trusted: str) -> list[Any]:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        from phalanx.control.backends.ray.actor import AgentActor

        made = []
        settings = self.backend.ray
        runtime_env = runtime_env_of(settings)
        for group in groups:
            for index, bundle in enumerate(group.bundle_specs):
                remote = ray.remote(AgentActor).options(
                    num_cpus=bundle["CPU"],
                    num_gpus=bundle.get("GPU", 0),
                    runtime_env=runtime_env,
                    max_restarts=-1,  # with its bundle, wherever Ray puts that
                    scheduling_strategy=PlacementGroupSchedulingStrategy(
                        placement_group=group, placement_group_bundle_index=index
                    ),
                )
                arguments = (url, token, self.need.gpus_per_node, settings.leaf_resource, self.key)
                made.append(remote.remote(*arguments, self.backend.standby, trusted))
        return made

    def _site(self, ray: Any, actors: list[Any]) -> RaySite:
        """Once every actor has started: on a busy cluster that takes a while."""
        names = [actor.name.remote() for actor in actors]
        _, missing = ray.wait(names, num_returns=len(names), timeout=PLACE_SECONDS)
        site = RaySite(ray, actors)
        if len(site.nodes()) < self.need.slots:
            raise RayError(
                f"{len(missing)} of {len(names)} actors did not start within "
                f"{PLACE_SECONDS:.0f} s: see `ray list actors` and the logs of Ray's workers"
            )
        return site

    def _give_back(self, ray: Any, groups: list[Any], actors: list[Any]) -> None:
        from ray.util.placement_group import remove_placement_group

        stopping = [actor.stop.remote() for actor in actors]
        with suppress(Exception):
            ray.wait(stopping, num_returns=len(stopping), timeout=30.0)
        for actor in actors:
            with suppress(Exception):
                ray.kill(actor)
        for group in groups:
            with suppress(Exception):
                remove_placement_group(group)
        ray.shutdown()


def runtime_env_of(settings: Ray) -> dict[str, Any]:
    """Ray's runtime_env from its file; ConfigError where that is none."""
    if not settings.runtime_env:
        return {}
    try:
        environment = msgspec.json.decode(Path(settings.runtime_env).read_bytes())
    except (OSError, msgspec.DecodeError) as error:
        rule, fix = f"cannot be read: {plain_reason(error)}", 'a file such as {"pip": ["einops"]}'
        raise ConfigError("backend.ray.runtime_env", settings.runtime_env, rule, fix) from None
    if not isinstance(environment, dict):
        rule = "holds no JSON object"
        raise ConfigError("backend.ray.runtime_env", settings.runtime_env, rule, "write {…}")
    return environment


class _Tokens:
    """The join token of a controller that has just started."""

    def __init__(self, state: Path) -> None:
        self._path = state / "join.token"

    def __call__(self) -> str:
        deadline = time.monotonic() + PLACE_SECONDS
        while not self._path.exists():
            if time.monotonic() > deadline:
                raise LeadError(f"the controller made no token: see {self._path.parent}")
            time.sleep(0.05)
        return self._path.read_text().strip()


def describe(need: Need, backend: Backend) -> str:
    """What Ray would be asked for, for --dry-run."""
    cpus = backend.ray.cpus_per_node or "all"
    gpus = f", GPU {need.gpus_per_node}" if need.wants_gpus else ""
    lines = [
        f"address {backend.ray.address}",
        f"placement group STRICT_SPREAD: {need.slots} bundles of CPU {cpus}{gpus} for the gang",
    ]
    if need.spares:
        lines.append(f"placement group STRICT_SPREAD: {need.spares} of the same as spares")
    lines.append("an actor in each bundle runs the node's agent; this process leads the job")
    return "\n".join(lines)
