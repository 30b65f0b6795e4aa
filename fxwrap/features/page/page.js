"use strict";
// GRAPHS holds, for each graph: memory (a Vega-Lite specification or null), colours of it, drawings and nodes by name.
// COLUMNS are the pixels that an entry of a legend takes.
const MOST_FOUND = 200;
const SIDE = 76; // pixels that the axis takes beside the memory picture
const BOX = { width: 168, height: 40, across: 190, down: 74 };
const views = new Map(), graphViews = new Map(); // of memory pictures and of host graphs, by graph
const short = (line) => line && line.replace(/^.*?([^/\\]*, line )/, "$1");
const state = { graph: 0, level: GRAPHS.map(() => "top"), query: "" };
const pageOf = (number) => document.querySelector(`main[data-graph="${number}"]`);

function colours(legend) {
  const style = getComputedStyle(document.documentElement);
  const [text, faint, line] = ["--text", "--faint", "--line"].map((name) => style.getPropertyValue(name).trim());
  return {
    background: "transparent",
    axis: { labelColor: text, titleColor: faint, domainColor: line, tickColor: line, gridColor: line },
    legend: { ...legend, labelColor: text, titleColor: faint },
    view: { stroke: null },
  };
}

function embed(where, spec) {
  const dark = document.documentElement.classList.contains("dark");
  const config = { ...(spec.config || {}), ...colours((spec.config || {}).legend) };
  const options = { actions: false, renderer: "canvas", config, tooltip: { theme: dark ? "dark" : "light" } };
  return vegaEmbed(where, { ...spec, config: undefined }, options);
}

async function drawMemory(number) {
  const spec = GRAPHS[number].memory, page = pageOf(number);
  if (!spec) return;
  const where = page.querySelector(".memory-chart"), [strip, picture] = spec.vconcat;
  strip.width = picture.width = Math.max(240, where.clientWidth - SIDE);
  picture.layer[0].encoding.color = GRAPHS[number].colours[page.querySelector(".colour-by").value];
  for (const { encoding } of picture.layer) {
    encoding.color.legend.columns = Math.max(1, Math.floor(strip.width / COLUMNS[encoding.color.field]));
  }
  const { view } = await embed(where, spec);
  views.set(number, view);
  view.signal("search", state.query).run();
  view.addEventListener("click", (event, item) => {
    if (item && item.datum && item.datum.name) showDetails(page, number, item.datum);
  });
}

function showDetails(page, number, storage) {
  const node = GRAPHS[number].nodes[storage.node] || {};
  const rows = {
    storage: storage.name, use: storage.use, size: storage.size, alive: storage.alive,
    partition: storage.partition, device: storage.device, "made by": node.line, module: node.module,
    "line of yours, or module": storage.user_line,
  };
  const details = page.querySelector(".details");
  details.replaceChildren(...Object.entries(rows).filter(([, text]) => text).flatMap(([name, text]) => {
    const [dt, dd] = [document.createElement("dt"), document.createElement("dd")];
    dt.textContent = name;
    dd.textContent = text;
    return [dt, dd];
  }));
  details.hidden = false;
}

function matches(name, node) {
  return [name, node.operator, node.line, node.user_line, node.module].some(
    (text) => text && text.toLowerCase().includes(state.query));
}

async function drawGraph(number) {
  const { drawings, nodes } = GRAPHS[number], page = pageOf(number);
  const drawing = drawings[state.level[number]];
  showCrumbs(number, page);
  const xs = drawing.boxes.map((box) => box.x), ys = drawing.boxes.map((box) => box.y);
  const left = Math.min(...xs, 0), right = Math.max(...xs, 0), bottom = Math.max(...ys, 0);
  const x = (at) => (at - left) * BOX.across + BOX.across / 2, y = (at) => at * BOX.down + BOX.down / 2;
  const boxes = drawing.boxes.map((box) => ({
    ...box, left: x(box.x) - BOX.width / 2, right: x(box.x) + BOX.width / 2, middle: x(box.x),
    top: y(box.y) - BOX.height / 2, low: y(box.y) + BOX.height / 2, line: y(box.y),
    first: box.opens ? `${box.label} ▸` : box.label,
    found: !state.query || (box.node ? matches(box.node, nodes[box.node]) : holds(number, box.opens)),
  }));
  const edges = drawing.edges.map((edge) => ({
    x: x(edge.x), y: y(edge.y) + BOX.height / 2, x2: x(edge.x2), y2: y(edge.y2) - BOX.height / 2,
  }));
  const width = (right - left + 1) * BOX.across, height = (bottom + 1) * BOX.down;
  const flat = (field, end) => ({ field, type: "quantitative", axis: null, scale: { domain: [0, end], nice: false, zero: false } });
  const down = (field) => ({ ...flat(field, height), scale: { domain: [height, 0], nice: false, zero: false } });
  const opacity = { condition: { test: "datum.found", value: 1 }, value: 0.2 };
  const style = getComputedStyle(document.documentElement);
  const [text, card] = ["--text", "--card"].map((name) => style.getPropertyValue(name).trim());
  const spec = {
    width, height, padding: 4,
    layer: [
      { data: { values: edges }, mark: { type: "rule", color: "#8b8d98", strokeWidth: 1, opacity: 0.6 },
        encoding: { x: flat("x", width), y: down("y"), x2: { field: "x2" }, y2: { field: "y2" } } },
      { data: { values: boxes }, mark: { type: "rect", cornerRadius: 6, color: card },
        encoding: { x: flat("left", width), x2: { field: "right" }, y: down("top"), y2: { field: "low" } } },
      { data: { values: boxes }, mark: { type: "rect", cornerRadius: 6, strokeWidth: 1.5, fillOpacity: 0.18, cursor: "pointer" },
        encoding: {
          x: flat("left", width), x2: { field: "right" }, y: down("top"), y2: { field: "low" }, opacity,
          color: { field: "verdict", type: "nominal", legend: null, scale: { domain: ["captured", "eager"], range: ["#4c9f70", "#d1495b"] } },
          stroke: { field: "verdict", type: "nominal", legend: null, scale: { domain: ["captured", "eager"], range: ["#4c9f70", "#d1495b"] } },
          tooltip: [{ field: "label", title: "box" }, { field: "about" }],
        } },
      { data: { values: boxes }, mark: { type: "text", fontSize: 12, color: text, limit: BOX.width - 12, dy: -7, cursor: "pointer" },
        encoding: { x: flat("middle", width), y: down("line"), text: { field: "first" }, opacity } },
      { data: { values: boxes }, mark: { type: "text", fontSize: 10, color: text, limit: BOX.width - 12, dy: 8, opacity: 0.7, cursor: "pointer" },
        encoding: { x: flat("middle", width), y: down("line"), text: { field: "about" } } },
    ],
  };
  const { view } = await embed(page.querySelector(".graph-chart"), spec);
  graphViews.set(number, view);
  view.addEventListener("click", (event, item) => {
    if (item && item.datum && item.datum.opens) {
      state.level[number] = item.datum.opens;
      drawGraph(number);
    }
  });
}

