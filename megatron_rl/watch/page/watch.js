"use strict";
// Asks the server for new rows every two seconds, and for a rollout when one is chosen. Everything that a run wrote is
// put in place as text, never as HTML.

const EVERY_MS = 2000;
const GROUPS_AT_ONCE = 20;
const USUAL = [
  "reward/mean", "preference/loss", "preference/accuracy", "preference/margin", "preference/chosen_reward",
  "preference/chosen_logprob", "skip/zero_advantage_ratio", "train/loss", "train/lr", "perf/tokens_per_second",
  "train/grad_norm", "train/entropy", "train/kl", "train/logprob_gap_mean", "train/clip_ratio", "rollout/truncated_share",
  "rollout/tokens", "async/staleness_max",
  "rollout/weight_version_min", "skip/tokens_executed", "skip/speedup_ideal", "perf/dense_equivalent_tokens_per_second",
  "perf/rollout_tokens_per_second", "perf/rollout_wait_share", "perf/mfu", "perf/peak_memory_bytes",
];
const SKIPPED = new Set(["step", "rollout", "weight_version"]);
// A second line on the axes of the first: held out beside trained, rejected beside chosen.
const BESIDE = {
  "train/loss": "sft/eval_loss", "preference/loss": "preference/eval_loss", "preference/accuracy": "preference/eval_accuracy",
  "preference/margin": "preference/eval_margin", "preference/chosen_reward": "preference/rejected_reward",
  "preference/chosen_logprob": "preference/rejected_logprob",
};
const SHARES = new Set(["skip/zero_advantage_ratio", "preference/accuracy"]); // their axis is 0 to 1

const at = (id) => document.getElementById(id);
const make = (tag, className, text) => {
  const node = document.createElement(tag);
  if (className) node.className = className;
  if (text !== undefined) node.textContent = text;
  return node;
};
const svg = (tag, attributes) => {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  return node;
};
const short = (value) => {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (Number.isInteger(value) && size < 1e6) return String(value);
  if (size >= 1e9) return `${(value / 1e9).toFixed(2)}G`;
  if (size >= 1e6) return `${(value / 1e6).toFixed(2)}M`;
  return size !== 0 && size < 1e-3 ? value.toExponential(2) : String(Number(value.toPrecision(4)));
};
// Control, format and private characters could reverse a line or pass for another: they are shown as escapes.
const visible = (text) => text.replace(/[^\P{C}\n\t]|[\u2028\u2029]/gu, (c) => `\\u{${c.codePointAt(0).toString(16)}}`);

async function ask(path) {
  const answer = await fetch(path);
  if (!answer.ok) throw new Error(await answer.text());
  return answer.json();
}

// ---- metrics -----------------------------------------------------------------------------------------------------

let rows = [], offset = 0, run = null;

const isSupervised = (row) => run.phases.supervised.includes(row.phase);

// The steps of one part of the run: those of its supervised start would take the axes of what follows.
function partOf(chosen) {
  const start = rows.filter(isSupervised), own = rows.filter((row) => !isSupervised(row));
  if (!start.length || !own.length) return rows;
  return chosen === "start" ? start : own;
}

function series(name, part) {
  // a value of before a step stands at the step before; what ends the supervised start is where the run itself begins
  const from = name.startsWith("eval/") ? rows : part;
  return from.flatMap((row) => [[row.step - 1, row[`${name}_before`]], [row.step, row[name]]].filter((p) => typeof p[1] === "number"));
}

function thinned(points, most) {
  // of each stretch the lowest and the highest point stay, so that no peak is lost
  if (points.length <= most) return points;
  const stretch = Math.ceil(points.length / (most / 2)), kept = [];
  for (let i = 0; i < points.length; i += stretch) {
    const part = points.slice(i, i + stretch);
    let low = part[0], high = part[0];
    for (const point of part) { if (point[1] < low[1]) low = point; if (point[1] > high[1]) high = point; }
    kept.push(...(low[0] <= high[0] ? [low, high] : [high, low]));
  }
  return kept;
}

