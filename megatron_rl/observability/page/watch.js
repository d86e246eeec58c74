"use strict";
// Follows a run that the page is served for, every two seconds, and shows a report once.

const EVERY_MS = 2000;

let turn = Promise.resolve(), offset = 0;
// One at a time: two that read from the same offset would have each row twice.
const refresh = () => (turn = turn.then(readOnce));

const ofTotal = (step, total) => (total === null || step > total ? short(step) : `${step} of ${total}`);

function stateText() {
  const { name, total_steps: total, at: seconds, fault } = run.state, last = rows.length ? rows[rows.length - 1] : null;
  const step = last ? `step ${ofTotal(last.step, total)}` : "no optimizer step yet", time = seconds === null ? "" : when(seconds);
  const phase = last && last.phase ? `${titleOf(last.phase)}, ` : "";
  const said = {
    running: last ? `running: ${phase}${step}` : "starting: no optimizer step yet",
    ended: `ended at ${time}, ${step}`,
    preempted: `told to leave, with a checkpoint, at ${time}, ${step}`,
    stopped: `stopped by Ctrl-C at ${time}, ${step}`,
    failed: `failed at ${time}, ${step}`,
    silent: `not heard from since ${time}, ${step}`,
    written: `${step}, written at ${time}`,
    unknown: `${step}${last && time ? `, at ${time}` : ""}`,
  };
  return said[name] + (fault ? `; ${visible(fault)}` : "");
}

async function readOnce() {
  try {
    run = await source.facts();
    at("name").textContent = document.title = run.name;
    at("yaml").textContent = run.config;
    let news = offset === 0;
    for (;;) {
      const answer = await source.rows(offset);
      if (answer.restarted) { rows = []; news = true; }
      rows.push(...answer.rows);
      offset = answer.offset;
      if (!answer.rows.length) break;
      news = true;
    }
    if (news) drawMetrics();
    if (!at("rollouts").hidden) await refreshChoices(run.rollouts);
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
    if (run && tab.id === "tab-metrics") drawMetrics(); // its charts are as wide as it is shown
  });
}
at("filter").addEventListener("input", drawMetrics);
addEventListener("resize", () => { if (run) drawMetrics(); });
at("number").addEventListener("change", chooseRollout);
for (const id of ["search", "order", "signal"]) at(id).addEventListener("input", () => { limit = GROUPS_AT_ONCE; drawRollout(); });
at("more").addEventListener("click", () => { limit += GROUPS_AT_ONCE; drawRollout(); });

async function follow() {
  await refresh();
  if (!source.isReport) setTimeout(follow, EVERY_MS);
}
if (source.isReport) {
  at("kind").textContent = "megatron_rl run report";
  at("recorded").hidden = false;
  source.completions().then((recorded) => { at("tab-rollouts").hidden = !recorded.length; });
}
document.querySelector(`[aria-controls="${CSS.escape(location.hash.slice(1))}"]`)?.click();
follow();
