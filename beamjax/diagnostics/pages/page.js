// Draws the graph and the charts of one page. `root` is the element of the page, `dagre` and `uPlot`
// are the bundled libraries. Without this script, the page still has its text and tables.
const all = (selector, within = root) => [...within.querySelectorAll(selector)];
const data = JSON.parse(root.querySelector("script.data").textContent);
const color = (name) => getComputedStyle(root).getPropertyValue(name);

// The value of a variable with light-dark(), as a color that a canvas takes.
const paint = (name) => {
  const probe = document.createElement("i");
  probe.style.color = `var(${name})`;
  root.append(probe);
  const found = getComputedStyle(probe).color;
  probe.remove();
  return found;
};

const SVG = "http://www.w3.org/2000/svg";
const make = (name, attributes, ...children) => {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) {
    if (value !== undefined) element.setAttribute(key, value);
  }
  element.append(...children);
  return element;
};
const titled = (text) => make("title", {}, text);

// --- the graph

const LINE = 15, PAD = 9, MARGIN = 12, MOST = 44, SMALLEST = 0.3;
const pen = document.createElement("canvas").getContext("2d");
const widthOf = (text, kind) => {
  pen.font = `${kind === "name" ? "650 13px" : "600 11px"} ${color("--mono")}`;
  return pen.measureText(text).width;
};
const short = (text, most = MOST) => {
  const letters = [...text.replace(/\s+/g, " ").trim()];
  return letters.length <= most ? letters.join("") : `${letters.slice(0, most - 1).join("").trimEnd()}…`;
};

// The boxes and lines of an area with their positions. Blocks that are not folded are laid out
// first: a box is as large as the areas in it.
const layout = (area, folded) => {
  const graph = new dagre.graphlib.Graph();
  graph.setGraph({ nodesep: 26, edgesep: 16, ranksep: 22 });
  graph.setDefaultEdgeLabel(() => ({}));
  const boxes = new Map();
  for (const node of area.nodes) {
    const words = node.words.map(([text, kind]) => [short(text), kind]);
    const inner = folded.has(node.key) ? [] : node.blocks.map((block) => layout(block, folded));
    const head = words.length ? 2 * PAD + LINE * words.length : 0;
    let width = Math.max(60, ...words.map(([text, kind]) => widthOf(text, kind) + 2 * PAD + 10));
    if (node.blocks.length) width += 2 * PAD;
    let height = head;
    if (inner.length) {
      width = Math.max(width, inner.reduce((sum, each) => sum + each.width + 3 * PAD, PAD));
      height += Math.max(...inner.map((each) => each.height)) + 3 * PAD;
    }
    const box = { node, words, inner, head, width, height };
    boxes.set(node.key, box);
    graph.setNode(node.key, box);
  }
  // dagre needs a graph without cycles: lines lead from a box to a later one.
  const order = new Map(area.nodes.map((node, i) => [node.key, i]));
  const edges = area.edges.filter((edge) => order.get(edge.source) < order.get(edge.target))
    .sort((a, b) => order.get(a.source) - order.get(b.source));
  for (const edge of edges) {
    const words = edge.words.map((text) => short(text, 28));
    const width = Math.max(...words.map((text) => widthOf(text))) + 8;
    graph.setEdge(edge.source, edge.target, { edge, words, width, height: LINE * words.length + 4, labelpos: "c" });
  }
  // All boxes of a block lie between "in" and "out", which are as wide as the area.
  if (boxes.has("in")) {
    for (const key of boxes.keys()) {
      if (key !== "in" && key !== "out" && !graph.inEdges(key).length) graph.setEdge("in", key);
      if (key !== "in" && key !== "out" && !graph.outEdges(key).length) graph.setEdge(key, "out");
    }
    if (!graph.hasEdge("in", "out")) graph.setEdge("in", "out");
  }
  dagre.layout(graph);
  const { width = 0, height = 0 } = graph.graph();
  for (const key of ["in", "out"]) {
    if (boxes.has(key)) Object.assign(boxes.get(key), { x: width / 2, width });
  }
  const lines = edges.map((edge) => graph.edge(edge.source, edge.target));
  // dagre may reverse boxes beside each other. The mirror image of a layout is as good as the layout.
  const placed = [...boxes.values()];
  let inOrder = 0;
  placed.forEach((box, i) => placed.slice(i + 1).forEach((next) => {
    if (box.y === next.y) inOrder += Math.sign(next.x - box.x);
  }));
  if (inOrder < 0) for (const at of [...placed, ...lines, ...lines.flatMap((line) => line.points)]) at.x = width - at.x;
  return { boxes: [...boxes.values()], lines, width, height };
};

