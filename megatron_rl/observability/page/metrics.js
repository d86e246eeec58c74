"use strict";
// Sums a run's rows up to headline figures, and chooses and fills the charts of its parts.

const CARD_AIR = 34; // of a card: its padding and border
const NOT_FINITE = new Set(["nan", "inf", "-inf"]); // numbers that JSON cannot hold
const SKIPPED = new Set(["step", "rollout", "weight_version"]);

let rows = [], run = null;

// ---- rows --------------------------------------------------------------------------------------------------------

const isSupervised = (row) => run.phases.supervised.includes(row.phase);
const isGhost = (row) => row.step_kind !== "REAL";
const titleOf = (phase) => run.phases.titles[phase] ?? visible(String(phase));
const numberOf = (value) => (typeof value === "number" ? value : NOT_FINITE.has(value) ? NaN : undefined);

// [the supervised steps that precede others, the run's own steps]: those would take the axes of these.
function parts(all) {
  const start = all.filter(isSupervised), own = all.filter((row) => !isSupervised(row));
  return start.length && own.length ? [start, own] : [[], all];
}

// [[phase, its rows], ...] of each stretch of one phase
function inPhases(all) {
  const stretches = [];
  for (const row of all) {
    if (!stretches.length || stretches[stretches.length - 1][0] !== row.phase) stretches.push([row.phase, []]);
    stretches[stretches.length - 1][1].push(row);
  }
  return stretches;
}

// [[step, value], ...] of a metric; what was measured before a step stands at the step before.
function series(name, part) {
  const points = [], before = `${name}_before`;
  for (const row of part) {
    for (const [step, value] of [[row.step - 1, numberOf(row[before])], [row.step, numberOf(row[name])]]) {
      if (value !== undefined) points.push([step, value]);
    }
  }
  return points;
}

const finite = (name, part) => part.map((row) => numberOf(row[name])).filter(Number.isFinite);
const meanOf = (values) => values.reduce((sum, value) => sum + value, 0) / values.length;
const sumOf = (values) => values.reduce((sum, value) => sum + value, 0);

function median(values) {
  const sorted = [...values].sort((a, b) => a - b), half = sorted.length >> 1;
  return sorted.length % 2 ? sorted[half] : (sorted[half - 1] + sorted[half]) / 2;
}

// Of each set: {metrics: {"mean@4": [[step, value], ...], ...}, errors: {"mean@4": {step: standard error}}}
function evaluations(all) {
  const sets = new Map();
  for (const row of all) {
    for (const key in row) {
      if (!key.startsWith("eval/")) continue;
      const match = /^eval\/(.+)\/((mean|pass)@(\d+))(_se)?(_before)?$/.exec(key), value = numberOf(row[key]);
      if (!match || value === undefined) continue;
      const [, name, metric, kind, , isError, before] = match, step = row.step - (before ? 1 : 0);
      if (!sets.has(name)) sets.set(name, { metrics: {}, errors: {} });
      if (isError && kind === "mean") (sets.get(name).errors[metric] ??= {})[step] = value;
      if (!isError) (sets.get(name).metrics[metric] ??= []).push([step, value]);
    }
  }
  const rank = (metric) => (metric.startsWith("mean") ? 0 : 1e9) + Number(metric.split("@")[1]);
  for (const set of sets.values()) {
    set.metrics = Object.fromEntries(Object.entries(set.metrics).sort((a, b) => rank(a[0]) - rank(b[0])));
    for (const points of Object.values(set.metrics)) points.sort((a, b) => a[0] - b[0]);
  }
  return [...sets].sort(([a], [b]) => (a < b ? -1 : 1));
}

// ---- headline figures --------------------------------------------------------------------------------------------

