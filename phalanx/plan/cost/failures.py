"""How often a cluster fails, how often to checkpoint, what goodput is left, how many spares."""

from __future__ import annotations

import math

import numpy as np
from msgspec import Struct

from phalanx.config import ConfigError
from phalanx.hardware import Cluster
from phalanx.hardware.tables import nearest

DAY_SECONDS = 86400.0
NODE_GPUS = 8  # the rates below are of nodes with eight GPUs


class Rate(Struct, frozen=True):
    """Interruptions of one site, per 1000 days of a node of eight GPUs."""

    name: str
    per_1000_node_days: float
    source: str


# 419 unexpected interruptions in 54 days of 16,384 GPUs.
LLAMA3_PER_1000 = 419 / (54 * 16384 / NODE_GPUS) * 1000

RATES = {
    rate.name: rate
    for rate in (
        Rate("llama3", LLAMA3_PER_1000, "The Llama 3 Herd of Models, 2024, table 5"),
        Rate("rsc-1", 6.50, "Kokolis et al., 2024, Meta RSC-1 (16k A100, InfiniBand)"),
        Rate("rsc-2", 2.34, "Kokolis et al., 2024, Meta RSC-2 (8k A100, RoCE)"),
    )
}

# What a running job replaces by its fleet's own, once these are known.
AUTOMATIC_RATE = "auto"

# Above 32k GPUs whole racks, power feeds, fabrics and firmware versions fail too. 98,304 GPUs were
# interrupted every 18 minutes, 2.8 times as often as their nodes alone would say: 51 of the 80
# interruptions a day came from such domains. They are taken to grow with the GPUs above 32k.
CORRELATED_FROM_GPUS = 32768
CORRELATED_GPUS, CORRELATED_FACTOR, CORRELATED_MTBF_SECONDS = 98304, 2.8, 18 * 60.0
CORRELATED_PER_DAY = DAY_SECONDS / CORRELATED_MTBF_SECONDS * (1 - 1 / CORRELATED_FACTOR)

# Seconds from a detected failure to the next step when every rank restarts, by GPUs.
COLD_RECOVERY = ((16384, 200.0), (65536, 600.0), (98304, 900.0))
LEAST_RECOVERY_SECONDS = 60.0

# Llama 3: 78 % of unexpected interruptions were hardware, so a node leaves the job.
HARDWARE_SHARE = 0.78

# The shortest stop that a snapshot into host memory is published with (DLRover, 65B on 1,536 GPUs).
LEAST_STALL_SECONDS = 0.2


class FailureSettings(Struct, frozen=True, kw_only=True):
    """What is assumed about a site; every field can be given by the user."""

    rate: Rate = RATES["llama3"]
    correlated: bool = True
    detection_seconds: float = 60.0  # ByteRobust: 2 to 60 s
    recovery_seconds: float = 0.0  # 0: by size, from COLD_RECOVERY
    repair_hours: float = 24.0  # until a failed node is back; an assumption
    stall_seconds: float = 0.0  # a checkpoint stops training this long; 0: copy to host memory
    storage_bandwidth_per_node: float = 1e9  # bytes/s; Llama 3's storage gave 2 TB/s to 2,048 nodes
    spare_quantile: float = 0.99


class Spares(Struct, frozen=True):
    """Spare units so that a job is whole with the wanted probability."""

    domain: str
    units: int  # in use
    gpus_per_unit: int
    down_probability: float  # of one unit at one moment
    spares: int

    @property
    def gpus(self) -> int:
        """GPUs in the spare units."""
        return self.spares * self.gpus_per_unit


class FailureOutlook(Struct, frozen=True, kw_only=True):
    """What failures do to a run on a cluster."""

    rate: Rate
    mtbf_seconds: float
    linear_mtbf_seconds: float  # without correlation
    failures_per_day: float
    detection_seconds: float
    recovery_seconds: float
    checkpoint_bytes: float
    stall_seconds: float
    flush_seconds: float
    storage_bandwidth_per_node: float  # bytes/s
    young_interval_seconds: float
    interval_seconds: float  # the exact optimum, not below the time to write a checkpoint
    goodput: float  # share of the time that makes progress that is kept
    goodput_low: float  # at the worst published rate, or 1.5 times a given one
    goodput_high: float  # at the best
    goodput_fast: float  # if a failure were detected and repaired in LEAST_RECOVERY_SECONDS
    spares: tuple[Spares, ...]