const texts = (words, x, top, centred, kind = "") => words.map(([text, of], i) => make("text", {
  class: `${kind} ${of}`.trim(), x, y: top + LINE * (i + 0.76), "text-anchor": centred ? "middle" : undefined,
}, text));

// A smooth line through the middles of the segments between points.
const smooth = (points) => {
  const [first, ...rest] = points, last = rest.pop();
  let path = `M${first.x} ${first.y}`;
  rest.forEach((point, i) => {
    const next = rest[i + 1] || last;
    path += `Q${point.x} ${point.y} ${(point.x + next.x) / 2} ${(point.y + next.y) / 2}`;
  });
  return `${path}L${last.x} ${last.y}`;
};

const drawArea = (area, x, y, draw) => {
  const group = make("g", { transform: `translate(${x} ${y})` });
  const labels = [];
  for (const { edge, words, points, x, y, width, height } of area.lines) {
    const ends = `${edge.source}\n${edge.target}`;
    const thick = 1 + 0.5 * Math.max(0, Math.log10(Math.max(edge.nbytes, 1)) - 3);
    group.append(make("g", { class: "edge", "data-ends": ends }, titled(edge.title), make("path", {
      class: `line ${edge.kind}`, d: smooth(points), "stroke-width": thick.toFixed(2),
      "marker-end": `url(#${root.id}-${edge.kind})`,
    })));
    const under = make("rect", { class: "under-label", x: x - width / 2, y: y - height / 2, width, height });
    const shown = texts(words.map((text) => [text, edge.kind]), x, y - LINE * words.length / 2, true, "label");
    labels.push(make("g", { class: "edge", "data-ends": ends }, titled(edge.title), under, ...shown));
  }
  area.boxes.forEach((box) => group.append(...drawBox(box, draw)));
  group.append(...labels);
  return group;
};

const drawBox = (box, draw) => {
  const { node, words, inner, head, width, height } = box;
  const x = box.x - width / 2, y = box.y - height / 2;
  const round = { input: height / 2, output: height / 2, in: 3, out: 3 }[node.kind] ?? 7;
  const parts = node.title ? [titled(node.title)] : [];
  if (node.kind === "map") { // drawn as a stack, for many members
    for (const by of [6, 3]) parts.push(make("rect", { class: "behind", x: x + by, y: y + by, width, height, rx: round }));
  }
  parts.push(make("rect", { class: "shape", x, y, width, height, rx: Math.min(round, 18) }));
  if (["map", "server", "scatter"].includes(node.kind)) {
    parts.push(make("path", { class: "stripe", d: `M${x + 4} ${y + 6}V${y + height - 6}` }));
  }
  if (node.kind === "gather") { // a mark besides the color
    parts.push(make("path", { class: "sign", d: `M${x + width - 11} ${y + 5}l6 11h-12zv0m0 4v3.2m0 1.8v.4` }));
  }
  const centred = node.kind === "in" || node.kind === "out";
  parts.push(...texts(words, centred ? box.x : x + PAD + 4, y + PAD, centred));
  const panel = draw.panelOf(node);
  const own = panel
    ? make("a", {
      href: `#${panel.id}`, class: `box ${node.kind}`, "data-names": node.names.join("\n"), "data-key": node.key,
      "aria-label": words.map(([text]) => text).join(", "),
    }, ...parts)
    : make("g", { class: `box ${node.kind}` }, ...parts);
  const drawn = [own];
  let left = x + PAD;
  inner.forEach((area) => {
    drawn.push(
      make("rect", { class: "block", x: left, y: y + head, width: area.width + 2 * PAD, height: height - head - PAD, rx: 6 }),
      drawArea(area, left + PAD, y + head + PAD, draw),
    );
    left += area.width + 3 * PAD;
  });
  if (node.blocks.length) {
    const sign = make("path", { d: `M${x + width - 20} ${y + 14}h10${inner.length ? "" : "m-5 -5v10"}` });
    const fold = make("g", {
      class: "fold", role: "button", tabindex: 0, "aria-expanded": Boolean(inner.length),
      "aria-label": `blocks of ${node.key}`, "data-fold": node.key,
    }, make("rect", { x: x + width - 24, y: y + 5, width: 18, height: 18, rx: 4 }), sign);
    drawn.push(fold);
  }
  return drawn;
};

