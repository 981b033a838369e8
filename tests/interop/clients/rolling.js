"use strict";
// Clients that call without pause: rolling.js ADDRESSES REQUEST CLIENTS. REQUEST is in hex. Prints
// a line when each has had an answer, and at the end of standard input a line of JSON: how many
// answers were whole, and the errors.
const grpc = require("@grpc/grpc-js");

const [addresses, hex, count] = process.argv.slice(2);
const request = Buffer.from(hex, "hex");
const same = (bytes) => bytes;
const lost = [];
const whole = new Array(Number(count)).fill(0);
let isStopping = false;

function call(client) {
  return new Promise((resolve) => {
    const stream = client.makeServerStreamRequest(
      "/triolet.v1.Inference/Generate", same, same, request, new grpc.Metadata(), {},
    );
    let messages = 0;
    stream.on("data", () => (messages += 1));
    stream.on("end", () => resolve(messages > 1 ? "" : "no answer"));
    stream.on("error", (error) => resolve(String(error)));
  });
}

async function run(number) {
  const policy = number % 2 ? "round_robin" : "pick_first";
  const client = new grpc.Client(`ipv4:${addresses}`, grpc.credentials.createInsecure(), {
    "grpc.enable_http_proxy": 0,
    "grpc.use_local_subchannel_pool": 1,
    "grpc.service_config": JSON.stringify({ loadBalancingConfig: [{ [policy]: {} }] }),
  });
  while (!isStopping) {
    const error = await call(client);
    if (error) lost.push(`${policy}: ${error}`);
    else whole[number] += 1;
    if (!error && whole[number] === 1 && whole.every(Boolean)) console.log("begun");
  }
  client.close();
}

process.stdin.on("end", () => (isStopping = true)).resume();
Promise.all(whole.map((_, number) => run(number))).then(() =>
  console.log(JSON.stringify({ whole: whole.reduce((a, b) => a + b), lost })),
);
