"""What the data room raises when a corpus, a setting or the supply of samples is at fault."""

from __future__ import annotations

from phalanx.config import ConfigError


class DataError(ConfigError):
    """A corpus, or a setting that does not fit it: which one, its value, the rule, the fix."""

    def __init__(self, key: str, value: object, rule: str, fix: str) -> None:
        super().__init__(key, str(value), rule, fix)


class DataExhausted(Exception):  # noqa: N818  (an end, not an error)
    """The allowed epochs hold too few samples for another whole step."""

    def __init__(self, needed: int, available: int, epochs: int) -> None:
        self.needed = needed
        self.available = available
        self.epochs = epochs
        super().__init__(
            f"the next step needs samples up to {needed}, but data.epochs = {epochs} ends at "
            f"{available}; raise data.epochs (0: no limit) or lower train.steps"
        )


class ObjectStoreError(Exception):
    """An object store that cannot be read now: unlike damaged data, another time it may."""

    def __init__(self, url: str, name: str, what: str) -> None:
        super().__init__(f"{url}/{name}: {what}")
