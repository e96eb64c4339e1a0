// Who waits, why, until when; what teams own and use.
import { get, status } from "../lib/api.js";
import { card, empty, fill, h, rowLink, table } from "../lib/dom.js";
import { counted, moment, span, whole, words } from "../lib/format.js";
import { state } from "../lib/state.js";

const SHOWN = 30;

export function queueView() {
  const list = table(["job", "team", ["GPUs", "num"], ["waited", "num"], "waits for", "estimated start", "priority"]);
  const none = empty("Nobody waits", "A job that does not start at once stands here, with the reason and an estimated start.");
  const listCard = card("Waiting", "in the order of their priority", h("div", {}, none, list), "flush");
  const teams = h("div", { class: "teams" });
  const running = table(["job", "state", "team", ["GPUs", "num"], ["priority", "num"], "may be asked to leave"]);
  const shut = table(["name", "from", "until", "for", "nodes"]);
  const teamsCard = card("Teams", "GPUs held, beside what each owns and its fair share", teams, "half");
  const runningCard = card("Holding nodes", "", running, "half flush");
  const shutCard = card("Reservations", "", shut, "half flush");
  const node = h("div", {}, h("div", { class: "title" }, h("h1", {}, "Queue")),
    h("div", { class: "grid" }, listCard, teamsCard, runningCard, shutCard));

  async function refresh() {
    const [{ jobs }, { quotas }, { reservations }, { gpus }, queue] = await Promise.all([
      get("/v1/jobs?state=live&limit=1000"), get("/v1/quotas"), get("/v1/reservations"), status(), get("/v1/queue"),
    ]);
    const rows = queue.rows.map(({ job, waits }) => ({ job, why: waits, total: Object.values(waits.priority).reduce((a, b) => a + b, 0) }));
    none.hidden = rows.length > 0;
    list.hidden = !rows.length;
    listCard.note(rows.length ? `${counted(queue.pending, "job")}, the next one first${queue.pending > rows.length ? `; ${rows.length} shown` : ""}` : "");
    const nowNs = queue.time_ns;
    fill(list.body, rows.map((row) => ({ ...row, waited: Math.floor((nowNs - row.job.submitted_ns) / 1e9) })), ({ job }) => job.id, ({ job, why, total, waited }) => rowLink(`#/job/${job.id}`,
      h("td", {}, h("a", { href: `#/job/${job.id}` }, `${job.id} ${job.name}`), h("div", { class: "faint small" }, job.user)), h("td", {}, job.team),
      h("td", { class: "num" }, whole(job.gpus)), h("td", { class: "num" }, span(waited)), h("td", {}, (why.waits_for ?? why.why).text),
      h("td", {}, why.start),
      h("td", {}, whole(total), h("div", { class: "faint small nowrap" }, Object.entries(why.priority).filter(([, v]) => v).map(([k, v]) => `${words(k)} ${whole(v)}`).join(", ")))));
    showTeams(quotas, gpus);
    const holding = jobs.filter((job) => job.state !== "pending").sort((a, b) => b.gpus - a.gpus);
    fill(running.body, holding.slice(0, SHOWN), (job) => job.id, (job) => rowLink(`#/job/${job.id}`,
      h("td", {}, h("a", { href: `#/job/${job.id}` }, `${job.id} ${job.name}`)), h("td", {}, state(job.state)), h("td", {}, job.team),
      h("td", { class: "num" }, whole(job.gpus)), h("td", { class: "num" }, whole(job.priority)), h("td", {}, job.preemptible ? "yes" : "no")));
    runningCard.note(holding.length > SHOWN ? `${counted(holding.length, "job")}, the largest ${SHOWN}` : counted(holding.length, "job"));
    shutCard.hidden = !reservations.length;
    fill(shut.body, reservations, (each) => each.name, (each) => h("tr", {}, h("td", {}, each.name), h("td", {}, moment(each.start_ns)), h("td", {}, moment(each.end_ns)),
      h("td", {}, each.teams.length ? each.teams.join(", ") : "maintenance"), h("td", {}, each.nodes.length ? counted(each.nodes.length, "node") : counted(each.gpus, "GPU"))));
  }

  function showTeams(quotas, gpus) {
    const weights = quotas.reduce((sum, each) => sum + each.weight, 0) || 1;
    const most = Math.max(1, gpus, ...quotas.map((each) => Math.max(each.used_gpus, each.gpus)));
    if (!quotas.length) { teams.replaceChildren(empty("No team holds anything", h("p", {}, "Give one a quota: ", h("code", {}, "phalanx quota research --gpus 512")))); teams.keyed = null; return; }
    fill(teams, quotas, (each) => each.team, (each) => {
      const share = Math.round((gpus * each.weight) / weights);
      const at = (value) => `${(100 * value) / most}%`;
      return h("div", { class: "team" },
        h("div", { class: "bar" }, h("strong", {}, each.team), h("span", { class: "muted small" },
          `${whole(each.used_gpus)} held, ${whole(each.gpus)} owned${each.ceiling ? `, at most ${whole(each.ceiling)}` : ""}, fair share ${whole(share)}`)),
        h("div", { class: "meter", role: "img", "aria-label": `${each.team} holds ${each.used_gpus} of ${each.gpus} owned GPUs` },
          h("div", { class: "part held", style: { width: at(Math.min(each.used_gpus, each.gpus || each.used_gpus)) } }),
          each.gpus && each.used_gpus > each.gpus ? h("div", { class: "part borrowed", style: { left: at(each.gpus), width: at(each.used_gpus - each.gpus) } }) : "",
          h("div", { class: "pin owned", title: "owned", style: { left: at(each.gpus) } }), h("div", { class: "pin", title: "fair share", style: { left: at(share) } })));
    });
  }
  return { node, refresh };
}
