"""Tokens and sessions of people, roles and teams: who may do what, and for how long.

A token is shown once, when it is made; the store keeps its SHA-256 alone (a token has 256 random
bits, so a slow hash would protect nothing). Looking one up is one dictionary access.
"""

from __future__ import annotations

import hashlib
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

import msgspec
from msgspec import Struct, structs

from phalanx.control.server.store.interface import EventStore
from phalanx.control.wire.api_types import Role

# What people ask for (`phalanx token create --role`), where it is not the role's own name.
ASKED_AS: dict[Role, str] = {"join": "agent"}
PREFIX = "phx_"
HOUR_NS = 3600 * 10**9
JOIN_HOURS = 24
LINK_HOURS = 0.5  # until a login link is useless; it is good once
SESSION_HOURS = 12  # of the token that a page gets for it
KEEP_HOURS = 24  # that a token which is over can still be told of
MOST_SESSIONS = 100  # links and sessions that come from one token; of more the oldest go
MOST_PARENTS = 64  # a session makes a link that makes a session: no further than this


class Token(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What is known of a token. ``team`` "": every team (admin, read); ``node``: an agent's own."""

    id: str
    name: str  # of the person or program that has it
    role: Role
    team: str = ""
    node: str = ""
    machine: str = ""
    grants: Role = "read"  # what a login link is exchanged for
    parent: str = ""  # id of the token that it was made with; it ends with that one
    created_ns: int = 0
    expires_ns: int = 0  # 0: never
    revoked: bool = False
    network: str = ""  # a join token's, and of agents that joined with it; "": any
    uses: int = 0  # nodes that may join with it; 0: any number
    used: int = 0
    approves: bool = True  # a join token's: who joins with it is let in at once
    key: str = ""  # an agent's: public, of its node
    pending: bool = False  # an administrator has yet to let the node in (revoked: has rejected it)
    unconfirmed: bool = False  # nobody has shown yet to have that key


class KeptToken(Struct, frozen=True):
    """A token as the store keeps it."""

    digest: bytes
    token: Token


class AuthError(Exception):
    """A request that is not let through; ``status`` as in HTTP."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status, self.code = status, code


class Tokens:
    """Every token of a server. All changes go through the leader's store."""

    def __init__(self, store: EventStore, now_ns: Callable[[], int] = time.time_ns) -> None:
        self._store = store
        self._now_ns = now_ns
        self._by_digest: dict[bytes, Token] = {}
        self._digests: dict[str, bytes] = {}
        self._of_node: dict[str, dict[str, None]] = {}  # ids of its agents' tokens, oldest first
        self._changing = threading.RLock()
        self._unstored: dict[bytes, Token | None] | None = None  # within ``together``: as before
        self._spent: set[str] = set()  # login links that are on their way out of the store
        self.reload()

    def reload(self) -> None:
        """Read them all from the store (a standby that takes over)."""
        for _, record in self._store.tokens():
            kept = msgspec.msgpack.decode(record, type=KeptToken)
            self._remember(kept.digest, kept.token)

    def __len__(self) -> int:
        return len(self._digests)

    def all(self) -> list[Token]:
        """Every token's record, oldest first."""
        known = self._by_digest.copy()  # others may change it meanwhile
        return sorted(known.values(), key=lambda token: token.created_ns)

    def create(
        self,
        role: Role,
        name: str,
        *,
        hours: float = 0,
        until_ns: int = 0,
        hand_over: Callable[[str], None] = lambda _: None,
        secret: str = "",
        **more: Any,
    ) -> tuple[str, Token]:
        """A new token, in words that only its owner will know, and its record.

        It ends after some hours, and at ``until_ns`` at the latest (0: neither). Where it cannot
        be handed over (``hand_over`` raises), it is not made. ``secret``: as somebody chose it.
        """
        secret = secret or f"{PREFIX}{role}_{secrets.token_urlsafe(32)}"
        now = self._now_ns()
        ends = [at for at in (now + int(hours * HOUR_NS) if hours else 0, until_ns) if at]
        token = Token(
            id=secrets.token_hex(6),
            name=name,
            role=role,
            created_ns=now,
            expires_ns=min(ends, default=0),
            **more,
        )
        hand_over(secret)
        self._keep({_digest(secret): token})
        return secret, token

    def get(self, number: str) -> Token | None:
        """A token's record by its id."""
        digest = self._digests.get(number)
        return self._by_digest.get(digest) if digest is not None else None

    def change(self, number: str, **fields: Any) -> Token | None:
        """Other values for some of a token's fields; None when there is none of this id."""
        return self.change_all({number: fields}).get(number)

    def change_all(self, fields: Mapping[str, Mapping[str, Any]]) -> dict[str, Token]:
        """Other values for fields of several tokens, kept together; what is gone is left out."""
        with self._changing:
            known = {n: self._digests[n] for n in fields if n in self._digests}
            changed = {
                digest: structs.replace(self._by_digest[digest], **fields[number])
                for number, digest in known.items()
            }
            self._keep(changed)
            return {token.id: token for token in changed.values()}

    def revoke(self, number: str) -> Token | None:
        """Make a token worthless; None when there is none of this id."""
        return self.change(number, revoked=True, expires_ns=self._now_ns())

    def spend(self, number: str) -> bool:
        """Use up a token that is good once; False where somebody was faster."""
        if number in self._spent:
            return False
        self._spent.add(number)
        return True

    def take_use(self, number: str) -> bool:
        """Count a node that joins with a token; False where it has been used up."""
        with self._changing:
            token = self.get(number)
            if token is None or (token.uses and token.used >= token.uses):
                return False
            if token.uses:
                self.change(number, used=token.used + 1)
            return True

    def bound_sessions(self, number: str) -> None:
        """Forget the oldest links and sessions of a token's kin, where there are too many.

        And those of anybody that are good no more, since one that they come from is gone.
        """
        with self._changing:
            origin = self._origin(number)
            made = {t.id: self._origin(t.id) for t in self.all() if t.parent}
            kin = [each for each, known in made.items() if known == origin]
            orphans = [each for each, known in made.items() if not known]
            for each in (*orphans, *kin[: max(0, len(kin) - MOST_SESSIONS + 1)]):
                self.drop(each)

    def _origin(self, number: str) -> str:
        """The token that one comes from, through links and sessions; "": it is gone."""
        for _ in range(MOST_PARENTS):
            token = self.get(number)
            if token is None:
                return ""
            if not token.parent:
                return number
            number = token.parent
        return ""

    def drop(self, number: str) -> None:
        """Forget a token."""
        with self._changing:
            digest = self._digests.get(number)
            if digest is None:
                return
            self._store.drop_token(number)
            self._forget(digest, self._by_digest[digest])

    def prune(self) -> int:
        """Forget tokens that have been worthless for a while; how many there were."""
        since = self._now_ns() - KEEP_HOURS * HOUR_NS
        over = [
            token.id
            for token in self.all()
            if 0 < token.expires_ns < since
            or (token.role == "login" and not self.alive(token.id))
            or (token.revoked and not token.expires_ns and token.created_ns < since)
            or (token.parent and self.get(token.parent) is None)
        ]
        for number in over:
            self.drop(number)
        return len(over)

    def of_node(self, name: str) -> list[Token]:
        """Tokens of a node's agents, oldest first."""
        known = (self.get(number) for number in list(self._of_node.get(name, ())))
        return [token for token in known if token is not None]

    def agent_of(self, name: str) -> Token | None:
        """The token of a node that has shown its key; None: there is no such node."""
        good = [t for t in self.of_node(name) if not (t.pending or t.unconfirmed or t.revoked)]
        return good[-1] if good else None

    def check(self, secret: str) -> Token:
        """The record of a token that is good now; AuthError otherwise."""
        token = self._by_digest.get(_digest(secret))
        if token is None or self._revoked(token):
            raise AuthError(
                401,
                "wrong_token",
                "this token is not known here (or was revoked): ask an administrator for one "
                "(`phalanx token create`)",
            )
        if token.expires_ns and token.expires_ns <= self._now_ns():
            ended = datetime.fromtimestamp(token.expires_ns / 1e9, UTC)
            role = ASKED_AS.get(token.role, token.role)
            raise AuthError(
                401,
                "expired_token",
                f"this token expired at {ended:%Y-%m-%d %H:%M:%S} UTC: an administrator makes a "
                f"new one with `phalanx token create NAME --role {role}`",
            )
        return token

    def alive(self, number: str) -> bool:
        """Whether a token that was good before still is."""
        token = self.get(number)
        if token is None or self._revoked(token):
            return False
        return not token.expires_ns or token.expires_ns > self._now_ns()

    def _revoked(self, token: Token) -> bool:
        """Whether it, or one that it was made with, was revoked or is forgotten."""
        for _ in range(MOST_PARENTS):
            if token.revoked:
                return True
            if not token.parent:
                return False
            parent = self.get(token.parent)
            if parent is None:
                return True
            token = parent
        return True

    @contextmanager
    def together(self) -> Iterator[None]:
        """What is made or changed inside is known there, and stored at the end, all or nothing.

        Secrets of new tokens may be handed out after that.
        """
        with self._changing:
            self._unstored = {}
            try:
                yield
                self._put({d: self._by_digest[d] for d in self._unstored if d in self._by_digest})
            except BaseException:
                for digest, before in self._unstored.items():
                    known = self._by_digest.get(digest)
                    if known is not None and before is None:
                        self._forget(digest, known)
                    elif known is not None and before is not None:
                        self._remember(digest, before)
                raise
            finally:
                self._unstored = None

    def _keep(self, tokens: Mapping[bytes, Token]) -> None:
        """Store tokens by their digests, then know them."""
        with self._changing:
            if self._unstored is None:
                self._put(tokens)
            for digest, token in tokens.items():
                if self._unstored is not None:
                    self._unstored.setdefault(digest, self._by_digest.get(digest))
                self._remember(digest, token)

    def _put(self, tokens: Mapping[bytes, Token]) -> None:
        kept = {
            token.id: msgspec.msgpack.encode(KeptToken(digest, token))
            for digest, token in tokens.items()
        }
        self._store.put_tokens(kept)

    def _remember(self, digest: bytes, token: Token) -> None:
        self._by_digest[digest] = token
        self._digests[token.id] = digest
        if token.node:
            self._of_node.setdefault(token.node, {})[token.id] = None

    def _forget(self, digest: bytes, token: Token) -> None:
        del self._by_digest[digest], self._digests[token.id]
        self._spent.discard(token.id)
        if token.node in self._of_node:
            self._of_node[token.node].pop(token.id, None)


def _digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode()).digest()


def bearer(header: str | None) -> str:
    """The token of an Authorization header."""
    kind, _, secret = (header or "").partition(" ")
    if kind.lower() != "bearer" or not secret.strip():
        raise AuthError(
            401,
            "no_token",
            "give a token: `Authorization: Bearer …` (the command line reads PHALANX_TOKEN, "
            "PHALANX_TOKEN_FILE, or the file in the server's state folder)",
        )
    return secret.strip()


def require(token: Token, roles: tuple[Role, ...]) -> None:
    """AuthError unless the token's role is one of these."""
    if token.role not in roles:
        wanted = " or ".join(ASKED_AS.get(role, role) for role in roles)
        raise AuthError(
            403, "wrong_role", f"this needs the role {wanted}; the token's role is {token.role}"
        )


def may_see(token: Token, team: str) -> bool:
    """Whether the token's owner may know of a team's jobs."""
    return token.role == "admin" or not token.team or token.team == team
