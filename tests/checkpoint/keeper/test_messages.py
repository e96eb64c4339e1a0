"""What workers and keepers say to each other keeps its names: a keeper outlives an upgrade."""

from __future__ import annotations

import msgspec
import pytest

from phalanx.checkpoint.keeper.messages import (
    Durable,
    Failed,
    Filled,
    FlushBuffer,
    Hello,
    MemoryGranted,
)

ON_THE_WIRE = {
    Hello: ("rank", "slot_bytes", "slots", "step"),
    FlushBuffer: ("slot", "order"),
    Filled: ("slot", "bytes"),
    MemoryGranted: ("slots", "port", "token", "shared"),
    Durable: ("slot", "step", "seconds"),
    Failed: ("step", "path", "problem", "fix", "errno", "slot"),
}


@pytest.mark.parametrize("message", ON_THE_WIRE)
def test_names_on_the_wire_are_those_of_earlier_versions(message: type[msgspec.Struct]) -> None:
    assert message.__struct_encode_fields__ == ON_THE_WIRE[message]
