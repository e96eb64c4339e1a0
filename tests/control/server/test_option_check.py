"""What of a server's options is refused before anything is started."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from phalanx.control.server.option_check import first_problem
from phalanx.control.server.process import Options

STATE = Path("/nowhere")


@pytest.mark.parametrize(
    ("options", "blamed"),
    [
        ({"tls_cert": Path("cert.pem")}, ""),
        ({"tls_key": Path("key.pem")}, ""),
        ({"own_tls": True, "url": "http://10.0.0.1:7070"}, "--url"),
        ({"url": "10.0.0.1"}, "--url"),
        ({"webhooks": ("https://good/path", "bad")}, "--webhook"),
        ({"mail_relay": "smtp://x"}, "--mail-relay"),
        ({"mail_relay": "x:25", "mail_from": "me"}, "--mail-from"),
        ({"audit_to": ("udp://",)}, "--audit-to"),
        ({"otlp": "collector"}, "--otlp"),
    ],
)
def test_a_wrong_option_is_named(options: dict[str, Any], blamed: str) -> None:
    problem = first_problem(Options(state=STATE, **options))
    assert problem is not None and problem.option == blamed and problem.rule


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"own_tls": True, "url": "https://10.0.0.1:7070"},
        {"tls_cert": Path("cert.pem"), "tls_key": Path("key.pem")},
        {"webhooks": ("https://host/path",), "audit_to": ("unix:/dev/log", "udp://host:514")},
    ],
)
def test_good_options_have_no_problem(options: dict[str, Any]) -> None:
    assert first_problem(Options(state=STATE, **options)) is None
