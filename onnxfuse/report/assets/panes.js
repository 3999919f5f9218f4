// The picture: two panes, one for each side, in which nodes can be opened, selected and zoomed.
const stage = document.getElementById("stage");
const detail = document.getElementById("detail");
const panes = Object.fromEntries([...document.querySelectorAll(".pane")].map((pane) => [pane.dataset.side, pane]));
const MIN_SCALE = 0.02, MAX_SCALE = 3, READABLE = 0.8, LEGIBLE = 0.4;
// Limits of the nodes drawn before fusing: at first, the largest at which the fitted picture is legible; after "Open all".
const BUDGETS = [160, 80, 40, 0], MAX_DRAWN = 1500;
const MAP_SIZE = 150;
const SIDES = ["before", "after"];
const shown = { graph: GRAPHS[0], scale: { before: 1, after: 1 }, chosen: null, copy: 0, highlight: null };

function classOf(graph, side, node) {
  const row = graph.sides[side].nodes[node];
  const after = side === "after" ? node : row[STANDS_FOR];
  const match = MATCH[graph.made.get(after)];
  if (!match) return ["stays", ""];
  const fate = side === "after" ? "fused" : DATA.fates[row[FATE]];
  return [`${fate}${OFF.has(match.name) ? " off" : ""}`, hueStyle(match.fusion), match.fusion];
}

function edgeMarkup(points) {
  const [start, ...rest] = points.map(({ x, y }) => `${x.toFixed(1)} ${y.toFixed(1)}`);
  if (rest.length < 2) return `<path class="edge" d="M${start}L${rest.join("L")}"/>`;
  let path = `M${start}`;
  for (let i = 1; i < points.length - 1; i++) {
    const end = i === points.length - 2 ? points[i + 1] : { x: (points[i].x + points[i + 1].x) / 2, y: (points[i].y + points[i + 1].y) / 2 };
    path += `Q${points[i].x.toFixed(1)} ${points[i].y.toFixed(1)} ${end.x.toFixed(1)} ${end.y.toFixed(1)}`;
  }
  return `<path class="edge" d="${path}"/>`;
}

function nodeMarkup(unit, look, attributes) {
  const [classes, style] = Array.isArray(look) ? look : [look, ""];
  const middle = unit.width / 2;
  const labels = unit.sub
    ? `<text class="name" x="${middle}" y="17" text-anchor="middle">${escaped(unit.name)}</text><text class="sub" x="${middle}" y="32" text-anchor="middle">${escaped(unit.sub)}</text>`
    : `<text class="name" x="${middle}" y="${unit.height / 2 + 4.5}" text-anchor="middle">${escaped(unit.name)}</text>`;
  return `<g class="node ${classes}" style="${style}" transform="translate(${unit.x.toFixed(1)} ${unit.y.toFixed(1)})" ${attributes}><rect width="${unit.width.toFixed(1)}" height="${unit.height}" rx="6"/>${labels}</g>`;
}

function unitsMarkup(graph, side, laid) {
  const boxes = laid.units.map((unit) => {
    if (unit.kind === "node") {
      const look = classOf(graph, side, unit.node);
      const label = `${unit.name}${unit.sub ? `, ${unit.sub}` : ""}, ${graph.sides[side].nodes[unit.node][LABEL]}`;
      return nodeMarkup(unit, look, `data-node="${unit.node}" data-fusion="${look[2] || ""}" role="button" tabindex="-1" aria-label="${escaped(label)}"`);
    }
    const { block } = unit;
    const badge = `×${block.copies}`, wide = widthOf(badge, true) + 18;
    const times = block.copies > 1 ? `<g class="copies" transform="translate(${unit.width - wide - 6} -11)"><rect width="${wide}" height="22" rx="11"/><text x="${wide / 2}" y="16" text-anchor="middle">${badge}</text></g>` : "";
    const inner = unit.isOpen
      ? `<g transform="translate(${(unit.width - unit.inner.width) / 2} ${HEAD + MARGIN})">${unitsMarkup(graph, side, unit.inner)}</g>`
      : unit.rows.map((row, i) => `<text class="sub" x="12" y="${HEAD + 12 + 15 * i}">${escaped(row)}</text>`).join("");
    const label = `${unit.name}${block.copies > 1 ? `, ${block.copies} times` : ""}; ${unit.isOpen ? "close" : "open"} the block`;
    return `<g class="block ${block.copies > 1 ? "repeats" : ""}" transform="translate(${unit.x.toFixed(1)} ${unit.y.toFixed(1)})"><rect width="${unit.width.toFixed(1)}" height="${unit.height.toFixed(1)}" rx="10"/>`
      + `<g class="node head" role="button" tabindex="-1" aria-expanded="${unit.isOpen}" aria-label="${escaped(label)}" data-block="${block.path}"><rect x="6" y="5" width="${widthOf(unit.name, false) + 40}" height="20" rx="5" style="fill:transparent;stroke:none"/><text class="title" x="12" y="19">${unit.isOpen ? "▾" : "▸"} ${escaped(unit.name)}</text></g>${inner}${times}</g>`;
  });
  return laid.lines.map(edgeMarkup).join("") + boxes.join("");
}