def rate_named(name: str) -> Rate:
    """A published rate by name, or a number per 1000 node-days; "auto": Llama 3's."""
    if name.casefold() == AUTOMATIC_RATE:
        return RATES["llama3"]
    if name.casefold() in RATES:
        return RATES[name.casefold()]
    try:
        value = float(name)
    except ValueError:
        fix = nearest(name.casefold(), list(RATES)) + " or a number per 1000 node-days"
        raise ConfigError("failure-rate", name, "no such site", fix) from None
    if not 0 < value <= 1e5:
        raise ConfigError("failure-rate", name, "must be above 0 and at most 100000", "e.g. 3.79")
    return Rate("given", value, "given by the user")


def failures_per_day(gpus: int, per_1000_node_days: float, correlated: bool = True) -> float:
    """Interruptions of a job on this many GPUs: of nodes and, where it is large, of domains."""
    of_nodes = gpus / NODE_GPUS * per_1000_node_days / 1000
    large = max(0, gpus - CORRELATED_FROM_GPUS) / (CORRELATED_GPUS - CORRELATED_FROM_GPUS)
    return of_nodes + (CORRELATED_PER_DAY * large if correlated else 0.0)


def mtbf_seconds(gpus: int, per_1000_node_days: float, correlated: bool = True) -> float:
    """Mean time between interruptions of a job on this many GPUs."""
    return DAY_SECONDS / failures_per_day(gpus, per_1000_node_days, correlated)


def cold_recovery_seconds(gpus: int) -> float:
    """Time to restart every rank, between and beyond the published points (log-log)."""
    points = COLD_RECOVERY
    below = 0 if gpus < points[1][0] else 1
    (x0, y0), (x1, y1) = points[below], points[below + 1]
    power = math.log(y1 / y0) / math.log(x1 / x0)
    return max(LEAST_RECOVERY_SECONDS, float(y0 * (gpus / x0) ** power))


def young_interval(mtbf: float, stall: float) -> float:
    """Young's interval between checkpoints, in seconds: right when small against the MTBF."""
    _refuse_times(mtbf, stall)
    return math.sqrt(2 * stall * mtbf)


def best_interval(mtbf: float, stall: float) -> float:
    """The interval of most goodput under exponential failures: exp((t + w)/M) (1 - t/M) = 1.

    All in seconds: ``mtbf`` M between interruptions of the whole job, ``stall`` w that a
    checkpoint stops it. Newton from Young's value on x = t/M, on the logarithm of the equation.
    """
    _refuse_times(mtbf, stall)
    if stall == 0:
        return 0.0
    if math.isinf(mtbf):
        return math.inf
    ratio = stall / mtbf
    if ratio > 30:
        return mtbf  # to 13 digits
    x = min(math.sqrt(2 * ratio), 1 - 0.5 * math.exp(-1 - ratio))
    for _ in range(50):
        # f(x) = x + ratio + log(1 - x) falls from ratio at 0 to -inf at 1.
        step = (x + ratio + math.log1p(-x)) * (1 - x) / x
        x = min(max(x + step, x / 2), (1 + x) / 2)
        if abs(step) < 1e-14:
            break
    return x * mtbf


def goodput(mtbf: float, interval: float, stall: float, recovery: float) -> float:
    """Share of time that is kept work, exactly, under exponential failures (renewal form).

    All in seconds; ``recovery`` is from a failure to the next step, detection included.
    A segment of interval + stall seconds that fails is repeated, recoveries may fail too: it
    takes M exp(R/M) (exp((t + w)/M) - 1) on average.
    """
    if interval <= 0:
        # The limit of ever shorter segments without a stall.
        return math.exp(-recovery / mtbf) if stall <= 0 else 0.0
    segment = (interval + stall) / mtbf
    if segment > 700:
        return 0.0
    return interval / mtbf * math.exp(-recovery / mtbf) / math.expm1(segment)


def _refuse_times(mtbf: float, stall: float) -> None:
    if not mtbf > 0:
        raise ConfigError("mtbf", mtbf, "must be seconds above 0", "e.g. 36000")
    if not 0 <= stall < math.inf:
        raise ConfigError("stall", stall, "must be seconds, 0 or more", "e.g. 0.5")


def spare_units(units: int, down_probability: float, quantile: float) -> int:
    """Fewest spares k with P(at most k of units + k are down) >= quantile, binomial."""
    if not 0 <= down_probability < 1:
        rule = "must be 0 or more, below 1"
        raise ConfigError("down_probability", down_probability, rule, "e.g. 0.001")
    if not 0 < quantile < 1:
        raise ConfigError("quantile", quantile, "must be between 0 and 1", "e.g. 0.99")
    if not down_probability or units < 1:
        return 0
    spares = 0
    while _binomial_cdf(units + spares, down_probability, spares) < quantile:
        shortfall = _quantile(units + spares, down_probability, quantile) - spares
        spares += max(1, shortfall)
    return spares


