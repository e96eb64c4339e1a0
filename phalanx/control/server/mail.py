"""Mail to people about their jobs, by a relay of the site."""

from __future__ import annotations

import re
import smtplib
from email.message import EmailMessage
from typing import Any

import msgspec
from msgspec import Struct

TIMEOUT_SECONDS = 10.0
SMTP_PORT = 25
ADDRESS = re.compile(r"[A-Za-z0-9._%+-]+@(?P<domain>[A-Za-z0-9.-]+)")
RELAY = re.compile(r"[A-Za-z0-9.-]+(:\d{1,5})?")


class MailRelay(Struct, frozen=True):
    """The site's mail server, which takes messages of this one."""

    where: str  # host, or host:port
    sender: str

    def send(self, address: str, data: bytes) -> str:
        """Why a message, as a webhook gets it, was not taken; "" when it was."""
        host, _, port = self.where.partition(":")
        message = composed(self.sender, address, msgspec.json.decode(data))
        try:
            with smtplib.SMTP(host, int(port or SMTP_PORT), timeout=TIMEOUT_SECONDS) as relay:
                relay.send_message(message)
        except (OSError, smtplib.SMTPException) as error:
            return f"the relay does not take it ({type(error).__name__})"
        return ""


def composed(sender: str, address: str, body: dict[str, Any]) -> EmailMessage:
    """What somebody reads: about a job, or of an alert, which brings subject and text."""
    message = EmailMessage()
    message["From"], message["To"] = sender, address
    if "subject" in body:
        message["Subject"] = " ".join(str(body["subject"]).split())
        message.set_content(f"{body['text']}\n")
        return message
    message["Subject"] = f"job {body['job']} ({body['name']}): {body['state']}"
    message.set_content(f"Job {body['job']} ({body['name']}) is {body['state']}: {body['why']}\n")
    return message


def bad_mail(address: str) -> str:
    """What is wrong with a person's address; "": nothing."""
    return "" if ADDRESS.fullmatch(address) else "an address like ann@example.org"


def bad_relay(where: str) -> str:
    """What is wrong with the name of a relay; "": nothing."""
    return "" if RELAY.fullmatch(where) else "a host, or host:port, like mail.example.org:25"