function draw() {
  const { graph } = shown;
  if (!graph) return;
  for (const side of SIDES) {
    const pane = panes[side], scroll = pane.querySelector(".scroll");
    if (!pane.offsetParent) continue;
    const state = [...graph.open].sort().join(" ");
    graph.laid ??= {};
    if (graph.laid[side]?.state !== state) graph.laid[side] = { state, ...layOut(graph, side, graph.root) };
    const laid = graph.laid[side];
    shown[side] = { width: laid.width, height: laid.height + 16 };
    scroll.innerHTML = `<svg role="group" aria-label="The graph ${side} fusing. Arrow keys move between nodes, Enter opens one, plus and minus zoom."><defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto"><path class="tip" d="M0 0L8 4L0 8z"/></marker></defs><g id="drawn-${side}" transform="translate(0 14)">${unitsMarkup(graph, side, laid)}</g></svg>`;
    const buttons = scroll.querySelectorAll("[role=button]");
    if (buttons.length) buttons[0].setAttribute("tabindex", "0");
    pane.querySelector("figcaption span").textContent = `fusing: ${sizeText(graph, side)}`;
    applyScale(side);
  }
  mark();
}

/** Return the number of nodes of a graph, and how many are not drawn.  Constants do not count, as in the report. */
function sizeText(graph, side) {
  const { nodes, position } = graph.sides[side];
  const counts = [...nodes.keys()].filter((i) => text(nodes[i][OP]) !== "Constant");
  const hidden = counts.filter((i) => position(i) === undefined).length;
  return `${counted(counts.length, "node")}${hidden ? `, ${hidden.toLocaleString("en")} of them not drawn` : ""}`;
}

function applyScale(side) {
  const svg = panes[side].querySelector("svg"), size = shown[side];
  if (!svg) return;
  const scale = shown.scale[side];
  svg.setAttribute("viewBox", `0 0 ${size.width} ${size.height}`);
  svg.setAttribute("width", (size.width * scale).toFixed(1));
  svg.setAttribute("height", (size.height * scale).toFixed(1));
  showMap(side);
}

/** If only a part of a side is visible, show all of the side in its corner, with a frame around the visible part. */
function showMap(side) {
  const scroll = panes[side].querySelector(".scroll"), map = panes[side].querySelector(".map"), size = shown[side];
  const { clientWidth, clientHeight, scrollWidth, scrollHeight } = scroll;
  const isWhole = scrollWidth <= clientWidth + 1 && scrollHeight <= clientHeight + 1;
  map.toggleAttribute("hidden", !size || isWhole);
  if (!size || isWhole) return;
  const scale = shown.scale[side], part = MAP_SIZE / Math.max(size.width, size.height);
  const attributes = (node, values) => Object.entries(values).forEach(([name, value]) => node.setAttribute(name, value));
  attributes(map, { viewBox: `0 0 ${size.width} ${size.height}`, width: size.width * part, height: size.height * part });
  attributes(map.querySelector(".view"), {
    x: scroll.scrollLeft / scale, y: scroll.scrollTop / scale,
    width: Math.min(clientWidth / scale, size.width), height: Math.min(clientHeight / scale, size.height),
  });
}

/** Show the part of a side around the place of the pointer in the side's map. */
function followMap(side, event) {
  const scroll = panes[side].querySelector(".scroll"), box = event.currentTarget.getBoundingClientRect();
  scroll.scrollLeft = (event.clientX - box.left) / box.width * scroll.scrollWidth - scroll.clientWidth / 2;
  scroll.scrollTop = (event.clientY - box.top) / box.height * scroll.scrollHeight - scroll.clientHeight / 2;
}

const base = () => Number.parseFloat(getComputedStyle(document.documentElement).fontSize) / 16;

