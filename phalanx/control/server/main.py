"""Runs a server until it is told to stop."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import resource
import signal
import socket
from collections.abc import Callable, Coroutine, Iterator
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import uvicorn
from uvicorn.config import Config

from phalanx import __version__
from phalanx.control.server.agent_link.connection import AgentSocket
from phalanx.control.server.app import make_app
from phalanx.control.server.http.front import NewConnection, Turns
from phalanx.control.server.http.http_connection import HEAD_SECONDS
from phalanx.control.server.process import Options, Server
from phalanx.control.server.store.interface import StoreError
from phalanx.control.trust.certificates import (
    CERTIFICATE_FILE,
    KEY_FILE,
    Authority,
    hosts_of,
    is_current,
    write_certificate,
)
from phalanx.control.trust.tls import TlsError, check_server_files
from phalanx.control.wire.server_file import ServerFile

logger = logging.getLogger("phalanx.server")

RENEW_SECONDS = 86_400.0  # between two looks at the certificate
LISTENERS = 16  # on the one socket
BACKLOG = 8192  # a whole fleet connects at once after a restart
MOST_FRAME_BYTES = 16 << 20


class StartError(Exception):
    """The server cannot start here, and why."""


Beside = Callable[[Server], Coroutine[Any, Any, None]]


def serve(
    options: Options,
    started: Callable[[Server], None] = lambda _: None,
    beside: Beside | None = None,
) -> None:
    """Serves until SIGINT, SIGTERM or SIGHUP. ``started`` is called once it leads or stands by.

    What runs ``beside`` it is cancelled, and waited for, before the server ends.
    """
    if options.tls_cert is not None and options.tls_key is not None:
        try:
            check_server_files(options.tls_cert, options.tls_key)
        except TlsError as error:
            raise StartError(str(error)) from None
    _raise_file_limit()
    listening = _listen(options)
    port = listening.getsockname()[1]
    try:
        server = Server(options)
    except StoreError as error:
        listening.close()
        raise StartError(str(error)) from None
    scheme = "https" if options.tls_cert or options.own_tls else "http"
    host = "127.0.0.1" if options.host in ("0.0.0.0", "::") else options.host
    server.url = options.url or f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"
    config = Config(
        make_app(server),
        http=partial(NewConnection, partial(AgentSocket, server), server.gate, Turns()),  # type: ignore[arg-type]
        ws="websockets-sansio",
        ws_max_size=MOST_FRAME_BYTES,
        ws_ping_interval=None,
        ws_per_message_deflate=False,
        access_log=False,
        log_level="warning",
        log_config=None,
        lifespan="off",
        proxy_headers=False,
        server_header=False,
        backlog=BACKLOG,
        timeout_graceful_shutdown=3,
        h11_max_incomplete_event_size=64 << 10,
        ssl_certfile=options.tls_cert,
        ssl_keyfile=options.tls_key,
    )
    with asyncio.Runner(loop_factory=_with_deadline(config.get_loop_factory())) as runner:
        try:
            runner.run(_run(server, config, listening, started, beside))
        finally:
            server.close()


class _Web(uvicorn.Server):
    """uvicorn's server; signals are ours, so that the log is closed in order behind it."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """The first signal ends the server; a second one has the usual effect."""
        loop = asyncio.get_running_loop()
        ending = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as under nohup
            ending.append(signal.SIGHUP)

        def stop() -> None:
            self.should_exit = True
            for each in ending:
                loop.remove_signal_handler(each)

        for each in ending:
            loop.add_signal_handler(each, stop)
        yield


