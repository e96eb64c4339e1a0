"""Restoring from keepers' memory: after a worker's death, a node's death, and with bad replicas."""

from __future__ import annotations

import os
import signal
import socket
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import psutil
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from phalanx.checkpoint import Checkpointer, CheckpointError, Extra
from phalanx.checkpoint.keeper import channel
from phalanx.checkpoint.keeper.messages import (
    AskSnapshots,
    Detail,
    Details,
    FenceReplicas,
    Fetch,
    KeeperInventory,
    Noted,
    Put,
    SnapshotBytes,
    Taken,
    Watch,
)
from phalanx.checkpoint.keeper.start import buddies, find_keepers, home_of, node_name
from phalanx.checkpoint.keeper.wire import ask, expect, receive_into, send
from phalanx.checkpoint.read import group_load
from phalanx.checkpoint.read.group_load import _offered_here
from phalanx.checkpoint.read.memory import KeeperPlace, condemn_held, connect, offers
from phalanx.config import Job
from phalanx.data import Cursor
from phalanx.train.resume.start import load_from_memory
from phalanx.train.trainer import Trainer
from tests.checkpoint.waiting import eventually, keepers_below
from tests.ranks import RankError, die_together, run_ranks

ROWS = 40_000  # 10 MB in all: several chunks a rank
CPU = torch.device("cpu")


def keepers_of(tmp_path: Path, node: str) -> list[psutil.Process]:
    return keepers_below(home_of_node(tmp_path, node))


def end(processes: list[psutil.Process]) -> None:
    for process in processes:
        process.kill()
        process.wait()


def home_of_node(tmp_path: Path, node: str) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PHALANX_NODE", node)
        return str(home_of(str(tmp_path)))


def extra(rank: int = 0) -> Extra:
    return Extra(
        tokens=5, cursor=Cursor(3, (), "f"), mesh={"data": 2}, config_hash="h", rng=b"dice%d" % rank
    )


def whole(value: float) -> torch.Tensor:
    return torch.arange(ROWS * 64.0).view(ROWS, 64) + value


def state(value: float) -> dict[str, torch.Tensor]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {
        "model.w": distribute_tensor(whole(value), mesh, [Shard(0)]),
        "copy": distribute_tensor(whole(value)[:100], mesh, [Replicate()]),
    }


def assert_value(tensors: dict[str, torch.Tensor], value: float) -> None:
    tensor = tensors["model.w"]
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    assert torch.equal(full, whole(value))


def become(rank: int) -> None:
    """Each rank pretends to be a node of its own."""
    os.environ["PHALANX_NODE"] = f"node{rank}"


def save_and_die(tmp_path: Path, *, nodes: bool, steps: int = 3, write: bool = True) -> None:
    def train() -> None:
        rank = dist.get_rank()
        if nodes:
            become(rank)
        tensors = state(0.0)
        checkpointer = Checkpointer(tmp_path / "checkpoints", keep=2)
        assert checkpointer.prepare_background(
            tensors,
            generation=0,
            step=0,
            device=CPU,
            lease_seconds=60.0,
            home=home_of(str(tmp_path)),
            replicate=nodes,
        )
        for step in range(1, steps + 1):
            for tensor in tensors.values():
                tensor += 1
            checkpointer.save(step, tensors, extra(rank), write=write)
        background = checkpointer._background
        assert background is not None
        background.wait_durable()
        if nodes:
            assert background._kept.replicated_step == steps
        die_together()

    with pytest.raises(RankError) as caught:
        run_ranks(2, train)
    assert str(caught.value).count("ended by SIGKILL") == 2, caught.value


