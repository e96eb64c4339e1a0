from __future__ import annotations

from pathlib import Path

from phalanx.control.server.store.interface import open_store
from phalanx.control.trust.server_key import load_server_key, signed_by


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