const showGraph = (box) => {
  const steps = all("details", box.closest(".work").querySelector(".panel"));
  const folded = new Set();
  const draw = {
    panelOf: (node) => node.names.length
      ? steps.find((step) => step.dataset.step === node.names[0]) || steps.find((step) => step.className === "ends")
      : undefined,
  };
  const view = { x: 0, y: 0, scale: 1 };
  let svg, width, height, moved = false;

  const show = () => {
    const w = box.clientWidth / view.scale, h = box.clientHeight / view.scale;
    // Part of the drawing stays visible.
    view.x = Math.min(Math.max(view.x, 40 - w), width - 40);
    view.y = Math.min(Math.max(view.y, 40 - h), height - 40);
    svg.setAttribute("viewBox", `${view.x} ${view.y} ${w} ${h}`);
    svg.dataset.scale = view.scale;
  };
  const render = () => {
    const area = layout(data.graph, folded);
    [width, height] = [area.width + 2 * MARGIN, area.height + 2 * MARGIN];
    const heads = ["served", "placed", "gathered"].map((kind) => make("marker", {
      id: `${root.id}-${kind}`, markerWidth: 8, markerHeight: 8, refX: 7, refY: 4, orient: "auto", markerUnits: "userSpaceOnUse",
    }, make("path", { d: "M0 0L8 4L0 8z", class: `head ${kind}` })));
    const label = box.getAttribute("aria-label");
    svg = make("svg", { class: "graph", width, height, role: "group", "aria-label": label, fill: "none" },
      titled(label), make("defs", {}, ...heads), drawArea(area, MARGIN, MARGIN, draw));
    box.replaceChildren(svg);
  };
  // Shows all of it, unless boxes would be too small to see: then the part at the first box.
  const fit = (scale) => {
    const room = box.clientWidth, most = parseFloat(getComputedStyle(box).maxHeight) - 2 || height; // without its border; none on paper
    view.scale = scale ?? Math.max(SMALLEST, Math.min(1, room / width, most / height));
    box.style.height = `${Math.min(height * view.scale, most) + 2}px`;
    const seen = room / view.scale, shape = svg.querySelector("a.box .shape");
    const first = shape ? place(shape) : { x: 0, width };
    view.x = seen < width ? Math.min(Math.max(first.x + first.width / 2 - seen / 2, 0), width - seen) : (width - seen) / 2;
    view.y = 0;
    show();
  };
  const place = (shape) => {
    const { x, y, width, height } = shape.getBBox(), matrix = svg.getCTM().inverse().multiply(shape.getCTM());
    return { x: x + matrix.e, y: y + matrix.f, width, height };
  };
  const zoom = (factor, at) => {
    const bounds = box.getBoundingClientRect();
    const px = at ? at.clientX - bounds.left : box.clientWidth / 2;
    const py = at ? at.clientY - bounds.top : box.clientHeight / 2;
    const scale = Math.min(Math.max(view.scale * factor, 0.08), 6);
    view.x += px / view.scale - px / scale;
    view.y += py / view.scale - py / scale;
    view.scale = scale;
    show();
  };
  const into = (link) => {
    const { x, y, width: w } = place(link.querySelector(".shape"));
    const vw = box.clientWidth / view.scale, vh = box.clientHeight / view.scale;
    if (x >= view.x && x + w <= view.x + vw && y >= view.y && y + 40 <= view.y + vh) return;
    view.x = x + w / 2 - vw / 2;
    view.y = y - vh / 3;
    show();
  };
  const choose = (link, fromPanel) => {
    const key = link && !link.hasAttribute("aria-current") ? link.dataset.key : null;
    all("a.box", svg).forEach((other) => other.removeAttribute("aria-current"));
    svg.classList.toggle("choosing", key !== null);
    all(".edge", svg).forEach((edge) => edge.classList.toggle("near", edge.dataset.ends.split("\n").includes(key)));
    steps.forEach((step) => step.classList.remove("chosen"));
    if (key === null) return;
    link.setAttribute("aria-current", "true");
    into(link);
    const step = steps.find((other) => `#${other.id}` === link.getAttribute("href"));
    step.classList.add("chosen");
    if (fromPanel) return;
    steps.forEach((other) => { other.open = other === step; });
    const panel = step.parentNode;
    panel.scrollTop += step.getBoundingClientRect().top - panel.getBoundingClientRect().top - 4;
  };
  const fold = (toggle) => {
    const key = toggle.dataset.fold;
    if (!folded.delete(key)) folded.add(key);
    render();
    fit();
    all(".fold", svg).find((other) => other.dataset.fold === key).focus();
  };

  box.addEventListener("pointerdown", (event) => {
    if (event.button) return;
    moved = false;
    let { clientX, clientY } = event;
    const move = (next) => {
      if (!moved && Math.hypot(next.clientX - clientX, next.clientY - clientY) < 4) return;
      moved = true;
      box.classList.add("moving");
      view.x -= (next.clientX - clientX) / view.scale;
      view.y -= (next.clientY - clientY) / view.scale;
      ({ clientX, clientY } = next);
      show();
    };
    const up = () => {
      box.classList.remove("moving");
      removeEventListener("pointermove", move);
    };
    addEventListener("pointermove", move);
    addEventListener("pointerup", up, { once: true });
    addEventListener("pointercancel", up, { once: true });
  });
  box.addEventListener("dragstart", (event) => event.preventDefault());
  box.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && !event.metaKey) return;
    event.preventDefault();
    zoom(Math.exp(-event.deltaY * (event.deltaMode ? 0.05 : 0.0025)), event);
  }, { passive: false });
  box.addEventListener("click", (event) => {
    const link = event.target.closest("a.box"), toggle = event.target.closest(".fold");
    if (link || moved) event.preventDefault();
    if (moved) return;
    if (toggle) fold(toggle);
    else choose(link);
  });
  box.addEventListener("focusin", (event) => {
    const link = event.target.closest("a.box");
    if (link && link.matches(":focus-visible")) into(link);
  });
  box.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const step = 60 / view.scale, toggle = event.target.closest(".fold");
    const go = (dx, dy) => () => { view.x += dx; view.y += dy; show(); };
    const keys = {
      "+": () => zoom(1.25), "=": () => zoom(1.25), "-": () => zoom(0.8), 0: () => fit(), Escape: () => choose(null),
      ArrowLeft: go(-step, 0), ArrowRight: go(step, 0), ArrowUp: go(0, -step), ArrowDown: go(0, step),
      ...(toggle && { Enter: () => fold(toggle), " ": () => fold(toggle) }),
    };
    if (!keys[event.key]) return;
    event.preventDefault();
    keys[event.key]();
  });
  steps.forEach((step) => step.querySelector("summary").addEventListener("click", () => {
    const link = all("a.box", svg).find((other) => other.getAttribute("href") === `#${step.id}`);
    if (link && !step.open && !link.hasAttribute("aria-current")) choose(link, true);
  }));

  const tools = document.createElement("div");
  tools.className = "tools";
  tools.setAttribute("role", "group");
  tools.setAttribute("aria-label", "Zoom");
  for (const [text, title, action] of [
    ["+", "zoom in", () => zoom(1.25)], ["−", "zoom out", () => zoom(0.8)],
    ["fit", "show the whole graph", () => fit()], ["1:1", "original size", () => fit(1)],
  ]) {
    const button = Object.assign(document.createElement("button"), { type: "button", textContent: text, title });
    button.setAttribute("aria-label", title);
    button.addEventListener("click", action);
    tools.append(button);
  }
  box.closest(".section").querySelector(".bar").append(tools);
  box.tabIndex = 0;
  render();
  fit();
  let before = box.clientWidth;
  new ResizeObserver(() => {
    if (!box.clientWidth || Math.abs(box.clientWidth - before) < 2) return; // 0: it is folded
    before = box.clientWidth;
    fit();
  }).observe(box);
  addEventListener("beforeprint", () => svg.setAttribute("viewBox", `0 0 ${width} ${height}`));
  addEventListener("afterprint", show);
};