def restore(
    tmp_path: Path,
    *,
    nodes: bool,
    expected: float | None,
    newer_than: int = -1,
    lost: str = "",
) -> None:
    """``lost``: a node whose keeper ends when it has said what it holds."""

    def offered_and_lost(home: Path) -> object:
        offered = _offered_here(home)
        if node_name() == lost:
            end(keepers_of(tmp_path, lost))
        return offered

    def load() -> None:
        rank = dist.get_rank()
        if nodes:
            become(rank)
        group_load._offered_here = offered_and_lost  # type: ignore[assignment]
        tensors = state(-100.0)
        loader = Checkpointer(tmp_path / "checkpoints")
        home = home_of(str(tmp_path))
        manifest = loader.load_memory(home, tensors, newer_than=newer_than)
        if expected is None:
            assert manifest is None
            return
        assert manifest is not None and manifest.step == expected
        assert manifest.rng == b"dice%d" % rank and manifest.cursor.consumed == 3
        assert_value(tensors, expected)

    run_ranks(2, load)


@pytest.mark.parametrize("lost", ["node0", "node1"])  # every rank asks the first one's keeper
def test_a_keeper_that_ends_as_a_restore_begins_gives_way_to_its_buddy(
    tmp_path: Path, lost: str
) -> None:
    save_and_die(tmp_path, nodes=True, write=False)
    restore(tmp_path, nodes=True, expected=3, lost=lost)


def test_a_killed_job_continues_from_memory_without_a_disk(tmp_path: Path) -> None:
    save_and_die(tmp_path, nodes=False, write=False)
    assert not list((tmp_path / "checkpoints").glob("step-*"))
    restore(tmp_path, nodes=False, expected=3)
    restore(tmp_path, nodes=False, expected=None, newer_than=3)  # the disk has as much
    alone = {"model.w": torch.zeros(ROWS, 64)}  # another mesh
    loader = Checkpointer(tmp_path / "checkpoints")
    manifest = loader.load_memory(home_of(str(tmp_path)), alone)
    assert manifest is not None and manifest.step == 3
    assert_value(alone, 3)
    loader.release_memory(home_of(str(tmp_path)))
    assert eventually(lambda: find_keepers(home_of(str(tmp_path))) == [])


def test_a_worker_that_dies_while_it_copies_costs_only_that_copy(tmp_path: Path) -> None:
    def train() -> None:
        tensors = state(1.0)
        checkpointer = Checkpointer(tmp_path / "checkpoints", keep=2)
        home = home_of(str(tmp_path))
        assert checkpointer.prepare_background(
            tensors, generation=0, step=0, device=CPU, lease_seconds=60.0, home=home
        )
        for tensor in tensors.values():
            tensor += 1
        checkpointer.save(2, tensors, extra(dist.get_rank()))
        checkpointer.finish()
        background = checkpointer._background
        assert background is not None
        if dist.get_rank() == 1:
            background._kept.filled = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        checkpointer.save(3, tensors, extra())
        dist.barrier()

    with pytest.raises(RankError):
        run_ranks(2, train)
    restore(tmp_path, nodes=False, expected=2)
    path = tmp_path / "checkpoints" / "step-00000003"
    assert eventually(lambda: not list(path.glob("rank-00001.*.safetensors")))
    assert not (path / "manifest.json").exists()


def test_a_lost_node_is_restored_from_its_buddy(tmp_path: Path) -> None:
    save_and_die(tmp_path, nodes=True)
    end(keepers_of(tmp_path, "node1"))
    restore(tmp_path, nodes=True, expected=3)


def test_both_keepers_of_a_rank_gone_leaves_nothing_to_restore(
    tmp_path: Path, runtime: Path
) -> None:
    save_and_die(tmp_path, nodes=True)
    end(keepers_below(str(runtime)))
    restore(tmp_path, nodes=True, expected=None)


def test_a_corrupt_snapshot_gives_way_to_its_replica(tmp_path: Path) -> None:
    save_and_die(tmp_path, nodes=True)
    spoil(keepers_of(tmp_path, "node0")[0], whole(3.0))
    restore(tmp_path, nodes=True, expected=3)


def test_a_corrupt_replica_is_refused_when_nothing_else_is_left(tmp_path: Path) -> None:
    save_and_die(tmp_path, nodes=True, steps=1)
    (left,) = keepers_of(tmp_path, "node1")
    end(keepers_of(tmp_path, "node0"))
    spoil(left, whole(1.0))
    restore(tmp_path, nodes=True, expected=None)


