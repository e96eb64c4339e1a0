// The ledger's buckets: work, waits inside a step, losses, and GPUs that nobody used. Four hues,
// apart in lightness, so that a stack reads as four groups before it reads as fourteen parts.
import { colours } from "./theme.js";

export const BUCKETS = {
  productive: ["work", "steps that were kept", "#2c7f77", "#5cb8ac"],
  unreported: ["work", "programs that report no steps", "#7fb0aa", "#3a716a"],
  exposed_communication: ["wait", "communication that nothing hides (estimated)", "#1f4f96", "#8ab8f5"],
  bubble: ["wait", "pipeline bubble (estimated)", "#5b86c4", "#5f8fcd"],
  data_wait: ["wait", "waiting for data", "#9dbbe3", "#3f648f"],
  straggler: ["loss", "held up by slow ranks", "#8c5a00", "#f0c267"],
  checkpoint_stall: ["loss", "stopped for checkpoints", "#c08a1e", "#c9962f"],
  detection: ["loss", "until a failure was noticed", "#7d1f0a", "#ffb49c"],
  restart: ["loss", "until steps went on", "#bf3b1d", "#ff8361"],
  recompute: ["loss", "steps that were made again", "#e08a6c", "#b4543a"],
  idle_spare: ["idle", "spares that stood by", "#6b56a5", "#ac9be8"],
  quarantined: ["idle", "lost or quarantined nodes", "#8d877a", "#8d877a"],
  unallocated: ["idle", "nobody asked for them", "#cfc8b8", "#48443a"],
  residual: ["idle", "not explained", "#3f3b33", "#d6d0c2"],
};
// Events that time in a bucket comes from: what a slice of the ledger leads to.
const FAILURES = ["WorkerExited", "NodeSilent", "DeviceError", "NoProgress", "GangStuck", "GangJoined", "GangReady", "RestoreFailed", "Corruption", "Tick"];
const NODES = ["NodeSilent", "NodeSeen", "NodeJoined", "CheckResult", "NodeRepaired", "DrainNode", "ReadmitNode", "QuarantineNode", "DeviceError"];
export const EVENTS = {
  productive: ["Progress", "GangReady", "JobFinished"], unreported: ["GangReady", "JobFinished", "WorkerExited"], exposed_communication: ["SlowRank", "ThroughputRegression"], bubble: ["SlowRank"],
  data_wait: ["DataStarved"], straggler: ["SlowRank", "ThroughputRegression"], checkpoint_stall: ["FlushWanted", "FlushDone", "StorageSlow"],
  detection: FAILURES, restart: FAILURES, recompute: FAILURES, idle_spare: NODES, quarantined: NODES,
  unallocated: ["Submit", "JobFinished", "Cancel", "Requeue", "Hold", ...NODES], residual: ["ThroughputRegression", "GangDrained", "Progress"],
};
export const ORDER = Object.keys(BUCKETS);
export const GROUPS = { work: "work", wait: "waits inside steps", loss: "lost", idle: "not used" };
export const tint = (name) => BUCKETS[name]?.[colours().dark ? 3 : 2] ?? "#888888";
export const meaning = (name) => BUCKETS[name]?.[1] ?? "";
export const ordered = (buckets) => [...ORDER, ...Object.keys(buckets).filter((name) => !ORDER.includes(name))]
  .map((name) => [name, BigInt(buckets[name] ?? 0)]).filter(([, value]) => value > 0n);
export const total = (buckets) => Object.values(buckets).reduce((sum, value) => sum + BigInt(value), 0n);
