// The operator's view: models, live requests and plots, asked for once per second while it is shown.

import { ask, askJson } from "./api.js";
import { at, make, notice } from "./dom.js";
import { Plot } from "./plot.js";

const EVERY_MS = 1000;

const count = (value) => `${Math.round(value * 10) / 10}`;
const share = (value) => `${Math.round(value * 100)} %`;
const millis = (value) => value < 1 ? `${Math.round(value * 1000)} ms` : `${value.toFixed(2)} s`;
const rate = (value) => `${count(value)}/s`;

const plots = {
  throughput: new Plot("Throughput", ["generated tokens", "prompt tokens"], rate),
  queue: new Plot("Requests", ["running", "waiting"], count),
  latency: new Plot("Time to the first token", ["half within", "95 % within"], millis),
  between: new Plot("Time between tokens", ["half within", "95 % within"], millis),
  cache: new Plot("Cache", ["blocks in use", "prompt found in the cache"], share, 1),
  memory: new Plot("Memory", ["reserved", "limit"], bytes),
};

let report;
let isShown = false;
let timer = 0;
let before = null;
let hasFailed = false;
let round = 0; // the number of the newest round of questions; older ones end

export function start(onError) {
  report = onError;
  at("plots").replaceChildren(...Object.values(plots).map((plot) => plot.element));
  at("explain-close").addEventListener("click", () => at("explain-dialog").close());
  document.addEventListener("visibilitychange", () => show(isShown));
}

export function show(shown) {
  isShown = shown;
  clearTimeout(timer);
  round += 1;
  if (shown && !document.hidden) look(round);
}

async function look(own) {
  try {
    const [statistics, live] = await Promise.all([
      askJson("/triolet/statistics"), askJson("/triolet/requests"),
    ]);
    if (own !== round) return;
    draw(statistics);
    drawModels(statistics);
    drawRequests(live);
    before = statistics;
    if (hasFailed) notice("");
    hasFailed = false;
    at("state").textContent = statistics.is_draining ? "The server drains: it takes no new requests." : "";
  } catch (error) {
    if (own !== round) return;
    hasFailed = true;
    report(error);
    if (error.status === 401 || error.status === 403) return;
  }
  timer = setTimeout(() => look(own), EVERY_MS);
}

// ---- plots

function draw(now) {
  const { totals } = now;
  plots.queue.add([totals.running, totals.waiting]);
  plots.memory.add([totals.memory_reserved, totals.memory_limit]);
  const seconds = before === null ? 0 : now.time - before.time;
  const since = (name) => Math.max(0, totals[name] - before.totals[name]);
  const used = totals.total_blocks ? 1 - totals.free_blocks / totals.total_blocks : null;
  if (seconds <= 0) {
    plots.cache.add([used, null]);
    return;
  }
  plots.throughput.add([
    since("completion_tokens_total") / seconds, since("prompt_tokens_total") / seconds,
  ]);
  const asked = since("prefix_queries");
  plots.cache.add([used, asked ? since("prefix_hits") / asked : null]);
  plots.latency.add(quantiles("first_token", now));
  plots.between.add(quantiles("inter_token", now));
}

// Return within what time half and 95 % of the values since the last look came: bounds of buckets.
function quantiles(name, now) {
  const [newer, older] = [now.latency[name], before.latency[name]];
  if (!newer || !older) return [null, null];
  const counts = newer.counts.map((value, index) => Math.max(0, value - older.counts[index]));
  const total = counts.reduce((sum, value) => sum + value, 0);
  return [0.5, 0.95].map((part) => {
    let seen = 0;
    const index = counts.findIndex((value) => (seen += value) >= part * total);
    return total ? newer.bounds[Math.min(index, newer.bounds.length - 1)] : null;
  });
}

// ---- tables

function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let index = 0;
  for (; value >= 1024 && index < units.length - 1; index += 1) value /= 1024;
  return `${value < 10 && index ? value.toFixed(1) : Math.round(value)} ${units[index]}`;
}

