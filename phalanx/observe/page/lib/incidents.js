// What went wrong in a job, from the log where the server has no better list: one incident a
// failure, with what was decided about it and when steps went on.
import { before } from "./scale.js";
import { spaced } from "./format.js";

const FAILURES = new Set(["WorkerExited", "NodeSilent", "DeviceError", "NoProgress", "Corruption", "GangStuck"]);
const FINDINGS = new Set(["SlowRank", "ThroughputRegression", "DataStarved", "LossSpike"]);
const TOGETHER_NS = 5e9; // one failure is seen by several

export function incidentsOf(events, job) {
  const found = [];
  let open = null;
  for (const event of events) {
    const mine = event.body.job === job || event.commands.length > 0;
    if (!mine) continue;
    const decision = event.commands.find((each) => ["Form", "Abort", "Requeue", "Notify", "Quarantine"].includes(each.kind) && each.why.text);
    if (FAILURES.has(event.kind)) {
      if (open && !open.resumed_ns && event.time_ns - open.time_ns < TOGETHER_NS) open.also.push(event);
      else found.push(open = { time_ns: event.time_ns, kind: event.kind, tone: "bad", body: event.body, also: [], decision: "", resumed_ns: 0, sequence: event.sequence });
    } else if (FINDINGS.has(event.kind)) {
      found.push({ time_ns: event.time_ns, kind: event.kind, tone: "warn", body: event.body, also: [], decision: decision?.why.text ?? "", resumed_ns: -1, sequence: event.sequence });
    }
    if (open && decision?.kind === "Form" && !open.decision) open.decision = decision.why.text;
    if (open && event.kind === "GangReady" && !open.resumed_ns) { open.resumed_ns = event.time_ns; open.step = event.body.step; }
  }
  return found;
}

const GRAVE = new Set(["worker_exited", "node_lost", "device_error", "hang", "silent_corruption", "gang_failed", "job_failed"]);
const NEAR_SECONDS = 3;

// Findings of the server, each with what the log says was decided about it and how long it took.
export function together(findings, fromLog) {
  if (!findings.length) return fromLog;
  return findings.map((finding) => {
    const near = fromLog.find((each) => Math.abs(each.time - finding.time) < NEAR_SECONDS);
    return {
      time: finding.time, tone: GRAVE.has(finding.kind) ? "bad" : "warn", text: finding.sentence || finding.kind,
      decision: near?.decision ?? "", suggestion: finding.suggestion, away: near?.away ?? null, step: finding.evidence?.step > 0 ? finding.evidence.step : undefined,
    };
  });
}

export const sentence = (incident, nodeName) => {
  const { body, kind } = incident;
  const where = Number.isInteger(body.node) ? ` on ${nodeName(body.node) ?? `node ${body.node}`}` : "";
  const who = Number.isInteger(body.rank) && body.rank >= 0 ? `rank ${body.rank}` : "";
  const slow = body.slowdown_ppm ? ` ${Math.round(body.slowdown_ppm / 1e4)} % slower than its peers` : "";
  return [spaced(kind), who, body.cause, slow].filter(Boolean).join(" ") + where;
};

// The step that was under way at a time.
export const stepAt = (series, seconds) => (series?.time?.length ? series.step[before(series.time, seconds)] : null);
