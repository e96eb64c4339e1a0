from __future__ import annotations

import pytest
from msgspec import structs

from phalanx.control.trust.node_key import NodeClaim, NodeKey, is_public_key, proved
from phalanx.control.trust.server_key import ServerKey

SERVER, NODE, OTHER = ServerKey(b"s" * 32), NodeKey(b"n" * 32), NodeKey(b"o" * 32)
CLAIM = NodeClaim(b"once", SERVER.public, "a", "machine-a")


def test_a_node_proves_that_it_has_its_key() -> None:
    assert proved(SERVER, NODE.public, NODE.prove(CLAIM, SERVER.agreement.public), CLAIM)


@pytest.mark.parametrize(
    "change",
    [{"nonce": b"twice"}, {"server": b"another"}, {"name": "b"}, {"machine": "machine-b"}],
)
def test_a_proof_is_good_for_what_was_asked_alone(change: dict[str, object]) -> None:
    proof = NODE.prove(CLAIM, SERVER.agreement.public)
    assert not proved(SERVER, NODE.public, proof, structs.replace(CLAIM, **change))


def test_nobody_else_can_prove_it() -> None:
    assert not proved(SERVER, NODE.public, OTHER.prove(CLAIM, SERVER.agreement.public), CLAIM)
    elsewhere = ServerKey(b"e" * 32)
    assert not proved(SERVER, NODE.public, NODE.prove(CLAIM, elsewhere.agreement.public), CLAIM)
    assert not proved(SERVER, NODE.public, b"", CLAIM)


@pytest.mark.parametrize("key", [bytes(32), (1).to_bytes(32, "little"), b"short"])
def test_a_key_with_which_everybody_agrees_is_none(key: bytes) -> None:
    assert not proved(SERVER, key.hex(), NODE.prove(CLAIM, SERVER.agreement.public), CLAIM)
    with pytest.raises(ValueError, match=r"X25519|shared key"):
        NODE.prove(CLAIM, key)


def test_a_key_has_one_name() -> None:
    key = bytearray.fromhex(NODE.public)
    key[31] |= 0x80  # the same key to X25519
    assert is_public_key(NODE.public)
    assert not is_public_key(bytes(key).hex()) and not is_public_key(NODE.public.upper())
    assert not is_public_key("ff" * 32) and not is_public_key("ab")
