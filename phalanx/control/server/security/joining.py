"""Who becomes a node: join tokens, keys of nodes, and what an administrator decides.

A node's agent has a token that is bound to the node's key. What joins under the name of a node
that is there, with another key, is another machine, or the same one installed anew: it replaces
nothing before somebody has let it in.
"""

from __future__ import annotations

import asyncio
import ipaddress

from phalanx.cluster.policy import JoinPolicy
from phalanx.control.server.security.auth import AuthError, Token, Tokens
from phalanx.control.trust.node_key import fingerprint

UNCONFIRMED_HOURS = 1.0  # for an agent to show that it has the key it joined with
PENDING_HOURS = 168.0  # for an administrator to decide
MOST_WAITING = 4  # keys that wait, or tokens that nobody has confirmed, by node
MOST_PENDING = 10_000  # of all nodes together
GATHER_SECONDS = 0.01  # that the first of several confirmations waits for the others


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


class Joining:
    """Decides about agents that join. ``own``: this server's nodes are started with it."""

    def __init__(self, tokens: Tokens, policy: JoinPolicy, *, own: bool) -> None:
        self._tokens, self._policy, self._own = tokens, policy, own
        self._shown: list[tuple[Token, asyncio.Future[Token]]] = []  # keys, not yet stored
        self._confirming: asyncio.Task[None] | None = None

    def join(
        self, join: Token, name: str, machine: str, key: str, *, connected: bool
    ) -> tuple[str, Token]:
        """A token for an agent; worth nothing before the node has shown its key."""
        known = self._tokens.agent_of(name)
        same = known is not None and known.key == key
        if known is not None and not same and connected:
            raise NameTakenError
        self._refuse_rejected(name, key)
        if not same and not self._tokens.take_use(join.id):
            text = f"{join.uses} nodes have joined with this token: that is all it is good for"
            raise AuthError(403, "token_used_up", text)
        pending = not same and self._waits(join, known)
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
        """A node has shown its key with this token: its older ones are worth nothing now.

        Thousands of agents that come for the first time are stored together, not one by one.
        """
        confirmed: asyncio.Future[Token] = asyncio.get_running_loop().create_future()
        self._shown.append((token, confirmed))
        if self._confirming is None:
            self._confirming = asyncio.create_task(self._confirm_shown())
        return await confirmed

    async def _confirm_shown(self) -> None:
        while self._shown:
            await asyncio.sleep(GATHER_SECONDS)
            shown, self._shown = self._shown, []
            try:
                known = await asyncio.to_thread(self._confirm_all, [token for token, _ in shown])
            except Exception as error:  # each of them tells its agent
                for _, confirmed in shown:
                    if not confirmed.done():
                        confirmed.set_exception(error)
                continue
            for token, confirmed in shown:
                if not confirmed.done():  # its connection may be gone
                    confirmed.set_result(known.get(token.id, token))
        self._confirming = None

    def _confirm_all(self, shown: list[Token]) -> dict[str, Token]:
        last = {token.node: token for token in shown}  # of a node that came twice
        for token in last.values():
            for other in self._tokens.of_node(token.node):
                if other.id != token.id and not other.pending:
                    self._tokens.drop(other.id)
        return self._tokens.change_all(
            {t.id: {"unconfirmed": False, "expires_ns": 0, "key": t.key} for t in last.values()}
        )

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
