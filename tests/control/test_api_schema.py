"""The API does what its OpenAPI document says, whatever schemathesis sends."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.control.servers import WORK, PlayedAgent, ServerProcess

CONFIG = 'headers = { Authorization = "Bearer ${PHALANX_TOKEN}" }\n'


def run_schemathesis(folder: Path, examples: int) -> None:
    """Drives a server that has a node and a job, as its administrator."""
    program = Path(sys.executable).parent / "schemathesis"
    if not program.exists():
        pytest.skip("schemathesis is not installed: pip install -e '.[dev]'")
    (folder / "schemathesis.toml").write_text(CONFIG)
    with ServerProcess(folder / "state", "--requests-per-second", "0") as server:
        join = (server.state / "join.token").read_text().strip()

        async def scenario() -> None:
            agent = PlayedAgent([server.url], join, "0")  # a name that it will try
            running = asyncio.create_task(agent.run())
            await agent.connected.wait()
            spec = {"name": "j", "gang": {"slot_gpus": 1}}
            await asyncio.to_thread(server.call, "POST", "/v1/jobs", {"spec": spec, "work": WORK})
            await asyncio.to_thread(drive, server)
            running.cancel()

        def drive(server: ServerProcess) -> None:
            command = [program, "--config-file", "schemathesis.toml", "run"]
            command += [f"{server.url}/v1/openapi.json", "--max-examples", str(examples)]
            command += ["--phases", "examples,coverage,fuzzing", "--seed", "1", "--no-color"]
            command += ["--suppress-health-check", "all", "--generation-database", "none"]
            done = subprocess.run(
                command,
                cwd=folder,
                env={**os.environ, "PHALANX_TOKEN": server.admin()},
                capture_output=True,
                text=True,
                check=False,
            )
            assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
            assert "Failures" not in done.stdout

        asyncio.run(scenario())
        assert server.call("GET", "/v1/status")[0] == 200
        assert "Traceback" not in server.output()


@pytest.mark.timeout(300)
def test_the_api_keeps_to_its_document(tmp_path: Path) -> None:
    run_schemathesis(tmp_path, 2)


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_the_api_keeps_to_its_document_for_long(tmp_path: Path) -> None:
    run_schemathesis(tmp_path, 100)
