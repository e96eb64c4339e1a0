"""In which language a text is, by its stop words: simple, and for prose only.

A text of some fifty words is told from the other languages of the table; a single sentence, a list
or code is not. Where that matters, use fastText's model as a classifier (``[[classifier]]``).
"""

from __future__ import annotations

from phalanx.data.prepare.rules.registry import RULES
from phalanx.data.prepare.words import TextView

SOURCE = "Phalanx (stop words; no published model)"
LANGUAGES = {
    "de": "der die das und ist nicht ein eine zu den mit von auf für dem im sich auch es wird sind",
    "en": "the and of to in is that it for was with as on be this are by from have not or an at",
    "es": "el la los las de que y en un una por con no para es se del lo como más pero su al",
    "fr": "le la les des et est une un dans que pour qui sur pas au du il elle avec ce sont par",
    "it": "il lo la gli di che è un una per con non del della nel sono si da al come più anche ma",
    "nl": "de het een en van is dat op te in voor met niet zijn aan er ook als door bij naar om",
    "pl": "i w na z do się nie to jest że o jak po co ale za przez od dla jego są było czy tym",
    "pt": "o a os as de que e em um uma para com não por do da no na se mais como mas foi ao é",
    "ru": "и в не на что с он как это по но из за у от так же для его к было бы мы они который",
    "sv": "och i att det som en på är av för med den till inte ett har de om var jag men sig",
}
_WORDS = {language: frozenset(words.split()) for language, words in LANGUAGES.items()}


def language_shares(view: TextView) -> dict[str, float]:
    """Share of the words that are stop words of each language."""
    total = max(1, len(view.words))
    return {
        language: sum(word in stops for word in view.words) / total
        for language, stops in _WORDS.items()
    }


@RULES.add("language.stop_words", SOURCE)
def main_language(
    view: TextView, *, languages: tuple[str, ...] = ("en",), least: float = 0.1
) -> str | None:
    """A tenth of the words are stop words of a wanted language, and of none more than of it."""
    shares = language_shares(view)
    best = max(shares, key=lambda language: shares[language])
    if best not in languages:
        return f"looks like {best} ({shares[best]:.0%} stop words)"
    return None if shares[best] >= least else f"{shares[best]:.0%} stop words of {best}"
