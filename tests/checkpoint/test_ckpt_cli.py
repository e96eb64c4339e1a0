"""``phalanx ckpt`` as a person uses it, and conversions larger than memory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from click.testing import Result
from typer.testing import CliRunner

from phalanx.checkpoint import (
    Checkpointer,
    CheckpointError,
    Extra,
    latest,
    list_checkpoints,
    read_manifest,
)
from phalanx.checkpoint.format.folder import WriterLock
from phalanx.checkpoint.read.verify import verify
from phalanx.checkpoint.tools.compare import diff
from phalanx.checkpoint.tools.convert import reshard
from phalanx.checkpoint.tools.dcp import import_dcp
from phalanx.checkpoint.tools.rewrite import write_whole
from phalanx.cli.checkpoints.ckpt import app
from phalanx.config import Model, resolve_model
from phalanx.data import Cursor
from phalanx.model import Transformer
from tests.limits import file_size_limit
from tests.ranks import run_ranks

MODEL = resolve_model(Model(dim=32, layers=2, heads=4, kv_heads=2, ffn=48, vocab=64))


def extra(**fields: Any) -> Extra:
    config = {"model": msgspec.to_builtins(MODEL), "data": {"sequence": 16}, "name": "try"}
    values: dict[str, Any] = {"tokens": 640, "cursor": Cursor(10, (), "f"), "mesh": {"data": 2}}
    return Extra(**(values | {"config_hash": "h", "config": config} | fields))


def tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {f"model.{n}": t.shape for n, t in Transformer(MODEL).state_dict().items()}
    shapes["optimizer.step"] = torch.Size(())
    shapes["optimizer.exp_avg.embed.weight"] = torch.Size((64, 32))
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run's folder with three checkpoints."""
    folder = tmp_path / "runs" / "try" / "20260101-000000-abc"
    checkpointer = Checkpointer(folder / "checkpoints")
    for step in (10, 20, 30):
        checkpointer.save(step, tensors(step), extra())
    checkpointer.close()
    return folder


def call(*words: object) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words])


def answer(*words: object) -> Any:
    done = call(*words, "--json")
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def step(run: Path, number: int) -> Path:
    return run / "checkpoints" / f"step-{number:08d}"


def flip(path: Path, position: int) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


def loaded(path: Path) -> dict[str, torch.Tensor]:
    state = {name: torch.zeros_like(tensor) for name, tensor in tensors().items()}
    Checkpointer(path.parent).load(path, state)
    return state


@pytest.mark.parametrize("levels", [0, 1, 2, 3])
def test_ls_finds_checkpoints_from_any_folder_above(run: Path, levels: int) -> None:
    where = [run / "checkpoints", run, run.parent, run.parents[1]][levels]
    found = answer("ls", where)
    assert [entry["step"] for entry in found] == [10, 20, 30]
    assert found[0]["tokens"] == 640 and found[0]["ranks"] == 1 and found[0]["bytes"] > 4096


def test_ls_is_a_table_and_names_what_is_incomplete(run: Path) -> None:
    (step(run, 20) / "manifest.json").unlink()
    text = call("ls", run).stdout
    assert "data2" in text and "no readable manifest.json" in text
    (run / "empty").mkdir()
    assert "no checkpoints in" in call("ls", run / "empty").stdout


@pytest.mark.parametrize("command", ["ls", "prune", "verify", "show", "pin"])
def test_a_place_that_is_not_there_is_an_error(command: str, tmp_path: Path) -> None:
    done = call(command, tmp_path / "nosuch")
    assert done.exit_code == 15 and "there is no such folder" in done.stderr
    (tmp_path / "file").touch()
    done = call(command, tmp_path / "file")
    assert done.exit_code == 15 and "is a file" in done.stderr


def test_a_checkpoint_under_another_name_is_shown_and_said_to_be_lost(run: Path) -> None:
    renamed = step(run, 20).rename(run / "checkpoints" / "before-the-spike")
    text = call("ls", run).stdout
    assert f"{renamed}: no run finds it under this name: rename it to step-00000020" in text
    assert answer("show", renamed)["step"] == 20 and answer("show", run)["step"] == 30
    assert call("verify", renamed).exit_code == 0
    call("prune", run, "--keep", 1)
    assert renamed.is_dir(), "what has a name of its own was kept on purpose"
    aside = renamed.rename(run.parents[2] / "aside")
    found = [entry["path"] for entry in answer("ls", run.parents[2])]
    assert found == [str(aside), str(step(run, 30))], "it hides no run"


