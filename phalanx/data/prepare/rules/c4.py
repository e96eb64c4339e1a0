"""Rules of C4: lines that are no sentences go, and pages that are no text.

The list of bad words is not applied: it removes much that is harmless (Dodge et al. 2021).
"""

from __future__ import annotations

import re

from phalanx.data.prepare.rules.registry import RULES, Edited
from phalanx.data.prepare.words import TextView

SOURCE = "Raffel et al. 2020, JMLR 21(140), 2.2"
CODE = "the code of C4, tensorflow_datasets/text/c4_utils.py"
TERMINAL = (".", "!", "?", '"')
CITATION = re.compile(r"\[\d*\]|\[edit\]|\[citation needed\]")
POLICY = (
    *("terms of use", "privacy policy", "cookie policy"),
    *("uses cookies", "use of cookies", "use cookies"),
)
_SENTENCE_END = re.compile(r"[.!?][\"')\]]*(?:\s|$)")


@RULES.add("c4.placeholder", SOURCE)
def placeholder(view: TextView) -> str | None:
    """A page does not contain “lorem ipsum”."""
    return "contains “lorem ipsum”" if "lorem ipsum" in view.text.lower() else None


@RULES.add("c4.curly_bracket", SOURCE)
def curly_bracket(view: TextView) -> str | None:
    """A page does not contain “{”: it stands in code, hardly in prose."""
    return "contains “{”" if "{" in view.text else None


@RULES.add("c4.lines", f"{SOURCE}; {CODE}")
def lines(
    view: TextView, *, least_words: int = 3, longest_word: int = 1000, punctuated: int = 1
) -> Edited:
    """Only lines of 3 words that end a sentence stay; none that speak of Javascript or cookies."""
    kept = []
    for each in view.lines:
        line = CITATION.sub("", each).rstrip()
        words, lowered = line.split(), line.lower()
        ends = line.endswith(TERMINAL) and not line.endswith("...")
        wanted = len(words) >= least_words and (ends or not punctuated)
        unwanted = "javascript" in lowered or any(phrase in lowered for phrase in POLICY)
        if wanted and not unwanted and max(map(len, words)) <= longest_word:
            kept.append(line)
    return Edited("\n".join(kept))


@RULES.add("c4.sentences", SOURCE)
def sentences(view: TextView, *, least: int = 5) -> str | None:
    """A page has at least 5 sentences (ends of sentences are found by their punctuation)."""
    count = len(_SENTENCE_END.findall(view.text))
    return None if count >= least else f"{count} sentences"