def kept_by(path: str) -> tuple[KeeperPlace, Put, bytearray]:
    """A keeper as another node sees it, and a snapshot of it as a replica."""
    header, place = offers(path)[0]
    key = (header.rank, header.session, header.step)
    with connect(place) as connection:
        details = ask(connection, Detail(*key), Details)
        ask(connection, Fetch(*key, 0, header.shard_bytes), SnapshotBytes)
        content = bytearray(header.shard_bytes)
        assert receive_into(connection, memoryview(content))
    return place._replace(node="elsewhere"), Put(details.order, details.sidecar), content


def test_a_replica_that_arrives_corrupt_is_refused(tmp_path: Path) -> None:
    save_and_die(tmp_path, nodes=False, steps=1, write=False)
    (path,) = find_keepers(home_of(str(tmp_path)))
    place, put, content = kept_by(path)
    for position in (0, 3_000_000, len(content) - 1):
        content[position] ^= 1
        with connect(place) as connection:
            send(connection, put)
            connection.sendall(content)
            with pytest.raises(ConnectionError, match="1 chunks arrived corrupt"):
                expect(connection, Taken)
        content[position] ^= 1
    assert not any(offer.header.replica for offer in offers(path))


def test_after_a_fence_replicas_of_older_generations_are_refused(tmp_path: Path) -> None:
    save_and_die(tmp_path, nodes=False, steps=1, write=False)
    (path,) = find_keepers(home_of(str(tmp_path)))
    place, put, content = kept_by(path)
    with connect(place) as connection:
        send(connection, put)
        connection.sendall(content)
        expect(connection, Taken)
    with keeper_connection(path) as agent:
        send(agent, FenceReplicas(1))
        ask(agent, AskSnapshots(), KeeperInventory)  # it has read what came before
    with connect(place) as connection:
        send(connection, put)
        with pytest.raises(ConnectionError, match="a newer generation goes on"):
            expect(connection, Taken)


