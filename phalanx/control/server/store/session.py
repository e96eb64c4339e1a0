"""What a database must give so that the log can be kept in it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any, ClassVar, Protocol

from phalanx.control.server.store.interface import Leadership


class DatabaseSession(Protocol):
    """A connection, or a cursor of one, inside a transaction."""

    def execute(self, statement: Any, values: Any = ..., /) -> Any:
        """One statement."""

    def executemany(self, statement: Any, rows: Iterable[Any], /) -> Any:
        """One statement for many rows."""


class SqlSession(ABC):
    """A database with one writer."""

    MARK: ClassVar[str]  # of a value in a statement, which is written with "?" here
    INTEGER: ClassVar[str]  # a type of 64 bits
    BLOB: ClassVar[str]
    ANCHORED: ClassVar[bool]  # whoever led it has left an anchor on this machine
    place: str  # where the log is, for people

    @abstractmethod
    def _writing(self) -> AbstractContextManager[DatabaseSession]:
        """A transaction of the leader; its errors come as ``StoreError``."""

    @abstractmethod
    def _read(self, statement: str, values: tuple[object, ...] = ()) -> list[tuple[Any, ...]]:
        """The rows of a query in this database's own writing."""

    @abstractmethod
    def _has_table(self, name: str) -> bool:
        """Whether there is a table of this name."""

    @abstractmethod
    def lead(self, url: str, version: str, *, damaged_too: bool = False) -> Leadership:
        """Become the one writer."""

    @abstractmethod
    def close(self) -> None:
        """Let go of everything."""

    @abstractmethod
    def last_epoch(self) -> int:
        """Of the last leader; 0: it never had one."""

    def _own(self, statement: str) -> str:
        return statement.replace("?", self.MARK)
