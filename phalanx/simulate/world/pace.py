"""Steps of a gang without playing them: exact integer arithmetic on the time since it began.

Step n of a span is complete after n steps and the stalls of checkpoints behind earlier steps; the
stall behind step n comes after it.
"""

from __future__ import annotations

from msgspec import Struct


class GangPace(Struct, frozen=True, kw_only=True):
    """How fast a gang goes."""

    step_ns: int
    memory_steps: int  # 0: no snapshots
    memory_ns: int
    checkpoint_steps: int  # 0: no durable checkpoints
    checkpoint_ns: int

    def stalls_ns(self, first: int, last: int) -> int:
        """Stalls behind steps first + 1 to last."""
        total = 0
        if self.memory_steps:
            total += self.memory_ns * (last // self.memory_steps - first // self.memory_steps)
        if self.checkpoint_steps:
            durable = last // self.checkpoint_steps - first // self.checkpoint_steps
            total += self.checkpoint_ns * durable
        return total

    def time_ns(self, base: int, step: int) -> int:
        """From the beginning at ``base`` until ``step`` is complete."""
        if step <= base:
            return 0
        return (step - base) * self.step_ns + self.stalls_ns(base, step - 1)

    def step_at(self, base: int, elapsed_ns: int) -> int:
        """The last step that is complete after some time."""
        high = elapsed_ns // self.step_ns
        if high <= 0:
            return base
        # With the stalls of more steps there are fewer, with those of fewer there are more.
        low = max(0, (elapsed_ns - self.stalls_ns(base, base + high - 1)) // self.step_ns)
        high = min(high, (elapsed_ns - self.stalls_ns(base, base + low - 1)) // self.step_ns)
        while low < high:
            middle = (low + high + 1) // 2
            if self.time_ns(base, base + middle) <= elapsed_ns:
                low = middle
            else:
                high = middle - 1
        return base + low

    def committed(self, base: int, elapsed_ns: int, replicate_ns: int) -> int:
        """The newest snapshot that buddies have acknowledged; ``base`` where there is none."""
        if not self.memory_steps:
            return base
        step = self.step_at(base, elapsed_ns) // self.memory_steps * self.memory_steps
        while step > base:
            if self.time_ns(base, step) + self.memory_ns + replicate_ns <= elapsed_ns:
                return step
            step -= self.memory_steps
        return base