function holds(number, name) {
  const { drawings, nodes } = GRAPHS[number];
  return drawings[name].boxes.some((box) => (box.node ? matches(box.node, nodes[box.node]) : holds(number, box.opens)));
}

function showCrumbs(number, page) {
  const { drawings } = GRAPHS[number], trail = [];
  for (let name = state.level[number]; name; name = drawings[name].up) trail.unshift(name);
  page.querySelector(".crumbs").replaceChildren(...trail.map((name, at) => {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = (at ? "/ " : "") + drawings[name].title.split(" / ").pop();
    button.onclick = () => { state.level[number] = name; drawGraph(number); };
    return button;
  }));
}

function search() {
  const number = state.graph, page = pageOf(number), { nodes } = GRAPHS[number];
  const view = views.get(number);
  if (view) view.signal("search", state.query).run();
  const found = state.query ? Object.entries(nodes).filter(([name, node]) => matches(name, node)) : [];
  document.getElementById("found").textContent = state.query ? `${found.length} nodes` : "";
  page.querySelector(".found-nodes").hidden = !found.length;
  page.querySelector(".nodes tbody").replaceChildren(...found.slice(0, MOST_FOUND).map(([, node]) => {
    const row = document.createElement("tr");
    for (const text of [node.line, node.partition ?? "", node.module, short(node.user_line)]) {
      const cell = row.insertCell();
      cell.textContent = text;
    }
    return row;
  }));
  for (const one of page.querySelectorAll(".kernel, .partitions tbody tr")) {
    one.hidden = one.matches(".kernel") && !!state.query && !one.textContent.toLowerCase().includes(state.query);
  }
  drawGraph(number);
}

async function show(number) {
  state.graph = number;
  document.querySelectorAll("main.graph").forEach((page) => { page.hidden = Number(page.dataset.graph) !== number; });
  document.querySelectorAll(".tab").forEach((tab) => {
    if (Number(tab.dataset.graph) === number) tab.setAttribute("aria-current", "true");
    else tab.removeAttribute("aria-current");
  });
  if (!views.has(number)) await drawMemory(number);
  search();
}

function theme(dark) {
  document.documentElement.className = dark ? "dark" : "light";
  document.getElementById("theme").textContent = dark ? "light" : "dark";
}

function redraw() {
  views.clear();
  if (GRAPHS.length) show(state.graph);
}

function start() {
  theme(window.matchMedia("(prefers-color-scheme: dark)").matches);
  document.getElementById("theme").onclick = () => {
    theme(!document.documentElement.classList.contains("dark"));
    redraw();
  };
  let waiting = 0;
  window.onresize = () => { clearTimeout(waiting); waiting = setTimeout(redraw, 200); };
  document.getElementById("search").oninput = (event) => {
    state.query = event.target.value.trim().toLowerCase();
    if (GRAPHS.length) search();
  };
  document.querySelectorAll(".tab").forEach((tab) => { tab.onclick = () => show(Number(tab.dataset.graph)); });
  document.querySelectorAll(".colour-by").forEach((select) => {
    select.onchange = () => drawMemory(state.graph);
  });
  document.querySelectorAll("time.made").forEach((time) => {
    time.textContent = new Date(Number(time.dataset.seconds) * 1000).toLocaleTimeString();
  });
  if (GRAPHS.length) show(0);
}

start();