def test_show_lists_tensors_with_shapes(run: Path) -> None:
    shown = answer("show", run)
    assert shown["step"] == 30 and shown["tensors"]["model.embed.weight"] == [[64, 32], "float32"]
    assert "64 x 32" in call("show", step(run, 10)).stdout


def test_verify_reads_every_byte_and_names_shard_and_tensor(run: Path) -> None:
    assert all(not verdict["problems"] for verdict in answer("verify", run))
    (shard,) = step(run, 20).glob("*.safetensors")
    flip(shard, shard.stat().st_size - 1)
    done = call("verify", run)
    assert done.exit_code == 15 and f"{shard.name} is corrupt" in done.stdout
    assert "model." in done.stdout and done.stdout.count("good") == 2


def test_a_refused_reshard_names_the_bytes_and_leaves_nothing(run: Path, tmp_path: Path) -> None:
    (shard,) = step(run, 30).glob("*.safetensors")
    flip(shard, shard.stat().st_size - 1)
    done = call("reshard", run, tmp_path / "new")
    assert done.exit_code == 15 and f"up to byte {shard.stat().st_size} (with" in done.stderr
    assert not (tmp_path / "new").exists()


def test_ls_makes_nothing_up_about_what_it_cannot_read(run: Path) -> None:
    (step(run, 10) / "manifest.json").write_bytes(b"{")
    assert call("ls", run).stdout.splitlines()[1].split()[:2] == ["10", "-"]


def test_verify_goes_on_after_a_manifest_that_is_garbage(run: Path) -> None:
    (step(run, 10) / "manifest.json").write_bytes(b"{")
    done = call("verify", run)
    assert done.exit_code == 15 and done.stdout.count("good") == 2
    assert "step-00000010: BAD" in done.stdout and "manifest.json is corrupt" in done.stdout


def test_ls_knows_what_was_verified(run: Path) -> None:
    assert call("verify", step(run, 10)).exit_code == 0
    lines = call("ls", run).stdout.splitlines()
    assert " verified " in lines[1] and "not verified" in lines[2]
    (shard,) = step(run, 10).glob("*.safetensors")
    flip(shard, 5000)
    assert call("verify", step(run, 10)).exit_code == 15
    text = call("ls", run).stdout
    assert " BAD " in text.splitlines()[1] and f"{step(run, 10)}: {shard.name} is corrupt" in text
    assert step(run, 10) not in list_checkpoints(run / "checkpoints"), "nobody loads it"
    flip(shard, 5000)
    assert call("verify", step(run, 10)).exit_code == 0
    assert " verified " in call("ls", run).stdout.splitlines()[1]
    assert latest(run / "checkpoints") and step(run, 10) in list_checkpoints(run / "checkpoints")


def test_a_bad_checkpoint_is_not_taken_for_the_newest(run: Path) -> None:
    (shard,) = step(run, 30).glob("*.safetensors")
    flip(shard, 5000)
    assert call("verify", run).exit_code == 15
    assert answer("show", run)["step"] == 20
    assert call("show", step(run, 30)).stdout.count("BAD") == 1


