"use strict";
// The client in JavaScript of ../test_interop_cases.py. Each line of its standard input is a call
// {id, address, method, requests, metadata, timeout_s, compressed, plain, turn_by_turn,
// half_closes, cancel_after, fresh, times}, which it begins at once, or {cancel: id}. When a call
// has ended, a line of its standard output has {id, outcomes: [{messages, code, text, initial,
// trailing}]}, one for each of the ``times``. Requests and messages are in proto's JSON; a body of
// zeros in a message is its length. Metadata whose name ends in -bin is in base64.
const path = require("node:path");
const readline = require("node:readline");
const grpc = require("@grpc/grpc-js");
const loader = require("@grpc/proto-loader");

const proto = path.join(__dirname, "../protos/testing.proto");
const { testing } = grpc.loadPackageDefinition(loader.loadSync(proto, { keepCase: true })).grpc;
const NO_COMPRESS = 2; // grpc-js has the flag, and does not export it
const clients = new Map();
const running = new Map();

function clientOf({ address, method, compressed, fresh }) {
  const [service, name] = method.includes("/") ? method.split("/") : ["TestService", method];
  const key = [address, service, compressed].join();
  let client = clients.get(key);
  if (client === undefined || fresh) {
    const encoding = grpc.compressionAlgorithms[compressed ? "gzip" : "identity"];
    client = new testing[service](address, grpc.credentials.createInsecure(), {
      "grpc.enable_http_proxy": 0,
      "grpc.use_local_subchannel_pool": 1,
      "grpc.default_compression_algorithm": encoding,
    });
    if (!fresh) clients.set(key, client);
  }
  return { client, name, kind: testing[service].service[name] };
}

function metadataOf(pairs) {
  const metadata = new grpc.Metadata();
  for (const [name, value] of Object.entries(pairs))
    metadata.set(name, name.endsWith("-bin") ? Buffer.from(value, "base64") : value);
  return metadata;
}

function pairsOf(metadata) {
  const pairs = Object.entries(metadata?.getMap() ?? {});
  return Object.fromEntries(
    pairs.map(([name, value]) => [name, name.endsWith("-bin") ? value.toString("base64") : value]),
  );
}

function told(message) {
  const body = message.payload?.body;
  if (!body?.length) return message;
  const isZero = body.equals(Buffer.alloc(body.length));
  return { ...message, payload: { body: isZero ? body.length : body.toString("base64") } };
}

class Turns {
  constructor() {
    this.given = 0;
    this.waiting = [];
  }

  give() {
    const next = this.waiting.shift();
    if (next) next();
    else this.given += 1;
  }

  take() {
    if (this.given === 0) return new Promise((resolve) => this.waiting.push(resolve));
    this.given -= 1;
    return undefined;
  }
}

async function say(call, { requests, plain, turn_by_turn, half_closes }, turns) {
  for (const [number, request] of requests.entries()) {
    // Writable.write takes no flags, as Node.js lets only encodings pass where grpc-js reads them.
    if (plain.includes(number))
      await new Promise((resolve) =>
        call.call.sendMessageWithContext({ callback: resolve, flags: NO_COMPRESS }, request),
      );
    else await new Promise((resolve) => call.write(request, resolve));
    if (turn_by_turn) await turns.take();
  }
  if (half_closes) call.end();
}

async function make(one, begun) {
  const { client, name, kind } = clientOf(one);
  const options = { deadline: Date.now() + one.timeout_s * 1000 };
  const request = kind.requestStream ? [] : [one.requests[0]];
  const messages = [];
  const turns = new Turns();
  let initial;
  const status = await new Promise((resolve) => {
    const keep = (message) => {
      messages.push(told(message));
      turns.give();
      if (messages.length === one.cancel_after) call.cancel();
    };
    const done = kind.responseStream ? [] : [(_, message) => message && keep(message)];
    const call = client[name](...request, metadataOf(one.metadata), options, ...done);
    begun.push(call);
    let ended = !kind.responseStream;
    let found;
    const end = (isEnd, status) => {
      ended ||= isEnd;
      found ??= status;
      if (ended && found) resolve(found);
    };
    call.on("metadata", (metadata) => (initial = metadata));
    call.on("status", (status) => end(false, status));
    if (kind.responseStream) {
      call.on("data", keep);
      call.on("end", () => end(true));
      call.on("error", () => end(true));
    }
    if (kind.requestStream) say(call, one, turns);
  });
  if (one.fresh) client.close();
  return {
    messages,
    code: status.code ?? -1, // grpc-js has none for an answer that it cannot decompress
    text: status.details ?? "",
    initial: pairsOf(initial),
    trailing: pairsOf(status.metadata),
  };
}

async function begin(one) {
  const begun = [];
  running.set(one.id, begun);
  const outcomes = await Promise.all(Array.from({ length: one.times }, () => make(one, begun)));
  running.delete(one.id);
  console.log(JSON.stringify({ id: one.id, outcomes }));
}

const lines = readline.createInterface({ input: process.stdin });
lines.on("line", (line) => {
  const one = JSON.parse(line);
  if (one.cancel === undefined) begin(one);
  else running.get(one.cancel)?.forEach((call) => call.cancel());
});
lines.on("close", () => clients.forEach((client) => client.close()));
