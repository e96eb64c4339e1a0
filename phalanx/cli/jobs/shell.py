"""``phalanx shell``: a terminal in a job's environment on one of its nodes."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from phalanx.cli.completion import job_numbers
from phalanx.cli.connection import REFUSED, connected
from phalanx.cli.options import ServerUrl, State

if TYPE_CHECKING:
    from websockets.asyncio.client import ClientConnection

    from phalanx.control.client.client import Client

app = typer.Typer()

PIECE_BYTES = 16 << 10


@app.command()
def shell(
    job: Annotated[
        int, typer.Argument(help="Number of a job that runs.", autocompletion=job_numbers)
    ],
    command: Annotated[
        list[str] | None,
        typer.Argument(metavar="[-- PROGRAM…]", help="Program to run instead of a shell."),
    ] = None,
    node: Annotated[str, typer.Option(help="One of its nodes (default: the first).")] = "",
    server: ServerUrl = "",
    state: State = None,
) -> None:
    """Open a shell in a job's environment on a node: its folder, variables, GPUs and user.

    The connection goes through the server, is open to the job's own team only and is audited.
    """
    with connected(server, False, state) as client:
        status = asyncio.run(_talk(client, job, node, tuple(command or ())))
    raise typer.Exit(status)


async def _talk(client: Client, job: int, node: str, argv: tuple[str, ...]) -> int:
    from websockets.asyncio.client import connect
    from websockets.exceptions import ConnectionClosed, InvalidHandshake

    size = shutil.get_terminal_size()
    terminal = os.environ.get("TERM", "xterm")
    wanted = {"node": node, "argv": argv, "rows": size.lines, "columns": size.columns}
    url, headers, context = client.live(f"/v1/jobs/{job}/shell")
    try:
        connecting = connect(
            url, additional_headers=headers, ssl=context, compression=None, proxy=None
        )
        async with connecting as connection:
            await connection.send(msgspec.json.encode(wanted | {"terminal": terminal}).decode())
            with _raw_terminal():
                return await _pass(connection)
    except ConnectionClosed as error:
        reason = error.rcvd.reason if error.rcvd is not None else ""
        print(f"error: {reason or 'the connection is gone'}", file=sys.stderr)
    except (OSError, InvalidHandshake) as error:
        print(f"error: {error}", file=sys.stderr)
    return REFUSED


async def _pass(connection: ClientConnection) -> int:
    loop = asyncio.get_running_loop()
    typed: asyncio.Queue[bytes] = asyncio.Queue()
    source = sys.stdin.fileno()

    def read() -> None:
        data = os.read(source, PIECE_BYTES)
        typed.put_nowait(data or b"\x04")  # the end of a file is what Ctrl-D says
        if not data:
            loop.remove_reader(source)

    async def send() -> None:
        while True:
            await connection.send(await typed.get())

    def resized() -> None:
        size = shutil.get_terminal_size()
        text = msgspec.json.encode({"rows": size.lines, "columns": size.columns}).decode()
        resizing.append(loop.create_task(connection.send(text)))

    resizing: list[asyncio.Task[None]] = []
    with suppress(OSError, PermissionError):  # a file as input cannot be waited for
        loop.add_reader(source, read)
    loop.add_signal_handler(signal.SIGWINCH, resized)
    sending = asyncio.create_task(send())
    try:
        async for message in connection:
            if isinstance(message, bytes):
                sys.stdout.buffer.write(message)
                sys.stdout.buffer.flush()
                continue
            last = msgspec.json.decode(message)
            if last.get("problem"):
                print(f"error: {last['problem']}", file=sys.stderr)
            return int(last.get("status", 0)) % 256
    finally:
        sending.cancel()
        loop.remove_reader(source)
    return REFUSED


class _raw_terminal:  # noqa: N801 - used like a function
    """Keys go to the shell as they are; the terminal is as before afterwards."""

    def __enter__(self) -> None:
        import termios
        import tty

        self._before = termios.tcgetattr(0) if sys.stdin.isatty() else None
        if self._before is not None:
            tty.setraw(0)

    def __exit__(self, *_: object) -> None:
        import termios

        if self._before is not None:
            termios.tcsetattr(0, termios.TCSADRAIN, self._before)