/** Show all of a side. */
function fit(side) {
  const scroll = panes[side].querySelector(".scroll"), size = shown[side];
  if (!size || !scroll.clientWidth) return;
  const all = Math.min((scroll.clientWidth - 4) / size.width, (scroll.clientHeight - 4) / size.height);
  shown.scale[side] = Math.min(all, 1.25 * base());
  applyScale(side);
}

function zoom(side, factor, at) {
  const scroll = panes[side].querySelector(".scroll");
  const old = shown.scale[side], scale = Math.min(Math.max(old * factor, MIN_SCALE), MAX_SCALE);
  const point = at || { x: scroll.clientWidth / 2, y: scroll.clientHeight / 2 };
  const x = (scroll.scrollLeft + point.x) / old, y = (scroll.scrollTop + point.y) / old;
  shown.scale[side] = scale;
  applyScale(side);
  scroll.scrollLeft = x * scale - point.x;
  scroll.scrollTop = y * scale - point.y;
}

/** Mark the chosen node, and on the other side the nodes that it replaced, or the node that replaced it. */
function mark() {
  const { graph, chosen, highlight } = shown;
  for (const side of SIDES) {
    for (const node of panes[side].querySelectorAll("g.node[data-node]")) {
      const i = Number(node.dataset.node);
      const isChosen = chosen && afterOf(graph, side, i) === chosen.after && (side !== chosen.side || i === chosen.drawn || side === "after");
      node.classList.toggle("chosen", Boolean(isChosen));
      node.classList.toggle("dim", Boolean(highlight) && node.dataset.fusion !== highlight);
    }
  }
}

const afterOf = (graph, side, node) => side === "after" ? node : graph.before[node][STANDS_FOR];

/** Return the node that is drawn for a node: itself, or its counterpart in the first copy of its block. */
function drawnFor(graph, after) {
  let p = graph.sides.after.position(after), block = graph.root;
  const path = [];
  for (;;) {
    const item = block.items.find((each) => { const [start, end] = spanOf(each); return start <= p && p < end; });
    if (item === undefined || !isBlock(item)) return { after: graph.order[p], path };
    path.push({ block: item, copy: Math.floor((p - item.start) / item.length) });
    p = item.start + (p - item.start) % item.length;
    block = item;
  }
}

/** Select a node and show its record; `near` zooms in until its name can be read. */
function choose(side, node, near = false) {
  const { graph } = shown;
  const after = afterOf(graph, side, node);
  const drawn = after >= 0 ? drawnFor(graph, after) : { after, path: [] };
  const closed = drawn.path.filter(({ block }) => !graph.open.has(block.path));
  closed.forEach(({ block }) => graph.open.add(block.path));
  const own = side === "before" ? graph.drawnBy[drawn.after]?.[graph.drawnBy[after].indexOf(node)] : undefined;
  shown.chosen = { side, node, drawn: own ?? node, after: drawn.after, real: after };
  if (closed.length) draw(); else mark();
  showDetail();
  for (const each of SIDES) {
    if (near && shown[each] && shown.scale[each] < READABLE * base()) zoom(each, READABLE * base() / shown.scale[each]);
    reveal(each);
  }
}

/** Scroll a pane to the nodes that are marked in it. */
function reveal(side) {
  const scroll = panes[side].querySelector(".scroll"), marked = scroll.querySelector(".chosen");
  if (!marked) return;
  const box = marked.getBoundingClientRect(), frame = scroll.getBoundingClientRect();
  const outside = box.top < frame.top || box.bottom > frame.bottom || box.left < frame.left || box.right > frame.right;
  if (outside) scroll.scrollBy({ left: box.left - frame.left - frame.width / 2 + box.width / 2, top: box.top - frame.top - frame.height / 3 });
}

function showDetail() {
  const { graph, chosen } = shown;
  const copies = drawnFor(graph, chosen.after).path.filter(({ block }) => block.copies > 1).at(-1)?.block;
  const content = [recordOf(graph, chosen.side, chosen.node)];
  const p = graph.sides.after.position(chosen.real);
  if (copies && p !== undefined) {
    const copy = Math.floor((p - copies.start) / copies.length);
    const step = (by) => {
      const next = copy + by, other = graph.order[p + by * copies.length];
      if (next < 0 || next >= copies.copies) return;
      shown.chosen = { ...chosen, side: "after", node: other, real: other };
      showDetail();
    };
    const button = (label, by, sign) => element("button", { type: "button", "aria-label": label, onclick: () => step(by) }, sign);
    content.unshift(element("p", { class: "stepper" }, button("Previous copy", -1, "‹"), `copy ${copy + 1} of ${copies.copies}`, button("Next copy", 1, "›")));
  }
  detail.hidden = false;
  detail.replaceChildren(element("button", { type: "button", class: "close", "aria-label": "Close the record", onclick: closeDetail }, "×"), ...content);
}