// A run's figures over its own steps; null for a metric that it lacks. Ends are [mean of the first window, of the last].
function summarize(all) {
  const [start, own] = parts(all), supervised = own.length > 0 && isSupervised(own[0]);
  const window = Math.min(10, Math.max(1, own.length >> 1));
  const ends = (name) => {
    const values = finite(name, own);
    return values.length ? [meanOf(values.slice(0, window)), meanOf(values.slice(-window))] : null;
  };
  const counted = own.filter((row) => "skip/tokens_executed" in row && "skip/tokens_dense" in row);
  const medianOf = (name) => { const values = finite(name, own); return values.length ? median(values) : null; };
  // of supervised steps, only pairs beyond the hinge loss's margin have no signal: a share of 0 says nothing
  const tellsSilence = !supervised || finite("skip/zero_advantage_ratio", own).some(Boolean);
  const times = finite("time/step_s", all), ghosts = own.filter(isGhost).length;
  return {
    window, supervised, ghosts, steps: own.length, warmup: start.length, reward: ends("reward/mean"),
    phase: own.length ? own[own.length - 1].phase : null,
    loss: supervised ? ends("train/loss") : null, accuracy: ends("preference/accuracy"),
    silent: tellsSilence ? ends("skip/zero_advantage_ratio") : null, truncated: ends("rollout/truncated_share"),
    executed: sumOf(counted.map((row) => row["skip/tokens_executed"])), dense: sumOf(counted.map((row) => row["skip/tokens_dense"])),
    rewardErrors: sumOf(finite("reward/errors", own)), rewardErrorShare: ends("reward/error_share"),
    rate: medianOf("perf/tokens_per_second"), step: medianOf("time/step_s"), total: times.length ? sumOf(times) : null,
  };
}

// [[name, value, note, value at the start or ""], ...]
function tileFacts(all) {
  const sum = summarize(all), [, own] = parts(all), facts = [];
  const ends = sum.window > 1 ? `means of the first and the last ${sum.window} steps` : "first and last step";
  const last = (name) => { const points = series(name, own); return points.length ? points[points.length - 1][1] : null; };
  const change = (name, values, text) => { if (values) facts.push([name, text(values[1]), ends, text(values[0])]); };
  const measured = (name, points, kind, errors = {}) => {
    const [[first, before], [step, value]] = [points[0], points[points.length - 1]], changed = step > first;
    const known = (changed ? [first, step] : [step]).filter((each) => each in errors).map((each) => errors[each].toFixed(3));
    const note = `${changed ? `steps ${first} and ${step}` : `step ${step}`}${kind}`;
    facts.push([name, value.toFixed(3), step in errors ? `${note}; standard error ${known.join(" and ")}` : note, changed ? before.toFixed(3) : ""]);
  };
  if (last("rollout") !== null) facts.push(["Rollout", short(last("rollout")), "the last with an optimizer step", ""]);
  change("Reward", sum.reward, (value) => value.toFixed(3));
  change("Loss", sum.loss, (value) => value.toFixed(3));
  change("Pairs told apart", sum.accuracy, (value) => percent(value, 0));
  const heldOut = [["Held-out supervised loss", "sft/eval_loss"], ["Held-out pairs, loss", "preference/eval_loss"], ["Held-out pairs, accuracy", "preference/eval_accuracy"]];
  for (const [name, metric] of heldOut) if (series(metric, all).length) measured(name, series(metric, all), "");
  if (sum.supervised && last("train/lr") !== null) facts.push(["Learning rate", short(last("train/lr")), "of the last step", ""]);
  if (sum.supervised && sum.rate !== null) facts.push(["Tokens a second", short(Number(sum.rate.toPrecision(3))), "median of the steps", ""]);
  for (const [name, { metrics, errors }] of evaluations(all)) {
    for (const [metric, points] of Object.entries(metrics)) {
      if (metric.startsWith("mean@")) measured(`Evaluation: ${visible(name)}`, points, `, ${metric}`, errors[metric]);
    }
  }
  if (sum.rewardErrors) {
    const share = sum.rewardErrorShare ? `, ${percent(sum.rewardErrorShare[1], 1)} in the last ${sum.window} steps` : "";
    facts.push(["Reward errors", short(sum.rewardErrors), `samples whose reward failed${share}`, ""]);
  }
  if (sum.truncated) facts.push(["Truncated responses", percent(sum.truncated[1], 1), `of the last ${sum.window} steps, at the limit of their tokens`, ""]);
  change("Zero-advantage ratio", sum.silent, (value) => percent(value, 0));
  if (sum.dense) facts.push(["Tokens executed", percent(sum.executed / sum.dense, 1), `${short(sum.executed)} of the dense run's ${short(sum.dense)}`, ""]);
  if (!sum.supervised || sum.ghosts) {
    facts.push(["Ghost steps", String(sum.ghosts), `of ${sum.steps} optimizer steps${sum.warmup ? `, after ${sum.warmup} of warm-up` : ""}`, ""]);
  } else facts.push(["Optimizer steps", short(sum.steps), titleOf(sum.phase), ""]);
  if (sum.step !== null) facts.push(["Time", duration(sum.total), `in ${all.length} steps, median ${duration(sum.step)}`, ""]);
  return facts;
}

