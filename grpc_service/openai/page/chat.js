// The chat: one conversation with one model. What a model writes becomes text nodes alone.

import { ask, askJson, events } from "./api.js";
import { at, make, notice } from "./dom.js";

const TEXT_MODELS = ["text-to-text", "vision"];
const NUMBERS = ["temperature", "top_p", "top_k", "max_tokens", "seed"];
const RETRY_MS = 3000; // while no model is ready

let report;
let models = [];
let turns = []; // of OpenAI's form
let pictures = []; // data URLs to send with the next message
let running = null; // the AbortController of the answer that is on its way
let retry = 0;

export function start(onError) {
  report = onError;
  at("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    send();
  });
  at("message").addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    send();
  });
  at("chat").addEventListener("keydown", (event) => {
    if (event.key === "Escape") running?.abort();
  });
  at("stop").addEventListener("click", () => running?.abort());
  at("again").addEventListener("click", regenerate);
  at("clear").addEventListener("click", clear);
  at("model").addEventListener("change", showModel);
  at("picture").addEventListener("change", takePictures);
  refresh();
}

export function show(isShown) {
  if (isShown) at("message").focus({ preventScroll: true });
}

// Ask which models there are, again and again until one is ready.
export async function refresh() {
  clearTimeout(retry);
  try {
    const { data } = await askJson("/v1/models");
    models = data.filter((one) => TEXT_MODELS.includes(one.capability));
  } catch (error) {
    report(error);
    if (error.status !== 401) retry = setTimeout(refresh, RETRY_MS);
    return;
  }
  const chosen = at("model").value;
  at("model").replaceChildren(
    ...models.map((one) => {
      const state = one.state === "ready" ? "" : ` (${one.state})`;
      return make("option", { value: one.id, selected: one.id === chosen }, one.id + state);
    }),
  );
  showModel();
  if (models.some((one) => one.state === "loading")) retry = setTimeout(refresh, RETRY_MS);
}

function modelOf(name) {
  return models.find((one) => one.id === name);
}

function showModel() {
  const sees = modelOf(at("model").value)?.capability === "vision";
  at("picture-label").hidden = !sees;
  if (!sees) dropPictures();
}

// ---- pictures

async function takePictures() {
  for (const file of at("picture").files) {
    try {
      pictures.push(await dataUrlOf(file));
    } catch (error) {
      report(error);
    }
  }
  at("picture").value = "";
  showPictures();
}

function dataUrlOf(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
}

function showPictures() {
  at("pictures").replaceChildren(
    ...pictures.map((url, index) => {
      const remove = make("button", { type: "button" }, `Remove picture ${index + 1}`);
      remove.addEventListener("click", () => {
        pictures.splice(index, 1);
        showPictures();
        at("message").focus();
      });
      return make("li", {}, make("img", { src: url, alt: `Picture ${index + 1}` }), remove);
    }),
  );
}

function dropPictures() {
  pictures = [];
  showPictures();
}

// ---- the conversation

function clear() {
  running?.abort();
  running = null;
  turns = [];
  at("turns").replaceChildren();
  dropPictures();
  notice("");
  showState();
  at("message").focus();
}

function showState() {
  at("send").disabled = running !== null;
  at("stop").disabled = running === null;
  at("again").disabled = running !== null || !turns.some((turn) => turn.role === "user");
}

function send() {
  const text = at("message").value.trim();
  if (running !== null || (!text && !pictures.length)) return;
  const parts = pictures.map((url) => ({ type: "image_url", image_url: { url } }));
  if (text) parts.push({ type: "text", text });
  turns.push({ role: "user", content: parts.length === 1 && text ? text : parts });
  const shown = pictures.map((url, index) =>
    make("img", { className: "sent", src: url, alt: `Picture ${index + 1} that was sent` }),
  );
  addTurn("user", "You", make("p", { className: "text" }, text), ...shown);
  at("message").value = "";
  dropPictures();
  answer();
}

function regenerate() {
  if (running !== null) return;
  while (turns.at(-1)?.role === "assistant") turns.pop();
  while (at("turns").lastElementChild?.className === "assistant") at("turns").lastElementChild.remove();
  answer();
}

function addTurn(role, name, ...content) {
  const turn = make("li", { className: role }, make("p", { className: "who" }, name), ...content);
  at("turns").append(turn);
  turn.scrollIntoView({ block: "end" });
  return turn;
}

