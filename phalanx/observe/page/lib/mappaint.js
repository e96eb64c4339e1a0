// Drawing of the map. Nodes are filled by colour; what is wrong also has a shape of its own.
import { colours } from "./theme.js";

const SHAPES = { suspect: "triangle", draining: "lower", quarantined: "square", dead: "cross", spare: "ring" };
const NAMES_FROM = 64, MARKS_FROM = 7, GPUS_FROM = 40; // pixels of a node

export function paint(map) {
  const { canvas, places, fleet, colour, ratio } = map;
  const c = canvas.getContext("2d", { alpha: false });
  const theme = colours();
  const width = canvas.width / ratio, height = canvas.height / ratio;
  c.setTransform(ratio, 0, 0, ratio, 0, 0);
  c.fillStyle = theme.surface;
  c.fillRect(0, 0, width, height);
  const scale = map.scale(), [ox, oy] = map.offset;
  blocks(c, map, theme, scale, ox, oy);
  const gap = scale > 12 ? Math.min(5, scale * 0.08) : scale > 4 ? 0.75 : 0.25;
  const size = scale - gap;
  const { x, y } = places;
  const count = Math.min(fleet.names.length, x.length);
  const groups = colour.palette.map(() => []);
  const dim = map.found;
  for (let node = 0; node < count; node++) {
    const px = ox + x[node] * scale, py = oy + y[node] * scale;
    if (px > width || py > height || px + scale < 0 || py + scale < 0) continue;
    groups[colour.of[node]].push(node);
  }
  groups.forEach((nodes, index) => {
    c.fillStyle = colour.palette[index];
    if (!dim) {
      fillAll(c, nodes, x, y, ox, oy, scale, size);
      return;
    }
    fillAll(c, nodes.filter((node) => dim.has(node)), x, y, ox, oy, scale, size);
    c.globalAlpha = 0.18;
    fillAll(c, nodes.filter((node) => !dim.has(node)), x, y, ox, oy, scale, size);
    c.globalAlpha = 1;
  });
  if (scale >= MARKS_FROM) marks(c, map, groups, scale, size, ox, oy);
  if (scale >= NAMES_FROM) names(c, map, theme, groups, scale, size, ox, oy);
  if (map.chosen >= 0 && map.chosen < count) {
    c.lineWidth = 2;
    c.strokeStyle = theme.ink;
    c.strokeRect(ox + x[map.chosen] * scale - 1.5, oy + y[map.chosen] * scale - 1.5, size + 3, size + 3);
  }
}

function fillAll(c, nodes, x, y, ox, oy, scale, size) {
  if (size > 14) {
    const radius = Math.min(6, size * 0.12);
    c.beginPath();
    for (const node of nodes) c.roundRect(ox + x[node] * scale, oy + y[node] * scale, size, size, radius);
    c.fill();
    return;
  }
  for (const node of nodes) c.fillRect(ox + x[node] * scale, oy + y[node] * scale, size, size);
}

function blocks(c, map, theme, scale, ox, oy) {
  const { blocks: all } = map.places;
  c.lineWidth = 1;
  c.strokeStyle = theme.line;
  c.fillStyle = theme.sunken;
  for (const block of all) {
    c.beginPath();
    c.roundRect(ox + block.x * scale, oy + block.y * scale, block.w * scale, block.h * scale, Math.min(8, scale * 0.5));
    c.fill();
  }
  const { edge, head } = map.places;
  const room = scale * head * 0.9;
  if (room < 9) return;
  c.fillStyle = theme.faint;
  c.textBaseline = "middle";
  c.font = `550 ${Math.min(14, room * 0.72)}px Inter, sans-serif`;
  for (const block of all) {
    const text = map.fleet.pods[block.pod] ?? "";
    c.fillText(text, ox + (block.x + edge) * scale, oy + (block.y + head / 2) * scale, (block.w - 1) * scale);
  }
}

function marks(c, map, groups, scale, size, ox, oy) {
  const { fleet, places } = map;
  c.lineWidth = Math.max(1.2, Math.min(3, size * 0.11));
  const r = Math.min(size * 0.26, 11);
  for (const node of groups.flat()) {
    const shape = SHAPES[fleet.states[fleet.state[node]]];
    if (!shape) continue;
    c.strokeStyle = c.fillStyle = inkOn(map.colour.palette[map.colour.of[node]]);
    const big = size >= NAMES_FROM;
    const cx = ox + places.x[node] * scale + (big ? size - r * 1.6 : size / 2);
    const cy = oy + places.y[node] * scale + (big ? r * 1.6 : size / 2);
    c.beginPath();
    if (shape === "cross") { c.moveTo(cx - r, cy - r); c.lineTo(cx + r, cy + r); c.moveTo(cx + r, cy - r); c.lineTo(cx - r, cy + r); c.stroke(); }
    else if (shape === "triangle") { c.moveTo(cx, cy - r); c.lineTo(cx + r, cy + r); c.lineTo(cx - r, cy + r); c.fill(); }
    else if (shape === "lower") { c.moveTo(cx - r, cy - r * 0.7); c.lineTo(cx + r, cy - r * 0.7); c.lineTo(cx, cy + r); c.fill(); }
    else if (shape === "square") { c.rect(cx - r * 0.8, cy - r * 0.8, r * 1.6, r * 1.6); c.fill(); }
    else { c.moveTo(cx, cy - r); c.lineTo(cx + r, cy); c.lineTo(cx, cy + r); c.lineTo(cx - r, cy); c.closePath(); c.stroke(); }
  }
}

function names(c, map, theme, groups, scale, size, ox, oy) {
  const { fleet, places } = map;
  c.textBaseline = "alphabetic";
  const text = Math.min(15, size * 0.13);
  for (const node of groups.flat()) {
    const px = ox + places.x[node] * scale, py = oy + places.y[node] * scale;
    c.fillStyle = inkOn(map.colour.palette[map.colour.of[node]]);
    c.font = `620 ${text}px Inter, sans-serif`;
    c.fillText(fleet.names[node], px + size * 0.09, py + size * 0.09 + text, size * 0.82);
    const job = fleet.job[node];
    c.font = `450 ${text * 0.85}px Inter, sans-serif`;
    c.globalAlpha = 0.85;
    c.fillText(job > 0 ? `job ${job}` : job < 0 ? "held" : fleet.states[fleet.state[node]], px + size * 0.09, py + size * 0.09 + text * 2.2, size * 0.82);
    c.globalAlpha = 1;
    if (size >= GPUS_FROM) gpus(c, theme, px, py, size, fleet.gpus[node], fleet.gpus[node] - fleet.free_gpus[node]);
  }
}

// Black or white, whichever is read better on a colour (given as #rrggbb).
function inkOn(colour) {
  const [r, g, b] = [1, 3, 5].map((i) => parseInt(colour.slice(i, i + 2), 16));
  return 0.3 * r + 0.59 * g + 0.11 * b > 140 ? "#191712" : "#fffdf8";
}

function gpus(c, theme, px, py, size, count, held) {
  const across = Math.min(count, 8);
  const each = Math.min((size * 0.82) / across, size * 0.16);
  for (let gpu = 0; gpu < count; gpu++) {
    c.globalAlpha = gpu < held ? 0.9 : 0.3;
    const row = Math.floor(gpu / across);
    c.fillRect(px + size * 0.09 + (gpu % across) * each, py + size * 0.86 - row * each, each * 0.78, each * 0.45);
  }
  c.globalAlpha = 1;
}