async def _run(
    server: Server,
    config: Config,
    listening: socket.socket,
    started: Callable[[Server], None],
    beside: Beside | None,
) -> None:
    web = _Web(config)
    leading = asyncio.create_task(server.lead_forever())
    settled = asyncio.create_task(server.settled.wait())
    # Until it leads or stands by nobody can connect: a fleet that tries costs it nothing meanwhile.
    await asyncio.wait([leading, settled], return_when=asyncio.FIRST_COMPLETED)
    settled.cancel()
    serving: asyncio.Task[None] | None = None
    other: asyncio.Task[None] | None = None
    if server.settled.is_set():
        if server.options.own_tls:
            await _own_tls(server, config, leading)
        # The loop takes one connection from each listener in a turn: with one alone, everybody
        # would wait for as many turns as others knocked before.
        listeners = [listening, *(listening.dup() for _ in range(LISTENERS - 1))]
        serving = asyncio.create_task(web.serve(sockets=listeners))
        while not web.started and not serving.done():
            await asyncio.sleep(0.01)
        try:
            ServerFile(server.url, os.getpid(), __version__).write(server.options.state)
        except OSError as error:
            logger.error("commands will not find this server by themselves: %s", error)
        started(server)
        renewing = asyncio.create_task(renew_forever(server, config))
        other = asyncio.create_task(beside(server)) if beside is not None else None
        waited = [task for task in (leading, serving, other) if task is not None]
        await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        renewing.cancel()
    failed = leading.done()
    if other is not None:
        other.cancel()
        (problem,) = await asyncio.gather(other, return_exceptions=True)
        if isinstance(problem, Exception):
            logger.error("%s", problem)
    leading.cancel()
    web.should_exit = True
    if serving is not None:
        await asyncio.gather(serving, return_exceptions=True)
    (problem,) = await asyncio.gather(leading, return_exceptions=True)
    if failed and isinstance(problem, StoreError):
        raise StartError(str(problem))
    if failed and isinstance(problem, Exception):
        raise problem


async def _own_tls(server: Server, config: Config, leading: asyncio.Task[None]) -> None:
    try:
        await asyncio.to_thread(own_certificate, server, config)
    except (OSError, StoreError) as error:
        leading.cancel()
        await asyncio.gather(leading, return_exceptions=True)
        raise StartError(f"the server has no certificate: {error}") from None


def own_certificate(server: Server, config: Config) -> None:
    """A certificate of the cluster's own authority, which a pair of servers shares."""
    state, url = server.options.state, urlsplit(server.url)
    server.authority = authority = Authority(server.store.secret("authority"))
    hosts = hosts_of(server.options.host, url.hostname or "")
    if not is_current(authority, state, hosts):
        write_certificate(authority, state, hosts)
    config.ssl_certfile, config.ssl_keyfile = state / CERTIFICATE_FILE, state / KEY_FILE
    if config.loaded and config.ssl is not None:  # it serves: who connects now sees the new one
        config.ssl.load_cert_chain(state / CERTIFICATE_FILE, state / KEY_FILE)


async def renew_forever(server: Server, config: Config) -> None:
    """Renews the server's own certificate before it ends."""
    while True:
        await asyncio.sleep(RENEW_SECONDS)
        if server.authority is None:
            continue
        try:
            await asyncio.to_thread(own_certificate, server, config)
        except (OSError, StoreError) as error:
            logger.error("the certificate cannot be renewed: %s", error)


def _with_deadline(
    factory: Callable[[], asyncio.AbstractEventLoop] | None,
) -> Callable[[], asyncio.AbstractEventLoop]:
    """Loops like those of a factory, whose servers do not wait long for a TLS handshake.

    Nobody sees a connection before its handshake is done, and uvicorn leaves it a minute.
    """
    probe = (factory or asyncio.new_event_loop)()
    kind: Any = type(probe)
    probe.close()

    class Loop(kind):  # type: ignore[misc]
        def create_server(self, *args: Any, **rest: Any) -> Any:
            if rest.get("ssl") is not None:
                rest.setdefault("ssl_handshake_timeout", HEAD_SECONDS)
            return super().create_server(*args, **rest)

    return Loop


def _listen(options: Options) -> socket.socket:
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((options.host, options.port))
    except OSError as error:
        listening.close()
        wrong_host = isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL
        where, why = f"{options.host}:{options.port}", error.strerror
        fix = (
            "--host (an address of this machine)" if wrong_host else "--port (0: any that is free)"
        )
        raise StartError(f"cannot listen on {where}: {why}; choose another {fix}") from None
    return listening


def _raise_file_limit() -> None:
    """One file a connection: as many as the system allows."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