def outlook(
    cluster: Cluster, checkpoint_bytes: float, settings: FailureSettings | None = None
) -> FailureOutlook:
    """Failures, checkpoint interval, goodput and spares of a run that fills a cluster."""
    settings = settings or FailureSettings()
    per_1000 = settings.rate.per_1000_node_days
    mtbf = mtbf_seconds(cluster.gpus, per_1000, settings.correlated)
    recovery = settings.recovery_seconds or cold_recovery_seconds(cluster.gpus)
    flush = checkpoint_bytes / (settings.storage_bandwidth_per_node * cluster.nodes)
    copy = checkpoint_bytes / cluster.gpus / cluster.host_bandwidth
    stall = settings.stall_seconds or max(LEAST_STALL_SECONDS, copy)
    # A checkpoint that is still being written is lost with the node: its flush is redone work.
    cost = settings.detection_seconds + recovery + flush

    def at(rate: float) -> tuple[float, float]:
        mean = mtbf_seconds(cluster.gpus, rate, settings.correlated)
        interval = max(best_interval(mean, stall), flush)
        return interval, goodput(mean, interval, stall, cost)

    interval, kept = at(per_1000)
    rates = _plausible(settings.rate)
    return FailureOutlook(
        rate=settings.rate,
        mtbf_seconds=mtbf,
        linear_mtbf_seconds=mtbf_seconds(cluster.gpus, per_1000, correlated=False),
        failures_per_day=DAY_SECONDS / mtbf,
        detection_seconds=settings.detection_seconds,
        recovery_seconds=recovery,
        checkpoint_bytes=checkpoint_bytes,
        stall_seconds=stall,
        flush_seconds=flush,
        storage_bandwidth_per_node=settings.storage_bandwidth_per_node,
        young_interval_seconds=young_interval(mtbf, stall),
        interval_seconds=interval,
        goodput=kept,
        goodput_low=at(max(rates))[1],
        goodput_high=at(min(rates))[1],
        goodput_fast=goodput(mtbf, interval, stall, LEAST_RECOVERY_SECONDS),
        spares=spares_of(cluster, settings),
    )


def _plausible(rate: Rate) -> list[float]:
    """The published rates; around a rate that the user knows, what luck does in a few weeks."""
    if rate.name in RATES:
        return [known.per_1000_node_days for known in RATES.values()]
    return [rate.per_1000_node_days / 1.5, rate.per_1000_node_days * 1.5]


def spares_of(cluster: Cluster, settings: FailureSettings) -> tuple[Spares, ...]:
    """Spares of each failure domain: nodes anywhere, nodes in each pod, whole NVLink racks."""
    spares = [_spares("node", cluster.gpus, cluster.gpus_per_node, settings)]
    pod = cluster.fabric.pod_gpus
    if pod and cluster.gpus > pod:
        # Spares that must stand in the pod of the node they replace cannot be pooled.
        pods = -(-cluster.gpus // pod)
        one = _spares(f"node, in each of {pods} pods", pod, cluster.gpus_per_node, settings)
        spares.append(one)
    if cluster.gpus_per_node < cluster.domain_gpus <= cluster.gpus_per_rack:
        spares.append(_spares("NVLink domain", cluster.gpus, cluster.domain_gpus, settings))
    return tuple(spares)


def _spares(domain: str, gpus: int, gpus_per_unit: int, settings: FailureSettings) -> Spares:
    per_day = gpus_per_unit / NODE_GPUS * settings.rate.per_1000_node_days / 1000 * HARDWARE_SHARE
    repair_days = settings.repair_hours / 24
    down = per_day * repair_days / (1 + per_day * repair_days)
    units = -(-gpus // gpus_per_unit)
    needed = spare_units(units, down, settings.spare_quantile)
    return Spares(domain, units, gpus_per_unit, down, needed)


def _quantile(units: int, probability: float, quantile: float) -> int:
    cumulative = np.cumsum(np.exp(_log_binomial(units, probability)))
    return int(np.searchsorted(cumulative, min(quantile, cumulative[-1])))


def _binomial_cdf(units: int, probability: float, most: int) -> float:
    return float(np.exp(_log_binomial(units, probability)[: most + 1]).sum())


def _log_binomial(units: int, probability: float) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Log of P(k down), for k up to where the tail no longer counts."""
    mean = units * probability
    most = min(units, int(mean + 12 * math.sqrt(mean + 1) + 30))
    k = np.arange(most, dtype=np.float64)
    odds = math.log(probability) - math.log1p(-probability)
    steps = np.log(units - k) - np.log(k + 1) + odds
    return np.concatenate(([0.0], np.cumsum(steps))) + units * math.log1p(-probability)
