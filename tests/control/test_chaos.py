"""Harm by plan: what is drawn, what is refused, what is noticed, and that nothing is lost."""

from __future__ import annotations

import json
import mmap
import os
import signal
import socket
import subprocess
import sys
import threading
import tomllib
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from phalanx.config import ConfigError, job_from_table, resolve
from phalanx.control.backends.local import LocalNode
from phalanx.control.wire.server_file import ServerFile
from phalanx.testing.chaos import ChaosCluster, ChaosPlan, also_drawn, random_plan, read_plan
from phalanx.testing.chaos.injector import JobFaults
from phalanx.testing.chaos.live import agents_here
from phalanx.testing.chaos.plan import MORE_WEIGHTS, WEIGHTS, Action
from phalanx.testing.chaos.run import play_all
from phalanx.testing.chaos.verdict import (
    belonging,
    leaked_memory,
    leaked_ports,
    listening,
    orphans,
    shared_memory,
)
from phalanx.testing.local_cluster import TrialCluster
from tests.control.jobs import JOB, write_job

EXAMPLE = Path(__file__).parents[2] / "examples" / "chaos.toml"


def test_a_seed_draws_the_same_plan_and_another_one_another() -> None:
    plans = [random_plan(seed, slots=4, steps=60) for seed in range(200)]
    assert plans[7] == random_plan(7, slots=4, steps=60)
    assert len({str(plan.actions) for plan in plans}) > 150
    drawn = {action.do for plan in plans for action in plan.actions}
    assert drawn == set(WEIGHTS)
    for plan in plans:
        steps = [action.at_step for action in plan.actions]
        assert steps == sorted(steps) and steps[0] > 1 and steps[-1] <= 45
        assert all(0 <= action.slot < 4 for action in plan.actions)


@pytest.mark.parametrize(
    ("axes", "drawn"),
    [
        ("data = 2\npipeline = 2", False),  # two halves of each stage, and no copy
        ("data = 2\npipeline = 2\nreplicate = 2", True),
        ("data = 4\nzero = 0", True),
        ("data = 2\ntensor = 2\nzero = 0", True),
    ],
)
def test_bits_are_flipped_at_random_only_where_replicas_find_them(axes: str, drawn: bool) -> None:
    text = JOB.format(name="chaos", steps=60).replace("data = 2\npipeline = 2", axes)
    job = resolve(job_from_table(tomllib.loads(text)), 4)
    assert also_drawn(job) == (("flip_bit",) if drawn else ())
    never = structs.replace(job, train=structs.replace(job.train, compare_every=0))
    assert also_drawn(never) == ()
    assert set(also_drawn(job, namespaces=True)) >= {"partition", "fill_disk"}


def test_what_more_a_job_bears_is_drawn_too() -> None:
    plans = [random_plan(seed, 4, 60, tuple(MORE_WEIGHTS)) for seed in range(200)]
    drawn = {action.do for plan in plans for action in plan.actions}
    assert drawn == {*WEIGHTS, *MORE_WEIGHTS}


def test_the_example_is_a_plan() -> None:
    plan = read_plan(EXAMPLE, slots=4, steps=30)
    assert plan.actions[0].do == "kill_worker"


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ('[[actions]]\ndo = "kill_worker"\nat_step = 5\nslot = 4', "actions[0].slot"),
        ('[[actions]]\ndo = "kill_worker"\nat_step = 30', "actions[0].at_step"),
        ('[[actions]]\ndo = "kill_worker"\nat_step = 5\nseconds = -1', "actions[0].seconds"),
        ('[[actions]]\ndo = "kill_everybody"\nat_step = 5', "actions[0].do"),
        ('[[action]]\ndo = "kill_worker"', "plan"),
        ("not TOML at all [", "--plan"),
    ],
)
def test_a_plan_that_does_not_fit_is_refused_with_its_key(
    tmp_path: Path, text: str, key: str
) -> None:
    path = tmp_path / "plan.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_plan(path, slots=4, steps=30)
    assert key in str(caught.value)


