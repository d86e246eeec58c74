"use strict";
// Draws one chart as SVG, as wide as its card: lines, bands or stacked areas over optimizer steps, and the values of the
// step under the pointer. A line is {label, points: [[step, value], ...], colour}; a value that is not finite is NaN,
// and breaks the line.

const LEFT = 46, RIGHT_AIR = 10, TOP = 16, BOTTOM = 178, HEIGHT = 214;
const GHOST_TOP = 3, GHOST_BOTTOM = 11; // above the data, where neither a fill nor a tick can be taken for a ghost step
const MOST_POINTS = 600; // per line: more than a point per pixel only slows the page
const FEW_POINTS = 8; // below that a running mean hides more than it shows

// ---- axes --------------------------------------------------------------------------------------------------------

// About `count` multiples of 1, 2 or 5 times a power of ten that cover [low, high].
function ticksBetween(low, high, count = 5) {
  const rough = (high - low) / count, power = 10 ** Math.floor(Math.log10(rough));
  const size = [1, 2, 5, 10].map((m) => m * power).find((each) => each >= rough * 0.999);
  const ticks = [];
  for (let i = Math.floor(low / size + 1e-9); i <= Math.ceil(high / size - 1e-9); i += 1) ticks.push(Number((i * size).toPrecision(12)));
  return ticks;
}

const scaled = (low, high, ticks) => ({ low, high, ticks, y: (value) => BOTTOM - ((value - low) / (high - low)) * (BOTTOM - TOP) });

// What is never negative counts from nothing, unless it is close: then values above half of the largest are shown alone.
// A constant gets room around it.
function linearAxis(values, close = false) {
  let low = Infinity, high = -Infinity;
  for (const value of values) { low = Math.min(low, value); high = Math.max(high, value); }
  if (low > 0 && !(close && low > high / 2 && low < high)) low = 0;
  if (high - low <= 1e-9 * Math.max(Math.abs(low), Math.abs(high), 1e-30)) {
    const room = 0.5 * Math.abs(high) || 0.5;
    high += room;
    if (low < 0) low -= room;
  }
  const ticks = ticksBetween(low, high);
  return scaled(ticks[0], ticks[ticks.length - 1], ticks);
}

// Whole decades, with at most seven ticks.
function logAxis(values) {
  let smallest = Infinity, largest = 0;
  for (const value of values) { smallest = Math.min(smallest, value); largest = Math.max(largest, value); }
  const low = Math.floor(Math.log10(smallest)), high = Math.max(low + 1, Math.ceil(Math.log10(largest) + 1e-9)), ticks = [];
  for (let e = low; e <= high; e += Math.ceil((high - low) / 6)) ticks.push(Number(`1e${e}`));
  const { y } = scaled(low, high, []);
  return { low: 10 ** low, high: 10 ** high, ticks, y: (value) => (value > 0 ? y(Math.log10(value)) : NaN) };
}

function axisOf({ share, spiky, close }, values) {
  if (share) return scaled(0, 1, [0, 0.25, 0.5, 0.75, 1]);
  if (spiky && values.every((value) => value > 0)) {
    const sorted = [...values].sort((a, b) => a - b);
    if (sorted[sorted.length - 1] > 20 * sorted[Math.floor(sorted.length / 2)]) return logAxis(values);
  }
  return linearAxis(values, close);
}

// ---- lines -------------------------------------------------------------------------------------------------------

const windowOf = (count) => (count < FEW_POINTS ? 1 : Math.min(201, Math.max(3, Math.floor(count / 15) | 1)));

// The centred mean over the finite values within the window, at each of some places; NaN if there are none.
function runningMean(values, window, places = values.map((_, i) => i)) {
  const half = Math.floor(window / 2);
  return places.map((i) => {
    const last = Math.min(values.length - 1, i + half);
    let total = 0, count = 0;
    for (let j = Math.max(0, i - half); j <= last; j += 1) {
      if (Number.isFinite(values[j])) { total += values[j]; count += 1; }
    }
    return count ? total / count : NaN;
  });
}

// A line's running mean, phase by phase: steps of one say nothing of another's. Of a wide window a twentieth is a step.
function smoothed(points, phaseStarts) {
  const window = windowOf(points.length), stride = Math.max(1, Math.floor(window / 20)), parts = [[]];
  let next = 0;
  for (const point of points) {
    while (next < phaseStarts.length && point[0] >= phaseStarts[next]) { next += 1; parts.push([]); }
    parts[parts.length - 1].push(point);
  }
  return parts.flatMap((part) => {
    const places = part.map((_, i) => i).filter((i) => i % stride === 0 || i === part.length - 1);
    const means = runningMean(part.map((p) => p[1]), window, places);
    return places.map((place, i) => [part[place][0], means[i]]);
  });
}

