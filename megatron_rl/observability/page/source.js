"use strict";
// Reads the run: from the server that serves this page, or from the page itself, where a report holds it.

async function ask(path) {
  const answer = await fetch(path);
  if (!answer.ok) throw new Error(await answer.text());
  return answer.json();
}

const SERVED = {
  isReport: false,
  facts: () => ask("/api/run"),
  rows: (offset) => ask(`/api/metrics?offset=${offset}`),
  rollout: (number) => ask(`/api/rollout?number=${number}`),
  completions: async () => (await ask("/api/completions")).completions,
};

// A report's rows: {names, columns: [[a value of each row, null if it has none], ...]}, as JSON, by gzip and base64.
async function unpackedRows(text) {
  const bytes = Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  const { names, columns } = JSON.parse(await new Response(stream).text());
  return columns[0].map((_, i) => {
    const row = {};
    names.forEach((name, place) => { if (columns[place][i] !== null) row[name] = columns[place][i]; });
    return row;
  });
}

function inlined(text) {
  const report = JSON.parse(text);
  return {
    isReport: true,
    facts: async () => report.facts,
    rows: async (offset) => (offset ? { rows: [], offset, restarted: false } : { rows: report.rows ? await unpackedRows(report.rows) : [], offset: 1, restarted: false }),
    completions: async () => report.completions,
  };
}

const source = at("report") ? inlined(at("report").textContent) : SERVED;
