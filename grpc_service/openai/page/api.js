// Requests to the server that sent this page, with the key of the person before it. The key is kept
// in sessionStorage, which ends with the tab, and goes nowhere but into the header of requests.

const NAME = "triolet-key";

export const key = {
  get: () => sessionStorage.getItem(NAME) ?? "",
  set: (value) => sessionStorage.setItem(NAME, value),
  forget: () => sessionStorage.removeItem(NAME),
};

// An answer that is no success. `status` is HTTP's; `reason` the server's, such as "overloaded".
export class Refused extends Error {
  constructor(status, error, retryAfter) {
    const wait = retryAfter ? ` Try again in ${retryAfter} s.` : "";
    super(`${error?.message ?? `The server answered ${status}.`}${wait}`);
    this.status = status;
    this.reason = error?.code ?? "";
  }
}

// Send a request; throw Refused unless it succeeds. A body goes as JSON.
export async function ask(path, { body, signal } = {}) {
  const headers = {};
  if (key.get()) headers.Authorization = `Bearer ${key.get()}`;
  if (body !== undefined) headers["Content-Type"] = "application/json";
  const answer = await fetch(path, {
    method: body === undefined ? "GET" : "POST",
    headers,
    body: body === undefined ? undefined : JSON.stringify(body),
    signal,
    credentials: "omit",
    cache: "no-store",
    redirect: "error",
  });
  if (answer.ok) return answer;
  const told = await answer.json().catch(() => null);
  throw new Refused(answer.status, told?.error, answer.headers.get("retry-after"));
}

export async function askJson(path, options) {
  return await (await ask(path, options)).json();
}

// Yield the JSON of each event of a stream, until [DONE]; throw Refused for an event with an error.
export async function* events(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) throw new Error("The connection ended before the answer did.");
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const data = part.replace(/^data: /, "");
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new Refused(answer.status, event.error);
      yield event;
    }
  }
}
