"""Whether a server can be run as its options say, before anything of it is started."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from typing import NamedTuple

from phalanx.control.server.mail import bad_mail, bad_relay
from phalanx.control.server.process import Options
from phalanx.control.server.security.audit_ship import bad_receiver
from phalanx.control.server.webhooks import bad_address


class OptionProblem(NamedTuple):
    """What is wrong, and with which option; "": with several together."""

    option: str
    rule: str


def first_problem(options: Options) -> OptionProblem | None:
    """The first thing that is wrong with options; None: nothing."""
    return next(_problems(options), None)


def _problems(options: Options) -> Iterator[OptionProblem]:
    if (options.tls_cert is None) != (options.tls_key is None):
        yield OptionProblem("", "give --tls-cert and --tls-key together")
    if options.own_tls and options.url.startswith("http:"):
        rule = "the server speaks TLS beyond loopback: https://…, or --plain-http"
        yield OptionProblem("--url", rule)
    for each in options.webhooks:
        if rule := bad_address(each):
            yield OptionProblem("--webhook", rule)
    if options.mail_relay and (rule := bad_relay(options.mail_relay)):
        yield OptionProblem("--mail-relay", rule)
    if options.mail_relay and (rule := bad_mail(options.mail_from)):
        yield OptionProblem("--mail-from", rule)
    for each in options.audit_to:
        if rule := bad_receiver(each):
            yield OptionProblem("--audit-to", rule)
    if options.otlp and bad_address(options.otlp):
        yield OptionProblem("--otlp", "an address like http://127.0.0.1:4318")
    if options.otlp and find_spec("opentelemetry") is None:
        yield OptionProblem("", "needs OpenTelemetry: pip install 'phalanx[otel]'")
    if options.url and bad_address(options.url):
        yield OptionProblem("--url", "an address like http://10.0.0.1:7070")