function closeDetail() {
  detail.hidden = true;
  shown.chosen = null;
  mark();
}

function toggleBlock(path) {
  const { graph } = shown;
  if (!graph.open.delete(path)) graph.open.add(path);
  draw();
}

function showGraph(index) {
  shown.graph = GRAPHS[index];
  if (!shown.graph) return;
  closeDetail();
  for (const budget of BUDGETS) {
    openWithin(shown.graph, budget);
    draw();
    fit("before");
    fit("after");
    if (Math.min(...SIDES.filter((side) => panes[side].offsetParent).map((side) => shown.scale[side])) >= LEGIBLE * base()) break;
  }
  drawLegend();
}

function drawLegend() {
  const fusions = [...new Set(MATCH.filter((match) => match.graph === shown.graph).map((match) => match.fusion))].sort();
  const entries = fusions.map((fusion) => element("li", {}, element("button", {
    type: "button", "aria-pressed": "false", "data-fusion": fusion,
    onclick: () => {
      shown.highlight = shown.highlight === fusion ? null : fusion;
      document.querySelectorAll("#legend button").forEach((each) => each.setAttribute("aria-pressed", String(each.dataset.fusion === shown.highlight)));
      mark();
    },
  }, element("span", { class: "dot", style: hueStyle(fusion) }), fusion)));
  document.getElementById("legend").replaceChildren(...entries);
}

function showSides(which) {
  stage.dataset.shows = which;
  draw();
  fit("before");
  fit("after");
}

function startPanes() {
  if (!GRAPHS.length) { document.getElementById("picture").hidden = true; return; }
  const narrow = matchMedia("(max-width: 700px)").matches;
  const side = narrow ? "after" : "both";
  document.querySelector(`#sides input[value=${side}]`).checked = true;
  stage.dataset.shows = side;
  document.getElementById("sides").addEventListener("change", (event) => showSides(event.target.value));
  const where = document.getElementById("where");
  const fusedIn = GRAPHS.map((graph) => graph.made.size);
  const order = GRAPHS.map((_, i) => i).sort((a, b) => fusedIn[b] - fusedIn[a] || GRAPHS[b].after.length - GRAPHS[a].after.length);
  order.forEach((i) => where.append(element("option", { value: i }, `${cut(GRAPHS[i].where || "the main graph", 90)} (${counted(fusedIn[i], "fused node")})`)));
  document.getElementById("where-label").hidden = GRAPHS.length < 2;
  where.addEventListener("change", () => showGraph(Number(where.value)));
  document.getElementById("picture").addEventListener("click", ({ target }) => {
    const { zoom: how, fold } = target.closest("button")?.dataset || {};
    for (const each of how ? SIDES : []) how === "fit" ? fit(each) : zoom(each, how === "in" ? 1.25 : 0.8);
    if (fold) {
      const { graph } = shown;
      openWithin(graph, fold === "open" ? MAX_DRAWN : 0);
      draw();
      fit("before");
      fit("after");
    }
  });
  for (const each of SIDES) startPane(each);
  showGraph(order[0]);
  startJump();
}

/** Return the nodes whose names, operators or fusions have all words, those of the graph in view first. */
function nodesWith(words) {
  const found = [];
  for (const graph of words.length ? [...GRAPHS].sort((a, b) => (b === shown.graph) - (a === shown.graph)) : []) {
    for (const side of ["after", "before"]) graph.sides[side].nodes.forEach((row, i) => {
      const name = `${row[LABEL]} ${text(row[OP])}`.toLowerCase();
      if (words.every((word) => name.includes(word))) found.push([graph, side, i]);
    });
  }
  return found;
}

/** Select a node in the picture, in whichever graph it is. */
function jumpTo(graph, side, node) {
  const index = GRAPHS.indexOf(graph);
  document.getElementById("where").value = index;
  if (shown.graph !== graph) showGraph(index);
  choose(side, node, true);
}

