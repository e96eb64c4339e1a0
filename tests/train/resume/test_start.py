"""A run starts where its configuration says, or says why it cannot."""

from __future__ import annotations

import datetime
import shutil
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import msgspec
import pytest
import torch
from torch.distributed.checkpoint.state_dict_saver import save as save_dcp

from phalanx.checkpoint import Checkpointer, CheckpointError, Extra, latest, stored_tensors
from phalanx.checkpoint.tools.convert import import_checkpoint
from phalanx.checkpoint.tools.dcp import export_dcp, import_dcp
from phalanx.checkpoint.write import group_layout
from phalanx.config import ConfigError, Job, RopeScaling, SequenceStage
from phalanx.data import Cursor
from phalanx.model.hf import HfError, export_hf
from phalanx.parallel import build_mesh
from phalanx.train.resume.parent import find_parent, find_parents
from phalanx.train.resume.refusal import refuse_files
from phalanx.train.resume.start import load_foreign_weights, load_start
from phalanx.train.trainer import Trainer
from tests.ranks import run_ranks
from tests.train.forked_runs import Run, small_job, start

__all__ = ["start"]


def save(folder: Path, step: int) -> Path:
    extra = Extra(tokens=0, cursor=Cursor(), mesh={"data": 1}, config_hash="")
    return Checkpointer(folder, keep=0).save(step, {"x": torch.ones(2)}, extra)


def test_auto_without_any_checkpoint_is_a_fresh_start(tmp_path: Path) -> None:
    assert find_parent(small_job(tmp_path, checkpoint__resume="auto")) is None


def test_auto_takes_the_newest_of_the_name_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path / "try" / "a" / "checkpoints", 40)
    save(tmp_path / "other" / "b" / "checkpoints", 90)
    newer = save(tmp_path / "try" / "c" / "checkpoints", 50)
    assert find_parent(small_job(tmp_path, checkpoint__resume="auto")) == newer


@pytest.mark.parametrize("archived", ["", "job-2"])
def test_auto_takes_what_was_saved_last_whatever_its_run_is_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, archived: str
) -> None:
    """Runs of engines and servers are not called by their time."""
    for run, hour, step in (
        ("slurm-1", 9, 70),
        ("20260101-120000-abc123", 12, 30),
        ("job-2", 11, 60),
    ):
        at = datetime.datetime(2026, 1, 1, hour, tzinfo=datetime.UTC)
        monkeypatch.setattr(group_layout, "datetime", Mock(**{"datetime.now.return_value": at}))
        made = save(tmp_path / "try" / run / "checkpoints", step)
        if run == archived:
            (tmp_path / "copies" / "try").mkdir(parents=True)
            made.parent.rename(tmp_path / "copies" / "try" / run)
    settings = {"checkpoint__archive__url": tmp_path / "copies"} if archived else {}
    job = small_job(tmp_path, checkpoint__resume="auto", **settings)
    steps = [int(Path(each).name.removeprefix("step-")) for each in find_parents(job)]
    assert steps == [30, 60, 70]
    newest = find_parent(job)
    assert newest is not None and newest.name == "step-00000030"


def test_auto_passes_over_a_damaged_checkpoint(tmp_path: Path) -> None:
    good = save(tmp_path / "try" / "a" / "checkpoints", 40)
    bad = save(tmp_path / "try" / "b" / "checkpoints", 50)
    (bad / "manifest.json").write_text("{")
    assert find_parent(small_job(tmp_path, checkpoint__resume="auto")) == good


def test_a_run_folder_stands_for_its_newest_checkpoint(tmp_path: Path) -> None:
    save(tmp_path / "run" / "checkpoints", 1)
    newest = save(tmp_path / "run" / "checkpoints", 2)
    assert find_parent(small_job(tmp_path, checkpoint__resume=tmp_path / "run")) == newest


def test_a_folder_without_checkpoint_is_refused_with_the_nearest_one(tmp_path: Path) -> None:
    newest = save(tmp_path / "try" / "a" / "checkpoints", 40)
    with pytest.raises(ConfigError, match=r"checkpoint\.resume") as caught:
        find_parent(small_job(tmp_path, checkpoint__resume=tmp_path / "none"))
    assert str(newest) in str(caught.value)


