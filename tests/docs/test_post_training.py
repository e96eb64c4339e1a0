"""The page about post-training does what it shows, and its examples are accepted."""

from __future__ import annotations

import re
import shlex
import shutil
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from phalanx.cli.data.data import app
from phalanx.config import check, job_from_table, load_job, resolve
from phalanx.data import refuse_unreadable
from tests.data.chat.chats import train

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "how-to" / "post-train.md").read_text(encoding="utf-8")
EXAMPLES = ROOT / "examples" / "post_training"


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def test_the_data_commands_make_what_the_examples_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(EXAMPLES, "examples/post_training")
    shutil.copytree(EXAMPLES, "runs/docs/tokenizer")
    train(Path("runs/docs/tokenizer"))  # in place of the one on the standard library, which is slow
    lines = "".join(blocks("sh")).replace("\\\n", " ").splitlines()
    prepared = [
        shlex.split(line)[2:] for line in lines if re.match("phalanx data (chat|pref)", line)
    ]
    assert [words[0] for words in prepared] == ["chat", "preferences"]
    for words in prepared:
        done = CliRunner().invoke(app, words)
        assert done.exit_code == 0, done.output
        assert "left out" not in done.output
    for name in ("lora", "dpo"):
        job = resolve(load_job(EXAMPLES / f"{name}.toml"), 2)
        check(job, 2)
        refuse_unreadable(job.data, job.model.vocab)


def test_the_job_examples_are_accepted() -> None:
    assert blocks("toml")
    for example in blocks("toml"):
        check(job_from_table({"model": {"preset": "tiny"}, **tomllib.loads(example)}), 1)


def test_the_python_example_is_a_callback() -> None:
    (example,) = blocks("python")
    names: dict[str, object] = {}
    exec(compile(example, "docs/how-to/post-train.md", "exec"), names)
    names["MyEngine"]()  # type: ignore[operator]
