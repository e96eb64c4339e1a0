"""Recipes: mistakes are named all at once, before anything is read."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from phalanx.config import ConfigError
from phalanx.data.prepare.engine import LocalEngine
from phalanx.data.prepare.recipe import filter_digest, load_recipe
from phalanx.data.prepare.run import prepare
from tests.data.prepare.raw import recipe, recipe_file

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("read.input=x", 'read.input = "x": is no known key; did you mean "inputs"?'),
        ("tokenize.vocab_size=0", "give either tokenizer (a file) or vocab_size"),
        ("tokenize.tokenizer=x.json", "give either tokenizer (a file) or vocab_size"),
        ("deduplicate.jaccard=1.5", "must be a number >= 0.3 and <= 0.99"),
        ('mask.what=["name"]', "mask.what"),
        ('filter.rules=["gofer"]', 'did you mean "gopher"'),
        ("read.inputs=[]", "names nothing"),
        ('decontaminate={against=["x"],words=5}', "is more than decontaminate.words = 5"),
    ],
)
def test_a_mistake_is_named_with_its_fix(tmp_path: Path, override: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_recipe(recipe_file(tmp_path), [override])
    assert said in str(caught.value)


def test_a_named_tokenizer_must_be_there(tmp_path: Path) -> None:
    overrides = ["tokenize.vocab_size=0", "tokenize.tokenizer=no.json"]
    with pytest.raises(ConfigError, match="is no file"):
        load_recipe(recipe_file(tmp_path), overrides)


def test_what_does_not_change_a_file_s_result_does_not_change_its_identity(tmp_path: Path) -> None:
    def identity(*overrides: str) -> str:
        return filter_digest(recipe(tmp_path, overrides=overrides), (), "")

    same = identity()
    assert identity("tokenize.vocab_size=999", "read.most_unreadable=1.0", "work=elsewhere") == same
    different = [
        identity("filter.rules=[]"),
        identity("read.text_key=body"),
        identity("deduplicate.words=3"),
        identity('mask.what=["ip"]'),
    ]
    assert len({same, *different}) == 5


def test_the_recipe_of_the_page_is_accepted(tmp_path: Path) -> None:
    page = (ROOT / "docs/how-to/clean-raw-text.md").read_text(encoding="utf-8")
    (shown,) = re.findall(r"```toml recipe\n(.*?)```", page, re.DOTALL)
    path = tmp_path / "recipe.toml"
    path.write_text(shown)
    assert load_recipe(path).classifier[0].function == "quality:score"


def test_the_example_runs_as_it_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    path = Path("examples/prepare/recipe.toml")
    shorter = ['read.inputs=["docs/concepts"]', "deduplicate.recall=0.5"]
    example = load_recipe(path, [f"out={tmp_path / 'out'}", *shorter])
    report = prepare(example, path.parent, LocalEngine(1)).report
    assert report.documents > 10 and report.failed == {}