function chart(name, part) {
  const points = series(name, part);
  if (!points.length) return null;
  const beside = BESIDE[name] ? series(BESIDE[name], part) : [], all = [...points, ...beside];
  const figure = make("figure", "chart"), caption = make("figcaption", "", name);
  figure.dataset.metric = name;
  const last = (line) => short(line[line.length - 1][1]);
  caption.append(make("small", "", last(points)));
  let x0 = Infinity, x1 = -Infinity, low = SHARES.has(name) ? 0 : Infinity, high = SHARES.has(name) ? 1 : -Infinity;
  for (const [x, y] of all) { x0 = Math.min(x0, x); x1 = Math.max(x1, x); low = Math.min(low, y); high = Math.max(high, y); }
  if (low > 0) low = 0; // what is never negative counts from nothing
  const place = ([x, y]) => [x1 > x0 ? (x - x0) / (x1 - x0) * 300 : 150, high > low ? 95 - (y - low) / (high - low) * 90 : low === 0 ? 95 : 50];
  const picture = svg("svg", { viewBox: "0 0 300 100", preserveAspectRatio: "none", role: "img", "aria-label": name });
  for (const y of [5, 50, 95]) picture.append(svg("line", { x1: 0, x2: 300, y1: y, y2: y }));
  for (const [line, className] of [[points, "first"], [beside, "second"]]) {
    if (line.length === 1) {
      const [x, y] = place(line[0]);
      picture.append(svg("circle", { class: className, cx: x, cy: y, r: 2 }));
    } else if (line.length) {
      picture.append(svg("polyline", { class: className, points: thinned(line, 600).map((p) => place(p).map((v) => v.toFixed(2)).join(",")).join(" ") }));
    }
  }
  const range = make("div", "range");
  range.append(make("span", "axis", `${short(low)} … ${short(high)}`), make("span", "", `step ${x0} … ${x1}`));
  figure.append(caption, picture, range);
  if (beside.length) figure.append(make("div", "beside", `${BESIDE[name]} ${last(beside)}`));
  return figure;
}

const ofTotal = (step, total) => (total === null || step === null || step > total ? short(step) : `${step} of ${total}`);
const percent = (value) => (value === null ? null : `${(100 * value).toFixed(1)} %`);

function tiles() {
  const own = partOf("own");
  const last = (name) => { const points = series(name, own); return points.length ? points[points.length - 1][1] : null; };
  const ghosts = own.filter((row) => row.step_kind === "GHOST").length;
  const executed = series("skip/tokens_executed", own).reduce((sum, p) => sum + p[1], 0);
  const dense = series("skip/tokens_dense", own).reduce((sum, p) => sum + p[1], 0);
  const supervised = own.length > 0 && own.every(isSupervised);
  const facts = [["step", ofTotal(last("step"), run.state.total_steps)]];
  if (supervised) {
    facts.push(["loss", last("train/loss")], ["held-out loss", last("sft/eval_loss") ?? last("preference/eval_loss")]);
    if (last("preference/accuracy") !== null) facts.push(["pairs told apart", percent(last("preference/accuracy"))], ["margin", last("preference/margin")]);
    facts.push(["learning rate", last("train/lr")], ["tokens a second", last("perf/tokens_per_second")]);
  } else {
    facts.push(["rollout", last("rollout")], ["reward", last("reward/mean")], ["samples without signal", percent(last("skip/zero_advantage_ratio"))]);
  }
  if (ghosts || !supervised) facts.push(["ghost steps", ghosts]);
  facts.push(["tokens run of dense", dense ? percent(executed / dense) : null]);
  at("tiles").replaceChildren(...facts.filter((fact) => fact[1] !== null).map(([name, value]) => {
    const tile = make("div", "tile");
    tile.append(make("b", "", typeof value === "string" ? value : short(value)), make("span", "", name));
    return tile;
  }));
}

function drawMetrics() {
  at("parts").hidden = partOf("own").length === rows.length;
  const wanted = at("filter").value.trim().toLowerCase(), part = partOf(at("part").value), names = new Set();
  for (const row of part) for (const name in row) if (typeof row[name] === "number" && !SKIPPED.has(name)) names.add(name);
  const usual = [...USUAL.filter((name) => names.has(name)), ...[...names].filter((n) => /^eval\/.+\/mean@\d+$|^async\/|engine|replica/.test(n) && !USUAL.includes(n)).sort()];
  // the loss and the tokens of supervised steps have two names, and those that drop nothing have no skip to tell of
  const again = new Set(names.has("preference/loss") ? ["train/loss"] : []);
  if (part.every(isSupervised)) again.add("perf/dense_equivalent_tokens_per_second");
  const tellsNothing = part.every(isSupervised) && !part.some((row) => row["skip/zero_advantage_ratio"]);
  const told = usual.filter((name) => !again.has(name) && !(tellsNothing && name.startsWith("skip/")));
  const chosen = wanted ? [...names].filter((name) => name.toLowerCase().includes(wanted)).sort() : told;
  at("charts").replaceChildren(...chosen.map((name) => chart(name, part)).filter(Boolean));
  tiles();
}

// ---- rollouts ----------------------------------------------------------------------------------------------------

let numbers = [], shown = null, limit = GROUPS_AT_ONCE, completions = null;