// At most about MOST_POINTS indices; of each stretch the lowest and the highest value stay, so that no peak is lost.
function thinned(values) {
  if (values.length <= MOST_POINTS) return values.map((_, i) => i);
  const kept = new Set([0, values.length - 1]), stretch = Math.ceil(values.length / (MOST_POINTS / 2));
  for (let first = 0; first < values.length; first += stretch) {
    let low = -1, high = -1;
    for (let i = first; i < Math.min(values.length, first + stretch); i += 1) {
      if (!Number.isFinite(values[i])) continue;
      if (low < 0 || values[i] < values[low]) low = i;
      if (high < 0 || values[i] > values[high]) high = i;
    }
    for (const i of low < 0 ? [first] : [low, high]) kept.add(i);
  }
  return [...kept].sort((a, b) => a - b);
}

const within = (y) => Math.min(BOTTOM, Math.max(TOP, y)); // NaN stays NaN

function pathOf(frame, axis, points) {
  let d = "", down = false;
  for (const i of thinned(points.map((p) => p[1]))) {
    const y = within(axis.y(points[i][1]));
    if (Number.isFinite(y)) d += `${down ? "L" : "M"}${frame.x(points[i][0]).toFixed(1)} ${y.toFixed(1)}`;
    down = Number.isFinite(y);
  }
  return d;
}

const lineNode = (frame, axis, points, className) => svg("path", { class: className, d: pathOf(frame, axis, points) });

// The area between two lines over the same steps.
function areaNode(frame, axis, low, high, className) {
  const corners = (points) => thinned(points.map((p) => p[1])).map((i) => points[i]).filter((p) => Number.isFinite(p[1]))
    .map((p) => `${frame.x(p[0]).toFixed(1)} ${within(axis.y(p[1])).toFixed(1)}`);
  const edge = [...corners(high), ...corners(low).reverse()];
  return svg("path", { class: className, d: edge.length ? `M${edge.join("L")}Z` : "" });
}

// ---- charts ------------------------------------------------------------------------------------------------------

// The x axis that all charts of a part of the run share, half a step of air on either side.
function frameOf(first, last, ghosts, phaseStarts, width) {
  const right = width - RIGHT_AIR, span = last - first + 1;
  const x = (step) => LEFT + ((step - first + 0.5) / span) * (right - LEFT);
  return { first, last, ghosts, phaseStarts, width, right, x };
}

function scenery(frame, axis) {
  const nodes = [], { right, first, last } = frame;
  for (const tick of axis.ticks) {
    const y = axis.y(tick).toFixed(1);
    nodes.push(svg("line", { class: "grid", x1: LEFT, x2: right, y1: y, y2: y }));
    nodes.push(svg("text", { class: "tick y", "text-anchor": "end", x: LEFT - 7, y: Number(y) + 3.5 }, tickText(tick)));
  }
  const most = Math.max(2, Math.floor((right - LEFT) / 55));
  for (const tick of ticksBetween(first, first + Math.max(last - first, 1), most)) {
    if (!Number.isInteger(tick) || tick < first || tick > last) continue;
    const x = frame.x(tick).toFixed(1);
    nodes.push(svg("line", { class: "edge", x1: x, x2: x, y1: BOTTOM, y2: BOTTOM + 4 }));
    nodes.push(svg("text", { class: "tick x", "text-anchor": "middle", x, y: BOTTOM + 17 }, tickText(tick)));
  }
  nodes.push(svg("line", { class: "edge", x1: LEFT, x2: right, y1: BOTTOM, y2: BOTTOM }));
  nodes.push(svg("text", { class: "tick", "text-anchor": "end", x: right, y: HEIGHT - 4 }, "optimizer step"));
  return nodes;
}

// One short mark per ghost step above the data; steps that share a pixel share their mark.
function ghostMarks(frame) {
  const places = new Set(frame.ghosts.map((step) => frame.x(step).toFixed(1)));
  return places.size ? [svg("path", { class: "ghost", d: [...places].map((x) => `M${x} ${GHOST_TOP}V${GHOST_BOTTOM}`).join("") })] : [];
}

const finiteOf = (lines) => lines.flatMap((line) => line.points.map((p) => p[1]).filter(Number.isFinite));

function lineNodes(frame, figure, lines) {
  const axis = axisOf(figure, finiteOf(lines)), nodes = scenery(frame, axis);
  for (const { points, colour } of lines) {
    const smooth = smoothed(points, frame.phaseStarts);
    if (figure.filled) nodes.push(areaNode(frame, axis, smooth.map(([step]) => [step, axis.low]), smooth, `tint c${colour}`));
    if (points.length >= FEW_POINTS) {
      nodes.push(lineNode(frame, axis, points, `raw c${colour}`), lineNode(frame, axis, smooth, `line c${colour}`));
      continue;
    }
    nodes.push(lineNode(frame, axis, points, `line c${colour}`));
    for (const [step, value] of points) {
      const cy = axis.y(value);
      if (Number.isFinite(cy)) nodes.push(svg("circle", { class: `dot c${colour}`, cx: frame.x(step).toFixed(1), cy: cy.toFixed(1), r: 3.5 }));
    }
  }
  return nodes;
}

