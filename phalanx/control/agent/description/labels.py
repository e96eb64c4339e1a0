"""Labels of the Kubernetes node that an agent runs on: from a file, or from the API."""

from __future__ import annotations

import ssl
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import quote

from phalanx.hardware.probe.kubernetes_labels import parse_labels
from phalanx.hardware.probe.reader import ReadError

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
API_SECONDS = 5.0
MOST_BYTES = 4 << 20


def read_labels(
    file: str, environment: Mapping[str, str], account: Path = ACCOUNT
) -> dict[str, str]:
    """Labels by name; none where there is no Kubernetes, ReadError where it does not answer."""
    if file:
        try:
            return parse_labels(Path(file).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise ReadError(file, getattr(error, "strerror", None) or str(error)) from None
    host, node = environment.get("KUBERNETES_SERVICE_HOST"), environment.get("PHALANX_POD_NODE")
    if not host or not node or not (account / "token").exists():
        return {}
    port = environment.get("KUBERNETES_SERVICE_PORT", "443")
    address = f"[{host}]" if ":" in host else host
    return ask_api(f"https://{address}:{port}", node, account)


def ask_api(url: str, node: str, account: Path) -> dict[str, str]:
    """Labels of a node as the API server has them."""
    what = "Kubernetes API"
    try:
        token = (account / "token").read_text().strip()
        trust = ssl.create_default_context(cafile=str(account / "ca.crt"))
        request = urllib.request.Request(
            f"{url}/api/v1/nodes/{quote(node, safe='')}",
            headers={"Authorization": f"Bearer {token}"},
        )
        with urllib.request.urlopen(request, timeout=API_SECONDS, context=trust) as answer:
            return parse_labels(answer.read(MOST_BYTES).decode(errors="replace"))
    except urllib.error.HTTPError as error:
        fix = ": let the service account get nodes" if error.code in (401, 403) else ""
        raise ReadError(what, f"{error.code} for node {node}{fix}") from None
    except (OSError, ValueError) as error:
        raise ReadError(what, str(getattr(error, "reason", error))) from None