function tokenNodes(sample, tokens, scale) {
  // A token may be a part of a character: the decoder keeps its bytes until the character is whole.
  const decoder = new TextDecoder("utf-8"), nodes = [];
  sample.ids.forEach((id, place) => {
    const latin = tokens[id] ?? "", bytes = Uint8Array.from(latin, (c) => c.charCodeAt(0));
    const text = decoder.decode(bytes, { stream: place + 1 < sample.ids.length });
    if (!text) return;
    const node = make("span", "", visible(text)), advantage = sample.advantages ? sample.advantages[place] : sample.advantage;
    if (advantage && scale) {
      const strength = Math.min(1, Math.abs(advantage) / scale);
      node.style.background = `rgba(var(--${advantage > 0 ? "high" : "low"}), ${(0.12 + 0.5 * strength).toFixed(3)})`;
    }
    node.title = `token ${place}, id ${id}, advantage ${short(advantage)}`;
    nodes.push(node);
  });
  return nodes;
}

function textOf(sample, tokens) {
  if (sample.text === undefined) {
    const latin = sample.ids.map((id) => tokens[id] ?? "").join("");
    sample.text = new TextDecoder("utf-8").decode(Uint8Array.from(latin, (c) => c.charCodeAt(0)));
  }
  return sample.text;
}

const rewardsOf = (group) => group.samples.map((sample) => sample.reward).filter((reward) => reward !== null);
const mean = (values) => (values.length ? values.reduce((sum, value) => sum + value, 0) / values.length : 0);
const spread = (values) => (values.length ? Math.max(...values) - Math.min(...values) : 0);
const lengthOf = (sample) => (sample.ids ? sample.ids.length : sample.tokens);
const ORDERS = {
  reward_up: (a, b) => mean(rewardsOf(a)) - mean(rewardsOf(b)),
  reward_down: (a, b) => mean(rewardsOf(b)) - mean(rewardsOf(a)),
  spread: (a, b) => spread(rewardsOf(b)) - spread(rewardsOf(a)),
  length: (a, b) => Math.max(...b.samples.map(lengthOf)) - Math.max(...a.samples.map(lengthOf)),
};

function groupNode(group, document) {
  const node = make("article", "group"), rewards = rewardsOf(group);
  const title = make("h2", "", group.prompt_id);
  title.append(make("small", "", `mean reward ${short(mean(rewards))}, ${group.samples.length} samples${group.answer === null ? "" : `, answer ${visible(group.answer)}`}`));
  node.append(title, make("div", "prompt", visible(group.prompt)));
  const scale = Math.max(0, ...group.samples.map((s) => Math.max(Math.abs(s.advantage ?? 0), ...(s.advantages ?? []).map((v) => Math.abs(v ?? 0)))));
  for (const sample of group.samples) {
    const facts = make("div", "facts"), parts = sample.rewards.map((value, i) => `${document.functions[i]} ${short(value)}`);
    facts.append(make("b", "", `#${sample.sample} reward ${short(sample.reward)}`), ` advantage ${short(sample.advantage)} · ${parts.length > 1 ? `${parts.join(", ")} · ` : ""}${lengthOf(sample)} tokens · ${sample.finish_reason} · weights ${sample.weight_version}${sample.excluded ? ` · excluded: ${visible(sample.excluded)}` : ""}`);
    const text = make("div", "completion");
    if (sample.ids) text.append(...tokenNodes(sample, document.tokens, scale)); else text.textContent = visible(sample.text);
    node.append(facts, text);
  }
  return node;
}

function drawRollout() {
  if (!shown) return;
  const words = at("search").value.trim().toLowerCase();
  let groups = shown.groups.filter((group) => !words || [group.prompt, group.answer ?? "", ...group.samples.map((s) => textOf(s, shown.tokens))].some((text) => text.toLowerCase().includes(words)));
  if (at("signal").checked) groups = groups.filter((group) => group.samples.some((sample) => sample.advantage));
  const order = ORDERS[at("order").value];
  if (order) groups = [...groups].sort(order);
  at("count").textContent = `${groups.length} of ${shown.groups.length} groups`;
  at("groups").replaceChildren(...groups.slice(0, limit).map((group) => groupNode(group, shown)));
  at("more").hidden = groups.length <= limit;
}

function fromCompletions(list, number) {
  // A run that saves no rollouts has some completions of each, cut short and without tokens.
  const groups = new Map(), functions = [];
  for (const each of list.filter((c) => (c.rollout ?? c.source) === number)) {
    const [prompt, sample] = each.sample.split("#");
    for (const name in each.rewards) if (!functions.includes(name)) functions.push(name);
    if (!groups.has(prompt)) groups.set(prompt, { prompt_id: prompt, prompt: each.prompt, answer: each.answer, samples: [] });
    groups.get(prompt).samples.push({ sample, text: each.response, tokens: each.response_tokens, reward: each.reward, advantage: each.advantage, rewards: functions.map((name) => each.rewards[name] ?? null), finish_reason: each.finish_reason, weight_version: each.weight_version, excluded: each.excluded });
  }
  return { functions, tokens: {}, groups: [...groups.values()] };
}

