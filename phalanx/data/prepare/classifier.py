"""A user's own classifier, ``module:function``: from a text to a score, or to true or false."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path

from phalanx.data.errors import DataError

Score = Callable[[str], float]


class ClassifierFailure(Exception):  # noqa: N818  (of a document, not of the run)
    """The classifier raised, or gave no number, for a document."""


def load_classifier(reference: str, folder: Path) -> Score:
    """The function that ``module:function`` names; modules beside the recipe are found too."""
    module_name, _, name = reference.partition(":")
    if not module_name or not name:
        rule = "must be module:function"
        raise DataError("classifier.function", reference, rule, 'e.g. "quality:score"')
    sys.path.insert(0, str(folder.absolute()))
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # a user's code may raise anything
        rule = f"cannot be imported: {type(error).__name__}: {error}"
        fix = f"put {module_name}.py beside the recipe, or install its package"
        raise DataError("classifier.function", reference, rule, fix) from error
    finally:
        sys.path.remove(str(folder.absolute()))
    function = getattr(module, name, None)
    if not callable(function):
        rule = f"{module_name} has no function {name}"
        raise DataError("classifier.function", reference, rule, "correct its name")
    return function  # type: ignore[no-any-return]


def score(function: Score, text: str) -> float:
    """The score of a text; ``ClassifierFailure`` where there is none."""
    try:
        value = float(function(text))
    except (Exception, SystemExit) as error:  # a user's code may raise anything
        raise ClassifierFailure(f"{type(error).__name__}: {error}") from error
    if value != value:
        raise ClassifierFailure("the score is not a number")
    return value