function tileNode([name, value, note, before]) {
  const node = make("div", "tile"), figure = make("div", "value");
  if (before) figure.append(make("span", "", `${before} → `));
  figure.append(value);
  node.append(make("div", "name", name), figure, make("div", "note", note));
  return node;
}

// A row for each stretch of one phase, and a column for each fact that any of them has.
function phaseTable(all) {
  const names = ["phase", "steps", "real", "ghost", "loss", "reward", "executed of dense", "median step", "time"];
  const lines = inPhases(all).map(([phase, part]) => {
    const sum = summarize(part), ends = (pair) => (pair ? `${pair[0].toFixed(3)} → ${pair[1].toFixed(3)}` : null);
    return [
      titleOf(phase), `${part[0].step} – ${part[part.length - 1].step}`, String(sum.steps - sum.ghosts), String(sum.ghosts),
      ends(sum.loss), ends(sum.reward), sum.dense ? percent(sum.executed / sum.dense, 1) : null,
      sum.step === null ? null : duration(sum.step), sum.total === null ? null : duration(sum.total),
    ];
  });
  const used = names.map((_, i) => i).filter((i) => lines.some((line) => line[i] !== null));
  const table = make("table"), rowOf = (tag, texts) => { const node = make("tr"); node.append(...texts.map((text) => make(tag, "", text))); return node; };
  table.append(rowOf("th", used.map((i) => names[i])), ...lines.map((line) => rowOf("td", used.map((i) => line[i] ?? "–"))));
  return table;
}

// ---- the charts of one part of the run -----------------------------------------------------------------------------

function figureCard(figure, part, frame) {
  const used = figure.realOnly ? part.filter((row) => !isGhost(row)) : part;
  const lines = figure.lines.map(([metric, label, colour]) => ({ label, colour, points: series(metric, used) }));
  const drawn = lines.filter((line) => line.points.some((p) => Number.isFinite(p[1])));
  if (!drawn.length || (figure.nonzero && !drawn.some((line) => line.points.some((p) => p[1])))) return null;
  return card({ metric: figure.lines[0][0], ...figure }, frame, lineNodes(frame, figure, drawn), drawn);
}

const plainFigure = (name) => ({ title: name, lines: [[name, name, 1]] });

// The rewards' median in a band of their quartiles, in a band of least and largest.
function spreadCard(part, frame) {
  const having = part.filter((row) => SPREAD.every((name) => Number.isFinite(row[`reward/${name}`])));
  if (!having.length) return null;
  const line = (name, colour, label = name) => ({ label, colour, points: series(`reward/${name}`, having) });
  const [least, largest, low, high, middle] = [line("min", GREY), line("max", GREY), line("p25", 1), line("p75", 1), line("median", 1)];
  const legend = [line("min", GREY, "least to largest"), line("p25", 1, "quartiles"), middle];
  const figure = { title: "Spread of rewards", subtitle: "over the samples of the rollout" };
  return card(figure, frame, bandNodes(frame, [[least, largest], [low, high]], middle), legend, [least, largest, low, high, middle]);
}

