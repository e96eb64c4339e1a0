"""A node's own key: made when it first joins, kept in its state folder, never sent anywhere.

Whoever connects as a node shows that it knows the key which this node and the server agree on,
over a number used once, for this server, in the name of this node. An agent that has shown it gets
a link key for the next times, which it proves to know in the same way: an agreement with each of
thousands of agents that come back at once would hold up the server.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from pathlib import Path

import msgspec
from msgspec import Struct

from phalanx.control.trust.secret_file import read_text, write_secret
from phalanx.control.trust.server_key import KeyAgreement, ServerKey, private_key

KEY_FILE = "node.key"
SERVER_FILE = "server.pub"  # the key of the server that this node joined
NONCE_HEADER = "x-phalanx-nonce"
SERVER_HEADER = "x-phalanx-server"  # the key of the server that asks
AGREEMENT_HEADER = "x-phalanx-agreement"  # its other public key, to agree on one with
NONCE_BYTES = 16
PUBLIC_LETTERS = 64  # 32 bytes as hexadecimal digits
LINK_BYTES = 32
SIGNING = b"phalanx node signature 1"
PRIME = (1 << 255) - 19  # of the curve: a public key is a number below it


class NodeClaim(Struct, frozen=True, array_like=True):
    """What a node proves that it says itself."""

    nonce: bytes
    server: bytes  # its public key
    name: str
    machine: str

    def encode(self) -> bytes:
        """The bytes that are proved."""
        return b"phalanx node 2\0" + msgspec.msgpack.encode(self)


class NodeKey:
    """The key pair of this node, and a second one, from the same seed, that it signs with."""

    def __init__(self, seed: bytes) -> None:
        self._seed = seed
        self._agreement = KeyAgreement(seed)
        self.public: str = self._agreement.public.hex()

    def sign(self, data: bytes) -> tuple[str, str]:
        """The signature of some bytes, and the public key (Ed25519) that it is checked with."""
        key = private_key(hmac.digest(self._seed, SIGNING, "sha256"))
        return key.sign(data).hex(), key.public_key().public_bytes_raw().hex()

    def agree(self, server: bytes) -> bytes:
        """The key that this node and the server with this public key have in common."""
        return self._agreement.with_peer(server)

    def prove(self, asked: NodeClaim, server: bytes) -> bytes:
        """The proof that this node has its key; ``server``: what it agrees with."""
        return claim_proof(self.agree(server), asked)


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
        key = bytes.fromhex(text)
    except ValueError:
        return False
    # Several numbers and spellings stand for one key: only one of them is its name.
    return key.hex() == text and len(text) == PUBLIC_LETTERS and _number(key) < PRIME


def is_hexadecimal(text: str, count: int) -> bool:
    """Whether this is so many bytes as hexadecimal digits."""
    try:
        return len(bytes.fromhex(text)) == count
    except ValueError:
        return False


def _number(key: bytes) -> int:
    return int.from_bytes(key, "little")


def fingerprint(public: str) -> str:
    """A key in few letters, for people to compare."""
    return f"sha256:{hashlib.sha256(bytes.fromhex(public)).hexdigest()[:16]}" if public else ""


def proved(server: ServerKey, public: str, proof: bytes, asked: NodeClaim) -> bool:
    """Whether this comes from the node with this public key."""
    try:
        agreed = server.agreement.with_peer(bytes.fromhex(public))
    except ValueError:
        return False
    return hmac.compare_digest(claim_proof(agreed, asked), proof)


def link_key(secret: bytes, token: str, public: str) -> bytes:
    """What an agent that has shown its key proves to know from then on."""
    return _keyed(secret, f"{token} {public}".encode())


def claim_proof(key: bytes, asked: NodeClaim) -> bytes:
    """The proof of whoever knows the agreed key, or the link key."""
    return _keyed(key, asked.encode())


def _keyed(key: bytes, data: bytes) -> bytes:
    """A code that nobody makes without the key; HMAC would take ten times as long here."""
    return hashlib.blake2b(data, key=key, digest_size=LINK_BYTES).digest()
