// The graphs before and after fusing, their blocks, and the places of nodes and edges in the picture.
const DATA = JSON.parse(document.getElementById("data").textContent);
const text = (number) => DATA.texts[number];
const LABEL = 0, OP = 1, ATTRIBUTES = 2, TYPES = 3, WEIGHTS = 4, READS = 5, FATE = 6, STANDS_FOR = 7;  // columns of nodes
const PAD = 18, MAX_CHARS = 34;
const pen = document.createElement("canvas").getContext("2d");
const widths = new Map();

/** Return how wide a text is in the picture: a name, or a smaller line under it. */
function widthOf(value, isName) {
  const key = `${isName} ${value}`;
  if (!widths.has(key)) {
    pen.font = isName ? "600 13px system-ui, sans-serif" : "11px system-ui, sans-serif";
    widths.set(key, pen.measureText(value).width);
  }
  return widths.get(key);
}

const counted = (count, what, several) => `${count.toLocaleString("en")} ${count === 1 ? what : several || what + "s"}`;
/** Return a text with invisible characters, such as direction marks, as escapes: the model's names are untrusted. */
const printable = (value) => String(value).replace(/[^\P{C}\n]|[^\P{Z} ]|\p{DI}|\u2800/gu, (c) => `\\u{${c.codePointAt(0).toString(16)}}`);
const escaped = (value) => printable(value).replace(/[&<>"']/g, (c) => `&#${c.charCodeAt(0)};`);
const cut = (value, length = MAX_CHARS) => value.length > length ? value.slice(0, length - 1) + "…" : value;

/** Link one graph of the data: positions, the nodes that each fused node replaced, both sides, and the matches. */
function linked(graph) {
  const position = new Map(graph.order.map((node, i) => [node, i]));
  const made = new Map(Object.entries(graph.matches).map(([number, [after]]) => [after, Number(number)]));
  const isDrawn = drawnBefore(graph);
  const replacedBy = graph.after.map(() => []), drawnBy = graph.after.map(() => []);
  graph.before.forEach((node, i) => {
    if (node[STANDS_FOR] < 0) return;
    replacedBy[node[STANDS_FOR]].push(i);
    if (isDrawn[i]) drawnBy[node[STANDS_FOR]].push(i);
  });
  const sides = {
    after: { nodes: graph.after, position: (i) => position.get(i), at: (p) => [graph.order[p]] },
    before: {
      nodes: graph.before,
      position: (i) => isDrawn[i] ? position.get(graph.before[i][STANDS_FOR]) : undefined,
      at: (p) => drawnBy[graph.order[p]],
    },
  };
  const root = asBlock([1, graph.order.length, graph.items, ""], 0, "");
  return { ...graph, made, replacedBy, drawnBy, sides, root, open: new Set() };
}

/**
 * Return which nodes before fusing are drawn: those that a node after fusing stands for, without the arithmetic on
 * shapes and masks that was rewritten, which reads nothing that flows through the model.
 */
function drawnBefore(graph) {
  const flows = [];
  return graph.before.map((node, i) => {
    const fate = DATA.fates[node[FATE]];
    const reads = !["Shape", "Size"].includes(text(node[OP])) && node[READS].some((each) => flows[each]);
    flows[i] = fate !== "constant" && (fate === "fused" || fate === "weights" || reads);
    return node[STANDS_FOR] >= 0 && (flows[i] || fate === "stays");
  });
}

/** Turn an item of the data into a block or a position; `start` is where the block begins. */
function asBlock([copies, length, items, scope], start, path) {
  const block = { copies, length, start, path, scope, items: [] };
  let at = start;
  for (const item of items) {
    if (typeof item === "number") {
      block.items.push(item);
      at = item + 1;
    } else {
      const inner = asBlock(item, at, `${path}/${at}`);
      block.items.push(inner);
      at += inner.copies * inner.length;
    }
  }
  return block;
}

const isBlock = (item) => typeof item === "object";
const spanOf = (item) => isBlock(item) ? [item.start, item.start + item.copies * item.length] : [item, item + 1];

/** Return how many boxes a block draws on a side, with the blocks that are open. */
function drawnIn(graph, side, block) {
  return block.items.reduce((sum, item) => sum + (!isBlock(item) ? graph.sides[side].at(item).length : graph.open.has(item.path) ? drawnIn(graph, side, item) : 1), 0);
}

/** Open the blocks of one level after the other, as long as not too many boxes are drawn before fusing. */
function openWithin(graph, budget) {
  graph.open.clear();
  for (let level = graph.root.items.filter(isBlock); level.length; level = level.flatMap((block) => block.items.filter(isBlock))) {
    level.forEach((block) => graph.open.add(block.path));
    if (drawnIn(graph, "before", graph.root) > budget) return level.forEach((block) => graph.open.delete(block.path));
  }
}

/** Lay out the first copy of a block: units with places, and edges with points. */
function layOut(graph, side, block) {
  const { nodes, position, at } = graph.sides[side];
  const units = [], unitOfNode = new Map(), ranges = [];
  for (const item of block.items) {
    if (isBlock(item)) {
      const [start, end] = spanOf(item);
      ranges.push([start, end, units.length]);
      units.push(blockUnit(graph, side, item));
    } else {
      for (const node of at(item)) {
        unitOfNode.set(node, units.length);
        units.push(nodeUnit(graph, side, node));
      }
    }
  }
  const first = block.start, last = block.start + block.length;
  const unitOf = (node) => {
    const known = unitOfNode.get(node);
    if (known !== undefined) return known;
    const p = position(node);
    return p === undefined ? undefined : ranges.find(([start, end]) => start <= p && p < end)?.[2];
  };
  const isInside = (node) => { const p = position(node); return p !== undefined && first <= p && p < last; };
  const edges = new Map();
  for (let p = first; p < last; p++) {
    for (const node of at(p)) {
      const to = unitOf(node);
      if (to === undefined) continue;
      for (const read of nodes[node][READS]) {
        const from = isInside(read) ? unitOf(read) : undefined;
        if (from !== undefined && from !== to) edges.set(`${from} ${to}`, [from, to]);
      }
    }
  }
  return { ...placed(units, [...edges.values()]), units };
}

/** Place units by dagre, which ranks them from top to bottom. */
function placed(units, edges) {
  const g = new dagre.graphlib.Graph();
  g.setGraph({ rankdir: "TB", nodesep: 18, ranksep: 26, marginx: 6, marginy: 6 });
  g.setDefaultEdgeLabel(() => ({}));
  units.forEach((unit, i) => g.setNode(String(i), { width: unit.width, height: unit.height }));
  edges.forEach(([from, to]) => g.setEdge(String(from), String(to)));
  dagre.layout(g);
  units.forEach((unit, i) => { const { x, y } = g.node(String(i)); unit.x = x - unit.width / 2; unit.y = y - unit.height / 2; });
  const lines = g.edges().map((e) => g.edge(e).points);
  const left = Math.min(0, ...lines.flat().map(({ x }) => x - 6)), right = Math.max(...lines.flat().map(({ x }) => x + 6), g.graph().width || 40);
  units.forEach((unit) => { unit.x -= left; });
  const moved = lines.map((points) => points.map(({ x, y }) => ({ x: x - left, y })));
  return { lines: moved, width: right - left, height: Math.max(g.graph().height || 0, 20) };
}

function nodeUnit(graph, side, node) {
  const row = graph.sides[side].nodes[node];
  const name = cut(text(row[OP]));
  const sub = cut(side === "after" ? subtitle(graph, node) : "");
  const width = Math.max(widthOf(name, true), widthOf(sub, false), 34) + PAD;
  return { kind: "node", node, name, sub, width, height: sub ? 40 : 26 };
}

/** Return the second line in the box of a fused node: its program or activation, and its sizes. */
function subtitle(graph, node) {
  const match = graph.made.get(node);
  if (match === undefined) return "";
  const sizes = lines(text(DATA.matches[match][4])).filter((line) => / = \d+$/.test(line)).map((line) => line.replace(" = ", " "));
  const found = Object.fromEntries(lines(text(graph.after[node][ATTRIBUTES])).map((line) => line.split(" = ")));
  const words = [found.program, found.activation !== "none" && found.activation].filter(Boolean);
  return [...words, ...sizes].join(" · ");
}

const lines = (value) => value ? value.split("\n").filter(Boolean) : [];
const HEAD = 24, MARGIN = 10;

function blockUnit(graph, side, block) {
  const isOpen = graph.open.has(block.path);
  const count = [...Array(block.length).keys()].reduce((sum, i) => sum + graph.sides[side].at(block.start + i).length, 0);
  const unit = { kind: "block", block, isOpen, name: blockTitle(block, count) };
  if (isOpen) {
    unit.inner = layOut(graph, side, block);
    unit.width = Math.max(unit.inner.width, widthOf(unit.name, true) + 92) + 2 * MARGIN;
    unit.height = unit.inner.height + HEAD + 2 * MARGIN;
  } else {
    const ops = new Map();
    for (let i = 0; i < block.length; i++) for (const node of graph.sides[side].at(block.start + i)) {
      const op = text(graph.sides[side].nodes[node][OP]);
      ops.set(op, (ops.get(op) || 0) + 1);
    }
    const kinds = [...ops].sort((a, b) => b[1] - a[1]);
    const others = kinds.length > 3 ? kinds.splice(2).reduce((sum, [, n]) => sum + n, 0) : 0;
    unit.rows = [...kinds.map(([op, n]) => cut(`${n} ${op}`)), ...(others ? [`${others} others`] : [])];
    unit.width = Math.max(widthOf(unit.name, true) + 92, ...unit.rows.map((row) => widthOf(row, false) + 28), 150);
    unit.height = HEAD + MARGIN + 15 * unit.rows.length;
  }
  return unit;
}

/** Return "/encoder/layer.0: 7 nodes": the scope of a block's names, if they have one, and the nodes of a copy. */
function blockTitle(block, count) {
  const scope = block.scope.length > MAX_CHARS ? `…${block.scope.slice(1 - MAX_CHARS)}` : block.scope;
  return `${scope ? `${scope}: ` : ""}${counted(count, "node")}${block.copies > 1 ? " each" : ""}`;
}