async function chooseRollout() {
  const number = at("number").value;
  if (!number) return;
  limit = GROUPS_AT_ONCE;
  try {
    shown = completions ? fromCompletions(completions, /^\d+$/.test(number) ? Number(number) : number) : await ask(`/api/rollout?number=${number}`);
    drawRollout();
  } catch (error) {
    at("groups").replaceChildren(make("p", "error", error.message));
  }
}

async function refreshNumbers(saved) {
  let found = saved;
  if (!saved.length) {
    completions = (await ask("/api/completions")).completions;
    found = [...new Set(completions.map((c) => c.rollout ?? c.source))];
  } else completions = null;
  if (found.join() === numbers.join()) return;
  const select = at("number"), followed = !select.value || select.value === String(numbers[numbers.length - 1]), before = select.value;
  numbers = found;
  select.replaceChildren(...numbers.map((number) => make("option", "", String(number))));
  select.value = followed ? String(numbers[numbers.length - 1]) : before;
  if (followed) await chooseRollout();
}

// ---- the page ----------------------------------------------------------------------------------------------------

let turn = Promise.resolve(), drawnTotal = null; // of the tiles
// One at a time: two that read from the same offset would have each row twice.
const refresh = () => (turn = turn.then(readOnce));

// "14:05", or with its day where that is not today
function when(seconds) {
  const time = new Date(1000 * seconds), clock = time.toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", hour12: false });
  return time.toDateString() === new Date().toDateString() ? clock : `${time.toLocaleDateString()} ${clock}`;
}

function stateText() {
  const { name, total_steps: total, at: seconds, fault } = run.state, last = rows.length ? rows[rows.length - 1] : null;
  const step = last ? `step ${ofTotal(last.step, total)}` : "no optimizer step yet", time = seconds === null ? "" : when(seconds);
  const phase = last && last.phase ? `${run.phases.titles[last.phase] ?? visible(last.phase)}, ` : "";
  const said = {
    running: last ? `running: ${phase}${step}` : "starting: no optimizer step yet",
    ended: `ended at ${time}, ${step}`,
    preempted: `told to leave, with a checkpoint, at ${time}, ${step}`,
    stopped: `stopped by Ctrl-C at ${time}, ${step}`,
    failed: `failed at ${time}, ${step}`,
    silent: `not heard from since ${time}, ${step}`,
    unknown: `${step}${last && time ? `, at ${time}` : ""}`,
  };
  return said[name] + (fault ? `; ${visible(fault)}` : "");
}

async function readOnce() {
  try {
    run = await ask("/api/run");
    at("name").textContent = document.title = run.name;
    at("yaml").textContent = run.config;
    let news = run.state.total_steps !== drawnTotal;
    for (;;) {
      const answer = await ask(`/api/metrics?offset=${offset}`);
      if (answer.restarted) { rows = []; news = true; }
      rows.push(...answer.rows);
      offset = answer.offset;
      if (!answer.rows.length) break;
      news = true;
    }
    if (news) { drawnTotal = run.state.total_steps; drawMetrics(); }
    if (!at("rollouts").hidden) await refreshNumbers(run.rollouts);
    at("state").textContent = stateText();
    at("state").className = run.state.name;
  } catch (error) {
    at("state").textContent = `the run cannot be read: ${error.message}`;
    at("state").className = "error";
  }
}

for (const tab of document.querySelectorAll('[role="tab"]')) {
  tab.addEventListener("click", async () => {
    for (const other of document.querySelectorAll('[role="tab"]')) {
      other.setAttribute("aria-selected", String(other === tab));
      at(other.getAttribute("aria-controls")).hidden = other !== tab;
    }
    location.hash = tab.getAttribute("aria-controls");
    await refresh();
  });
}
at("filter").addEventListener("input", drawMetrics);
at("part").addEventListener("input", drawMetrics);
at("number").addEventListener("change", chooseRollout);
for (const id of ["search", "order", "signal"]) at(id).addEventListener("input", () => { limit = GROUPS_AT_ONCE; drawRollout(); });
at("more").addEventListener("click", () => { limit += GROUPS_AT_ONCE; drawRollout(); });

async function follow() {
  await refresh();
  setTimeout(follow, EVERY_MS);
}
document.querySelector(`[aria-controls="${CSS.escape(location.hash.slice(1))}"]`)?.click();
follow();
