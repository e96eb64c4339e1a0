"""The server's key is its store's; its half of an agreement is prepared for nodes that join."""

from __future__ import annotations

from pathlib import Path

import pytest

from phalanx.control.server.store.interface import open_store
from phalanx.control.trust import server_key
from phalanx.control.trust.node_key import NodeClaim, NodeKey, proved
from phalanx.control.trust.server_key import KeyAgreement, ServerKey, load_server_key, signed_by

SERVER = ServerKey(bytes(32))
CLAIM = NodeClaim(b"once" * 4, SERVER.public, "n1", "machine-1")


def test_a_cluster_has_one_key_that_its_store_keeps(tmp_path: Path) -> None:
    store = open_store("", tmp_path)
    store.lead("http://a", "1")
    key = load_server_key(store)
    signature = key.sign(b"an order")
    assert load_server_key(store).public == key.public
    assert signed_by(key.public, signature, b"an order")
    assert not signed_by(key.public, signature, b"another order")
    assert not signed_by(b"no key", signature, b"an order")
    assert not signed_by(key.public, b"no signature", b"an order")
    store.close()


def test_a_prepared_agreement_is_the_same_and_is_used_once() -> None:
    node, server = KeyAgreement(b"\1" * 32), KeyAgreement(b"\2" * 32)
    server.prepare(node.public)
    assert len(server._prepared) == 1
    agreed = server.with_peer(node.public)
    assert agreed == node.with_peer(server.public) and not server._prepared
    assert server.with_peer(node.public) == agreed


def test_a_node_that_the_server_prepared_for_still_has_to_know_its_key() -> None:
    server, node, other = ServerKey(bytes(32)), NodeKey(b"\1" * 32), NodeKey(b"\2" * 32)
    server.agreement.prepare(bytes.fromhex(node.public))
    stolen = other.prove(CLAIM, server.agreement.public)
    assert not proved(server, node.public, stolen, CLAIM)
    assert proved(server, node.public, node.prove(CLAIM, server.agreement.public), CLAIM)


def test_what_is_no_key_is_not_prepared_and_refused_later() -> None:
    server = KeyAgreement(b"\2" * 32)
    server.prepare(bytes(32))  # a point with which every agreement would be the same
    server.prepare(b"short")
    assert not server._prepared
    with pytest.raises(ValueError, match="shared key"):
        server.with_peer(bytes(32))


def test_joins_without_end_do_not_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_key, "MOST_PREPARED", 3)
    server = KeyAgreement(b"\2" * 32)
    nodes = [KeyAgreement(bytes([number]) * 32) for number in range(3, 10)]
    for node in nodes:
        server.prepare(node.public)
    assert len(server._prepared) == 3
    assert all(server.with_peer(n.public) == n.with_peer(server.public) for n in nodes)
