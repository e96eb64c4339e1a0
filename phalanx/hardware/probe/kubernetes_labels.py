"""Labels of a Kubernetes node: topology, and what GPU feature discovery found."""

from __future__ import annotations

import json
import re

from phalanx.hardware.probe.description import KUBERNETES, Fact
from phalanx.hardware.probe.reader import ReadError

# The first label that is there says the fact.
LABELS: dict[str, tuple[str, ...]] = {
    "leaf": (
        "network.topology.nvidia.com/block",
        "topology.k8s.aws/network-node-layer-3",
        "topology.kubernetes.io/leaf",
    ),
    "pod": (
        "network.topology.nvidia.com/spine",
        "topology.k8s.aws/network-node-layer-2",
        "topology.kubernetes.io/zone",
    ),
    "rack": ("topology.kubernetes.io/rack",),
    "domain": ("nvidia.com/gpu.clique", "network.topology.nvidia.com/accelerator"),
    "product": ("nvidia.com/gpu.product",),
    "driver": ("nvidia.com/cuda.driver-version.full",),
    "cuda": ("nvidia.com/cuda.runtime-version.full",),
}
NUMBERS = {"gpu_count": "nvidia.com/gpu.count"}
MEMORY = "nvidia.com/gpu.memory"  # MiB


def parse_labels(text: str) -> dict[str, str]:
    """Labels as ``kubectl get node -o json`` has them, or as lines of ``key="value"``."""
    if text.lstrip().startswith("{"):
        try:
            root = json.loads(text)
            labels = root.get("metadata", {}).get("labels", {}) if "metadata" in root else root
            return {str(key): str(value) for key, value in labels.items()}
        except (ValueError, AttributeError, RecursionError) as error:
            raise ReadError("Kubernetes labels", f"no JSON of a node: {error}") from None
    return dict(re.findall(r'(?m)^\s*([\w./-]+)="?([^"\n]*)"?\s*$', text))


def label_facts(labels: dict[str, str]) -> list[Fact]:
    """What labels say of a node."""
    facts = []
    for key, names in LABELS.items():
        value = next((labels[name] for name in names if labels.get(name)), "")
        if value:
            # A label cannot have spaces: "NVIDIA-H100-80GB-HBM3".
            facts.append(Fact(key, value, KUBERNETES))
    for key, name in NUMBERS.items():
        if labels.get(name, "").isdigit():
            facts.append(Fact(key, int(labels[name]), KUBERNETES))
    if labels.get(MEMORY, "").isdigit():
        facts.append(Fact("gpu_memory_bytes", int(labels[MEMORY]) << 20, KUBERNETES))
    return facts
