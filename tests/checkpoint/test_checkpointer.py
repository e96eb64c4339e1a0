"""Checkpoints over forked ranks: resharding, proof on load, atomicity, failure on one rank."""

from __future__ import annotations

import os
import random
import resource
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

from phalanx.checkpoint import (
    BadCheckpointError,
    Checkpointer,
    CheckpointError,
    Extra,
    latest,
    list_checkpoints,
    read_manifest,
)
from phalanx.checkpoint import checkpointer as checkpointer_module
from phalanx.checkpoint.format import folder as folder_module
from phalanx.checkpoint.format.folder import read_bad
from phalanx.checkpoint.format.manifest import seal, shard_name
from phalanx.checkpoint.format.tier import FolderTier
from phalanx.checkpoint.write import commit
from phalanx.data import Cursor
from tests.ranks import RankError, run_ranks

SHAPES = {"weight": (10, 6), "moment": (7, 4), "row": (3, 8), "scale": ()}


def extra(rng: bytes = b"", **fields: object) -> Extra:
    defaults = {"tokens": 64, "cursor": Cursor(8, (), "f"), "mesh": {"data": 1}, "config_hash": "h"}
    return Extra(rng=rng, **{**defaults, **fields})


def full(key: str, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + sum(key.encode()))
    return torch.randn(SHAPES[key], generator=generator)


def sharded(mesh_shape: tuple[int, ...], placements: list[Placement], *, empty: bool = False):
    """The test state as DTensors (scalars replicated): filled, or zeros to load into."""
    mesh = init_device_mesh("cpu", mesh_shape)
    state = {}
    for key in SHAPES:
        value = torch.zeros(SHAPES[key]) if empty else full(key)
        placed = placements if value.dim() else [Replicate()] * mesh.ndim
        state[key] = distribute_tensor(value, mesh, placed)
    return state


def plain(seed: int = 0) -> dict[str, torch.Tensor]:
    return {key: full(key, seed) for key in SHAPES}


def zeros() -> dict[str, torch.Tensor]:
    return {key: torch.zeros(shape) for key, shape in SHAPES.items()}


def assert_state(state: dict[str, torch.Tensor], seed: int = 0) -> None:
    for key, value in state.items():
        whole = value.full_tensor() if hasattr(value, "full_tensor") else value
        assert torch.equal(whole, full(key, seed)), key


MESHES: dict[str, tuple[int, tuple[int, ...], list[Placement]]] = {
    "fsdp4": (4, (4,), [Shard(0)]),
    "fsdp2": (2, (2,), [Shard(0)]),
    "columns3": (3, (3,), [Shard(1)]),
    "hsdp2x2": (4, (2, 2), [Replicate(), Shard(0)]),
    "fsdp2xtp2-rows-and-columns": (4, (2, 2), [Shard(0), Shard(1)]),
    "tp2xfsdp2-same-rows": (4, (2, 2), [Shard(0), Shard(0)]),
}


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("fsdp4", "fsdp2"),
        ("fsdp2", "fsdp4"),
        ("fsdp4", "columns3"),
        ("hsdp2x2", "fsdp2"),
        ("fsdp2xtp2-rows-and-columns", "fsdp2"),
        ("tp2xfsdp2-same-rows", "fsdp2"),
        ("columns3", "fsdp2xtp2-rows-and-columns"),
    ],
)
def test_state_saved_from_one_mesh_loads_into_another(
    tmp_path: Path, source: str, target: str
) -> None:
    ranks, shape, placements = MESHES[source]
    checkpoints = tmp_path / "checkpoints"

    def save() -> None:
        Checkpointer(checkpoints).save(3, sharded(shape, placements), extra())

    run_ranks(ranks, save)
    path = latest(checkpoints)
    assert path is not None
    ranks, shape, placements = MESHES[target]

    def load() -> None:
        state = sharded(shape, placements, empty=True)
        assert Checkpointer(checkpoints).load(path, state).step == 3
        assert_state(state)

    run_ranks(ranks, load)
    alone = zeros()
    Checkpointer(checkpoints).load(path, alone)
    assert_state(alone)