// --- charts

// Bars at the bottom for `marks`, and diamonds at the top for `saved`: places on the x axis.
const marks = (chart) => ({ hooks: { draw: (plot) => {
  const { ctx, bbox } = plot, ratio = devicePixelRatio;
  const at = (x) => plot.valToPos(x, "x", true);
  ctx.save();
  ctx.strokeStyle = paint("--loop");
  for (const x of chart.marks || []) {
    ctx.beginPath();
    ctx.moveTo(at(x), bbox.top + bbox.height - 6 * ratio);
    ctx.lineTo(at(x), bbox.top + bbox.height);
    ctx.stroke();
  }
  ctx.fillStyle = paint("--branch");
  ctx.font = `${12 * ratio}px sans-serif`;
  ctx.textAlign = "center";
  for (const x of chart.saved || []) ctx.fillText("◆", at(x), bbox.top + 10 * ratio);
  ctx.restore();
} } });

const plain = (value) => value == null ? "" : Number(value.toPrecision(4)).toLocaleString("en", { maximumSignificantDigits: 4, ...(Math.abs(value) < 1e-3 && value && { notation: "scientific" }) });

// At an axis: "15M", where "15,000,000" would not fit.
const brief = (value) => value == null ? "" : Math.abs(value) < 1e5 ? plain(value) : value.toLocaleString("en", { notation: "compact", maximumSignificantDigits: 4 });
const COUNTS = ["round", "shards", "retries", "dropped"];
const WHOLE = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9].flatMap((power) => [1, 2, 5].map((digit) => digit * 10 ** power));

