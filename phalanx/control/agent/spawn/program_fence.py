"""Until when the programs of a node may run, as their zygote knows it.

A program knows nothing of generations: nobody but the kernel keeps it from writing beside the one
that takes its place. So it runs only for as long as the server is known to count on this node; the
agent renews that time (``program_lease``), and whatever happens to the agent, it runs out here.
"""

from __future__ import annotations

import time

from phalanx.control.wire.zygote_messages import RenewPrograms


class ProgramFence:
    """The programs of one zygote; ``lease`` 0: nobody has ever said how long they may run."""

    def __init__(self) -> None:
        self.lease = 0.0
        self.programs: dict[str, None] = {}  # by key, those that live
        self._until = 0.0
        self._ended: dict[str, None] = {}  # that were ended here

    def renew(self, order: RenewPrograms) -> None:
        """They may run for longer; never for less than was said before."""
        self.lease = order.lease
        self._until = max(self._until, time.monotonic() + order.left)

    def wait_seconds(self) -> float | None:
        """Until some have to end; None: none have."""
        if not self.lease or not any(key not in self._ended for key in self.programs):
            return None
        return max(0.0, self._until - time.monotonic())

    def due(self) -> list[str]:
        """Programs whose time is over, each said once."""
        if self.wait_seconds() != 0.0:
            return []
        late = [key for key in self.programs if key not in self._ended]
        self._ended.update(dict.fromkeys(late))
        return late

    def ended(self, key: str) -> str:
        """A child is gone; why, where it was ended here."""
        self.programs.pop(key, None)
        if key not in self._ended:
            return ""
        del self._ended[key]
        return f"ended, since the server had not answered for {self.lease:.0f} s"
