// Where each node stands on the map: leaves are blocks of nodes, pods are blocks of leaves.
function shelves(boxes, width, gap) {
  let x = 0, y = 0, tall = 0, widest = 0;
  for (const box of boxes) {
    if (x > 0 && x + box.w > width) { x = 0; y += tall + gap; tall = 0; }
    box.x = x;
    box.y = y;
    x += box.w + gap;
    tall = Math.max(tall, box.h);
    widest = Math.max(widest, x - gap);
  }
  return { w: widest, h: y + tall };
}

// The width of shelves at which everything is drawn largest on a screen of this shape.
function pack(boxes, aspect, gap) {
  const area = boxes.reduce((sum, box) => sum + (box.w + gap) * (box.h + gap), 0);
  const widest = Math.max(...boxes.map((box) => box.w));
  let best = null;
  for (const stretch of [0.7, 0.85, 1, 1.1, 1.25, 1.5, 2]) {
    const width = Math.max(widest, Math.sqrt(area * aspect) * stretch);
    const size = shelves(boxes, width, gap);
    const scale = Math.min(aspect / size.w, 1 / size.h);
    if (!best || scale > best.scale * 1.001) best = { width, scale };
  }
  return shelves(boxes, best.width, gap);
}

export function layout(fleet, aspect) {
  const count = fleet.names.length;
  const edge = count > 64 ? 0.6 : 0.2, head = count > 64 ? 1.4 : 0.5; // of a pod, in nodes
  const pods = new Map();
  for (let node = 0; node < count; node++) {
    const leaves = pods.get(fleet.pod[node]) ?? new Map();
    pods.set(fleet.pod[node], leaves);
    const nodes = leaves.get(fleet.leaf[node]) ?? [];
    leaves.set(fleet.leaf[node], nodes);
    nodes.push(node);
  }
  const x = new Float32Array(count), y = new Float32Array(count);
  const blocks = [...pods].map(([pod, leaves]) => {
    const inner = [...leaves].map(([leaf, nodes]) => {
      const across = Math.min(nodes.length, Math.max(1, Math.ceil(Math.sqrt(nodes.length * (nodes.length > 8 ? 2 : 1.4)))));
      return { leaf, nodes, across, w: across, h: Math.ceil(nodes.length / across) };
    });
    const size = pack(inner, pods.size > 1 ? 1.3 : aspect, count > 64 ? 0.8 : 0.25);
    return { pod, inner, w: size.w + 2 * edge, h: size.h + head + edge };
  });
  const size = blocks.length ? pack(blocks, aspect, 0.9) : { w: 1, h: 1 };
  const order = [];
  for (const block of blocks) {
    for (const leaf of block.inner) {
      leaf.nodes.forEach((node, i) => {
        x[node] = block.x + edge + leaf.x + (i % leaf.across);
        y[node] = block.y + head + leaf.y + Math.floor(i / leaf.across);
        order.push(node);
      });
    }
  }
  return { x, y, order, blocks, edge, head, width: size.w, height: size.h };
}