def test_what_may_not_be_read_is_neither_good_nor_bad(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("phalanx.checkpoint.format.source.FolderSource.open_shard", refuse)
    done = call("verify", step(run, 10))
    assert done.exit_code == 15 and "step-00000010: NOT READ" in done.stdout
    assert "Permission denied" in done.stdout and not (step(run, 10) / "bad.json").exists()
    with monkeypatch.context() as patch:
        patch.setattr("phalanx.checkpoint.tools.inspect.os.scandir", refuse)
        done = call("ls", run)
    assert done.exit_code == 15 and "is not allowed: Permission denied" in done.stderr


def test_a_verdict_that_cannot_be_noted_is_still_given(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("phalanx.checkpoint.format.tier.FolderTier.write", refuse)
    done = call("verify", step(run, 10))
    assert done.exit_code == 0 and "not remembered: Permission denied" in done.stdout


def test_verify_compares_the_copies_that_pipeline_stages_hold(tmp_path: Path) -> None:
    """Two ranks with different tables, as stages have, and a tensor that both hold."""

    def save(folder: Path, spoilt: float) -> None:
        rank = dist.get_rank()
        state = {"model.tied": torch.arange(9.0), f"model.{rank}": torch.ones(3)}
        state["model.tied"][-1] += spoilt * rank
        Checkpointer(folder).save(1, state, extra())

    for name, spoilt in (("good", 0.0), ("bad", 1.0)):
        run_ranks(2, save, tmp_path / name, spoilt)
    assert call("verify", tmp_path / "good").exit_code == 0
    done = call("verify", tmp_path / "bad")
    assert done.exit_code == 15 and "model.tied is held by 2 stages" in done.stdout


def test_diff_names_what_differs(run: Path) -> None:
    assert "equal to the bit" in call("diff", step(run, 10), step(run, 10)).stdout
    done = call("diff", step(run, 10), step(run, 20))
    assert done.exit_code == 1 and "model.embed.weight: values" in done.stdout
    partial = Checkpointer(run.parent / "other").save(1, {"model.x": torch.ones(2)}, extra())
    found = diff(str(step(run, 10)), str(partial), lambda _: None)
    assert {entry.what for entry in found} >= {f"only in {partial}"}


def test_diff_compares_what_the_manifests_say_of_the_run(tmp_path: Path) -> None:
    state = {"model.w": torch.ones(2)}
    changed: dict[str, Any] = {"tokens": 641, "cursor": Cursor(11, (), "f"), "mesh": {"data": 4}}
    changed |= {"generation": 2, "config": {"train": {"steps": 9}}, "rng": b"other"}
    one = Checkpointer(tmp_path / "a").save(10, state, extra(rng=b"dice"))
    same = Checkpointer(tmp_path / "b").save(10, state, extra(rng=b"dice"))
    other = Checkpointer(tmp_path / "c").save(11, state, extra(**changed))
    assert "equal to the bit" in call("diff", one, same).stdout
    done = call("diff", one, other)
    for words in ("step: 10 against 11", "tokens: 640 against 641", "mesh.data: 2 against 4",
                  "cursor.consumed: 10 against 11", "generation: 0 against 2",
                  "config.train.steps: nothing against 9", "random generators: of ranks 0",
                  "0 tensors and"):  # fmt: skip
        assert words in done.stdout, done.stdout
    assert done.exit_code == 1


def test_diff_counts_elements_by_their_bits(tmp_path: Path) -> None:
    nan = float("nan")
    one = Checkpointer(tmp_path / "a").save(1, {"x": torch.tensor([nan, 1.0, 0.0])}, extra())
    other = Checkpointer(tmp_path / "b").save(1, {"x": torch.tensor([nan, 3.0, -0.0])}, extra())
    (found,) = diff(str(one), str(other), lambda _: None)
    assert (found.elements, found.greatest) == (2, 2.0)


def test_reshard_changes_the_files_and_no_bit(run: Path, tmp_path: Path) -> None:
    made = Path(answer("reshard", run, tmp_path / "new", "--shards", 4)["checkpoint"])
    assert 3 <= len(read_manifest(made).shards) <= 5
    assert read_manifest(made).cursor.consumed == 10
    assert diff(str(made), str(step(run, 30)), lambda _: None) == []
    assert not verify(str(made), lambda _: None).problems
    with pytest.raises(CheckpointError, match="is there already"):
        reshard(made, tmp_path / "new", 2)
    (listed,) = answer("ls", made)
    shards = len(read_manifest(made).shards)
    assert (listed["ranks"], listed["mesh"], listed["shards"]) == (1, {"data": 2}, shards)
    assert [path.name for path in (tmp_path / "new").iterdir()] == [made.name], "no lock is left"


def test_a_lock_file_that_is_taken_away_locks_nobody_in_twice(tmp_path: Path) -> None:
    first = WriterLock(tmp_path)
    with pytest.raises(CheckpointError, match="another job writes here"):
        WriterLock(tmp_path)
    first.release(remove=True)
    second = WriterLock(tmp_path)
    with pytest.raises(CheckpointError, match="another job writes here"):
        WriterLock(tmp_path)
    second.release()
    WriterLock(tmp_path).release()


@pytest.mark.parametrize("command", ["reshard", "import", "export", "export --to dcp"])
def test_what_a_disk_refuses_is_said_in_words(command: str, run: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    source = tmp_path / "hf" if command == "import" else run
    if command == "import":
        call("export", run, source, "--no-compare")
    done = call(*command.split(), source, tmp_path / "file" / "below")
    assert done.exit_code == 15 and str(tmp_path / "file") in done.stderr, done.output
    with file_size_limit(4096):
        full = call(*command.split(), source, tmp_path / "full")
    assert full.exit_code == 15 and "File too large" in full.stderr, full.output
    for said in (done.stderr, full.stderr):
        assert "Errno" not in said and "name a" in said, said
    assert not (tmp_path / "full").exists() or not list((tmp_path / "full").iterdir())


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_dcp_folder_goes_out_and_comes_back(run: Path, tmp_path: Path) -> None:
    assert answer("export", run, tmp_path / "dcp", "--to", "dcp")["tensors"] == len(tensors())
    state = {name: torch.zeros_like(tensor) for name, tensor in tensors().items()}
    dcp.load(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert all(torch.equal(state[name], tensor) for name, tensor in tensors(30).items())
    made = Path(answer("import", tmp_path / "dcp", tmp_path / "back")["checkpoint"])
    assert diff(str(made), str(step(run, 30)), lambda _: None) == []


def test_what_a_dcp_folder_cannot_hold_comes_back_too(
    run: Path, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    def save(folder: Path) -> None:
        rank = dist.get_rank()
        place = extra(generation=3, tokens=77, mesh={"data": 2}, rng=b"dice%d" % rank)
        Checkpointer(folder).save(5, {"model.w": torch.arange(6.0)}, place)

    def generators(path: Path) -> bytes:
        return Checkpointer(path.parent).load(path, {"model.w": torch.zeros(6)}).rng

    run_ranks(2, save, tmp_path / "saved")
    (path,) = (tmp_path / "saved").glob("step-*")
    answer("export", path, tmp_path / "dcp", "--to", "dcp")
    made = answer("import", tmp_path / "dcp", tmp_path / "back")
    assert not [each for each in recwarn if "torch.distributed" in str(each.message)]
    back, before = read_manifest(Path(made["checkpoint"])), read_manifest(path)
    assert made["notes"] == [] and Path(made["checkpoint"]).name == path.name
    for field in ("step", "generation", "tokens", "cursor", "mesh", "config_hash", "config"):
        assert getattr(back, field) == getattr(before, field), field
    assert back.run_ranks == 2 and len(back.shards) == 1
    again = Path(answer("reshard", made["checkpoint"], tmp_path / "again")["checkpoint"])
    for copy in (Path(made["checkpoint"]), again):
        assert run_ranks(2, generators, copy) == [b"dice0", b"dice1"]


def test_a_dcp_folder_is_proved_when_it_comes_back(run: Path, tmp_path: Path) -> None:
    answer("export", run, tmp_path / "dcp", "--to", "dcp")
    file = max((tmp_path / "dcp").glob("*.distcp"), key=lambda path: path.stat().st_size)
    flip(file, file.stat().st_size // 2)
    done = call("import", tmp_path / "dcp", tmp_path / "back")
    assert done.exit_code == 15 and "model." in done.stderr and "corrupt" in done.stderr
    file.unlink()
    done = call("import", tmp_path / "dcp", tmp_path / "back")
    assert done.exit_code == 15 and "cannot be read" in done.stderr
    (tmp_path / "dcp" / "phalanx.json").write_text("{}")
    done = call("import", tmp_path / "dcp", tmp_path / "back")
    assert done.exit_code == 15 and "phalanx.json is corrupt" in done.stderr
    assert not list((tmp_path / "back").glob("step-*"))


def test_a_foreign_dcp_folder_says_what_it_lacks(
    tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    state = {"model.w": torch.ones(3), "epoch": 4}
    dcp.save(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    recwarn.clear()
    done = call("import", tmp_path / "dcp", tmp_path / "back")
    assert done.exit_code == 0 and "left out, since they are no tensors: epoch" in done.stdout
    assert "nothing of step, tokens, data cursor" in done.stdout
    assert "checkpoint.weights_only = true" in done.stdout
    assert not list(recwarn), "DCP's warnings are not for the user of ours"


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_version_1_checkpoint_is_refused_with_the_command_that_imports_it(
    tmp_path: Path,
) -> None:
    old = tmp_path / "step-00000007"
    dcp.save(dict(tensors(7)), checkpoint_id=old, no_dist=True)
    manifest = {"version": 1, "step": 7, "generation": 0, "tokens": 99, "mesh": {"data": 1}}
    manifest |= {"cursor": msgspec.to_builtins(Cursor(5, (), "f")), "config_hash": "h"}
    (old / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match="phalanx ckpt import"):
        read_manifest(old)
    made = import_dcp(old, tmp_path / "new")
    assert made.name == "step-00000007" and read_manifest(made).tokens == 99
    assert all(torch.equal(loaded(made)[name], tensor) for name, tensor in tensors(7).items())


def test_prune_keeps_what_the_rules_and_pins_say(run: Path) -> None:
    assert "is pinned" in call("pin", step(run, 10)).stdout
    would = answer("prune", run, "--keep", 1, "--dry-run")
    assert list(would["removed"]) == [str(step(run, 20))] and step(run, 20).exists()
    assert "removed" in call("prune", run, "--keep", 1).stdout
    assert latest(run / "checkpoints") == step(run, 30) and step(run, 10).exists()
    call("pin", step(run, 10), "--off")
    call("prune", run, "--keep", 1)
    assert not step(run, 10).exists()


def test_prune_of_a_folder_of_runs_goes_through_each(run: Path) -> None:
    other = run.with_name("20260102-000000-def")
    for number in (1, 2):
        checkpointer = Checkpointer(other / "checkpoints")
        checkpointer.save(number, tensors(), extra())
        checkpointer.close()
    found = answer("prune", run.parents[1], "--keep", 1)["removed"]
    assert sorted(found) == sorted(map(str, [step(run, 10), step(run, 20), step(other, 1)]))
    assert step(run, 30).exists() and step(other, 2).exists()
    done = call("prune", step(run, 30))
    assert done.exit_code == 15 and "is one checkpoint" in done.stderr and step(run, 30).exists()


@pytest.mark.parametrize(
    "words",
    [["show", "{}"], ["verify", "{}"], ["diff", "{}", "{}"], ["export", "{}", "{}/out"],
     ["import", "{}/nosuch", "{}/out"], ["import", "{}", "{}/out"], ["reshard", "{}", "{}/out"]],
)  # fmt: skip
def test_a_folder_without_checkpoint_ends_in_words(words: list[str], tmp_path: Path) -> None:
    done = call(*(word.format(tmp_path) for word in words))
    assert done.exit_code == 15 and done.stderr.startswith("error: ")


def test_an_import_that_fails_leaves_nothing(tmp_path: Path) -> None:
    def broken() -> Any:
        yield "a", torch.ones(10)
        raise OSError(5, "the disk is gone")

    with pytest.raises(OSError, match="disk is gone"):
        write_whole(tmp_path, 1, broken(), extra(), shard_bytes=8)
    assert not (tmp_path / "step-00000001").exists()


LARGER_THAN_MEMORY = """
import resource, sys
from pathlib import Path
import msgspec, torch
from phalanx.checkpoint.tools.convert import export_checkpoint, import_checkpoint
from phalanx.checkpoint.tools.dcp import export_dcp, import_dcp
from phalanx.checkpoint.tools.rewrite import write_whole
from phalanx.checkpoint import Extra
from phalanx.config import Model, resolve_model
from phalanx.data import Cursor
from phalanx.model import Transformer

root, limit = Path(sys.argv[1]), int(sys.argv[2])
model = resolve_model(Model(dim=512, layers=24, heads=8, ffn=2048, vocab=1024))
with torch.device("meta"):
    shapes = {f"model.{n}": t.shape for n, t in Transformer(model).state_dict().items()}
total = 4 * sum(shape.numel() for shape in shapes.values())
extra = Extra(tokens=0, cursor=Cursor(), mesh={}, config_hash="",
              config={"model": msgspec.to_builtins(model)})
status = Path("/proc/self/status").read_text().splitlines()
data = next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmData"))
resource.setrlimit(resource.RLIMIT_DATA, (data + limit, data + limit))
assert total > 1.5 * limit, total
whole = ((name, torch.randn(shape)) for name, shape in shapes.items())
path = write_whole(root / "a", 1, whole, extra, shard_bytes=16 << 20)
export_checkpoint(path, root / "hf", torch.float32, 16 << 20)
import_checkpoint(root / "hf", root / "b", 16 << 20)
export_dcp(path, root / "dcp")
import_dcp(root / "dcp", root / "c", shard_bytes=16 << 20)
"""


def test_a_checkpoint_larger_than_memory_streams_through(tmp_path: Path) -> None:
    """400 MB of weights through 256 MiB that the kernel enforces, stacks of threads included."""
    command = [sys.executable, "-c", LARGER_THAN_MEMORY, str(tmp_path), str(256 << 20)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