def test_without_its_spare_a_gang_on_one_node_has_its_snapshots_safe_on_that_one(
    tmp_path: Path,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        nobody = f"127.0.0.1:{closed.getsockname()[1]}"

    def train() -> None:
        tensors = state(0.0)
        checkpointer = Checkpointer(tmp_path / "checkpoints")
        assert checkpointer.prepare_background(
            tensors,
            generation=0,
            step=0,
            device=CPU,
            buffers=4,
            lease_seconds=60.0,
            home=home_of(str(tmp_path)),
            replicate=True,
            spare=nobody,
            prompt=True,
        )
        for step in (1, 2):
            checkpointer.save(step, tensors, extra(), write=False)
        checkpointer.wait_acknowledged()
        (path,) = find_keepers(home_of(str(tmp_path)))
        with keeper_connection(path) as agent:
            send(agent, Watch())
            notes = [expect(agent, Noted) for _ in range(4)]
        assert {(note.rank, note.step) for note in notes} == {(0, 1), (0, 2), (1, 1), (1, 2)}
        checkpointer.close()

    run_ranks(2, train)


def keeper_connection(path: str) -> socket.socket:
    """As its agent has it."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(20)
    connection.connect(path)
    return connection


def spoil(keeper: psutil.Process, content: torch.Tensor) -> None:
    """Flip a byte wherever the first rows of ``content`` lie in a keeper's memory."""
    wanted = content[:4].numpy().tobytes()
    hits = 0
    for descriptor in Path(f"/proc/{keeper.pid}/fd").iterdir():
        try:
            if "phalanx-snapshot" not in str(descriptor.readlink()):
                continue
        except FileNotFoundError:  # of a connection that has just ended
            continue
        with descriptor.open("r+b") as file:
            memory = file.read()
            position = memory.find(wanted)
            if position >= 0:
                file.seek(position + 5)
                file.write(bytes([memory[position + 5] ^ 1]))
                hits += 1
    assert hits


def test_memory_that_breaks_off_half_way_is_not_trained_on(tmp_path: Path) -> None:
    """Without a checkpoint on disk the start is refused, once: what is bad is remembered."""
    save_and_die(tmp_path, nodes=False, steps=1, write=False)
    spoil(keepers_below(str(home_of(str(tmp_path))))[0], whole(1.0))
    job = Job(name=tmp_path.name, runs=str(tmp_path.parent))
    tensors = {"model.w": torch.zeros_like(whole(0.0))}
    trainer = cast(Trainer, SimpleNamespace(tensors=lambda: tensors))
    with pytest.raises(CheckpointError, match=r"rank-00000\..*\.safetensors is corrupt") as refused:
        load_from_memory(job, trainer, Checkpointer(tmp_path / "checkpoints"), [])
    assert "model.w" in str(refused.value) and "start again" in str(refused.value)
    (path,) = find_keepers(home_of(str(tmp_path)))
    assert {offer.header.rank for offer in offers(path)} == {1}, "the good one is kept"
    again = Checkpointer(tmp_path / "checkpoints")
    assert load_from_memory(job, trainer, again, []) is None
    assert again.passed_over == ["memory of keepers, step 1: found bad before"]


def test_a_snapshot_that_is_good_cannot_be_condemned(tmp_path: Path) -> None:
    save_and_die(tmp_path, nodes=True, steps=1)
    for node in ("node0", "node1"):  # each holds a rank's own one and a replica
        (keeper,) = Path(home_of_node(tmp_path, node)).glob("*.sock")
        for header, place in offers(str(keeper)):
            assert not condemn_held(place, header.rank, header.session, header.step)
        assert len(offers(str(keeper))) == 2


def test_memory_that_was_resumed_from_is_kept_for_the_next_crash(tmp_path: Path) -> None:
    save_and_die(tmp_path, nodes=False, steps=1, write=False)
    job = Job(name=tmp_path.name, runs=str(tmp_path.parent))
    for _ in range(2):  # the first one dies before it has saved anything
        tensors = {"model.w": torch.zeros_like(whole(0.0))}
        trainer = cast(Trainer, SimpleNamespace(tensors=lambda found=tensors: found))
        loader = Checkpointer(tmp_path / "checkpoints")
        manifest = load_from_memory(job, trainer, loader, [])
        assert manifest is not None and manifest.step == 1
        assert_value(tensors, 1.0)


def test_a_stranger_without_the_token_gets_nothing(tmp_path: Path) -> None:
    save_and_die(tmp_path, nodes=False, steps=1, write=False)
    (path,) = find_keepers(home_of(str(tmp_path)))
    place = offers(path)[0].place
    with pytest.raises(ConnectionError):
        channel.connect(place.host, place.port, b"guess", 5)
    far = KeeperPlace("elsewhere", "", place.host, place.port, place.token)
    assert node_name() != "elsewhere"
    with closing(connect(far)) as connection:
        assert len(ask(connection, AskSnapshots(), KeeperInventory).headers) == 2


def test_a_keeper_survives_words_it_does_not_understand(tmp_path: Path) -> None:
    save_and_die(tmp_path, nodes=False, steps=1, write=False)
    (path,) = find_keepers(home_of(str(tmp_path)))
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.connect(path)
        stranger.sendall(b"\x08\x00\x00\x00nonsense")
        assert stranger.recv(1) == b""
    restore(tmp_path, nodes=False, expected=1)


@pytest.mark.parametrize(
    ("domains", "possible"),
    [
        (["a", "b"], True),
        (["a", "a", "b", "b"], True),
        (["a", "a", "a", "b", "c", "c"], True),
        (["b", "a", "c", "a", "b", "c", "c"], True),
        (["a", "a", "a", "b"], False),
    ],
)
def test_every_node_has_a_buddy_of_its_own_in_another_domain(
    domains: list[str], possible: bool
) -> None:
    found = buddies(domains)
    assert sorted(found) == list(range(len(domains)))
    assert all(node != buddy for node, buddy in enumerate(found))
    if possible:
        assert all(domains[node] != domains[buddy] for node, buddy in enumerate(found))
