"""The GPUs and network behind one row of a table of runs."""

from __future__ import annotations

import re
from typing import Any

from phalanx.hardware import Cluster, ClusterFile, gpus_by_key, make_cluster
from phalanx.plan.evidence.fields import SkippedRowError

GPU_NAMES = "gb300|gb200|b300|b200|h800|h200|h100|a800|a100|v100|mi355x|mi300x|mi250x|tpu[- ]?v4"


def cluster_of(row: dict[str, str], gpus: int) -> Cluster:
    """The GPUs of a row with the network that its words name; SkippedRowError for others."""
    text = row.get("gpu", "")
    key = _gpu_key(text)
    if key is None:
        raise SkippedRowError(f"unknown gpu {text!r}" if text else "gpu is missing")
    described: dict[str, Any] = {"gpu": key, "gpus": gpus}
    everything = f"{text} {row.get('source', '')} {row.get('notes', '')}"
    cards = re.search(r"(\d+)x(\d+)G\b", everything)
    per_node = re.search(r"(\d+) ?Gbps|(\d+) Gb/s per node", everything)
    gigabits = 0.0
    if cards:
        gigabits = float(cards[1]) * float(cards[2])
    elif per_node:
        gigabits = float(per_node[1] or per_node[2])
    if gigabits:
        described |= {"nic": "hdr", "nics_per_gpu": gigabits / 8 / 200}
    if "grand teton" in text.lower():
        described["node"] = "grand-teton"
    if "jean zay" in text.lower():
        described |= {"nic": "opa100", "nics_per_gpu": 0.5, "link": "nvlink3-4"}
    if gpus > 8 and gpus % 8:
        described["gpus_per_node"] = 4 if gpus % 4 == 0 else 1
    return make_cluster(text, ClusterFile(**described))


def _gpu_key(text: str) -> str | None:
    """The catalogue's key of a GPU, by its name and what is said about its board."""
    lowered = text.lower()
    match = re.search(rf"(?<![a-z])({GPU_NAMES})(?![0-9])", lowered)
    if match is None:
        return None
    key = "tpu-v4" if match[1].startswith("tpu") else match[1]
    if "500w" in lowered:
        key += "-500w"
    if "dgx-2h" in lowered:
        key += "-450w"
    if "pcie" in lowered:
        key += "-pcie"
    small = re.search(r"(?<![0-9])(40|16) ?gi?b?\b", lowered.split("(")[0])
    if small:
        key += f"-{small[1]}g"
    return key if key in gpus_by_key() else match[1] if match[1] in gpus_by_key() else None