function row(name, ...cells) {
  return make("tr", {}, make("th", { scope: "row" }, name), ...cells.map((one) => make("td", {}, one)));
}

function drawModels({ models, replicas }) {
  at("models").replaceChildren(...models.map((model) => {
    const own = replicas.filter((one) => one.model === model.name);
    const sum = (name) => own.reduce((total, one) => total + one.counts[name], 0);
    const blocks = sum("total_blocks");
    const paused = own.find((one) => one.pause)?.pause;
    const state = [model.is_hung ? "hangs" : model.state, paused && `paused (${paused})`, model.error];
    return row(
      model.name,
      state.filter(Boolean).join(", "),
      model.base ? `adapter of ${model.base}` : model.capability,
      bytes(model.memory_bytes),
      count(sum("running")),
      count(sum("waiting")),
      blocks ? share(1 - sum("free_blocks") / blocks) : "–",
      [model.device, model.quantization || model.dtype].filter(Boolean).join(", ") || "–",
    );
  }));
}

// Rows stay while their requests live, so that the focus stays on their buttons.
function drawRequests({ total, requests }) {
  at("requests-note").textContent = total > requests.length
    ? `The oldest ${requests.length} of ${total}.` : total ? "" : "There are none.";
  const kept = new Map([...at("requests").children].map((one) => [one.dataset.id, one]));
  const rows = requests.map((one) => {
    const cells = [one.model || "–", one.phase, count(one.tokens_done), `${Math.round(one.age_s)} s`];
    const found = kept.get(one.request_id) ?? requestRow(one.request_id);
    cells.forEach((text, index) => { found.cells[index + 2].textContent = text; });
    return found;
  });
  const wanted = new Set(rows);
  for (const one of kept.values()) if (!wanted.has(one)) one.remove();
  rows.forEach((one, index) => {
    if (at("requests").children[index] !== one) {
      at("requests").insertBefore(one, at("requests").children[index] ?? null);
    }
  });
}

function requestRow(id) {
  const explain = make("button", { type: "button", ariaLabel: `Explain ${id}` }, "Explain");
  const abort = make("button", { type: "button", ariaLabel: `Abort ${id}` }, "Abort");
  explain.addEventListener("click", () => showExplanation(id));
  abort.addEventListener("click", () => end(id));
  const made = row(id, "", "", "", "", "");
  made.dataset.id = id;
  made.cells[0].title = id;
  made.cells[1].className = "actions";
  made.cells[1].append(explain, abort);
  return made;
}

async function showExplanation(id) {
  let told;
  try {
    told = await askJson(`/triolet/explain?request_id=${encodeURIComponent(id)}`);
  } catch (error) {
    report(error);
    return;
  }
  const shown = {
    "State": told.state,
    "Waits for": told.waiting_for || "nothing",
    "Place in the queue": told.position || "–",
    "Starts in about": told.estimate_s === null ? "–" : millis(told.estimate_s),
    "Tokens in the cache": told.computed_tokens,
    "Blocks": told.blocks,
    "Parked for": millis(told.parked_s),
    "Guessed tokens": `${told.accepted_tokens} right of ${told.drafted_tokens}`,
  };
  at("explain-title").textContent = `Request ${id}`;
  at("explanation").replaceChildren(...Object.entries(shown).flatMap(([name, value]) => [
    make("dt", {}, name), make("dd", {}, `${value}`),
  ]));
  if (!at("explain-dialog").open) at("explain-dialog").showModal();
}

async function end(id) {
  try {
    const answer = await ask("/triolet/abort", { body: { request_ids: [id] } });
    const [{ outcome }] = (await answer.json()).results;
    notice(outcome === "aborted" ? `${id} was aborted.` : `${id} had ended before.`);
  } catch (error) {
    report(error);
  }
}
