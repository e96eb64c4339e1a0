// The figures at the top of a job: is it learning, is it fast, what does it cost.
import { figure, h } from "./dom.js";
import { counted, dollars, gpuHours, percent, quantity, short, span, whole } from "./format.js";

const NAMES = [["step", "step"], ["loss", "loss"], ["speed", "tokens per second"], ["mfu", "MFU"], ["time", "step time"], ["goodput", "goodput"],
  ["price", "a million tokens"], ["generation", "generation"]];
const listed = (...parts) => parts.filter(Boolean).join(", ");
const known = (value) => value !== null && value !== undefined;

export class JobFigures {
  constructor() {
    this.each = Object.fromEntries(NAMES.map(([key, name]) => [key, figure(name)]));
    this.node = h("dl", { class: "figures" }, Object.values(this.each));
  }

  // now: the newest row of the job's metrics; plan: what was predicted; detail: the job with what it was submitted for.
  show(job, now, ledger, plan, detail) {
    const { step, loss, speed, mfu, time, goodput, price, generation } = this.each;
    const planned = plan.prediction, submitted = detail.plan ?? {}, lost = detail.lost_steps;
    const saved = job.printed ? "as it prints; what it saves is its own" : `${whole(job.committed)} safe in memory, ${whole(job.durable)} on disk`;
    step.set(job.step || job.steps ? whole(job.step) : "–", job.steps ? `of ${whole(job.steps)}` : "", listed(job.step || job.steps ? saved : "none was reported",
      job.state === "running" && now.eta_seconds > 0 ? `${span(now.eta_seconds)} to go` : ""));
    loss.set(short(now.loss, 4), "", listed(known(now.validation_loss) ? `${short(now.validation_loss, 4)} on unseen text` : "",
      known(now.grad_norm) ? `gradient ${short(now.grad_norm)}, rate ${short(now.learning_rate)}` : ""));
    speed.set(short(now.tokens_per_second), "", listed(known(now.tokens_per_second_per_gpu) ? `${short(now.tokens_per_second_per_gpu)} a rank` : "",
      known(now.scaling_efficiency) ? `${percent(now.scaling_efficiency, 0)} of the smallest world` : ""));
    mfu.set(percent(now.mfu, 1), "", listed(known(now.hfu) ? `HFU ${percent(now.hfu, 1)}` : "", planned ? `planned ${percent(planned.mfu, 1)}` : known(now.mfu) ? "" : "no peak is known of these devices"));
    time.set(job.step_seconds ? span(job.step_seconds) : known(now.step_seconds) ? span(now.step_seconds) : "–", "",
      listed(submitted.step_ns ? `planned ${span(submitted.step_ns.mid / 1e9)}` : "", known(now.plan_efficiency) ? `${percent(now.plan_efficiency, 0)} of the plan's speed` : "", now.peak_memory_bytes > 0 ? `${quantity(now.peak_memory_bytes, "B")} of memory` : ""));
    goodput.set(percent(ledger.goodput, 1), "", listed(`${gpuHours(ledger.allocation_gpu_ns).join(" ")}, ${dollars(ledger.dollars)}`,
      submitted.micro_dollars ? `planned ${dollars(submitted.micro_dollars.mid / 1e6)}` : ""));
    price.set(dollars(now.dollars_per_million_tokens ?? NaN), "", known(now.joules_per_million_tokens) ? `${quantity(now.joules_per_million_tokens, "J")}, ${short(now.co2_grams_per_million_tokens)} g CO₂` : "");
    generation.set(job.generation, "", listed(job.generation > 1 ? counted(job.generation - 1, "re-formation") : "never re-formed",
      lost ? `${counted(lost, "committed step")} lost` : ""));
  }
}
