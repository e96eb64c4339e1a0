"""DCGM's activity counters, read from a dcgm-exporter on the same node.

NVML's utilisation says that some kernel ran; these say how much of the card it used. They cost
profiling hardware that only one reader can have, so we ask whoever reads them already.
"""

from __future__ import annotations

import math
import re
import time
import urllib.error
import urllib.request
from collections.abc import Sequence

EXPORTER = "http://127.0.0.1:9400/metrics"  # where dcgm-exporter listens unless told otherwise
ACTIVITY = {  # shares of the time, from 0 to 1
    "DCGM_FI_PROF_SM_ACTIVE": "gpu_sm_activity",
    "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE": "gpu_tensor_activity",
    "DCGM_FI_PROF_DRAM_ACTIVE": "gpu_dram_activity",
}
TIMEOUT_SECONDS = 2.0
AGAIN_SECONDS = 300.0  # after nobody answered
MOST_BYTES = 4 << 20
_LINE = re.compile(r"(DCGM_FI_PROF_\w+)\{([^}]*)\}\s+(\S+)")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


class Dcgm:
    """An exporter that may or may not be there."""

    def __init__(self, url: str = EXPORTER) -> None:
        self._url = url
        self._due = 0.0

    def look(self, uuids: Sequence[str]) -> list[dict[str, float]]:
        """By GPU, in the order of their UUIDs: what the exporter says of each."""
        if time.monotonic() < self._due:
            return [{} for _ in uuids]
        try:
            with urllib.request.urlopen(self._url, timeout=TIMEOUT_SECONDS) as answer:
                text = answer.read(MOST_BYTES).decode("utf-8", "replace")
        except (OSError, ValueError, urllib.error.URLError):
            self._due = time.monotonic() + AGAIN_SECONDS
            return [{} for _ in uuids]
        return parse(text, uuids)


def parse(text: str, uuids: Sequence[str]) -> list[dict[str, float]]:
    """The activity of each GPU; one without a UUID is found by its number."""
    samples: list[dict[str, float]] = [{} for _ in uuids]
    places = {uuid: index for index, uuid in enumerate(uuids) if uuid}
    for name, written, value in _LINE.findall(text):
        labels = dict(_LABEL.findall(written))
        if name not in ACTIVITY or labels.get("GPU_I_ID"):  # a part of a divided card
            continue
        number = labels.get("gpu", "")
        index = places.get(labels.get("UUID", ""), int(number) if number.isdigit() else -1)
        try:
            share = float(value)
        except ValueError:
            continue
        if 0 <= index < len(samples) and math.isfinite(share) and 0 <= share <= 1:
            samples[index][ACTIVITY[name]] = share
    return samples
