"use strict";
// Shows rollouts group by group: saved whole, each token coloured by its advantage, or the recorded completions.

const GROUPS_AT_ONCE = 20;

let choices = [], shown = null, limit = GROUPS_AT_ONCE, completions = null;

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
  const title = make("h2", "", visible(group.prompt_id));
  title.append(make("small", "", `mean reward ${short(mean(rewards))}, ${group.samples.length} samples${group.answer === null ? "" : `, answer ${visible(group.answer)}`}`));
  node.append(title, make("div", "prompt", visible(group.prompt)));
  const scale = Math.max(0, ...group.samples.map((s) => Math.max(Math.abs(s.advantage ?? 0), ...(s.advantages ?? []).map((v) => Math.abs(v ?? 0)))));
  for (const sample of group.samples) {
    const facts = make("div", "facts"), parts = sample.rewards.map((value, i) => `${visible(document.functions[i])} ${short(value)}`);
    facts.append(make("b", "", `#${visible(String(sample.sample))} reward ${short(sample.reward)}`), ` advantage ${short(sample.advantage)} · ${parts.length > 1 ? `${parts.join(", ")} · ` : ""}${lengthOf(sample)} tokens · ${visible(sample.finish_reason)} · weights ${sample.weight_version}${sample.excluded ? ` · excluded: ${visible(sample.excluded)}` : ""}`);
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
  at("count").textContent = `${groups.length} of ${shown.groups.length} groups${shown.shortened ?? ""}`;
  at("groups").replaceChildren(...groups.slice(0, limit).map((group) => groupNode(group, shown)));
  at("more").hidden = groups.length <= limit;
}

// Completions were recorded with a row: those of one source and step are a batch. Example: "train@6".
const batchOf = (completion) => `${completion.source}@${completion.step}`;

function batchTitle(completion) {
  const where = completion.rollout === null ? visible(completion.source) : `rollout ${completion.rollout}`;
  return `${where}, step ${completion.step}`;
}

function fromCompletions(list, batch) {
  // A run that saves no rollouts has some completions of each, cut short and without tokens.
  const groups = new Map(), functions = [], chosen = list.filter((each) => batchOf(each) === batch);
  for (const each of chosen) {
    const [prompt, sample] = each.sample.split("#");
    for (const name in each.rewards) if (!functions.includes(name)) functions.push(name);
    if (!groups.has(prompt)) groups.set(prompt, { prompt_id: prompt, prompt: each.prompt, answer: each.answer, samples: [] });
    groups.get(prompt).samples.push({ sample, text: each.response, tokens: each.response_tokens, reward: each.reward, advantage: each.advantage, rewards: functions.map((name) => each.rewards[name] ?? null), finish_reason: each.finish_reason, weight_version: each.weight_version, excluded: each.excluded });
  }
  const recorded = chosen.length ? chosen[0].recorded ?? chosen.length : 0;
  return { functions, tokens: {}, groups: [...groups.values()], shortened: recorded > chosen.length ? `, ${chosen.length} of ${recorded} recorded completions` : "" };
}

async function chooseRollout() {
  const chosen = at("number").value;
  if (!chosen) return;
  limit = GROUPS_AT_ONCE;
  at("legend").hidden = completions !== null;
  try {
    shown = completions ? fromCompletions(completions, chosen) : await source.rollout(chosen);
    drawRollout();
  } catch (error) {
    at("groups").replaceChildren(make("p", "error", error.message));
  }
}

// Offers the saved rollouts, or the batches of completions; the newest stays chosen as others come.
async function refreshChoices(saved) {
  let named = saved.map((number) => [String(number), String(number)]);
  completions = null;
  if (!saved.length) {
    completions = await source.completions();
    named = [...new Map(completions.map((each) => [batchOf(each), batchTitle(each)]))];
  }
  if (named.join() === choices.join()) return;
  const select = at("number"), newest = choices.length ? choices[choices.length - 1][0] : "", before = select.value;
  const followed = !before || before === newest;
  choices = named;
  select.replaceChildren(...named.map(([value, text]) => Object.assign(make("option", "", text), { value })));
  select.value = followed && named.length ? named[named.length - 1][0] : before;
  if (followed) await chooseRollout();
}