// A step's stages, stacked up to its total time; seconds that belong to no stage are "other".
function timeCard(part, frame) {
  const timed = part.filter((row) => Number.isFinite(row["time/step_s"]));
  if (!timed.length) return null;
  const total = { label: "whole step", colour: GREY, points: series("time/step_s", timed) };
  const seconds = (row, name) => (Number.isFinite(row[`time/${name}_s`]) ? row[`time/${name}_s`] : 0);
  const names = TIME_PARTS.filter((name) => timed.some((row) => `time/${name}_s` in row));
  const stack = names.map((name) => ({ label: name.replace("_", " "), colour: TIME_PARTS.indexOf(name) + 1, points: timed.map((row) => [row.step, seconds(row, name)]) }));
  const rest = timed.map((row) => [row.step, Math.max(0, row["time/step_s"] - sumOf(names.map((name) => seconds(row, name))))]);
  if (sumOf(rest.map((p) => p[1])) > 0.01 * sumOf(total.points.map((p) => p[1]))) stack.push({ label: "other", colour: GREY, points: rest });
  const figure = { title: TIME_TITLE, metric: "time/step_s", subtitle: "seconds per optimizer step, by stage", unit: "s" };
  return card(figure, frame, stackNodes(frame, stack, total), stack, [...stack, total]);
}

// One line per metric; pass@1 shares the mean's line and label if rewards are 0 or 1.
function evaluationLines(metrics) {
  const drawn = [];
  for (const [label, points] of Object.entries(metrics)) {
    const same = drawn.length > 0 && label === "pass@1" && drawn[0].points.length === points.length
      && points.every(([step, value], i) => drawn[0].points[i][0] === step && Math.abs(drawn[0].points[i][1] - value) <= 1e-8 + 1e-5 * Math.abs(value));
    if (same) drawn[0].label = `${drawn[0].label} = ${label}`;
    else if (points.some((p) => Number.isFinite(p[1]))) drawn.push({ label, points, colour: EVALUATION_COLOURS[drawn.length % EVALUATION_COLOURS.length] });
  }
  return drawn;
}

function evaluationCards(sets, frame) {
  const cards = [];
  for (const [name, { metrics }] of sets) {
    const lines = evaluationLines(metrics);
    if (!lines.some((line) => line.points.filter((p) => Number.isFinite(p[1])).length >= 2)) continue; // a tile says it
    const greedy = lines.length === 1 && lines[0].label === "mean@1";
    const share = finiteOf(lines).every((value) => value >= 0 && value <= 1);
    const figure = { title: `Evaluation: ${visible(name)}`, metric: `eval/${name}`, subtitle: `${greedy ? "mean@1, greedy, " : ""}on held-out prompts` };
    cards.push(card(figure, frame, lineNodes(frame, { share }, lines), lines));
  }
  return cards;
}

// The sets with their evaluations from step `first` to `last` alone.
function evaluatedWithin(sets, first, last) {
  return sets.map(([name, { metrics }]) => {
    const chosen = Object.entries(metrics).map(([metric, points]) => [metric, points.filter(([step]) => first <= step && step <= last)]);
    return [name, { metrics: Object.fromEntries(chosen.filter(([, points]) => points.length)) }];
  });
}

function partFrame(part, sets, width) {
  // it begins a step early if something was measured before its first step
  const measured = sets.flatMap(([, { metrics }]) => Object.values(metrics).flatMap((points) => points.map((p) => p[0])));
  if (Object.keys(part[0]).some((key) => key.endsWith("_before"))) measured.push(part[0].step - 1);
  const first = measured.reduce((least, step) => Math.min(least, step), part[0].step);
  const starts = inPhases(part).map(([, stretch]) => stretch[0].step);
  return frameOf(first, part[part.length - 1].step, part.filter(isGhost).map((row) => row.step), starts, width);
}

