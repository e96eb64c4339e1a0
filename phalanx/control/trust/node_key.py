"""A node's own key: made when it first joins, kept in its state folder, never sent anywhere.

Whoever connects as a node signs what the server asks: a number used once, for this server, in the
name of this node. An agent that has signed gets a link key for the next times, which it proves to
know in the same way: checking a signature for each of thousands of agents that come back at once
would hold up the server.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from pathlib import Path

import msgspec
from msgspec import Struct

from phalanx.control.trust.secret_file import read_text, write_secret
from phalanx.control.trust.server_key import private_key, signed_by

KEY_FILE = "node.key"
SERVER_FILE = "server.pub"  # the key of the server that this node joined
NONCE_HEADER = "x-phalanx-nonce"
SERVER_HEADER = "x-phalanx-server"  # the key of the server that asks
NONCE_BYTES = 16
PUBLIC_LETTERS = 64  # 32 bytes as hexadecimal digits


class NodeClaim(Struct, frozen=True, array_like=True):
    """What a node proves that it says itself."""

    nonce: bytes
    server: bytes  # its public key
    name: str
    machine: str

    def encode(self) -> bytes:
        """The bytes that are signed."""
        return b"phalanx node 1\0" + msgspec.msgpack.encode(self)


class NodeKey:
    """The key pair of this node."""

    def __init__(self, seed: bytes) -> None:
        self._key = private_key(seed)
        self.public: str = self._key.public_key().public_bytes_raw().hex()

    def sign(self, asked: NodeClaim) -> bytes:
        """The proof that this node has its key."""
        return self._key.sign(asked.encode())


def node_key(state: Path) -> NodeKey:
    """The key in a state folder; made when there is none."""
    path = state / KEY_FILE
    text = read_text(path)
    if not text:
        state.mkdir(mode=0o700, parents=True, exist_ok=True)
        text = secrets.token_hex(32)
        write_secret(path, text)
    return NodeKey(bytes.fromhex(text))


def is_public_key(text: str) -> bool:
    """Whether this can be a node's public key."""
    try:
        return len(text) == PUBLIC_LETTERS and len(bytes.fromhex(text)) == PUBLIC_LETTERS // 2
    except ValueError:
        return False


def fingerprint(public: str) -> str:
    """A key in few letters, for people to compare."""
    return f"sha256:{hashlib.sha256(bytes.fromhex(public)).hexdigest()[:16]}" if public else ""


def signed(public: str, proof: bytes, asked: NodeClaim) -> bool:
    """Whether the node with this key signed what it was asked."""
    return signed_by(bytes.fromhex(public), proof, asked.encode())


def link_key(secret: bytes, token: str, public: str) -> bytes:
    """What an agent that has signed once proves to know from then on."""
    return hmac.digest(secret, f"{token} {public}".encode(), "sha256")


def link_proof(link: bytes, asked: NodeClaim) -> bytes:
    """The proof that an agent knows its link key."""
    return hmac.digest(link, asked.encode(), "sha256")