// A line in tinted bands, the widest first: [low, high] of each, over the same steps.
function bandNodes(frame, bands, line) {
  const axis = linearAxis(finiteOf([...bands.flat(), line])), nodes = scenery(frame, axis);
  const smooth = ({ points }) => smoothed(points, frame.phaseStarts);
  for (const [low, high] of bands) nodes.push(areaNode(frame, axis, smooth(low), smooth(high), `tint c${low.colour}`));
  return [...nodes, lineNode(frame, axis, smooth(line), `line c${line.colour}`)];
}

// Areas on top of each other, the first at the bottom, with the raw total as a faint line over them. The axis ends at the
// 99th percentile of the total, so that one slow step does not flatten the rest.
function stackNodes(frame, lines, total) {
  const tops = [smoothed(total.points, frame.phaseStarts).map(([step]) => [step, 0])];
  for (const { points } of lines) {
    const below = tops[tops.length - 1];
    tops.push(smoothed(points, frame.phaseStarts).map(([step, value], i) => [step, below[i][1] + value]));
  }
  const sorted = total.points.map((p) => p[1]).sort((a, b) => a - b);
  const usual = sorted[Math.min(sorted.length - 1, Math.floor(0.99 * sorted.length))];
  const highest = Math.max(usual, ...thinned(tops[tops.length - 1].map((p) => p[1])).map((i) => tops[tops.length - 1][i][1]));
  const axis = linearAxis([0, highest]);
  const areas = lines.map(({ colour }, i) => areaNode(frame, axis, tops[i], tops[i + 1], `layer c${colour}`));
  return [...scenery(frame, axis), ...areas, lineNode(frame, axis, total.points, `raw c${total.colour}`)];
}

// ---- cards -------------------------------------------------------------------------------------------------------

const lastFinite = (points) => points.findLast((p) => Number.isFinite(p[1]))?.[1];

// The card of a figure: nodes are its chart, legend the lines that its legend names, told those that the pointer reads.
function card(figure, frame, nodes, legend, told = legend) {
  const node = make("figure", "chart"), caption = make("figcaption"), keys = make("div", "legend");
  node.dataset.metric = figure.metric ?? figure.title;
  caption.append(make("b", "", figure.title));
  if (legend.length === 1) caption.append(make("small", "", short(lastFinite(legend[0].points))));
  if (figure.subtitle) caption.append(make("span", "sub", figure.subtitle));
  const key = (className, text) => {
    const entry = make("span");
    entry.append(make("i", className), text);
    keys.append(entry);
  };
  for (const line of legend.length > 1 ? legend : []) {
    key(`c${line.colour}`, told === legend ? `${line.label} ${short(lastFinite(line.points))}` : line.label);
  }
  if (frame.ghosts.length) key("mark", "ghost step");
  const lost = legend.reduce((count, line) => count + line.points.filter((p) => !Number.isFinite(p[1])).length, 0);
  if (lost) keys.append(make("span", "", `${lost} non-finite values are not drawn`));
  const picture = svg("svg", { viewBox: `0 0 ${frame.width} ${HEIGHT}`, role: "img", "aria-label": figure.title }, ...nodes, ...ghostMarks(frame));
  node.append(caption, keys, picture);
  tellUnderPointer(node, picture, frame, told, figure.unit ?? "");
  return node;
}

// Shows the values of the step nearest to the pointer, and a line at that step.
function tellUnderPointer(node, picture, frame, lines, unit) {
  const tip = make("div", "tip"), cursor = svg("line", { class: "cursor", y1: TOP, y2: BOTTOM });
  let tables = null, steps = null;
  picture.addEventListener("pointermove", (event) => {
    tables ??= lines.map((line) => new Map(line.points));
    steps ??= [...new Set(lines.flatMap((line) => line.points.map((p) => p[0])))].sort((a, b) => a - b);
    const box = picture.getBoundingClientRect(), x = ((event.clientX - box.left) / box.width) * frame.width;
    const step = steps.reduce((best, each) => (Math.abs(frame.x(each) - x) < Math.abs(frame.x(best) - x) ? each : best));
    const values = lines.flatMap((line, i) => (tables[i].has(step) ? [`${line.label}: ${short(tables[i].get(step))} ${unit}`.trimEnd()] : []));
    tip.textContent = [`step ${step}`, ...values].join("\n");
    tip.classList.toggle("left", frame.x(step) > frame.width / 2);
    cursor.setAttribute("x1", frame.x(step));
    cursor.setAttribute("x2", frame.x(step));
    picture.append(cursor);
    node.append(tip);
  });
  picture.addEventListener("pointerleave", () => { cursor.remove(); tip.remove(); });
}