// The lines of a logarithmic axis: only powers of ten, of the ticks of all digits.
const decades = (_, ticks) => ticks.map((tick) => Number.isInteger(Number(Math.log10(tick).toFixed(6))) ? tick : null);

const showChart = (figure, chart) => {
  const values = chart.series.flatMap(({ y }) => y).filter((y) => y !== null);
  if (chart.goal != null) values.push(chart.goal);
  const low = Math.min(...values), high = Math.max(...values);
  const isLog = Boolean(chart.wide) && low > 0 && high / 1000 >= low; // decades of losses
  const axis = (label) => ({
    label, labelSize: 16, size: label === chart.y_name ? 58 : 26, stroke: () => paint("--muted"), font: "11px sans-serif", labelFont: "11px sans-serif",
    grid: { stroke: () => paint("--rule"), width: 1, ...(isLog && label === chart.y_name && { filter: decades }) }, ticks: { show: false },
    ...(label === chart.y_name && { values: (_, ticks) => ticks.map(brief) }),
    ...(COUNTS.includes(label) && { incrs: WHOLE }),
  });
  let below = chart.x.map(() => 0);
  const columns = chart.series.map(({ y }) => chart.stacked ? (below = below.map((b, i) => b + y[i])) : y);
  const series = chart.series.map(({ name, color: of = "--map" }, i) => ({
    label: name, stroke: () => paint(of), width: chart.stacked ? 0 : 2, points: { show: chart.x.length <= 40 && !chart.stacked },
    fill: chart.stacked ? () => paint(of) : chart.area ? () => paint(of).replace("rgb(", "rgba(").replace(")", ", 0.13)") : undefined,
    value: (_, __, ___, at) => plain(chart.series[i].y[at]),
  }));
  if (chart.stacked) { columns.reverse(); series.reverse(); } // the topmost area is painted first
  if (chart.goal != null) {
    columns.push(chart.x.map(() => chart.goal));
    series.push({ label: "all", stroke: () => paint("--muted"), dash: [6, 4], width: 1, points: { show: false }, value: () => plain(chart.goal) });
  }
  const options = {
    width: figure.clientWidth || 440, height: 200, plugins: [marks(chart)], cursor: { y: false, drag: { setScale: false } },
    scales: { x: { time: false }, y: isLog ? { distr: 3 } : chart.area ? { range: (_, __, top) => [0, 1.05 * Math.max(top, 0) || 1] } : chart.stacked ? { range: [0, 1] } : {} },
    axes: [axis(chart.x_name), axis(chart.y_name)],
    series: [{ label: chart.x_name, value: (_, x) => plain(x) }, ...series],
  };
  const plot = new uPlot(options, [chart.x, ...columns], figure);
  figure.dataset.log = isLog;
  new ResizeObserver(() => {
    if (figure.clientWidth && figure.clientWidth !== plot.width) plot.setSize({ width: figure.clientWidth, height: 200 });
  }).observe(figure);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => plot.redraw());
};

root.classList.add("live");
all(".graph-box").forEach(showGraph);
all("figure.chart .plot").forEach((figure, i) => {
  if (data.charts[i].series.length) showChart(figure, data.charts[i]);
});