def test_leaks_are_found(tmp_path: Path) -> None:
    code = (
        "import socket, sys, time; s = socket.create_server(('127.0.0.1', 0)); "
        "print(s.getsockname()[1], flush=True); time.sleep(60)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    try:
        port = int(process.stdout.readline())
        assert process.pid in belonging(tmp_path)
        seen = listening(belonging(tmp_path))
        assert port in seen and leaked_ports(seen) == [f"port {port}"]
    finally:
        process.kill()
        process.wait()
    assert orphans(tmp_path) == [] and leaked_ports(seen) == []
    with socket.create_server(("127.0.0.1", 0)) as ours:
        assert ours.getsockname()[1] not in listening(belonging(tmp_path))


def test_shared_memory_that_nobody_holds_any_more_is_a_leak(tmp_path: Path) -> None:
    (tmp_path / "there before").touch()
    before = shared_memory(tmp_path)
    (tmp_path / "leaked").touch()
    with (tmp_path / "open").open("wb"):
        mapped = (tmp_path / "mapped").open("w+b")
        mapped.truncate(4096)
        memory = mmap.mmap(mapped.fileno(), 4096)
        mapped.close()  # the memory holds it alone
        leaked = [str(tmp_path / "leaked")]
        assert leaked_memory(before, tmp_path, wait_seconds=0.0) == leaked
        memory.close()


def test_shared_memory_that_is_cleared_away_after_a_moment_is_no_leak(tmp_path: Path) -> None:
    before = shared_memory(tmp_path)
    (tmp_path / "of a killed process").touch()
    tracker = threading.Timer(0.3, (tmp_path / "of a killed process").unlink)
    tracker.start()
    assert leaked_memory(before, tmp_path, wait_seconds=60.0) == []
    tracker.join()


class Counted:
    """A ground on which nothing runs: it counts what is killed and started."""

    network = None

    def __init__(self) -> None:
        self.calls: list[str] = []

    def job(self, number: int) -> dict[str, Any]:
        return {"nodes": ["a"]}

    def node(self, name: str) -> LocalNode:
        return LocalNode(name, Path("/nowhere"))

    def kill_agent(self, node: LocalNode) -> None:
        self.calls.append(f"kill agent {node.name}")

    def kill_node(self, node: LocalNode) -> None:
        self.calls.append(f"kill node {node.name}")

    def restart_node(self, node: LocalNode) -> None:
        self.calls.append(f"start {node.name}")

    def kill_server(self) -> None:
        self.calls.append("kill server")

    def start_server(self) -> None:
        self.calls.append("start server")


def test_what_is_killed_again_while_it_is_dead_is_started_once() -> None:
    """A second start would run beside the first, and nobody would know of one of them."""
    ground = Counted()
    harm = JobFaults(ground, 1)
    for do in ("kill_controller", "kill_agent", "kill_controller", "kill_node"):
        harm.do(Action(do=do, at_step=1, seconds=0.0))
    harm.due()
    harm.heal()
    assert sorted(ground.calls[-2:]) == ["start a", "start server"]
    assert len(ground.calls) == 6
    harm.do(Action(do="kill_controller", at_step=2, seconds=1e6))
    harm.due()
    assert ground.calls[-1] == "kill server"
    harm.heal()
    assert ground.calls[-1] == "start server"


def make_arena(
    root: Path, steps: int, plans: list[ChaosPlan], *, namespaces: bool = False, copies: int = 1
) -> ChaosCluster:
    text = JOB.format(name="chaos", steps=steps).replace("every = 0", "every = 20", 1)
    text = text.replace("data = 2\n", f"data = 2\nreplicate = {copies}\n")
    return ChaosCluster(
        root, job_from_table(tomllib.loads(text)), 4, plans=plans, namespaces=namespaces
    )


def judge(cluster: ChaosCluster, plans: list[ChaosPlan]) -> None:
    with cluster:
        outcomes = play_all(cluster, plans, print)
    bad = [outcome for outcome in outcomes if not outcome.good]
    assert not bad and not cluster.leaks, (bad, cluster.leaks)


def test_a_plan_of_harm_loses_nothing(tmp_path: Path) -> None:
    actions = (
        Action(do="kill_worker", at_step=6, slot=1),
        Action(do="kill_controller", at_step=14, seconds=0.5),
        Action(do="kill_node", at_step=25, slot=3, seconds=1.0),
    )
    plans = [ChaosPlan(name="three faults", actions=actions)]
    judge(make_arena(tmp_path, 50, plans), plans)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_fifty_random_plans_in_a_row_lose_nothing(tmp_path: Path) -> None:
    """``PHALANX_CHAOS_SEEDS=10:20`` plays a piece of them, so that pieces run side by side."""
    first, _, end = os.environ.get("PHALANX_CHAOS_SEEDS", "0:50").partition(":")
    plans = [random_plan(seed, 4, 60) for seed in range(int(first), int(end))]
    judge(make_arena(tmp_path, 60, plans), plans)


@pytest.mark.soak
def test_flipped_bits_among_other_harm_leave_no_trace(tmp_path: Path) -> None:
    actions = (
        Action(do="flip_bit", at_step=8, slot=1),
        Action(do="kill_worker", at_step=20, slot=0),
        Action(do="flip_bit", at_step=32, slot=2),  # another node is put aside: none is left
    )
    plans = [ChaosPlan(name="flipped bits", actions=actions)]
    judge(make_arena(tmp_path, 60, plans, copies=2), plans)


@pytest.mark.soak
def test_random_plans_with_cut_networks_full_disks_and_flipped_bits_lose_nothing(
    tmp_path: Path,
) -> None:
    if os.getuid() != 0:
        pytest.skip("only root can give nodes networks of their own")
    first, _, end = os.environ.get("PHALANX_CHAOS_SEEDS", "0:10").partition(":")
    also = tuple(MORE_WEIGHTS)
    plans = [random_plan(seed, 4, 60, also) for seed in range(int(first), int(end))]
    judge(make_arena(tmp_path, 60, plans, namespaces=True, copies=2), plans)


@pytest.mark.soak
def test_a_node_that_is_cut_off_trains_on_in_vain(tmp_path: Path) -> None:
    if os.getuid() != 0:
        pytest.skip("only root can give nodes networks of their own")
    actions = (Action(do="partition", at_step=10, slot=1, seconds=8.0),)
    plans = [ChaosPlan(name="a partition", actions=actions)]
    judge(make_arena(tmp_path, 40, plans, namespaces=True), plans)


@pytest.mark.soak
def test_a_full_disk_costs_checkpoints_and_not_the_run(tmp_path: Path) -> None:
    # Once in the middle, and once where the last checkpoint has to wait for room.
    actions = (
        Action(do="fill_disk", at_step=10, seconds=2.0),
        Action(do="fill_disk", at_step=395, seconds=3.0),
    )
    plans = [ChaosPlan(name="a full disk", actions=actions)]
    judge(make_arena(tmp_path, 400, plans), plans)


LIVE = """
[[actions]]
do = "kill_worker"
at_step = 3
slot = 1

[[actions]]
do = "kill_controller"
at_step = 10
seconds = 0.5

[[actions]]
do = "kill_node"
at_step = 20
slot = 2
seconds = 1.0
"""


def test_nodes_of_another_cluster_on_this_machine_are_not_harmed(tmp_path: Path) -> None:
    # Only addresses with these ports are in the command lines; nothing listens there.
    sleeps = (sys.executable, "-c", "import time; print('up', flush=True); time.sleep(60)")
    joins = {"mine": "http://localhost:64941,http://b:64942", "theirs": "http://localhost:64943"}
    agents = [
        subprocess.Popen(
            [*sleeps, "agent", "--join", url, "--name", "n0", "--state", str(tmp_path / whose)],
            stdout=subprocess.PIPE,
        )
        for whose, url in joins.items()
    ]
    try:
        for agent in agents:
            assert agent.stdout is not None and agent.stdout.readline() == b"up\n"
        assert agents_here(["http://127.0.0.1:64942"]) == [LocalNode("n0", tmp_path / "mine")]
        assert agents_here([]) == []
    finally:
        for agent in agents:
            agent.kill()
            agent.communicate()


@pytest.mark.soak
def test_a_job_that_runs_is_harmed_where_it_is(tmp_path: Path) -> None:
    (tmp_path / "plan.toml").write_text(LIVE)
    with TrialCluster(tmp_path, nodes=4, spares=1) as cluster:
        job = cluster.submit(str(write_job(tmp_path, "live", 200)))
        with pytest.raises(RuntimeError, match="there is no job 77"):
            cluster.command("chaos", "77", "--plan", "random")
        cluster.wait(lambda: cluster.job(job)["state"] == "running", "the job to run")
        said = json.loads(cluster.command("chaos", str(job), "--plan", str(tmp_path / "plan.toml")))
        again = ServerFile.read(cluster.state).pid
        assert said["good"], said
        outcome = said["outcome"]
        assert len(outcome["recovered_seconds"]) == 3 and outcome["generations"] >= 3
        assert outcome["differences"] == []
        cluster.wait(
            lambda: all(n["connected"] for n in cluster.get("/v1/nodes")["nodes"]), "nodes"
        )
        assert cluster.wait_ended(job, 120) == "done"
        os.kill(again, signal.SIGTERM)  # it is not the stage's child


def test_chaos_that_is_ended_from_outside_leaves_no_folder(tmp_path: Path) -> None:
    job, room = write_job(tmp_path, "harmed", steps=100_000), tmp_path / "room"
    room.mkdir()
    command = [sys.executable, "-m", "phalanx", "chaos", str(job)]
    environment = {**os.environ, "TMPDIR": str(room), "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as chaos:
        try:
            assert chaos.stdout is not None and "in peace" in chaos.stdout.readline()
            assert list(room.glob("phalanx-chaos-*"))
            chaos.terminate()
            assert chaos.wait(60) == 128 + signal.SIGTERM
        finally:
            chaos.kill()
    assert not list(room.glob("phalanx-chaos-*"))
