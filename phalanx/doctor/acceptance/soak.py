"""What is collected while a node is loaded: rates of loads, and the state of GPUs."""

from __future__ import annotations

import math
from statistics import median

from phalanx.doctor.acceptance.loads import LoadSample
from phalanx.doctor.acceptance.report import UNITS, GpuSoak, LoadFigures, LoadKind
from phalanx.observe.node.gpu_sample import Gpus, open_nvml

WINDOW_SECONDS = 60.0  # first and last minute; a third of a shorter burn-in
LOOK_SECONDS = 1.0
# A load that told nothing for so long before the end hangs; of shorter burn-ins a third, but never
# less than it takes a slow disk.
SILENT_SECONDS, LEAST_SILENT_SECONDS = 120.0, 30.0

Look = dict[str, tuple[float, ...]]


class LoadSeries:
    """Rates of one load over time."""

    def __init__(self) -> None:
        self._rates: list[tuple[float, float]] = []  # (when, rate)
        self._wrong = 0
        self.told = False  # it works, or it said why it does not
        self.problem = ""
        self.last_rate = 0.0

    def take(self, sample: LoadSample, at: float, *, counts: bool) -> None:
        """A word of the load; rates count once all loads work."""
        self.told = True
        self.problem = self.problem or sample.problem
        self._wrong += sample.wrong
        if not sample.problem:
            self.last_rate = sample.rate
            if counts:
                self._rates.append((at, sample.rate))

    def figures(
        self, load: LoadKind, device: str, wanted_seconds: float, *, ended_at: float = 0.0
    ) -> LoadFigures:
        """What it came to; ``ended_at``: when all loads were ended, 0: it is not known."""
        problem = self.problem or self._silence(wanted_seconds, ended_at)
        named = LoadFigures(
            load=load, device=device, unit=UNITS[load], wrong=self._wrong, problem=problem
        )
        if not self._rates:
            return named
        window = min(WINDOW_SECONDS, wanted_seconds / 3)
        first_at, last_at = self._rates[0][0], self._rates[-1][0]
        rates = [rate for _, rate in self._rates]
        return LoadFigures(
            load=load,
            device=device,
            unit=UNITS[load],
            samples=len(rates),
            first=median(rate for at, rate in self._rates if at <= first_at + window),
            last=median(rate for at, rate in self._rates if at >= last_at - window),
            worst=min(rates),
            median=median(rates),
            best=max(rates),
            wrong=self._wrong,
            problem=problem,
        )

    def _silence(self, wanted_seconds: float, ended_at: float) -> str:
        """That it told nothing any more, long before it was ended; "": it did."""
        silent = ended_at - self._rates[-1][0] if self._rates else 0.0
        limit = min(SILENT_SECONDS, max(LEAST_SILENT_SECONDS, wanted_seconds / 3))
        return f"no sign of life for the last {silent:.0f} s" if silent > limit else ""


class SoakSeries:
    """Looks at all GPUs by NVML; none where there is no such module or no driver."""

    def __init__(self, gpus: Gpus | None = None) -> None:
        self._gpus = gpus or Gpus(open_nvml())
        self._looks: list[Look] = []
        self._at = -math.inf

    def look(self, now: float) -> None:
        """Look, if the last time is long enough ago."""
        if now - self._at >= LOOK_SECONDS:
            self._at = now
            if found := self._gpus.look():
                self._looks.append(found)

    def figures(self) -> list[GpuSoak]:
        """Each GPU over the whole time."""
        if not self._looks:
            return []
        count = max(len(values) for values in self._looks[0].values())
        return [self._gpu(index) for index in range(count)]

    def _gpu(self, index: int) -> GpuSoak:
        heat = self._known("gpu_temperature_celsius", index)
        clocks = self._known("gpu_sm_clock_megahertz", index)
        reasons = 0
        for each in self._known("gpu_throttle_reasons", index):
            reasons |= int(each)
        return GpuSoak(
            index=index,
            samples=len(self._looks),
            first_celsius=heat[0] if heat else -1.0,
            most_celsius=max(heat, default=-1.0),
            most_sm_megahertz=max(clocks, default=-1.0),
            least_sm_megahertz=min(clocks, default=-1.0),
            throttle_reasons=reasons,
            uncorrected_errors=self._grown("gpu_ecc_uncorrected", index),
            corrected_errors=self._grown("gpu_ecc_corrected", index),
        )

    def _known(self, name: str, index: int) -> list[float]:
        rows = [look[name] for look in self._looks if name in look]
        return [row[index] for row in rows if index < len(row) and math.isfinite(row[index])]

    def _grown(self, name: str, index: int) -> int:
        counts = self._known(name, index)
        return int(max(0.0, counts[-1] - counts[0])) if counts else 0
