"""An engine gets the weights of a step boundary, and a run does not end for want of one."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from phalanx.checkpoint import Checkpointer, latest
from phalanx.checkpoint.tools.convert import export_checkpoint
from phalanx.config import HandOff, Job
from phalanx.model.hf import config_from_hf, load_hf
from phalanx.model.post_training.adapters import MARK
from phalanx.train.parity.prove import make_steps, make_trainer
from phalanx.train.post_training import WeightHandOff
from phalanx.train.post_training.hand_off import DETAIL, export_weights
from tests.parallel.test_parity import make_job
from tests.ranks import run_ranks

OUTCOME: Any = None


def job_of(ranks: int, parallel: dict[str, Any], **sections: dict[str, Any]) -> Job:
    return make_job(ranks, {"model": {"layers": 2}, "parallel": parallel, **sections})


class Engine(HTTPServer):
    """Takes what it is told."""

    def __init__(self, answer: int = 200) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.answer, self.told = answer, list[Any]()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/update_weights_from_disk"


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        assert isinstance(self.server, Engine)
        length = int(self.headers["Content-Length"])
        self.server.told.append(json.loads(self.rfile.read(length)))
        self.send_response(self.server.answer)
        self.end_headers()

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def engine() -> Iterator[Engine]:
    with Engine() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_the_engine_is_told_of_each_export_and_old_ones_go(tmp_path: Path, engine: Engine) -> None:
    trainer = make_trainer(job_of(1, {}, train={"steps": 6, "micro_batch": 4}))
    settings = HandOff(every=2, folder=str(tmp_path), url=engine.url, keep=2)
    callback = WeightHandOff(settings)
    run: Any = SimpleNamespace(trainer=trainer, rank=0, step=0, details={})
    for _ in range(6):
        make_steps(trainer, 1)
        run.step = trainer.step
        callback.after_step(run, OUTCOME)
    names = [tmp_path / f"step-{step:08d}" for step in (2, 4, 6)]
    assert engine.told == [{"model_path": str(name)} for name in names]
    assert sorted(tmp_path.iterdir()) == names[1:]
    assert run.details[DETAIL] == 6
    assert config_from_hf(names[2]).dim == trainer.job.model.dim
    stored = dict(load_hf(names[2]))
    for weight in trainer.engine.weights:
        assert torch.equal(stored[weight.name], weight.master), weight.name
    trainer.close()


def test_an_engine_that_refuses_does_not_end_the_run(
    tmp_path: Path, engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    engine.answer = 500
    trainer = make_trainer(job_of(1, {}))
    callback = WeightHandOff(HandOff(every=1, folder=str(tmp_path), url=engine.url))
    run: Any = SimpleNamespace(trainer=trainer, rank=0, step=1, details={})
    callback.after_step(run, OUTCOME)
    assert "step 1 were not handed off: HTTP Error 500" in caplog.text
    file = tmp_path / "file"
    file.touch()
    WeightHandOff(HandOff(every=1, folder=str(file))).after_step(run, OUTCOME)
    assert "not handed off: NotADirectoryError" in caplog.text
    assert DETAIL not in run.details
    trainer.close()


def exported(folder: str, job: Job) -> dict[str, torch.Tensor]:
    """Weights of this rank that are whole; all ranks export together."""
    trainer = make_trainer(job)
    with torch.no_grad():
        for weight in trainer.engine.weights:
            if weight.name.endswith(".adapter.b"):
                weight.master.fill_(0.5)
    trainer.publish_weights()
    assert export_weights(trainer, Path(folder) / "step-00000001") == ""
    trainer.close()
    return {}


@pytest.mark.parametrize(
    ("ranks", "parallel", "adapter"),
    [(4, {"pipeline": 2}, "none"), (2, {"tensor": 2}, "lora"), (2, {"zero": 3}, "dora")],
    ids=str,
)
def test_every_mesh_exports_the_same_model(
    tmp_path: Path, ranks: int, parallel: dict[str, Any], adapter: str
) -> None:
    settings = {"adapter": {"kind": adapter, "rank": 2}}
    run_ranks(1, exported, str(tmp_path / "alone"), job_of(1, {}, **settings))
    run_ranks(ranks, exported, str(tmp_path / "mesh"), job_of(ranks, parallel, **settings))
    alone, mesh = (dict(load_hf(tmp_path / each / "step-00000001")) for each in ("alone", "mesh"))
    assert alone.keys() == mesh.keys() and not any(MARK in name for name in alone)
    for name, value in alone.items():
        torch.testing.assert_close(mesh[name], value, rtol=1e-6, atol=1e-7)


def test_an_engine_gets_the_weights_that_are_validated(tmp_path: Path) -> None:
    schedule = {"optimizer": {"kind": "schedule-free"}, "schedule": {"kind": "constant"}}
    trainer = make_trainer(job_of(1, {}, **schedule))
    make_steps(trainer, 3)
    trained = [weight.master.clone() for weight in trainer.engine.weights]
    assert export_weights(trainer, tmp_path / "out") == ""
    stored = dict(load_hf(tmp_path / "out"))
    with trainer.optimizer.evaluated():
        for weight in trainer.engine.weights:
            assert torch.equal(stored[weight.name], weight.master), weight.name
    for weight, before in zip(trainer.engine.weights, trained, strict=True):
        assert torch.equal(weight.master, before)
    trainer.close()


def test_an_engine_gets_the_positions_of_the_stage_that_was_trained_last(tmp_path: Path) -> None:
    yarn = {"kind": "yarn", "factor": 2.0, "original_context": 32}
    stages = [{"after_tokens": 8 * 32, "sequence": 64, "rope_scaling": yarn}]
    trainer = make_trainer(job_of(1, {}, train={"steps": 3, "sequence_stages": stages}))
    for number, (kind, context) in enumerate((("none", 32), ("yarn", 64))):
        make_steps(trainer, 1)
        folder = tmp_path / str(number)
        assert export_weights(trainer, folder) == ""
        scaling = config_from_hf(folder).rope_scaling
        assert (kind == "none") == (scaling is None)
        assert (
            json.loads((folder / "config.json").read_text())["max_position_embeddings"] == context
        )
    trainer.close()


@pytest.mark.parametrize("tied", [False, True], ids=["apart", "tied"])
def test_an_engine_gets_every_tensor_of_an_export(tmp_path: Path, tied: bool) -> None:
    """Also what is stored once more with each layer that predicts tokens further on."""
    experts = {"experts": 4, "top_k": 2, "ffn": 32, "shared_experts": 1, "score": "sigmoid"}
    latent = {"key_value_rank": 16, "content_head_dim": 8, "rope_head_dim": 4, "value_head_dim": 8}
    model = {
        "moe": {**experts, "balance": "bias"},
        "latent": {**latent, "query_rank": 16},
        "norm_eps": 1e-6,
        "mtp": {"layers": 2},
        "tied_embedding": tied,
    }
    trainer = make_trainer(job_of(1, {}, model={"layers": 2, **model}))
    assert export_weights(trainer, tmp_path / "handed") == ""
    Checkpointer(tmp_path / "saved").save(0, trainer.tensors(), trainer.extra())
    trainer.close()
    saved = latest(tmp_path / "saved")
    assert saved is not None
    export_checkpoint(saved, tmp_path / "exported", torch.float32, 1 << 30)
    handed, exported = (stored_in(tmp_path / name) for name in ("handed", "exported"))
    assert handed.keys() == exported.keys()
    assert all(torch.equal(handed[name], value) for name, value in exported.items())


def stored_in(folder: Path) -> dict[str, torch.Tensor]:
    return {name: t for file in folder.glob("*.safetensors") for name, t in load_file(file).items()}
