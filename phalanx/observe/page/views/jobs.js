import { get } from "../lib/api.js";
import { card, empty, fill, h, rowLink, segmented, table } from "../lib/dom.js";
import { moment, span, whole } from "../lib/format.js";
import { state } from "../lib/state.js";

export function jobsView() {
  let which = "all";
  const list = table(["job", "state", "team", ["GPUs", "num"], ["step", "num"], ["ran", "num"], "submitted", "why"]);
  const nothing = empty("No jobs", h("p", {}, "Submit one: ", h("code", {}, "phalanx submit examples/demo.toml")));
  const tabs = segmented("Jobs", [["all", "All"], ["live", "Living"]], which, (value) => { which = value; refresh(); });
  const node = h("div", {}, h("div", { class: "title" }, h("h1", {}, "Jobs"), tabs), nothing, card("Jobs", "newest first", list, "flush"));
  async function refresh() {
    const found = [];
    for (let after = 0; found.length < 5000;) {
      const part = await get(`/v1/jobs?state=${which}&limit=1000&after=${after}`);
      found.push(...part.jobs);
      after = part.next_after;
      if (!after) break;
    }
    nothing.hidden = found.length > 0;
    node.lastElementChild.hidden = !found.length;
    fill(list.body, found.reverse().slice(0, 500), (job) => job.id, (job) => rowLink(`#/job/${job.id}`,
      h("td", {}, h("a", { href: `#/job/${job.id}` }, `${job.id} ${job.name}`), h("div", { class: "faint small" }, job.user)),
      h("td", {}, state(job.state), job.phase && job.phase !== job.state ? h("div", { class: "faint small" }, job.phase) : ""),
      h("td", {}, job.team), h("td", { class: "num" }, whole(job.gpus)),
      h("td", { class: "num" }, job.steps ? `${whole(job.step)} / ${whole(job.steps)}` : whole(job.step)),
      h("td", { class: "num" }, span(job.ran_seconds)), h("td", { class: "nowrap" }, moment(job.submitted_ns)),
      h("td", {}, h("span", { class: "clip", title: job.why.text }, job.why.text))));
  }
  return { node, refresh };
}
