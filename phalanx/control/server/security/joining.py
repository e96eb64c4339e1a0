"""Who becomes a node: join tokens, keys of nodes, and what an administrator decides.

A node's agent has a token that is bound to the node's key. What joins under the name of a node
that is there, with another key, is another machine, or the same one installed anew: it replaces
nothing before somebody has let it in.
"""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple, TypeVar

from phalanx.cluster.policy import JoinPolicy
from phalanx.control.server.security.auth import AuthError, Token, Tokens
from phalanx.control.trust.node_key import fingerprint

UNCONFIRMED_HOURS = 1.0  # for an agent to show that it has the key it joined with
PENDING_HOURS = 168.0  # for an administrator to decide
MOST_WAITING = 4  # keys that wait, or tokens that nobody has confirmed, by node
MOST_PENDING = 10_000  # of all nodes together
GATHER_SECONDS = 0.01  # that the first of several waits for the others

Question = TypeVar("Question")
Answer = TypeVar("Answer")


class NameTakenError(Exception):
    """Another machine is connected under this name."""


def is_network(text: str) -> bool:
    """Whether this is a network, such as 10.0.0.0/8."""
    try:
        ipaddress.ip_network(text, strict=False)
    except ValueError:
        return False
    return True


def refuse_elsewhere(token: Token, client: str) -> None:
    """AuthError where a token is used outside its network."""
    if not token.network:
        return
    try:
        address = ipaddress.ip_address(client)
    except ValueError:
        address = None
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    if address is None or address not in ipaddress.ip_network(token.network, strict=False):
        text = f"this token is good from {token.network} only, not from {client or 'elsewhere'}"
        raise AuthError(403, "wrong_network", text)


class JoinAsked(NamedTuple):
    """An agent that wants a token, with the join token that it showed."""

    join: Token
    name: str
    machine: str
    key: str
    connected: bool  # an agent is, under this name


class Gathered(Generic[Question, Answer]):
    """Answers questions together: thousands at a time are stored at once, not one by one.

    ``answer_all`` runs in a thread; an error of its own is that of each question.
    """

    def __init__(
        self, answer_all: Callable[[list[Question]], Sequence[Answer | Exception]]
    ) -> None:
        self._answer_all = answer_all
        self._asked: list[tuple[Question, asyncio.Future[Answer]]] = []
        self._answering: asyncio.Task[None] | None = None

    async def ask(self, question: Question) -> Answer:
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._asked.append((question, answer))
        if self._answering is None:
            self._answering = asyncio.create_task(self._answer())
        return await answer

    async def _answer(self) -> None:
        while self._asked:
            await asyncio.sleep(GATHER_SECONDS)
            asked, self._asked = self._asked, []
            answers: Sequence[Answer | Exception]
            try:
                answers = await asyncio.to_thread(self._answer_all, [each for each, _ in asked])
            except Exception as error:  # each of them tells whoever asked
                answers = [error] * len(asked)
            for (_, answer), said in zip(asked, answers, strict=True):
                if answer.done():  # whoever asked may be gone
                    continue
                if isinstance(said, Exception):
                    answer.set_exception(said)
                else:
                    answer.set_result(said)
        self._answering = None


class Joining:
    """Decides about agents that join. ``own``: this server's nodes are started with it."""

    def __init__(self, tokens: Tokens, policy: JoinPolicy, *, own: bool) -> None:
        self._tokens, self._policy, self._own = tokens, policy, own
        self._joins = Gathered(self._join_all)
        self._confirmations = Gathered(self._confirm_all)

    async def join(self, asked: JoinAsked) -> tuple[str, Token]:
        """A token for an agent; worth nothing before the node has shown its key."""
        return await self._joins.ask(asked)

    def _join_all(self, asked: list[JoinAsked]) -> list[tuple[str, Token] | Exception]:
        answers: list[tuple[str, Token] | Exception] = []
        with self._tokens.together():
            for each in asked:
                try:
                    answers.append(self._join(*each))
                except (AuthError, NameTakenError) as error:
                    answers.append(error)
        return answers

    def _join(
        self, join: Token, name: str, machine: str, key: str, connected: bool
    ) -> tuple[str, Token]:
        registered = self._tokens.agent_of(name)
        same = registered is not None and registered.key == key
        if registered is not None and not same and connected:
            raise NameTakenError
        self._refuse_rejected(name, key)
        if not same and not self._tokens.take_use(join.id):
            text = f"{join.uses} nodes have joined with this token: that is all it is good for"
            raise AuthError(403, "token_used_up", text)
        pending = not same and self._waits(join, registered)
        self._evict(name, key, pending=pending)
        return self._tokens.create(
            "agent",
            name,
            hours=PENDING_HOURS if pending else UNCONFIRMED_HOURS,
            node=name,
            machine=machine,
            key=key,
            network=join.network,
            pending=pending,
            unconfirmed=True,
        )

    def _waits(self, join: Token, known: Token | None) -> bool:
        """Whether a person decides about a new node, or a known one with another key."""
        if self._policy.approval == "manual":
            return True
        if known is None:
            return not join.approves
        return self._policy.rekey == "manual" or (self._policy.rekey == "own" and not self._own)

    def _refuse_rejected(self, name: str, key: str) -> None:
        for token in self._tokens.of_node(name):
            if token.pending and token.revoked and token.key == key:
                text = f"an administrator has rejected {name} with the key {fingerprint(key)}"
                raise AuthError(403, "rejected", text)

    def _evict(self, name: str, key: str, *, pending: bool) -> None:
        """What was asked for before and never used goes; requests do not pile up."""
        waiting = [t for t in self._tokens.of_node(name) if t.unconfirmed and not t.revoked]
        for token in [t for t in waiting if t.key == key and t.pending == pending][:-1]:
            self._tokens.drop(token.id)
        others = {t.key for t in waiting} - {key}
        if len(others) >= MOST_WAITING or (pending and len(self.pending()) >= MOST_PENDING):
            text = "too many machines ask for this: an administrator decides (`phalanx nodes`)"
            raise AuthError(429, "too_many_pending", text)

    async def confirm(self, token: Token) -> Token:
        """A node has shown its key with this token: its older ones are worth nothing now."""
        return await self._confirmations.ask(token)

    def _confirm_all(self, shown: list[Token]) -> list[Token]:
        last = {token.node: token for token in shown}  # of a node that came twice
        for token in last.values():
            for other in self._tokens.of_node(token.node):
                if other.id != token.id and not other.pending:
                    self._tokens.drop(other.id)
        known = self._tokens.change_all(
            {t.id: {"unconfirmed": False, "expires_ns": 0, "key": t.key} for t in last.values()}
        )
        return [known.get(token.id, token) for token in shown]

    def pending(self) -> list[Token]:
        """Nodes that wait for an administrator, oldest first."""
        return [
            token
            for token in self._tokens.all()
            if token.pending and not token.revoked and self._tokens.alive(token.id)
        ]

    def decide(self, name: str, key: str, *, approve: bool) -> list[Token]:
        """Let a node in, or not; ``key``: the beginning of its fingerprint, where several wait."""
        waiting = [t for t in self.pending() if t.node == name]
        if key:
            waiting = [t for t in waiting if fingerprint(t.key).startswith(key)]
        if len({token.key for token in waiting}) > 1 and approve:
            found = ", ".join(sorted({fingerprint(token.key) for token in waiting}))
            text = f"several machines ask to be {name}: name the key with --key ({found})"
            raise AuthError(409, "several_keys", text)
        fields = {"pending": False} if approve else {"revoked": True}
        return [t for each in waiting if (t := self._tokens.change(each.id, **fields)) is not None]