/** Make the search in the picture jump: to the first node while typing, to others by Enter and Shift+Enter. */
function startJump() {
  const jump = document.getElementById("jump"), count = document.getElementById("jumped");
  let found = [], at = 0, waiting;
  const go = (to) => {
    at = (to + found.length) % found.length || 0;
    count.textContent = jump.value.trim() ? `${found.length && at + 1} of ${counted(found.length, "node")}` : "";
    if (found.length) jumpTo(...found[at]);
  };
  const look = () => { found = nodesWith(jump.value.toLowerCase().split(/\s+/).filter(Boolean)); go(0); };
  jump.addEventListener("input", () => { clearTimeout(waiting); waiting = setTimeout(look, 150); });
  jump.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || !found.length) return;
    go(at + (event.shiftKey ? -1 : 1));
    event.preventDefault();
  });
  document.addEventListener("keydown", (event) => {
    if (event.key !== "/" || event.target.closest("input, select")) return;
    event.preventDefault();
    jump.focus();
    jump.select();
  });
}

function startPane(side) {
  const scroll = panes[side].querySelector(".scroll"), map = panes[side].querySelector(".map");
  scroll.addEventListener("scroll", () => showMap(side));
  new ResizeObserver(() => showMap(side)).observe(scroll);
  map.addEventListener("pointerdown", (event) => { map.setPointerCapture(event.pointerId); followMap(side, event); });
  map.addEventListener("pointermove", (event) => { if (event.buttons) followMap(side, event); });
  const act = (target) => {
    const button = target.closest("[data-block], [data-node]");
    if (!button) return;
    if (button.dataset.block !== undefined) {
      toggleBlock(button.dataset.block);
      focusOn(scroll, scroll.querySelector(`[data-block="${button.dataset.block}"]`));
    } else {
      choose(side, Number(button.dataset.node));
      focusOn(scroll, scroll.querySelector(`[data-node="${button.dataset.node}"]`));
    }
  };
  let drag = null, moved = false;
  const touches = new Map();
  scroll.addEventListener("click", (event) => { if (!moved) act(event.target); });
  scroll.addEventListener("pointerdown", (event) => {
    touches.set(event.pointerId, event);
    moved = false;
    if (event.pointerType === "mouse" && event.button === 0) drag = { x: event.clientX, y: event.clientY, left: scroll.scrollLeft, top: scroll.scrollTop };
  });
  scroll.addEventListener("pointermove", (event) => {
    if (touches.size === 2 && touches.has(event.pointerId)) {
      const spread = () => { const [a, b] = [...touches.values()]; return Math.hypot(a.clientX - b.clientX, a.clientY - b.clientY); };
      const old = spread();
      touches.set(event.pointerId, event);
      if (old > 0) zoom(side, spread() / old);
      return;
    }
    if (!drag) return;
    const dx = event.clientX - drag.x, dy = event.clientY - drag.y;
    if (Math.abs(dx) + Math.abs(dy) < 4) return;
    moved = true;
    scroll.classList.add("dragging");
    scroll.scrollLeft = drag.left - dx;
    scroll.scrollTop = drag.top - dy;
  });
  for (const name of ["pointerup", "pointercancel", "pointerleave"]) scroll.addEventListener(name, (event) => {
    touches.delete(event.pointerId);
    drag = null;
    scroll.classList.remove("dragging");
  });
  scroll.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && !event.metaKey) return;
    event.preventDefault();
    const frame = scroll.getBoundingClientRect();
    zoom(side, Math.exp(-event.deltaY / 300), { x: event.clientX - frame.left, y: event.clientY - frame.top });
  }, { passive: false });
  scroll.addEventListener("keydown", (event) => {
    const all = [...scroll.querySelectorAll("[role=button]")], now = all.indexOf(event.target.closest("[role=button]"));
    const steps = { ArrowDown: 1, ArrowRight: 1, ArrowUp: -1, ArrowLeft: -1 };
    if (event.key === "+" || event.key === "=") zoom(side, 1.25);
    else if (event.key === "-") zoom(side, 0.8);
    else if (event.key === "0") fit(side);
    else if (event.key === "Escape") closeDetail();
    else if ((event.key === "Enter" || event.key === " ") && now >= 0) act(event.target);
    else if (event.key in steps && now >= 0) focusOn(scroll, all[Math.min(Math.max(now + steps[event.key], 0), all.length - 1)]);
    else return;
    event.preventDefault();
  });
}

/** Move the focus to a node: one of them can be reached by Tab, the others by arrow keys. */
function focusOn(scroll, node) {
  if (!node) return;
  scroll.querySelectorAll("[role=button][tabindex='0']").forEach((each) => each.setAttribute("tabindex", "-1"));
  node.setAttribute("tabindex", "0");
  node.focus({ preventScroll: false });
}
