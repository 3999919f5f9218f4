// The list of matches, the search in it, and the plan that its switches make.
const ROWS = 4, VARIANTS = 6, PART = 40;  // matches of a variant, variants of a fusion, at first; more per click
const groups = [...document.querySelectorAll(".group")];
const search = document.getElementById("search");
const BY_FUSION = new Map(groups.map((group) => [group.dataset.fusion, MATCH.filter((match) => match.fusion === group.dataset.fusion)]));

/** Return the text of a match in which the search looks; it is made once. */
function haystack(match) {
  match.haystack ??= [match.fusion, match.node, match.output, match.where, ...match.names, ...match.dims, ...match.attributes, ...match.types].join("\n").toLowerCase();
  return match.haystack;
}

function matchRow(match) {
  const row = element("div", { class: "match" }, switchOf(match));
  const inside = element("details", {}, element("summary", {}, element("span", {},
    element("code", {}, match.node), element("span", { class: "tag" }, ` replaces ${match.replaced.length}${match.where ? `, in ${match.where}` : ""}`))));
  inside.addEventListener("toggle", () => {
    if (!inside.open || inside.children.length > 1) return;
    const go = element("button", { type: "button", onclick: () => showInPicture(match.graph, "after", match.after) }, "Show in the picture");
    inside.append(element("div", { class: "record" }, ...matchRecord(match), match.graph ? element("p", {}, go) : null));
  });
  row.append(inside);
  return row;
}

function variantBlock(matches) {
  const [first] = matches;
  const head = element("div", { class: "head" }, element("b", {}, `${matches.length}x`), chips([...first.dims, ...briefOf(first)]));
  const rows = element("div", {});
  appendInParts(rows, matches, ROWS, matchRow, "node");
  return element("div", { class: "variant" }, head, rows);
}

/** Append the first entries, and a button that appends more. */
function appendInParts(box, entries, first, made, what) {
  box.append(...entries.slice(0, first).map(made));
  let listed = first;
  if (entries.length <= listed) return;
  const more = element("button", { type: "button", class: "more" });
  const say = () => { more.textContent = `Show ${counted(Math.min(PART, entries.length - listed), `more ${what}`)} of ${entries.length.toLocaleString("en")}`; };
  more.addEventListener("click", () => {
    more.before(...entries.slice(listed, listed + PART).map(made));
    listed += PART;
    if (listed >= entries.length) more.remove(); else say();
  });
  say();
  box.append(more);
}

function fillGroup(group, matches) {
  const variants = new Map();
  for (const match of matches) {
    const key = [...match.dims, ...briefOf(match)].join("\n");
    variants.set(key, [...(variants.get(key) || []), match]);
  }
  const sorted = [...variants.values()].sort((a, b) => b.length - a.length);
  const box = group.querySelector(".matches");
  box.replaceChildren();
  appendInParts(box, sorted, VARIANTS, variantBlock, "variant");
  group.dataset.filled = "yes";
}

function allSwitch(group) {
  const input = element("input", { type: "checkbox", role: "switch", class: "switch", "aria-label": `Apply all matches of ${group.dataset.fusion}` });
  const own = BY_FUSION.get(group.dataset.fusion);
  input.addEventListener("change", () => switchMatches(own, input.checked));
  group.querySelector(".group-bar").append(element("label", { class: "with-switch" }, input, "apply all"));
  group.allSwitch = input;
}

function find() {
  const query = search.value.trim().toLowerCase();
  const words = query.split(/\s+/).filter(Boolean);
  let total = 0;
  for (const group of groups) {
    const found = BY_FUSION.get(group.dataset.fusion).filter((match) => words.every((word) => haystack(match).includes(word)));
    total += found.length;
    group.hidden = query !== "" && !found.length;
    delete group.dataset.filled;
    group.found = found;
    if (query) group.open = found.length > 0 && (total <= 60 || group.open);
    if (group.open) fillGroup(group, found);
  }
  document.getElementById("found").textContent = query ? `${counted(total, "match", "matches")} of ${MATCH.length.toLocaleString("en")} with "${search.value.trim()}"` : "";
  findNodes(words);
}