function bodyOf(model) {
  const system = at("system").value.trim();
  const body = {
    model,
    messages: system ? [{ role: "system", content: system }, ...turns] : turns,
    stream: true,
    return_progress: true,
    stream_options: { include_usage: true },
  };
  for (const name of NUMBERS) {
    if (at(name).value.trim() !== "") body[name] = Number(at(name).value);
  }
  if (at("stop-text").value) body.stop = [at("stop-text").value];
  if (at("reasoning_effort").value) body.reasoning_effort = at("reasoning_effort").value;
  return body;
}

// The parts of an answer on the screen: its reasoning, which is folded, its text, and figures.
function addAnswer(model) {
  const thought = make("p", { className: "text" }, "");
  const reasoning = make("details", { className: "reasoning", hidden: true },
    make("summary", {}, "Reasoning"), thought);
  const text = make("p", { className: "text" }, "");
  const figures = make("p", { className: "figures" }, "…");
  const bar = make("progress", { hidden: true, ariaLabel: "Until the first token" });
  const turn = addTurn("assistant", model, reasoning, text, bar, figures);
  return { turn, thought, reasoning, text, bar, figures };
}

async function answer() {
  const model = at("model").value;
  const shown = addAnswer(model);
  const told = { content: "", reasoning: "", calls: [], usage: null, finish: "" };
  const times = { asked: performance.now(), first: 0, last: 0 };
  const control = (running = new AbortController());
  showState();
  notice("");
  try {
    const response = await ask("/v1/chat/completions", { body: bodyOf(model), signal: control.signal });
    for await (const event of events(response)) take(event, told, times, shown);
  } catch (error) {
    if (control.signal.aborted) told.finish = "stopped";
    else {
      told.finish = "failed";
      shown.turn.append(make("p", { className: "bad", role: "alert" }, error.message));
      if (error.status === 401) report(error);
    }
  } finally {
    if (running === control) running = null;
  }
  shown.bar.hidden = true;
  shown.figures.textContent = figuresOf(told, times);
  if (!shown.turn.isConnected) return; // another chat has begun
  if (told.content) turns.push({ role: "assistant", content: told.content });
  showState();
}

function take(event, told, times, shown) {
  const isAtEnd = innerHeight + scrollY >= document.documentElement.scrollHeight - 80;
  told.usage = event.usage ?? told.usage;
  if (event.prompt_progress) showProgress(event.prompt_progress, shown);
  for (const { delta, finish_reason: finish } of event.choices) {
    told.finish = finish ?? told.finish;
    if (delta.reasoning_content) {
      told.reasoning += delta.reasoning_content;
      shown.reasoning.hidden = false;
      shown.thought.append(delta.reasoning_content);
    }
    if (delta.content) {
      told.content += delta.content;
      shown.text.append(delta.content);
    }
    for (const call of delta.tool_calls ?? []) {
      shown.text.append(call.function?.name ? `${call.function.name} ` : "", call.function?.arguments ?? "");
    }
    if (delta.content || delta.reasoning_content || delta.tool_calls) {
      times.last = performance.now();
      times.first ||= times.last;
      if (!shown.bar.hidden) hideProgress(shown);
    }
  }
  if (isAtEnd) shown.turn.scrollIntoView({ block: "end" });
}

// What the server does before the first token. A bar without a value only moves.
function showProgress(progress, { bar, figures }) {
  const parts = [];
  let [done, total] = [progress.processed, progress.total];
  if (progress.phase === "load") {
    [done, total] = [progress.loaded_bytes, progress.total_bytes];
    parts.push("loading the model");
  } else if (progress.queue_position) parts.push(`place ${progress.queue_position} in the queue`);
  else parts.push(total ? `${done} of ${total} tokens read` : "preparing");
  if (progress.first_token_ms !== null) parts.push(`about ${Math.ceil(progress.first_token_ms / 1000)} s left`);
  if (total && done) Object.assign(bar, { max: total, value: done });
  else bar.removeAttribute("value");
  bar.hidden = false;
  figures.textContent = parts.join(" · ");
}

function hideProgress({ bar, figures }) {
  bar.hidden = true;
  figures.textContent = "…";
}

function figuresOf(told, times) {
  const parts = [];
  const tokens = told.usage?.completion_tokens;
  if (times.first) parts.push(`first token after ${Math.round(times.first - times.asked)} ms`);
  if (tokens > 1 && times.last > times.first) {
    const rate = (tokens - 1) / ((times.last - times.first) / 1000);
    parts.push(`${rate.toFixed(1)} tokens/s`);
  }
  if (told.usage) parts.push(`${told.usage.prompt_tokens} + ${tokens} tokens`);
  const ends = { length: "ended at the limit", stopped: "stopped", failed: "failed" };
  if (ends[told.finish]) parts.push(ends[told.finish]);
  return parts.join(" · ") || "no answer";
}
