"""Connections between keepers of two nodes: proof of the token, sealed if told, held to a rate.

The token never travels. Sealed means AES-256-GCM with keys of an exchange (X25519) that is thrown
away with the connection: who only listens learns nothing, even with the token.

    server: wants, nonce            client: sealed, nonce, public key, proof
    server: public key, proof       then frames (sealed) or bytes as they are
"""

from __future__ import annotations

import hashlib
import hmac
import os
import socket
import struct
import threading
import time
from typing import Any, Protocol

from msgspec import Struct

NONCE_BYTES = KEY_BYTES = PROOF_BYTES = 32
FRAME_BYTES = 1 << 20
TAG_BYTES = 16
HELLO_BYTES = 1 + NONCE_BYTES
REPLY_BYTES = 1 + NONCE_BYTES + KEY_BYTES + PROOF_BYTES
REPLICA_KEY = "PHALANX_REPLICA_KEY"  # environment of a keeper: the token of all keepers of its job
PROOF_SECONDS = 10.0  # for either side to show that it knows the token

_LENGTH = struct.Struct("<I")


class ChannelError(ConnectionError):
    """The other side is not who it should be, or speaks another way."""


class ChannelClosedError(ChannelError):
    """The other side ended the connection."""


class ByteStream(Protocol):
    """What messages are sent over: a socket, or a sealed channel."""

    def sendall(self, data: Any, /) -> None: ...

    def recv_into(self, buffer: Any, /) -> int: ...

    def settimeout(self, seconds: float | None, /) -> None: ...

    def shutdown(self, how: int, /) -> None: ...

    def close(self) -> None: ...


class ReplicaOptions(Struct, frozen=True):
    """How a node's keepers exchange replicas; agents and people set it in the environment."""

    address: str = ""  # that other keepers connect to; "": the one towards the rendezvous
    encrypt: bool = False
    bytes_per_second: int = 0  # of replicas that are sent; 0: not limited

    @classmethod
    def from_environment(cls) -> ReplicaOptions:
        """As PHALANX_REPLICA_… say."""
        return cls(
            address=os.environ.get("PHALANX_REPLICA_ADDRESS", ""),
            encrypt=os.environ.get("PHALANX_REPLICA_ENCRYPT", "") == "1",
            bytes_per_second=int(os.environ.get("PHALANX_REPLICA_BYTES_PER_SECOND") or 0),
        )

    def environment(self) -> dict[str, str]:
        """The inverse of ``from_environment``."""
        return {
            "PHALANX_REPLICA_ADDRESS": self.address,
            "PHALANX_REPLICA_ENCRYPT": "1" if self.encrypt else "",
            "PHALANX_REPLICA_BYTES_PER_SECOND": str(self.bytes_per_second),
        }


class Throttle:
    """Lets so many bytes a second pass; short bursts are free."""

    def __init__(self, bytes_per_second: int) -> None:
        self._rate = bytes_per_second
        self._free_at = time.monotonic()
        self._lock = threading.Lock()

    def take(self, count: int) -> None:
        """Wait until so many bytes may go."""
        if self._rate <= 0:
            return
        with self._lock:
            now = time.monotonic()
            self._free_at = max(self._free_at, now) + count / self._rate
            wait = self._free_at - now
        time.sleep(max(0.0, wait))

    def parts(self, data: memoryview) -> list[memoryview]:
        """Data in pieces that are sent one by one; in one where nothing is limited."""
        step = FRAME_BYTES if self._rate > 0 else max(1, len(data))
        return [data[start : start + step] for start in range(0, len(data), step)]


def connect(
    host: str, port: int, token: bytes, seconds: float, *, encrypt: bool = False
) -> ByteStream:
    """To another node's keeper; sealed where either side wants it."""
    connection = socket.create_connection((host, port), seconds)
    try:
        return _prove(connection, token, encrypt)
    except BaseException:
        connection.close()
        raise


def _prove(connection: socket.socket, token: bytes, encrypt: bool) -> ByteStream:
    hello = _receive(connection, HELLO_BYTES)
    sealed = encrypt or bool(hello[0])
    private, public = _key_pair() if sealed else (None, bytes(KEY_BYTES))
    reply = bytes([sealed]) + os.urandom(NONCE_BYTES) + public
    connection.sendall(reply + _proof(token, b"client", hello + reply))
    answer = _receive(connection, KEY_BYTES + PROOF_BYTES)
    theirs, proof = answer[:KEY_BYTES], answer[KEY_BYTES:]
    script = hello + reply + theirs
    if not hmac.compare_digest(proof, _proof(token, b"server", script)):
        raise ChannelError("whoever answers there does not know the token")
    if private is None:
        return connection
    sending, receiving = _keys(private, theirs, script)
    return SealedStream(connection, sending, receiving)


