"""What the data room raises when a corpus, a setting or the supply of samples is at fault."""

from __future__ import annotations


class DataError(Exception):
    """A corpus or a data setting is unusable: which one, its value, the rule and the way out."""

    def __init__(self, key: str, value: object, rule: str, fix: str) -> None:
        # All four go to Exception so that the error survives pickling between processes.
        super().__init__(key, value, rule, fix)
        self.key = key
        self.value = value
        self.rule = rule
        self.fix = fix

    def __str__(self) -> str:
        return f"{self.key} = {self.value}: {self.rule}. {self.fix}."


class DataExhausted(Exception):  # noqa: N818  (an end, not an error)
    """The allowed epochs hold too few samples for another whole step."""

    def __init__(self, needed: int, available: int, epochs: int) -> None:
        super().__init__(needed, available, epochs)
        self.needed = needed
        self.available = available
        self.epochs = epochs

    def __str__(self) -> str:
        return (
            f"the next step needs samples up to {self.needed}, but data.epochs = {self.epochs} "
            f"ends at {self.available}. Raise data.epochs (0: no limit) or lower train.steps."
        )
