"use strict";
// The interop tests' client in JavaScript. ../caller.py describes its input and output.
const path = require("node:path");
const grpc = require("@grpc/grpc-js");
const loader = require("@grpc/proto-loader");
const protobuf = require("protobufjs");

const protos = path.join(__dirname, "../../../proto");
const definition = loader.loadSync("triolet/v1/inference.proto", {
  includeDirs: [protos],
  keepCase: true,
  enums: String,
  longs: String,
});
const { triolet } = grpc.loadPackageDefinition(definition);
const rpc = new protobuf.Root();
rpc.resolvePath = (_, name) =>
  protobuf.common.get(name) ? name : path.join(protos, "third_party", name);
rpc.loadSync(["google/rpc/status.proto", "google/rpc/error_details.proto"], { keepCase: true });

function details(error) {
  const [packed] = error.metadata?.get("grpc-status-details-bin") ?? [];
  if (packed === undefined) return {};
  const status = rpc.lookupType("google.rpc.Status").decode(packed);
  return Object.fromEntries(
    status.details.map((any) => {
      const name = any.type_url.split("/").pop();
      const type = rpc.lookupType(name);
      const found = type.toObject(type.decode(any.value), { longs: String });
      return [name.replace("google.rpc.", ""), found];
    }),
  );
}

function make(client, { method, request, deadline_s, metadata = {}, cancel_after }) {
  const options = deadline_s ? { deadline: Date.now() + deadline_s * 1000 } : {};
  const sent = new grpc.Metadata();
  for (const [name, value] of Object.entries(metadata)) sent.set(name, value);
  const call = client[method](request, sent, options);
  const messages = [];
  return new Promise((resolve) => {
    call.on("data", (message) => {
      messages.push(message);
      if (messages.length === cancel_after) call.cancel();
    });
    call.on("end", () => resolve({ messages }));
    call.on("error", (error) =>
      resolve({ messages, code: error.code, text: error.details, details: details(error) }),
    );
  });
}

async function main() {
  let text = "";
  for await (const part of process.stdin) text += part;
  const client = new triolet.v1.Inference(process.argv[2], grpc.credentials.createInsecure(), {
    "grpc.enable_http_proxy": 0,
  });
  const told = [];
  for (const call of JSON.parse(text)) told.push(await make(client, call));
  client.close();
  console.log(JSON.stringify(told));
}

main();
