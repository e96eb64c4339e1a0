"""The cluster's own key: what its server signs, and how agents tell that server from another.

It is made from a secret of the store, so that a standby has the same one; it stands in no event.
A second pair, from the same secret, agrees on a key with each node (X25519): a node that has its
own key knows that one too, and whether it does is seen at a third of the price of a signature.
"""

from __future__ import annotations

import hmac
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

SECRET = "server_key"
ORDER = b"phalanx order 1\n"  # before an order, so that no other signature passes for one of it
AGREEMENT = b"phalanx agreement 1"
MOST_PREPARED = 20_000  # peers that have joined and not come yet


class SecretStore(Protocol):
    """Whoever keeps the cluster's secrets."""

    def secret(self, name: str) -> bytes:
        """Random bytes that are made when they are first asked for, and stay."""


class KeyAgreement:
    """An X25519 key pair: from it and the other's public key both sides get the same secret."""

    def __init__(self, seed: bytes) -> None:
        self._key = _agreement_key(seed)
        self.public: bytes = self._key.public_key().public_bytes_raw()
        self._prepared: dict[bytes, bytes] = {}  # agreed keys, by the peer's

    def prepare(self, public: bytes) -> None:
        """Agree with a peer that is about to come: thousands may come at once."""
        with suppress(ValueError):
            self._prepared[public] = self._agree(public)
        if len(self._prepared) > MOST_PREPARED:
            del self._prepared[next(iter(self._prepared))]

    def with_peer(self, public: bytes) -> bytes:
        """The key that only this side and the peer know; ValueError where that is no public key."""
        prepared = self._prepared.pop(public, None)
        return self._agree(public) if prepared is None else prepared

    def _agree(self, public: bytes) -> bytes:
        from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PublicKey

        return self._key.exchange(X25519PublicKey.from_public_bytes(public))


class ServerKey:
    """An Ed25519 key pair; ``public`` is what agents pin when they join."""

    def __init__(self, seed: bytes) -> None:
        self._key = private_key(seed)
        self.public: bytes = self._key.public_key().public_bytes_raw()
        self.agreement = KeyAgreement(hmac.digest(seed, AGREEMENT, "sha256"))

    def sign_order(self, order: bytes) -> bytes:
        """The signature of an order to agents."""
        return self.sign(ORDER + order)

    def sign(self, data: bytes) -> bytes:
        """The signature of some bytes."""
        return self._key.sign(data)


def load_server_key(store: SecretStore) -> ServerKey:
    """The key of the cluster whose log this is; made at the first start."""
    return ServerKey(store.secret(SECRET))


def private_key(seed: bytes) -> Ed25519PrivateKey:
    """The key that 32 random bytes stand for."""
    # Imported here: a command that speaks to no agent starts without it.
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    return Ed25519PrivateKey.from_private_bytes(seed)


def _agreement_key(seed: bytes) -> X25519PrivateKey:
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

    return X25519PrivateKey.from_private_bytes(seed)


def signed_by(public: bytes, signature: bytes, data: bytes) -> bool:
    """Whether the owner of a public key signed these bytes."""
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    try:
        Ed25519PublicKey.from_public_bytes(public).verify(signature, data)
    except (InvalidSignature, ValueError):
        return False
    return True


def ordered_by(public: bytes, signature: bytes, order: bytes) -> bool:
    """Whether the owner of a public key signed these bytes as an order to agents."""
    return signed_by(public, signature, ORDER + order)