/** List the nodes of the original whose names have all words, with what became of them. */
function findNodes(words) {
  const box = document.getElementById("nodes-found");
  const found = nodesWith(words).filter(([, side]) => side === "before");
  box.hidden = !found.length;
  const items = found.slice(0, 12).map(([graph, , i]) => {
    const row = graph.before[i], after = row[STANDS_FOR], match = MATCH[graph.made.get(after)];
    const fate = match ? `${FATE_TEXTS[DATA.fates[row[FATE]]]}: ${match.fusion} ${match.node}` : FATE_TEXTS[DATA.fates[row[FATE]]];
    const why = !match && graph.why[after] !== undefined ? `, because ${text(graph.why[after])}` : "";
    return element("li", {}, element("code", {}, row[LABEL]), ` ${text(row[OP])}: ${fate}${why}`);
  });
  if (found.length > items.length) items.push(element("li", { class: "note" }, `${found.length.toLocaleString("en")} nodes in all`));
  box.replaceChildren(element("h3", {}, "Nodes of the original with this name"), element("ul", {}, ...items));
}

function showInPicture(...node) {
  document.getElementById("picture").scrollIntoView();
  jumpTo(...node);
}

// --- the plan ---

/** Apply matches, or not. */
function switchMatches(matches, apply) {
  for (const match of matches) apply ? OFF.delete(match.name) : OFF.add(match.name);
  for (const input of document.querySelectorAll("[data-match]")) input.checked = !OFF.has(input.dataset.match);
  for (const group of groups) {
    const own = BY_FUSION.get(group.dataset.fusion), off = own.filter((match) => OFF.has(match.name)).length;
    group.allSwitch.checked = off < own.length;
    group.allSwitch.indeterminate = off > 0 && off < own.length;
  }
  const bar = document.getElementById("planbar");
  bar.hidden = !OFF.size;
  bar.querySelector("b").textContent = counted(OFF.size, "match", "matches");
  draw();
}

/** Return the plan of all switches, as the file has it. */
function plan() {
  const found = new Map();
  for (const match of MATCH) {
    const entry = found.get(match.name) || { name: match.name, fusion: match.fusion, nodes: new Set(), apply: !OFF.has(match.name) };
    match.names.forEach((name) => entry.nodes.add(name));
    found.set(match.name, entry);
  }
  for (const name of DATA.off) found.set(name, { name, fusion: name.split(":")[0], nodes: [], apply: false });
  const matches = [...found.values()].map((entry) => ({ ...entry, nodes: [...entry.nodes] }));
  return { format: "onnxfuse-plan", version: 1, model: DATA.plan, matches };
}

function download() {
  const url = URL.createObjectURL(new Blob([JSON.stringify(plan(), null, 1) + "\n"], { type: "application/json" }));
  const link = element("a", { href: url, download: "plan.json" });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}

function startMatches() {
  for (const group of groups) {
    group.found = BY_FUSION.get(group.dataset.fusion);
    allSwitch(group);
    group.allSwitch.checked = true;
    group.addEventListener("toggle", () => { if (group.open && !group.dataset.filled) fillGroup(group, group.found); });
    if (group.open) fillGroup(group, group.found);
  }
  document.getElementById("times")?.addEventListener("click", ({ target }) => {
    const node = target.closest("[data-jump]");
    if (node) showInPicture(GRAPHS[0], node.dataset.jump, Number(node.dataset.at));
  });
  let waiting;
  search.addEventListener("input", () => { clearTimeout(waiting); waiting = setTimeout(find, 80); });
  const top = document.getElementById("plan-download-top");
  top.hidden = !DATA.plan || !MATCH.length;
  top.addEventListener("click", download);
  document.getElementById("plan-download").addEventListener("click", download);
  document.getElementById("plan-reset").addEventListener("click", () => switchMatches(MATCH, true));
}
