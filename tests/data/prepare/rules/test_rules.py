"""Each rule keeps good prose and drops what it was published against."""

from __future__ import annotations

import pytest

from phalanx.data.prepare.rules import RULES
from phalanx.data.prepare.rules.registry import Edited, chosen_rules, wrong_rules
from phalanx.data.prepare.words import TextView
from tests.data.prepare.raw import WORDS, prose

GOOD = prose(5, words=300)
BAD = {
    "gopher.word_count": "The end of it.",
    "gopher.mean_word_length": "ab " * 60,
    "gopher.symbol_ratio": "word # " * 60,
    "gopher.bullet_lines": "- a point of the list\n" * 20,
    "gopher.ellipsis_lines": "and then...\nwho knows.\n" * 20,
    "gopher.alphabetic_words": "12 345 word 6,7 8.9 " * 20,
    "gopher.stop_words": " ".join(WORDS[:80]),
    "repetition.lines": "Buy now, friend.\n" * 5 + GOOD[:60],
    "repetition.paragraphs": f"{GOOD[:90]}\n\n" * 3,
    "repetition.top_ngram": "spam spam " * 30 + GOOD[:100],
    "repetition.repeated_ngrams": " ".join(["one two three four five six seven"] * 4) + GOOD[:90],
    "c4.placeholder": "Lorem Ipsum dolor.",
    "c4.curly_bracket": "function f() { return 1 }",
    "c4.sentences": "One. Two. Three. Four",
    "fineweb.punctuated_lines": "no end\n" * 30,
    "fineweb.repeated_lines": f"{GOOD[:200]}\nand this again\nand this again\nand this again",
    "fineweb.short_lines": "a short line.\n" * 50 + GOOD,
    "fineweb.line_breaks": "one\ntwo\n\nthree\n",
    "language.stop_words": "der Hund und die Katze ist nicht auf dem Dach mit einer Maus zu sehen",
}


def test_every_rule_but_those_that_edit_has_a_bad_example() -> None:
    assert BAD.keys() == RULES.keys() - {"c4.lines"}


@pytest.mark.parametrize("name", RULES)
def test_good_prose_passes(name: str) -> None:
    outcome = RULES[name].function(TextView(GOOD))
    assert outcome is None or outcome == Edited(GOOD)


@pytest.mark.parametrize("name", BAD)
def test_what_the_rule_is_against_is_dropped_with_a_reason(name: str) -> None:
    assert isinstance(RULES[name].function(TextView(BAD[name])), str)


@pytest.mark.parametrize("name", RULES)
def test_an_empty_or_odd_text_breaks_no_rule(name: str) -> None:
    for text in ("", "\n", "###", "你好", "x", "\x00"):
        RULES[name].function(TextView(text))


def test_c4_keeps_sentences_and_drops_the_lines_around_them() -> None:
    text = (
        "Menu\nA real sentence stands here.[1]\nPlease enable Javascript.\nToo short.\n"
        "We use cookies on this site.\nIt trails off...\nAnd one more question?\n"
    )
    kept = RULES["c4.lines"].function(TextView(text))
    assert kept == Edited("A real sentence stands here.\nAnd one more question?")


def test_thresholds_are_the_published_ones_and_can_be_changed() -> None:
    assert RULES["gopher.word_count"].thresholds == {"least": 50, "most": 100_000}
    text = TextView("only four words here")
    (rule,) = chosen_rules(["gopher.word_count"], {}).values()
    assert rule(text) == "4 words"
    (rule,) = chosen_rules(["gopher.word_count"], {"gopher.word_count": {"least": 3}}).values()
    assert rule(text) is None


def test_sets_and_rules_are_applied_in_the_order_given() -> None:
    chosen = list(chosen_rules(["fineweb.short_lines", "c4"], {}))
    assert chosen[0] == "fineweb.short_lines" and chosen[1:] == [
        name for name in RULES if name.startswith("c4.")
    ]


@pytest.mark.parametrize(
    ("names", "changes", "said"),
    [
        (["gofer"], {}, 'did you mean "gopher"'),
        (["gopher"], {"gopher.word_cont": {}}, 'did you mean "gopher.word_count"'),
        (["c4"], {"gopher.word_count": {"least": 1}}, "belongs to a rule that is not applied"),
        (["gopher"], {"gopher.word_count": {"min": 1}}, "is not one of its thresholds"),
        (["gopher"], {"gopher.word_count": {"least": "x"}}, "must be a number"),
        (["c4"], {"c4.placeholder": {"least": 1}}, "this rule has none"),
        (["language"], {"language.stop_words": {"languages": 3}}, "must be an array"),
    ],
)
def test_mistakes_are_named(
    names: list[str], changes: dict[str, dict[str, int | float | str]], said: str
) -> None:
    assert said in "\n".join(map(str, wrong_rules(names, changes)))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "language"),
    [
        ("the cat sat on the mat and it was happy with that", "en"),
        ("le chat est sur la table et il ne bouge pas dans la nuit", "fr"),
        ("кот сидит на столе и не видит что это было для него", "ru"),
        ("el gato está en la mesa y no se mueve por la noche", "es"),
    ],
)
def test_languages_are_told_apart(text: str, language: str) -> None:
    rule = RULES["language.stop_words"].function
    assert rule(TextView(text), languages=(language,)) is None
    assert language in str(rule(TextView(text), languages=("pl",)))
