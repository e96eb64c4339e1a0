const p = (d) => ["path", { d }];
export const ICONS = {
  fleet: [p("M4 4h6v6H4zM14 4h6v6h-6zM4 14h6v6H4zM14 14h6v6h-6z")],
  jobs: [p("M4 19V5M4 19h16M8 15l4-6 3 3 5-7")],
  goodput: [p("M4 20V10M10 20V4M16 20v-7M22 20H2")],
  events: [p("M5 6h14M5 12h14M5 18h9")],
  queue: [p("M4 7h16M4 12h11M4 17h7")],
  runs: [p("M3 17c4 0 4-9 9-9s4 6 9 6M3 11c5 0 5 6 9 6s5-11 9-11")],
  sweeps: [p("M4 4v16M12 4v16M20 4v16M4 16l8-9 8 4M4 9l8 8 8-10")],
  plan: [p("M4 8h9M17 8h3M4 16h3M11 16h9M15 5.5v5M9 13.5v5")],
  pipelines: [p("M3 5h5v5H3zM16 5h5v5h-5zM16 15h5v5h-5zM8 7.5h8M12 7.5v10h4")],
  alerts: [p("M6 17V11a6 6 0 0 1 12 0v6M4 17h16M10 20.5h4")],
  simulate: [p("M12 3l8 4.5v9L12 21l-8-4.5v-9zM12 12l8-4.5M12 12v9M12 12L4 7.5")],
};
// Each shield covers its neighbour.
const ring = (x) => ["circle", { cx: x, cy: 13, r: 10, fill: "var(--paper)", stroke: "currentColor", "stroke-width": 2.6 }];
export const SHIELDS = [ring(13), ring(23), ring(33), ["circle", { cx: 33, cy: 13, r: 3.2, fill: "currentColor" }]];
