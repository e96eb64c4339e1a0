"""An exported folder is whole: transformers opens its tokenizer and model, and anybody reads it."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import torch

from phalanx.checkpoint import CheckpointError, Extra
from phalanx.checkpoint.tools.convert import complete_export, export_checkpoint
from phalanx.checkpoint.tools.rewrite import write_whole
from phalanx.config import Model, resolve_model
from phalanx.data import Cursor
from phalanx.data.tokenize.run import tokenize_files
from phalanx.data.tokenize.vocabulary import train_tokenizer
from phalanx.model import Transformer
from phalanx.model.hf import HfError, load_hf

MODEL = resolve_model(Model(dim=64, layers=1, heads=2, ffn=128, vocab=300))


def weights() -> dict[str, torch.Tensor]:
    """Of a model that says something of each token, the same every time."""
    model, chance = Transformer(MODEL), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(1.0 if parameter.dim() == 1 else 0.0, 0.1, generator=chance)
    return {f"model.{name}": each for name, each in model.state_dict().items()}


@pytest.fixture
def exported(tmp_path: Path) -> tuple[Path, Path]:
    """A checkpoint of a run on a corpus, and its exported folder."""
    text = tmp_path / "a.txt"
    text.write_text("the quick brown fox jumps over the lazy dog\n" * 50)
    tokenizer = train_tokenizer([text], 300)
    tokenize_files([text], tokenizer, tmp_path / "corpus")
    config = {
        "model": msgspec.to_builtins(MODEL),
        "data": {"source": "shards", "path": str(tmp_path / "corpus"), "sequence": 64},
    }
    extra = Extra(tokens=0, cursor=Cursor(), mesh={}, config_hash="", config=config)
    path = write_whole(tmp_path / "run", 1, weights().items(), extra)
    export_checkpoint(path, tmp_path / "hf", torch.float32, 10**9)
    return path, tmp_path / "hf"


def test_transformers_opens_the_tokenizer_and_generates(exported: tuple[Path, Path]) -> None:
    path, folder = exported
    assert "corpus" in complete_export(path, folder)
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert tokenizer.decode(tokenizer("the quick brown fox")["input_ids"]) == "the quick brown fox"
    assert tokenizer.eos_token == "<|endoftext|>" and tokenizer.model_max_length == 64
    ends = transformers.GenerationConfig.from_pretrained(folder).eos_token_id
    assert (
        ends
        == tokenizer.eos_token_id
        == json.loads((folder / "config.json").read_text())["eos_token_id"]
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    asked = tokenizer("the quick", return_tensors="pt")
    assert model.generate(**asked, max_new_tokens=2).shape[1] > asked["input_ids"].shape[1]


def test_every_file_has_the_mode_of_a_new_one(exported: tuple[Path, Path]) -> None:
    path, folder = exported
    complete_export(path, folder)
    mask = os.umask(0)
    os.umask(mask)
    modes = {each.name: each.stat().st_mode & 0o777 for each in folder.iterdir()}
    assert set(modes.values()) == {0o666 & ~mask}, modes


def test_a_tokenizer_can_be_given_and_its_absence_is_said(
    exported: tuple[Path, Path], tmp_path: Path
) -> None:
    path, folder = exported
    corpus = tmp_path / "corpus"
    corpus.rename(tmp_path / "moved")
    assert "give --tokenizer" in complete_export(path, folder)
    assert (folder / "generation_config.json").exists()
    complete_export(path, folder, tmp_path / "moved" / "tokenizer.json")
    assert (folder / "tokenizer.json").exists()
    with pytest.raises(HfError, match="cannot be used as a tokenizer"):
        complete_export(path, folder, tmp_path / "a.txt")


TASK = """
task: animals
dataset_path: json
dataset_kwargs:
  data_files: {{test: {questions}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{text}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: right
metric_list:
  - metric: acc
"""
QUESTIONS = (
    {"text": "the quick brown", "choices": ["fox", "dog"], "right": 0},
    {"text": "jumps over the lazy", "choices": ["fox", "dog"], "right": 1},
    {"text": "the quick", "choices": ["brown fox jumps", "lazy"], "right": 0},
)


@pytest.mark.soak
@pytest.mark.skipif(
    importlib.util.find_spec("lm_eval") is None,
    reason="lm_eval is not installed: pip install 'phalanx[eval]'",
)
def test_lm_eval_scores_the_folder_as_our_own_model_does(
    exported: tuple[Path, Path], tmp_path: Path
) -> None:
    path, folder = exported
    complete_export(path, folder)
    (tmp_path / "tasks").mkdir()
    questions = tmp_path / "questions.jsonl"
    questions.write_text("".join(json.dumps(each) + "\n" for each in QUESTIONS))
    (tmp_path / "tasks" / "animals.yaml").write_text(TASK.format(questions=questions))
    words = ["--model_args", f"pretrained={folder},dtype=float32", "--device", "cpu"]
    words += ["--tasks", "animals", "--include_path", str(tmp_path / "tasks")]
    words += ["--output_path", str(tmp_path / "scores"), "--log_samples"]
    done = subprocess.run(
        [sys.executable, "-m", "lm_eval", "--model", "hf", *words],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "cache")},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (samples,) = (tmp_path / "scores").rglob("samples_animals_*.jsonl")
    scored = [json.loads(line) for line in samples.read_text().splitlines()]
    scored.sort(key=lambda sample: sample["doc_id"])
    ours = [
        [log_likelihood(folder, each["text"], f" {choice}") for choice in each["choices"]]
        for each in QUESTIONS
    ]
    for sample, expected in zip(scored, ours, strict=True):
        theirs = [float(answer[0]) for answer in sample["filtered_resps"]]
        assert theirs == pytest.approx(expected, abs=1e-4)
    (results,) = (tmp_path / "scores").rglob("results_*.json")
    chosen = [each.index(max(each)) for each in ours]
    right = sum(each["right"] == choice for each, choice in zip(QUESTIONS, chosen, strict=True))
    accuracy = json.loads(results.read_text())["results"]["animals"]["acc,none"]
    assert accuracy == pytest.approx(right / len(QUESTIONS))


def log_likelihood(folder: Path, text: str, continuation: str) -> float:
    """Of a continuation, by our own model."""
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    context = len(tokenizer(text)["input_ids"])
    tokens = torch.tensor(tokenizer(text + continuation)["input_ids"])
    model = Transformer(MODEL).eval()
    model.load_state_dict({name.removeprefix("model."): w for name, w in weights().items()})
    model.prepare(torch.arange(len(tokens) - 1))
    with torch.no_grad():
        scores = model(tokens[None, :-1])[0].log_softmax(-1)
    return float(scores.gather(1, tokens[1:, None])[context - 1 :].sum())


def test_the_average_of_the_weights_is_exported_where_it_is_asked_for(tmp_path: Path) -> None:
    extra = Extra(
        tokens=0,
        cursor=Cursor(),
        mesh={},
        config_hash="",
        config={"model": msgspec.to_builtins(MODEL)},
    )
    plain = weights()
    averages = {name.replace("model.", "ema.", 1): 2 * each for name, each in plain.items()}
    path = write_whole(tmp_path / "run", 1, (plain | averages).items(), extra)
    counts = [
        export_checkpoint(path, tmp_path / str(n), torch.float32, 10**9, average=bool(n))
        for n in range(2)
    ]
    assert counts[0] == counts[1]
    found = [dict(load_hf(tmp_path / str(n))) for n in range(2)]
    assert found[0].keys() == found[1].keys()
    for name, tensor in found[1].items():
        assert torch.equal(tensor, 2 * found[0][name]), name


def test_an_average_that_was_not_kept_is_refused(exported: tuple[Path, Path]) -> None:
    path, folder = exported
    with pytest.raises(CheckpointError, match="holds no average"):
        export_checkpoint(path, folder.with_name("ema"), torch.float32, 10**9, average=True)


def test_an_export_has_the_positions_of_the_stage_of_its_last_step(tmp_path: Path) -> None:
    yarn = {"kind": "yarn", "factor": 4.0, "original_context": 32}
    stages = [{"after_tokens": 32 * 8, "sequence": 128, "rope_scaling": yarn}]
    config = {
        "model": msgspec.to_builtins(MODEL),
        "data": {"sequence": 32},
        "train": {"sequence_stages": stages},
    }
    contexts = []
    for seen in (8, 9):  # the last step of the first stage, and one of the second
        extra = Extra(
            tokens=0, cursor=Cursor(consumed=seen), mesh={}, config_hash="", config=config
        )
        path = write_whole(tmp_path / f"run{seen}", 1, weights().items(), extra)
        export_checkpoint(path, tmp_path / str(seen), torch.float32, 10**9)
        written = json.loads((tmp_path / str(seen) / "config.json").read_text())
        contexts.append((written["max_position_embeddings"], "yarn" in json.dumps(written)))
    assert contexts == [(32, False), (128, True)]
