// What went wrong in a job, from the log where the server has no better list: one incident a
// failure, with what was decided about it and when steps went on.
import { before } from "./scale.js";
import { spaced, words } from "./format.js";

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
    if (open && !open.resumed_ns && decision?.kind === "Form" && !open.decision) open.decision = decision.why.text;
    if (open && event.kind === "GangReady" && !open.resumed_ns) { open.resumed_ns = event.time_ns; open.step = event.body.step; }
  }
  return found;
}

const GRAVE = new Set(["worker_exited", "node_lost", "device_error", "hang", "silent_corruption"]);
const NEAR_SECONDS = 3;
const near = (one, other) => Math.abs(one.time - other.time) < NEAR_SECONDS;

// Findings of the server. A failure and the gang that formed again because of it are one incident;
// what the server did not find in time is told from the log.
export function together(findings, fromLog) {
  const formed = findings.filter((each) => each.kind === "incident");
  const found = formed.map((each) => {
    const cause = findings.find((other) => GRAVE.has(other.kind) && near(each, other));
    const told = fromLog.find((other) => near(each, other));
    return {
      time: each.time, tone: "bad", text: cause ? placed(cause) : told?.text ?? "the gang formed again", decision: each.sentence,
      suggestion: cause?.suggestion ?? "", away: each.evidence.resumed_seconds ?? told?.away ?? null, step: each.evidence.step,
      finding: { ...each, evidence: { ...cause?.evidence, ...each.evidence } },
    };
  });
  for (const each of findings) {
    if (each.kind === "incident" || (GRAVE.has(each.kind) && formed.some((other) => near(each, other)))) continue;
    found.push({ time: each.time, tone: GRAVE.has(each.kind) ? "bad" : "warn", text: placed(each), decision: "", suggestion: each.suggestion, away: null, step: each.evidence.step, finding: each });
  }
  found.push(...fromLog.filter((each) => !found.some((other) => near(each, other))));
  return found.sort((a, b) => a.time - b.time);
}

// Committed steps that had to be made again, as the job tells them.
export const lossOf = ({ first, last, at_ns, why }) => ({
  time: at_ns / 1e9, tone: "bad", text: first === last ? `step ${last} is lost` : `steps ${first} to ${last} are lost`, decision: why.text, away: null, step: last,
});

const placed = ({ sentence: text, node, kind }) => `${text || kind}${node && !text.includes(node) ? ` on ${node}` : ""}`;

export const sentence = (incident, nodeName) => {
  const { body, kind } = incident;
  const where = Number.isInteger(body.node) ? ` on ${nodeName(body.node) ?? `node ${body.node}`}` : "";
  const who = Number.isInteger(body.rank) && body.rank >= 0 ? `rank ${body.rank}` : "";
  if (body.slowdown_ppm && who) return `${who}${where} is ${Math.round(body.slowdown_ppm / 1e4)} % slower than its peers`;
  return [spaced(kind), who, words(body.cause ?? "")].filter(Boolean).join(" ") + where;
};

// The step that was under way at a time.
export const stepAt = (series, seconds) => (series?.time?.length ? series.step[before(series.time, seconds)] : null);
