"""Kubernetes: a controller's pod and one agent's pod a node, as one gang.

Manifests are plain objects, made from a job and the site's settings; ``kubectl`` applies them.
"""

from __future__ import annotations