function metricNames(part) {
  const names = new Set();
  for (const row of part) for (const name in row) if (!names.has(name) && numberOf(row[name]) !== undefined && !SKIPPED.has(name)) names.add(name);
  return names;
}

// Fills a grid with the figures of one part of a run: the first, evaluations, two more, a step's time, the rest, and
// the usual metrics that no figure draws; or with each metric whose name contains `wanted`. Returns what is missing.
function fillCharts(grid, part, sets, wanted) {
  const column = parseFloat(getComputedStyle(grid).gridTemplateColumns); // NaN while the tab is not shown
  const frame = partFrame(part, sets, Math.max(220, (Number.isFinite(column) ? column : 480) - CARD_AIR));
  const names = metricNames(part);
  if (wanted) {
    const chosen = [...names].filter((name) => name.toLowerCase().includes(wanted)).sort();
    grid.replaceChildren(...chosen.map((name) => figureCard(plainFigure(name), part, frame)).filter(Boolean));
    return [];
  }
  const figures = isSupervised(part[0]) ? SUPERVISED_FIGURES : RL_FIGURES;
  const [first, ...others] = figures.map((figure) => figureCard(figure, part, frame)), times = timeCard(part, frame);
  const shown = new Set(figures.flatMap((figure) => figure.lines.map((line) => line[0])));
  const more = [...(isSupervised(part[0]) ? [] : RL_MORE), ...MORE, ...[...names].filter(isMore).sort()];
  const plain = more.filter((name) => names.has(name) && !shown.has(name)).map((name) => figureCard({ ...plainFigure(name), nonzero: true }, part, frame));
  const ordered = [first, ...evaluationCards(sets, frame), spreadCard(part, frame), ...others.slice(0, 2), times, ...others.slice(2), ...plain];
  grid.replaceChildren(...ordered.filter(Boolean));
  const missing = figures.filter((figure, i) => figure.expected && ![first, ...others][i]).map((figure) => figure.title);
  return times ? missing : [...missing, TIME_TITLE];
}

// ---- the tab -----------------------------------------------------------------------------------------------------

function howToRead(own) {
  const window = windowOf(own.length);
  const lines = window > 1 ? `Strong lines are running means over about ${window} steps, faint ones the raw values.` : "Every step is drawn.";
  return own.some(isGhost) ? `${lines} A ghost step had no sample with signal, and ran no forward or backward pass.` : lines;
}

function missingText(missing) {
  return missing.length ? `Not in this run's metrics, so not drawn: ${missing.join(", ")}.` : "";
}

function drawMetrics() {
  const has = rows.length > 0;
  for (const id of ["tiles", "filters", "charts", "phases"]) at(id).hidden = !has;
  at("how").textContent = has ? "" : "metrics.jsonl holds no optimizer step yet, so there is nothing to draw.";
  if (!has) return;
  const [start, own] = parts(rows), sets = evaluations(rows), wanted = at("filter").value.trim().toLowerCase();
  const ownFrom = start.length ? own[0].step - 1 : -Infinity;
  at("tiles").replaceChildren(...tileFacts(rows).map(tileNode));
  at("how").textContent = howToRead(own);
  at("missing").textContent = missingText(fillCharts(at("charts"), own, evaluatedWithin(sets, ownFrom, Infinity), wanted));
  at("start").hidden = !start.length;
  if (start.length) {
    const kind = start[0].phase === "preference" ? "preference pairs" : "imitation";
    at("start-steps").textContent = `${kind}, steps ${start[0].step} – ${start[start.length - 1].step}`;
    at("start-missing").textContent = missingText(fillCharts(at("start-charts"), start, evaluatedWithin(sets, -Infinity, ownFrom), wanted));
  }
  at("phase-table").replaceChildren(phaseTable(rows));
}
