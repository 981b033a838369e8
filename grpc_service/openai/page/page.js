// The page's frame: which view is shown, and the dialog that asks for a key.

import { key } from "./api.js";
import * as chat from "./chat.js";
import { at, notice } from "./dom.js";
import * as server from "./server.js";

const VIEWS = { chat, server };

function show() {
  const name = location.hash === "#server" ? "server" : "chat";
  for (const [one, view] of Object.entries(VIEWS)) {
    at(one).hidden = one !== name;
    if (one === name) at(`to-${one}`).setAttribute("aria-current", "page");
    else at(`to-${one}`).removeAttribute("aria-current");
    view.show(one === name);
  }
  notice("");
}

// Say what went wrong; if a key is missing or wrong, ask for one.
function report(error) {
  notice(error.message);
  if (error.status === 401 && !at("key-dialog").open) askForKey(error.message);
}

function askForKey(why) {
  at("key-told").textContent = why;
  at("key").value = key.get();
  at("key-dialog").showModal();
}

function restart() {
  at("key-dialog").close();
  notice("");
  chat.refresh();
  show();
}

at("key-button").addEventListener("click", () => askForKey(""));
at("key-cancel").addEventListener("click", () => at("key-dialog").close());
at("key-forget").addEventListener("click", () => {
  key.forget();
  restart();
});
at("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  const given = at("key").value.trim();
  if (given) key.set(given);
  else key.forget();
  restart();
});
addEventListener("hashchange", show);

chat.start(report);
server.start(report);
show();