def accept(connection: socket.socket, token: bytes, *, encrypt: bool = False) -> ByteStream:
    """Whoever connected, once it has shown that it knows the token."""
    connection.settimeout(PROOF_SECONDS)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # nodes vanish silently
    hello = bytes([encrypt]) + os.urandom(NONCE_BYTES)
    connection.sendall(hello)
    answer = _receive(connection, REPLY_BYTES)
    reply, proof = answer[:-PROOF_BYTES], answer[-PROOF_BYTES:]
    if not hmac.compare_digest(proof, _proof(token, b"client", hello + reply)):
        raise ChannelError("it does not know this keeper's token")
    sealed = bool(reply[0])
    if encrypt and not sealed:
        raise ChannelError("it does not encrypt")
    private, public = _key_pair() if sealed else (None, bytes(KEY_BYTES))
    script = hello + reply + public
    connection.sendall(public + _proof(token, b"server", script))
    connection.settimeout(None)
    if private is None:
        return connection
    receiving, sending = _keys(private, reply[1 + NONCE_BYTES :], script)
    return SealedStream(connection, sending, receiving)


def _receive(connection: socket.socket, count: int) -> bytes:
    received = b""
    while len(received) < count:
        data = connection.recv(count - len(received))
        if not data:
            raise ChannelClosedError("the other side closed the connection")
        received += data
    return received


def _proof(token: bytes, who: bytes, script: bytes) -> bytes:
    return hmac.new(token, who + script, hashlib.sha256).digest()


def _key_pair() -> tuple[Any, bytes]:
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

    private = X25519PrivateKey.generate()
    return private, private.public_key().public_bytes_raw()


def _keys(private: Any, theirs: bytes, script: bytes) -> tuple[bytes, bytes]:
    """One key for what the client sends, one for what the server sends."""
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PublicKey
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    shared = private.exchange(X25519PublicKey.from_public_bytes(theirs))
    salt = hashlib.sha256(script).digest()
    both = HKDF(SHA256(), 2 * KEY_BYTES, salt, b"phalanx replica").derive(shared)
    return both[:KEY_BYTES], both[KEY_BYTES:]


class SealedStream:
    """Bytes in frames, each encrypted and authenticated; a changed or lost one ends it."""

    def __init__(self, connection: socket.socket, sending: bytes, receiving: bytes) -> None:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        self._connection = connection
        self._seal, self._open = AESGCM(sending), AESGCM(receiving)
        self._sent = self._received = 0
        self._rest = memoryview(b"")

    def sendall(self, data: Any, /) -> None:
        """Send all of it."""
        view = memoryview(data).cast("B")
        for start in range(0, len(view), FRAME_BYTES):
            body = self._seal.encrypt(_nonce(self._sent), view[start : start + FRAME_BYTES], None)
            self._sent += 1
            self._connection.sendall(_LENGTH.pack(len(body)))
            self._connection.sendall(body)

    def recv_into(self, buffer: Any, /) -> int:
        """Some bytes; 0 when the other side is gone."""
        if not self._rest and not self._next():
            return 0
        count = min(len(buffer), len(self._rest))
        buffer[:count] = self._rest[:count]
        self._rest = self._rest[count:]
        return count

    def _next(self) -> bool:
        from cryptography.exceptions import InvalidTag

        try:
            (size,) = _LENGTH.unpack(_receive(self._connection, _LENGTH.size))
            if not TAG_BYTES < size <= FRAME_BYTES + TAG_BYTES:
                raise ChannelError(f"a frame of {size} bytes")
            body = bytearray(size)
            view, done = memoryview(body), 0
            while done < size:
                count = self._connection.recv_into(view[done:])
                if count == 0:
                    return False
                done += count
            self._rest = memoryview(self._open.decrypt(_nonce(self._received), body, None))
        except InvalidTag:
            raise ChannelError("a frame was changed on its way") from None
        except ChannelClosedError:
            return False
        self._received += 1
        return True

    def settimeout(self, seconds: float | None, /) -> None:
        """As of a socket."""
        self._connection.settimeout(seconds)

    def shutdown(self, how: int, /) -> None:
        """As of a socket: also for a thread that waits in another method."""
        self._connection.shutdown(how)

    def close(self) -> None:
        """As of a socket."""
        self._connection.close()


def _nonce(number: int) -> bytes:
    """Never used twice with one key: keys are a connection's own."""
    return number.to_bytes(12, "little")


def interface_address(name: str) -> str:
    """The IPv4 address of a network interface; OSError says what is wrong."""
    import fcntl

    request = struct.pack("256s", name.encode()[:15])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe.fileno(), 0x8915, request)  # SIOCGIFADDR
        except OSError as error:
            known = ", ".join(each for _, each in socket.if_nameindex())
            raise OSError(
                error.errno, f"interface {name!r} has no address here; there are: {known}"
            ) from None
    return socket.inet_ntoa(answer[20:24])