@pytest.mark.parametrize("moe", ["none", "{experts = 4, top_k = 2, ffn = 16}"])
def test_imported_weights_are_a_start_only_when_asked_for_as_weights(
    tmp_path: Path, moe: str, start: Callable[..., Run]
) -> None:
    job = small_job(tmp_path, 1, model__moe=moe)
    state = {weight.name: weight.master for weight in _trainer(job).engine.weights}
    export_hf(state, job.model, tmp_path / "hf", dtype=torch.float32)
    imported = import_checkpoint(tmp_path / "hf", tmp_path / "imported")
    settings = {"model__moe": moe, "checkpoint__resume": imported, "train__steps": 2}
    with pytest.raises(ConfigError, match=r"Hugging Face.*checkpoint\.weights_only = true"):
        find_parent(small_job(tmp_path, 1, **settings))
    again = small_job(tmp_path, 1, checkpoint__weights_only="true", **settings)
    run = start(again, 1)
    assert run.wait() == 0, run.text
    assert [record.step for record in run.steps] == [1, 2]


def test_a_run_continues_to_the_bit_from_a_dcp_folder_that_was_exported(
    tmp_path: Path, start: Callable[..., Run]
) -> None:
    """Two ranks, saved half way, through DCP and back: the same as never having stopped."""

    def weights(run: Run) -> dict[str, torch.Tensor]:
        path = latest(run.folder.checkpoints)
        assert path is not None
        kinds = stored_tensors(path).items()
        state = {name: torch.zeros(shape, dtype=dtype) for name, (shape, dtype) in kinds}
        Checkpointer(path.parent).load(path, state)
        return state

    sharded = {"train__steps": 4, "parallel__zero": 3}
    whole = start(small_job(tmp_path, **sharded))
    assert whole.wait() == 0
    half = start(small_job(tmp_path, **sharded, checkpoint__every=2, checkpoint__keep=0))
    assert half.wait() == 0
    export_dcp(half.folder.checkpoints / "step-00000002", tmp_path / "dcp")
    made = import_dcp(tmp_path / "dcp", tmp_path / "imported")
    rest = start(small_job(tmp_path, **sharded, checkpoint__resume=made))
    assert rest.wait() == 0, rest.text
    assert [record.step for record in rest.steps] == [3, 4]
    expected, found = weights(whole), weights(rest)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("model.layers.0.self_attn.q_proj.weight", "(?s)names of Hugging Face .*safetensors"),
        ("layers.0.attention.wq.weight", "(?s)names of torchtitan .*convert_to_hf"),
        ("net.0.weight", "none of its tensors is a model's here"),
    ],
)
def test_a_dcp_folder_of_another_program_is_refused_when_it_is_imported(
    tmp_path: Path, name: str, said: str
) -> None:
    save_dcp({name: torch.ones(3)}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    with pytest.raises(CheckpointError, match=said):
        import_dcp(tmp_path / "dcp", tmp_path / "imported")
    assert not (tmp_path / "imported").exists()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_tensors_of_a_foreign_dcp_folder_are_no_run_to_continue(tmp_path: Path) -> None:
    save_dcp({"model.w": torch.ones(3)}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    made = import_dcp(tmp_path / "dcp", tmp_path / "imported")
    with pytest.raises(ConfigError, match=r"DCP folder .* data cursor .*weights_only = true"):
        find_parent(small_job(tmp_path, 1, checkpoint__resume=made))


def test_a_folder_that_holds_a_checkpoint_is_not_imported_into(tmp_path: Path) -> None:
    save(tmp_path / "out", 3)
    with pytest.raises(CheckpointError, match="holds a checkpoint already"):
        import_checkpoint(tmp_path / "hf", tmp_path / "out")


def test_a_checkpoint_of_another_model_is_refused_by_key(tmp_path: Path) -> None:
    job = small_job(tmp_path, 1)
    config = {"model": msgspec.to_builtins(job.model)}
    extra = Extra(tokens=0, cursor=Cursor(), mesh={"data": 1}, config_hash="", config=config)
    path = Checkpointer(tmp_path / "c").save(7, {"model.x": torch.ones(2)}, extra)
    refuse_files(small_job(tmp_path, 1, checkpoint__resume=path))
    with pytest.raises(ConfigError, match=r"model\.layers = 3: .*; set it to 2"):
        refuse_files(small_job(tmp_path, 1, checkpoint__resume=path, model__layers=3))


EXPERTS = "{experts=4, top_k=2, ffn=16}"
OTHER_FUNCTIONS = {
    "model__rope_theta": "1e4",
    "model__norm_eps": "1e-3",
    "model__rope_scaling": "{factor=4.0}",
    "model__moe__top_k": "1",
    "model__moe__score": "sigmoid",
    "model__moe__normalize_top_k": "false",
    "model__moe__route_scale": "2.5",
}


def test_a_checkpoint_of_another_function_is_refused_by_every_key(tmp_path: Path) -> None:
    job = small_job(tmp_path, 1, model__moe=EXPERTS)
    config = {"model": msgspec.to_builtins(job.model)}
    extra = Extra(tokens=0, cursor=Cursor(), mesh={"data": 1}, config_hash="", config=config)
    path = Checkpointer(tmp_path / "c").save(7, {"model.x": torch.ones(2)}, extra)
    common = {"model__moe": EXPERTS, "checkpoint__resume": path}
    refuse_files(small_job(tmp_path, 1, **common))
    with pytest.raises(ConfigError) as refused:
        refuse_files(small_job(tmp_path, 1, **common, **OTHER_FUNCTIONS))
    keys = {each.key for each in refused.value.problems} - {"checkpoint.resume"}
    assert keys == {key.replace("__", ".") for key in OTHER_FUNCTIONS}
    allowed = {"checkpoint__allow_other_model": "true"}
    refuse_files(small_job(tmp_path, 1, **common, **OTHER_FUNCTIONS, **allowed))


def test_a_checkpoint_whose_model_cannot_be_read_is_refused_in_words(tmp_path: Path) -> None:
    config = {"model": {"dim": 16, "of_a_later_version": 3}}
    extra = Extra(tokens=0, cursor=Cursor(), mesh={"data": 1}, config_hash="", config=config)
    path = Checkpointer(tmp_path / "c").save(7, {"model.x": torch.ones(2)}, extra)
    with pytest.raises(ConfigError, match=r"of_a_later_version.*later version"):
        refuse_files(small_job(tmp_path, 1, checkpoint__resume=path))


def test_a_checkpoint_that_no_launcher_saw_is_compared_when_it_is_loaded(tmp_path: Path) -> None:
    before = _trainer(small_job(tmp_path, 1))
    path = Checkpointer(tmp_path / "c").save(0, before.tensors(), before.extra())
    before.close()
    job = small_job(tmp_path, 1, model__rope_theta=1e4, checkpoint__resume=path)
    after = _trainer(job)
    with pytest.raises(ConfigError, match=r"model\.rope_theta = 10000\.0: .*500000\.0"):
        load_start(job, after, Checkpointer(tmp_path / "d"), [path])
    after.close()


def test_every_tensor_that_differs_from_the_models_is_named(
    tmp_path: Path, start: Callable[..., Run]
) -> None:
    assert start(small_job(tmp_path, 1, train__steps=1), 1).wait() == 0
    again = small_job(tmp_path, 1, checkpoint__resume="auto", model__ffn=48)
    with pytest.raises(ConfigError, match=r"model\.ffn = 48: .*; set it to 32") as refused:
        refuse_files(again)
    text = str(refused.value)
    for layer in (0, 1):
        for tensor in (f"layers.{layer}.mlp.gate_up.weight", f"layers.{layer}.mlp.down.weight"):
            assert f"\n  model.{tensor} (" in text and f"optimizer.exp_avg_sq.{tensor} (" in text
    assert "12 tensors are not the model's" in text and "embed" not in text
    deeper = small_job(tmp_path, 1, checkpoint__resume="auto", model__layers=3)
    with pytest.raises(ConfigError, match=r"model\.layers\.2\.\S+ is not in the checkpoint"):
        refuse_files(deeper)


def test_a_run_that_had_to_continue_an_older_checkpoint_says_so(
    tmp_path: Path, start: Callable[..., Run]
) -> None:
    settings = {"checkpoint__every": 2, "checkpoint__keep": 0, "train__steps": 4}
    first = start(small_job(tmp_path, **settings))
    assert first.wait() == 0
    newest = latest(first.folder.checkpoints)
    assert newest is not None
    shard = next(newest.glob("rank-00000.*.safetensors"))
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 0xFF
    shard.write_bytes(content)
    second = start(small_job(tmp_path, train__steps=5, checkpoint__resume="auto"))
    assert second.wait() == 0, second.text
    assert second.steps[0].step == 3
    assert f"continued from step 2: {newest} is damaged" in second.text
    older = newest.with_name("step-00000002")
    said = [f"passed over: {newest}: {shard.name} is corrupt", f"from disk: {older}", "step 3/5"]
    assert sorted(said, key=second.text.index) == said, "before the first step"
    shutil.rmtree(second.folder.path)
    third = start(small_job(tmp_path, train__steps=5, checkpoint__resume="auto"))
    assert third.wait() == 0, third.text
    said = [f"passed over: {newest}: {shard.name} is corrupt", f"from disk: {older}", "step 3/5"]
    assert sorted(said, key=third.text.index) == said, "found bad before, and still told"


def test_checkpoints_that_are_all_bad_are_named_before_a_fresh_start(
    tmp_path: Path, start: Callable[..., Run]
) -> None:
    only = save(tmp_path / "try" / "a" / "checkpoints", 40)
    (only / "manifest.json").write_text("{")
    fresh = start(small_job(tmp_path, train__steps=1, checkpoint__resume="auto"))
    assert fresh.wait() == 0, fresh.text
    said = [f"passed over: {only}: manifest.json is corrupt", "nothing to resume from", "step 1/1"]
    assert sorted(said, key=fresh.text.index) == said


def test_a_place_that_does_not_exist_is_called_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no such folder"):
        find_parent(small_job(tmp_path, checkpoint__resume=tmp_path / "nosuch"))


def test_a_run_that_is_done_already_says_how_to_go_on(
    tmp_path: Path, start: Callable[..., Run]
) -> None:
    job = small_job(tmp_path, train__steps=2, checkpoint__resume="auto")
    assert start(job).wait() == 0
    again = start(job)
    assert again.wait() == 0
    assert not again.steps
    assert "raise train.steps to go on" in again.text


def _trainer(job: Job) -> Trainer:
    device = torch.device("cpu")
    return Trainer(job, build_mesh(job, device), device)


def _load_and_collect(job: Job, folder: Path) -> dict[str, torch.Tensor]:
    trainer = _trainer(job)
    load_foreign_weights(trainer, folder)
    trainer.close()
    return {w.name: w.parameter.full_tensor().detach() for w in trainer.engine.weights}  # type: ignore[attr-defined]


@pytest.mark.parametrize("tensor", [1, 2])
def test_foreign_weights_arrive_whole_on_any_mesh(tmp_path: Path, tensor: int) -> None:
    source = _trainer(small_job(tmp_path, 1, train__seed=5))
    source.close()
    written = {w.name: w.master.clone() for w in source.engine.weights}
    export_hf(written, source.job.model, tmp_path / "hf", dtype=torch.float32)
    world = 2 * tensor
    job = small_job(tmp_path, world, parallel__tensor=tensor, parallel__zero=3)
    for found in run_ranks(world, _load_and_collect, job, tmp_path / "hf"):
        assert found.keys() == written.keys()
        for name, whole in found.items():
            assert torch.equal(whole, written[name]), name


def test_foreign_weights_of_another_shape_are_refused_by_name(tmp_path: Path) -> None:
    source = _trainer(small_job(tmp_path, 1))
    source.close()
    written = {w.name: w.master for w in source.engine.weights}
    export_hf(written, source.job.model, tmp_path / "hf", dtype=torch.float32)
    other = _trainer(small_job(tmp_path, 1, model__ffn=64))
    other.close()
    with pytest.raises(HfError, match=r"layers\.0\.mlp\.gate_up\.weight"):
        load_foreign_weights(other, tmp_path / "hf")


def test_selection_biases_of_a_folder_come_along_with_its_weights(tmp_path: Path) -> None:
    experts = 'experts = 4, top_k = 2, ffn = 16, shared_experts = 1, score = "sigmoid"'
    settings = {
        "model__moe": f'{{{experts}, balance = "bias"}}',
        "model__latent": "{query_rank = 8, key_value_rank = 8, content_head_dim = 8, "
        "rope_head_dim = 4, value_head_dim = 8}",
        "model__kv_heads": 0,
        "model__head_dim": 0,
        "model__norm_eps": "1e-6",
    }
    first = _trainer(small_job(tmp_path, 1, **settings))
    state = {weight.name: weight.master for weight in first.engine.weights}
    names = [n for n, _ in first.engine.parts[0].named_buffers() if n.endswith(".expert_bias")]
    assert names
    biases = {name: torch.arange(4.0) / 7 + number for number, name in enumerate(names)}
    folder = tmp_path / "hf"
    export_hf({**state, **biases}, first.job.model, folder)  # in bf16, but not the biases
    again = _trainer(small_job(tmp_path, 1, **settings, train__seed=5))
    load_foreign_weights(again, folder)
    found = dict(again.engine.parts[0].named_buffers())
    assert all(torch.equal(found[name], bias) for name, bias in biases.items())
    imported = stored_tensors(import_checkpoint(folder, tmp_path / "imported"))
    assert all(any(key.endswith(name) for key in imported) for name in names)


def saved_run(folder: Path, steps: int) -> Job:
    """A job whose run was saved after so many steps of four samples, its last ones."""
    job = small_job(folder, 1, train__steps=steps, checkpoint__resume="auto")
    trainer = _trainer(job)
    for _ in range(steps):
        trainer.train_step()
    place = folder / "try" / "a" / "checkpoints"
    Checkpointer(place, keep=0).save(trainer.step, trainer.tensors(), trainer.extra())
    trainer.close()
    return job


def continued(job: Job) -> tuple[Trainer, tuple[str, ...]]:
    """A trainer that continues a job's newest run, and what it says goes on otherwise."""
    trainer, found = _trainer(job), find_parent(job)
    assert found is not None
    refuse_files(job)
    return trainer, load_start(job, trainer, Checkpointer(found.parent), [found]).changes


def test_a_longer_run_says_where_its_rate_jumps(tmp_path: Path) -> None:
    job = saved_run(tmp_path, 2)
    same, said = continued(job)
    assert said == ()
    longer = msgspec.structs.replace(job, train=msgspec.structs.replace(job.train, steps=9))
    other, said = continued(longer)
    assert "[[schedule.extensions]] with at_step = 2" in said[0]
    for trainer in (same, other):
        trainer.close()


def test_a_stage_may_be_added_when_a_run_goes_on_and_not_changed_later(tmp_path: Path) -> None:
    job = saved_run(tmp_path, 2)
    batch, length = job.train.global_batch, job.data.sequence
    yarn = RopeScaling(kind="yarn", factor=2.0, original_context=length)
    stage = SequenceStage(after_tokens=2 * batch * length, sequence=2 * length, rope_scaling=yarn)

    def staged(stage: SequenceStage) -> Job:
        train = msgspec.structs.replace(job.train, steps=4, sequence_stages=(stage,))
        return msgspec.structs.replace(job, train=train)

    trainer, said = continued(staged(stage))
    line = said[-1]  # after that on the learning rate
    assert line.startswith(f"the stages are other ones: after step 2: samples of {2 * length} tok")
    assert trainer.train_step().tokens == 2 * batch * length
    place = tmp_path / "try" / "b" / "checkpoints"
    Checkpointer(place, keep=0).save(trainer.step, trainer.tensors(), trainer.extra())
    trainer.close()
    again, said = continued(staged(stage))
    assert said == () and again.train_step().tokens == 2 * batch * length
    again.close()
    steeper = msgspec.structs.replace(yarn, factor=4.0)
    with pytest.raises(ConfigError, match=r"model\.rope_scaling\.factor = 4\.0"):
        continued(staged(msgspec.structs.replace(stage, rope_scaling=steeper)))
    larger = msgspec.structs.replace(stage, global_batch=batch + 1)
    with pytest.raises(ConfigError, match="step 3 would be another one, and 3 steps are made"):
        continued(staged(larger))
