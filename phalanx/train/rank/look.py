"""What a rank is doing right now: its stacks, its last collectives, and whether it waits."""

from __future__ import annotations

import faulthandler
import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch._C import _distributed_c10d

from phalanx.train.measure.wait_hooks import waits_now

KEPT_COLLECTIVES = 256


def record_collectives() -> None:
    """Have torch keep the last collectives; to be called before there is a group."""
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", str(KEPT_COLLECTIVES))


def look(folder: Path, rank: int) -> bool:
    """Write stacks and flight recorder into a folder; whether the rank waits for others."""
    with suppress(OSError), (folder / f"rank-{rank}.stacks").open("w") as file:
        faulthandler.dump_traceback(file, all_threads=True)
    recorded = flight_recorder()
    with suppress(OSError):
        (folder / f"rank-{rank}.flight.json").write_text(json.dumps(recorded))
    groups = recorded.get("pg_status", {}).values()
    return waits_now() or any(_waits(group) for group in groups)


def flight_recorder() -> dict[str, Any]:
    """The last collectives and how far each group is; {} where torch keeps none."""
    dump = getattr(_distributed_c10d, "_dump_fr_trace_json", None)
    with suppress(RuntimeError, ValueError):
        return dict(json.loads(dump())) if dump is not None else {}
    return {}


def _waits(group: dict[str, Any]) -> bool:
    begun = group.get("last_enqueued_collective", -1)
    return int(begun) > int(group.get("last_completed_collective", -1))
