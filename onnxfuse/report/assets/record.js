// The record of a node: its facts, the nodes that it replaced, and a small drawing of these.
function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value === true) made.setAttribute(name, "");
    else if (value !== false && value != null) made.setAttribute(name, name.startsWith("data-") ? value : printable(value));
  }
  made.append(...children.filter((child) => child != null).map((child) => typeof child === "string" ? printable(child) : child));
  return made;
}

const GRAPHS = DATA.graphs.map(linked);
const MATCH = DATA.matches.map(([fusion, node, output, where, dims, joined, replaces], number) => {
  const graph = GRAPHS.find((each) => each.made && number in each.matches);
  const after = graph ? graph.matches[number][0] : undefined;
  const replaced = graph ? graph.matches[number][1] : replaces;
  return {
    number, fusion, node, output, where, graph, after, replaced, joined: new Set(joined),
    name: `${fusion}:${output}${where ? ` in ${where}` : ""}`, dims: lines(text(dims)),
    attributes: graph ? lines(text(graph.after[after][ATTRIBUTES])) : [],
    types: graph ? lines(text(graph.after[after][TYPES])) : [],
    names: replaced.map((each) => typeof each === "number" ? graph.before[each][LABEL] : each),
  };
});
const NODES_LISTED = 12;
const OFF = new Set();  // names of matches that are switched off
const FATE_TEXTS = {
  fused: "fused", weights: "folded into weights", merged: "rewritten or dropped", constant: "computed in advance",
  stays: "in the optimized model as it was",
};

const chips = (values) => values.length ? element("ul", { class: "chips" }, ...values.map((value) => element("li", {}, value))) : null;
const part = (title, ...content) => content.some(Boolean) ? element("div", {}, element("h3", { class: "part" }, title), ...content) : null;
/** Return a list of nodes; those after the first NODES_LISTED are folded away. */
function nodeList(entries) {
  const rest = entries.slice(NODES_LISTED);
  const more = rest.length ? element("details", { class: "more" }, element("summary", {}, counted(rest.length, "more node")), element("ol", { start: NODES_LISTED + 1 }, ...rest)) : null;
  return element("div", {}, element("ol", {}, ...entries.slice(0, NODES_LISTED)), ...(more ? [more] : []));
}

const hueStyle = (fusion) => fusion in DATA.hues ? `--hue:${DATA.hues[fusion]}` : "";

/** Return the attributes of a fused node, without those that are listed among its sizes. */
function variantOf(match) {
  const sizes = new Set(match.dims.map((line) => line.split(" = ")[0]));
  return match.attributes.filter((line) => !sizes.has(line.split(" = ")[0]));
}

/** Return the attributes that tell variants apart at a glance, without values such as "none" or pads of 0. */
function briefOf(match) {
  const plain = /^(none|NOTSET|before|\[?(1, )*1\]?|\[(0, )*0\])$/;
  return variantOf(match).filter((line) => {
    const [name, value] = line.split(" = ");
    return !plain.test(value) && !name.endsWith("_layout");
  });
}

function switchOf(match) {
  const input = element("input", { type: "checkbox", role: "switch", class: "switch", "aria-label": `Apply ${match.name}`, "data-match": match.name });
  input.checked = !OFF.has(match.name);
  input.addEventListener("change", () => switchMatches([match], input.checked));
  return input;
}

/** Return the parts of a match's record: sizes, variant, types, the nodes that it replaced, and their drawing. */
function matchRecord(match) {
  const { graph } = match;
  const operator = (i) => typeof i === "number" ? ` ${text(graph.before[i][OP])}` : " (made while the graph was simplified)";
  const replaced = nodeList(match.replaced.map((each, i) => element("li", {},
    element("code", {}, match.names[i]), operator(each), match.joined.has(match.names[i]) ? " (in the epilogue)" : "")));
  const others = graph ? graph.replacedBy[match.after].filter((i) => !match.replaced.includes(i)) : [];
  return [
    part("Sizes", chips(match.dims)),
    graph && part("What it replaced", drawing(graph, match.after)),
    part(`Replaces ${counted(match.replaced.length, "node")}`, replaced),
    others.length && part(`Takes the place of ${counted(others.length, "more node")}, folded or rewritten`,
      nodeList(others.map((i) => element("li", {}, element("code", {}, graph.before[i][LABEL]), ` ${text(graph.before[i][OP])}`)))),
    part("Variant", chips(variantOf(match))),
    part("Gives", chips(match.types)),
    graph && part("Weights", chips(lines(text(graph.after[match.after][WEIGHTS]).replaceAll("], ", "]\n")))),
    match.where && part("Where", match.where),
    part("Ends with the tensor", element("code", {}, match.output)),
  ].filter(Boolean);
}