def test_strided_shards_of_fsdp_over_tensor_parallel_load_whole(tmp_path: Path) -> None:
    """FSDP2 shards rows that tensor parallelism has sharded before, unevenly here."""

    def save() -> None:
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
        linear = torch.nn.Linear(6, 10, bias=False)
        weight = distribute_tensor(full("weight"), mesh["tensor"], [Shard(0)])
        linear.weight = torch.nn.Parameter(weight)
        fully_shard(linear, mesh=mesh["data"])
        Checkpointer(tmp_path).save(1, {"weight": linear.weight}, extra())

    run_ranks(4, save)
    state = {"weight": torch.zeros(10, 6)}
    Checkpointer(tmp_path).load(tmp_path / "step-00000001", state)
    assert_state(state)


def test_pipeline_ranks_save_different_keys_and_replicas_are_written_once(tmp_path: Path) -> None:
    stages = [["weight", "scale"], ["moment", "row"]]

    def save() -> None:
        rank = dist.get_rank()
        state = {key: full(key) for key in stages[rank // 2]}  # two replicas of each stage
        Checkpointer(tmp_path).save(1, state, extra())

    run_ranks(4, save)
    path = tmp_path / "step-00000001"
    state = zeros()
    Checkpointer(tmp_path).load(path, state)
    assert_state(state)

    def load_other_split() -> None:
        rank = dist.get_rank()
        part = {key: zeros()[key] for key in list(SHAPES)[rank::2]}
        Checkpointer(tmp_path).load(path, part)
        assert_state(part)

    run_ranks(2, load_other_split)

    def save_large() -> None:
        Checkpointer(tmp_path).save(2, {"large": torch.ones(300_000)}, extra())

    run_ranks(3, save_large)
    assert read_manifest(tmp_path / "step-00000002").total_bytes < 1.1 * 4 * 300_000


def test_manifest_returns_what_was_saved_and_each_rank_its_own_generators(tmp_path: Path) -> None:
    cursor = Cursor(12, ((3, 5),), "corpus")

    def save_and_load() -> None:
        rank = dist.get_rank()
        given = extra(
            rng=b"generators of rank %d" % rank,
            cursor=cursor,
            tokens=77,
            generation=4,
            mesh={"data": 2, "tensor": 1},
            config={"model": {"dim": 8, "norm_eps": 1e-5}},
        )
        checkpointer = Checkpointer(tmp_path)
        path = checkpointer.save(9, plain(), given)
        manifest = checkpointer.load(path, zeros())
        assert manifest.rng == b"generators of rank %d" % rank
        assert (manifest.step, manifest.tokens, manifest.generation) == (9, 77, 4)
        assert manifest.cursor == cursor and manifest.mesh == {"data": 2, "tensor": 1}
        assert manifest.config == {"model": {"dim": 8, "norm_eps": 1e-5}}

    run_ranks(2, save_and_load)
    assert Checkpointer(tmp_path).load(tmp_path / "step-00000009.g4", zeros()).rng == b""


def test_ranks_on_another_backend_agree_over_a_gloo_group_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def save_and_load() -> None:
        monkeypatch.setattr(dist, "get_backend", lambda group=None: "other")
        checkpointer = Checkpointer(tmp_path)
        path = checkpointer.save(1, sharded((2,), [Shard(0)]), extra())
        (group,) = {checkpointer._ranks.cpu_group(), checkpointer._ranks.cpu_group()}
        assert group is not None and group is not dist.group.WORLD
        state = sharded((2,), [Shard(0)], empty=True)
        checkpointer.load(path, state)
        assert_state(state)

    run_ranks(2, save_and_load)


def test_tensors_are_filled_in_place_with_gradients_and_types_untouched(tmp_path: Path) -> None:
    path = Checkpointer(tmp_path).save(1, plain(), extra())
    parameter = torch.nn.Parameter(torch.zeros(10, 6))
    storage = parameter.data_ptr()
    state: dict[str, torch.Tensor] = {"weight": parameter}
    Checkpointer(tmp_path).load(path, state)
    assert state["weight"] is parameter and parameter.data_ptr() == storage
    assert torch.equal(parameter.detach(), full("weight")) and parameter.requires_grad


def save_two(folder: Path) -> tuple[Path, Path]:
    checkpointer = Checkpointer(folder)
    older = checkpointer.save(1, plain(seed=1), extra())
    return older, checkpointer.save(2, plain(seed=2), extra())


def shard_of(path: Path, rank: int = 0) -> Path:
    return path / shard_name(rank, read_manifest(path).session)


def flip(file: Path, position: int) -> None:
    content = bytearray(file.read_bytes())
    content[position] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize("pattern", ["rank-*.safetensors", "rank-*.json", "table-*.json"])
def test_a_flipped_byte_is_detected_and_the_file_and_an_older_checkpoint_named(
    tmp_path: Path, pattern: str
) -> None:
    older, newer = save_two(tmp_path)
    (file,) = newer.glob(pattern)
    flip(file, file.stat().st_size // 2)
    with pytest.raises(BadCheckpointError, match=f"{file.name} is corrupt") as caught:
        Checkpointer(tmp_path).load(newer, zeros())
    assert str(older) in str(caught.value) and str(newer) in str(caught.value)


def test_the_tensor_in_a_corrupt_chunk_is_named(tmp_path: Path) -> None:
    large = {"first": torch.ones(600_000), "second": torch.ones(600_000)}
    path = Checkpointer(tmp_path).save(1, large, extra())
    file = shard_of(path)
    flip(file, file.stat().st_size - 1)
    with pytest.raises(BadCheckpointError) as caught:
        Checkpointer(tmp_path).load(path, {name: torch.zeros(600_000) for name in large})
    assert caught.value.problems == [f"{file.name} is corrupt in bytes 4194304 to 5242880: second"]


def test_random_flips_of_any_file_are_always_detected(tmp_path: Path) -> None:
    flip_anywhere(tmp_path, trials=40)


@pytest.mark.soak
def test_500_random_flips_of_any_file_are_always_detected(tmp_path: Path) -> None:
    flip_anywhere(tmp_path, trials=500)


def flip_anywhere(folder: Path, trials: int) -> None:
    state = plain(seed=1) | {"large": torch.arange(700_000.0)}
    path = Checkpointer(folder).save(1, state, extra(rng=b"generators"))
    files = sorted(path.iterdir())
    generator = random.Random(4)
    for _ in range(trials):
        file = generator.choice(files)
        position = generator.randrange(file.stat().st_size)
        flip(file, position)
        wanted = zeros() | {"large": torch.zeros(700_000)}
        with pytest.raises(CheckpointError):
            Checkpointer(folder).load(path, wanted)
        flip(file, position)
    wanted = zeros() | {"large": torch.zeros(700_000)}
    Checkpointer(folder).load(path, wanted)
    assert all(torch.equal(wanted[name], state[name]) for name in state)


def test_every_flipped_byte_of_the_manifest_is_detected(tmp_path: Path) -> None:
    _, newer = save_two(tmp_path)
    manifest = newer / "manifest.json"
    for position in range(manifest.stat().st_size):
        flip(manifest, position)
        with pytest.raises(BadCheckpointError, match="manifest"):
            read_manifest(newer)
        flip(manifest, position)
    assert read_manifest(newer).step == 2


def test_corruption_found_by_one_rank_fails_all_of_them(tmp_path: Path) -> None:
    _, newer = save_two(tmp_path)
    file = shard_of(newer)
    os.truncate(file, 100)

    def load() -> None:
        with pytest.raises(BadCheckpointError, match=f"{file.name} has 100 bytes instead of"):
            Checkpointer(tmp_path).load(newer, zeros() if dist.get_rank() == 1 else {})

    run_ranks(3, load)


def test_a_missing_file_is_named_with_the_tensors_it_held(tmp_path: Path) -> None:
    _, newer = save_two(tmp_path)
    shard_of(newer).unlink()
    with pytest.raises(BadCheckpointError, match=r"cannot be read: No such file.*moment, row"):
        Checkpointer(tmp_path).load(newer, zeros())


def test_a_bad_checkpoint_gives_way_to_the_older_one_and_is_not_tried_again(
    tmp_path: Path,
) -> None:
    older, newer = save_two(tmp_path)
    flip(shard_of(newer), 4200)

    def load() -> None:
        state = zeros()
        assert Checkpointer(tmp_path).load_newest([newer, older], state).step == 1
        assert_state(state, seed=1)

    run_ranks(2, load)
    assert latest(tmp_path) == older
    assert "is corrupt" in read_bad(FolderTier(newer.parent), newer.name)[0]


def test_without_an_older_one_the_bad_checkpoint_is_an_error(tmp_path: Path) -> None:
    path = Checkpointer(tmp_path).save(1, plain(), extra())
    flip(shard_of(path), 4200)
    with pytest.raises(BadCheckpointError, match="no older checkpoint"):
        Checkpointer(tmp_path).load_newest([path], zeros())


def test_a_manifest_of_a_newer_version_is_refused_and_not_fallen_back_from(tmp_path: Path) -> None:
    older, newer = save_two(tmp_path)
    (newer / "manifest.json").write_bytes(seal(b'{"version": 99, "layout": "unheard of"}'))
    with pytest.raises(CheckpointError, match="version 99") as caught:
        Checkpointer(tmp_path).load_newest([newer, older], zeros())
    assert not isinstance(caught.value, BadCheckpointError) and latest(tmp_path) == newer


def test_the_safetensors_library_reads_every_shard(tmp_path: Path) -> None:
    def save() -> None:
        Checkpointer(tmp_path).save(1, sharded((2,), [Shard(0)]), extra())

    run_ranks(2, save)
    path = tmp_path / "step-00000001"
    parts = [load_file(shard_of(path, rank)) for rank in range(2)]
    assert torch.equal(torch.cat([part["weight"] for part in parts]), full("weight"))
    for rank in range(2):
        length = int.from_bytes(shard_of(path, rank).read_bytes()[:8], "little")
        assert (8 + length) % 4096 == 0


def test_weights_alone_are_loaded_where_the_optimizer_is_missing(tmp_path: Path) -> None:
    path = Checkpointer(tmp_path).save(1, {"model.w": torch.ones(3)}, extra())
    state = {"model.w": torch.zeros(3), "optimizer.m": torch.zeros(3)}
    with pytest.raises(CheckpointError, match=r"checkpoint\.weights_only"):
        Checkpointer(tmp_path).load(path, state)
    Checkpointer(tmp_path).load(path, state, weights_only=True)
    assert state["model.w"].sum() == 3 and state["optimizer.m"].sum() == 0


def test_differing_tensors_are_all_listed_with_both_shapes(tmp_path: Path) -> None:
    path = Checkpointer(tmp_path).save(1, plain(), extra())
    wanted = {"weight": torch.zeros(10, 8), "row": torch.zeros(3, 8), "absent": torch.zeros(2)}
    with pytest.raises(CheckpointError) as caught:
        Checkpointer(tmp_path).load(path, wanted)
    assert caught.value.problems == [
        "weight has the shape (10, 6), the model has (10, 8)",
        "absent (2,) is not in the checkpoint",
    ]
    assert str(path) in str(caught.value)


def test_every_differing_tensor_is_listed_however_many(tmp_path: Path) -> None:
    path = Checkpointer(tmp_path).save(1, {f"w{i}": torch.ones(2) for i in range(50)}, extra())
    with pytest.raises(CheckpointError) as caught:
        Checkpointer(tmp_path).load(path, {f"w{i}": torch.ones(3) for i in range(50)})
    assert len(caught.value.problems) == 50


def test_what_older_gangs_did_not_complete_goes_with_the_next_checkpoint(tmp_path: Path) -> None:
    left = ("step-00000003", "step-00000005.g1", "step-00000007.g1", "step-00000007.g2")
    for name in left:
        (tmp_path / name).mkdir()
    Checkpointer(tmp_path, exclusive=False).save(5, plain(), extra(generation=2))
    found = sorted(path.name for path in tmp_path.glob("step-*"))
    assert found == ["step-00000005.g2", "step-00000007.g2"]  # which may still be written


def test_incomplete_folders_are_not_listed(tmp_path: Path) -> None:
    assert latest(tmp_path) is None and latest(tmp_path / "absent") is None
    older, newer = save_two(tmp_path)
    (newer / "manifest.json").unlink()
    (tmp_path / "step-00000003.removed").mkdir()
    (tmp_path / "step-notes").mkdir()
    assert list_checkpoints(tmp_path) == [older]
    with pytest.raises(CheckpointError, match=r"no readable manifest\.json"):
        Checkpointer(tmp_path).load(newer, zeros())


def test_only_the_newest_are_kept_and_never_is_the_one_just_written_removed(
    tmp_path: Path,
) -> None:
    checkpointer = Checkpointer(tmp_path, keep=2)
    for step in (10, 20, 30):
        checkpointer.save(step, plain(step), extra())
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-00000020", "step-00000030"]
    path = checkpointer.save(5, plain(5), extra())  # a run that went back
    state = zeros()
    checkpointer.load(path, state)
    assert_state(state, seed=5)


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir() if entry.name != "writer.lock")


def test_a_step_is_saved_once_by_a_generation_and_a_later_one_takes_its_place(
    tmp_path: Path,
) -> None:
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, plain(seed=1), extra())
    with pytest.raises(CheckpointError, match="saved already"):
        checkpointer.save(1, plain(seed=2), extra())
    path = checkpointer.save(1, plain(seed=3), extra(generation=2))
    state = zeros()
    assert latest(tmp_path) == path
    checkpointer.load(path, state)
    assert_state(state, seed=3)


def test_a_lower_generation_can_neither_save_nor_be_found_again(tmp_path: Path) -> None:
    old, new = Checkpointer(tmp_path), Checkpointer(tmp_path)
    old.save(10, plain(seed=1), extra(generation=1))
    late = old.save(30, plain(seed=1), extra(generation=1))
    old.close()
    new_path = new.save(20, plain(seed=2), extra(generation=2))
    new.close()
    assert late not in list_checkpoints(tmp_path) and latest(tmp_path) == new_path
    with pytest.raises(CheckpointError, match="lost its place to generation 2"):
        old.save(40, plain(seed=1), extra(generation=1))


def test_a_second_job_in_the_same_folder_is_refused(tmp_path: Path) -> None:
    first = Checkpointer(tmp_path)
    first.save(1, plain(), extra())
    with pytest.raises(CheckpointError, match=f"another job writes here.*process {os.getpid()}"):
        Checkpointer(tmp_path).save(2, plain(), extra())
    first.close()
    Checkpointer(tmp_path).save(2, plain(), extra())


def test_a_full_disk_on_one_rank_fails_all_and_leaves_the_old_checkpoint(tmp_path: Path) -> None:
    checkpoints = tmp_path / "checkpoints"

    def save() -> None:
        rank = dist.get_rank()
        checkpointer = Checkpointer(checkpoints, keep=1)
        mesh = init_device_mesh("cpu", (2,))
        large = distribute_tensor(torch.ones(400_000), mesh, [Shard(0)])
        checkpointer.save(1, plain(seed=1), extra())
        if rank == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
        with pytest.raises(CheckpointError, match=r"(?s)step-00000002.*rank 1.*File too large"):
            checkpointer.save(2, {"large": large}, extra())
        if rank == 1:
            limit = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
            resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        assert latest(checkpoints) == checkpoints / "step-00000001"
        state = zeros()
        checkpointer.load(checkpoints / "step-00000001", state)
        assert_state(state, seed=1)
        checkpointer.save(3, {"large": large}, extra())  # and the run goes on

    run_ranks(2, save)
    assert names(checkpoints) == ["step-00000003"]


def test_a_folder_that_cannot_be_made_is_an_error_on_every_rank(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")

    def save() -> None:
        with pytest.raises(CheckpointError, match="step-00000001"):
            Checkpointer(tmp_path / "file" / "checkpoints").save(1, plain(), extra())

    run_ranks(2, save)


def test_a_rank_killed_during_a_save_ends_the_save_of_the_others(tmp_path: Path) -> None:
    checkpoints = tmp_path / "checkpoints"

    def save() -> None:
        rank = dist.get_rank()
        checkpointer = Checkpointer(checkpoints)
        checkpointer.save(1, plain(seed=1), extra())
        if rank == 1:
            commit.publish_sidecar = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        checkpointer.save(2, plain(seed=2), extra())

    both = r"(?s)rank 0:.*onnection \w+ by peer.*rank 1:\nended by SIGKILL"
    with pytest.raises(RankError, match=both):
        run_ranks(2, save)
    assert list_checkpoints(checkpoints) == [checkpoints / "step-00000001"]


def in_child(function: Callable[[], object]) -> int:
    """Status of a forked child that calls ``function``; it never returns into the tests."""
    child = os.fork()
    if child == 0:
        try:
            function()
        finally:
            os._exit(1)
    return os.waitpid(child, 0)[1]


def assert_only_whole_ones(folder: Path) -> None:
    """What is listed loads and verifies; the next save sweeps the rest away."""
    listed = list_checkpoints(folder)
    assert listed
    checkpointer = Checkpointer(folder, keep=1)
    for path in listed:
        state = zeros()
        number = checkpointer.load(path, state).step
        assert_state(state, seed=number)
    checkpointer.save(99, plain(seed=3), extra())
    assert names(folder) == ["step-00000099"]


STEPS_OF_A_SAVE = ["write_file", "publish_sidecar", "try_commit", "create_manifest", "prune"]
STEPS_OF_A_SAVE += ["encode", "sync_folder", "doom", "clear"]


@pytest.mark.parametrize("step", STEPS_OF_A_SAVE)
@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_kill_at_any_step_of_a_save_leaves_only_whole_checkpoints(
    tmp_path: Path, step: str, moment: str
) -> None:
    """SIGKILL in the second save (keep = 1)."""
    checkpointer = Checkpointer(tmp_path, keep=1)
    checkpointer.save(1, plain(seed=1), extra())

    def save() -> None:
        owners = (commit, folder_module, checkpointer_module, FolderTier)
        owner = next(module for module in owners if hasattr(module, step))
        original = getattr(owner, step)

        def killing(*arguments: object) -> object:
            if moment == "after":
                original(*arguments)
            os.kill(os.getpid(), signal.SIGKILL)
            return None

        for module in owners:
            if hasattr(module, step):
                setattr(module, step, killing)
        checkpointer.save(2, plain(seed=2), extra())

    assert in_child(save) == signal.SIGKILL
    checkpointer.close()
    assert_only_whole_ones(tmp_path)


def kill_at_random_points(folder: Path, points: int) -> None:
    """SIGKILL after a random time in a series of saves."""
    generator = random.Random(7)
    state = plain(seed=2) | {"large": torch.ones(1 << 20)}
    for point in range(points):
        target = folder / str(point)
        Checkpointer(target).save(1, plain(seed=1), extra())
        child = os.fork()
        if child == 0:
            try:
                checkpointer = Checkpointer(target, keep=2)
                for step in range(2, 1000):
                    state["weight"] = full("weight", step)
                    checkpointer.save(step, state, extra())
            finally:
                os._exit(1)
        time.sleep(generator.uniform(0.0, 0.15))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        listed = list_checkpoints(target)
        assert listed
        for path in listed:
            weight = {"weight": torch.zeros(10, 6)}
            step = Checkpointer(target).load(path, weight).step
            assert torch.equal(weight["weight"], full("weight", step))
        Checkpointer(target, keep=1).save(2000, plain(), extra())
        assert names(target) == ["step-00002000"]
        shutil.rmtree(target)


def test_a_kill_at_random_points_leaves_only_whole_checkpoints(tmp_path: Path) -> None:
    kill_at_random_points(tmp_path, points=10)


@pytest.mark.soak
def test_a_kill_at_200_random_points_leaves_only_whole_checkpoints(tmp_path: Path) -> None:
    kill_at_random_points(tmp_path, points=200)