/** Draw the nodes before fusing that one node stands for, and the values that enter and leave them. */
function drawing(graph, after) {
  const nodes = graph.drawnBy[after];
  if (!nodes.length || nodes.length > 80) return null;
  const index = new Map(nodes.map((node, i) => [node, i]));
  const units = nodes.map((node) => nodeUnit(graph, "before", node));
  const edges = [];
  nodes.forEach((node, i) => {
    for (const read of graph.before[node][READS]) {
      if (index.has(read)) edges.push([index.get(read), i]);
      else if (graph.sides.before.position(read) !== undefined) edges.push([port(units, text(graph.before[read][OP])), i]);
    }
    const weights = text(graph.before[node][WEIGHTS]);
    if (weights) units[i].sub = cut(weights, 30);
    if (units[i].sub) { units[i].height = 40; units[i].width = Math.max(units[i].width, widthOf(units[i].sub, false) + PAD); }
  });
  const laid = placed(units, edges);
  const box = element("div", { class: "drawing", tabindex: "0", role: "group", "aria-label": "Drawing of the nodes that were replaced" });
  const size = `viewBox="0 0 ${laid.width} ${laid.height}" width="${laid.width}" height="${laid.height}"`;
  const boxes = units.map((unit) => nodeMarkup(unit, unit.kind === "port" ? "port" : classOf(graph, "before", unit.node), "")).join("");
  box.innerHTML = `<svg role="img" aria-label="${escaped(units.map((unit) => unit.name).join(", "))}" ${size}>${laid.lines.map(edgeMarkup).join("")}${boxes}</svg>`;
  return box;
}

function port(units, op) {
  const name = `from ${cut(op, 24)}`;
  units.push({ kind: "port", name, sub: "", width: widthOf(name, true) + PAD, height: 24 });
  return units.length - 1;
}

/** Return the record of a node on one side, with the switch of its match. */
function recordOf(graph, side, node) {
  const row = graph.sides[side].nodes[node];
  const after = side === "after" ? node : row[STANDS_FOR];
  const match = MATCH[graph.made.get(after)];
  const fate = side === "before" ? DATA.fates[row[FATE]] : "";
  const head = element("h3", { style: hueStyle(match?.fusion) }, element("span", { class: match ? "dot" : "dot plain" }), text(row[OP]));
  const box = element("div", { class: "record" }, head, element("p", { class: "label" }, row[LABEL]));
  if (side === "before") {
    const into = match ? `: ${match.fusion} ${match.node} stands for it` : "";
    box.append(element("p", {}, `This node is ${FATE_TEXTS[fate]}${into}.`));
    const own = [part("Attributes", chips(lines(text(row[ATTRIBUTES])))), part("Weights", chips(lines(text(row[WEIGHTS]).replaceAll("], ", "]\n")))), part("Gives", chips(lines(text(row[TYPES]))))];
    box.append(...own.filter(Boolean));
  }
  if (match) {
    box.append(element("label", { class: "with-switch" }, switchOf(match), "apply this match"));
    box.append(...matchRecord(match));
  } else if (side === "after") {
    const why = graph.why[node];
    box.append(...[
      part("Not fused, because", why === undefined ? null : element("p", {}, text(why))),
      part("Attributes", chips(lines(text(row[ATTRIBUTES])))),
      part("Weights", chips(lines(text(row[WEIGHTS]).replaceAll("], ", "]\n")))),
      part("Gives", chips(lines(text(row[TYPES])))),
    ].filter(Boolean));
  }
  return box;
}
