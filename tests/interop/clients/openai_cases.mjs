// Cases by OpenAI's client for Node.js. Reads {base_url} from standard input, and prints the result
// of each case by its name.
import OpenAI from "openai";

let input = "";
for await (const part of process.stdin) input += part;
const { base_url: baseURL } = JSON.parse(input);
const client = new OpenAI({ baseURL, apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: "Tell me a story." }];
const seeded = { model: "stories", seed: 7, max_tokens: 12, messages };

const cases = {
  async whole() {
    const answer = await client.chat.completions.create(seeded);
    return answer.choices[0].message.content;
  },
  async streamed() {
    let text = "";
    for await (const part of await client.chat.completions.create({ ...seeded, stream: true }))
      text += part.choices[0]?.delta?.content ?? "";
    return text;
  },
  async helper() {
    return await client.chat.completions.stream(seeded).finalContent();
  },
  async vectors() {
    const input = ["The dog sleeps by the fire.", "A ship left at dawn."];
    const answer = await client.embeddings.create({ model: "demo-embed", input });
    return answer.data.map((one) => Buffer.from(new Float32Array(one.embedding).buffer).toString("hex"));
  },
  async error() {
    try {
      await client.chat.completions.create({ ...seeded, model: "none" });
    } catch (error) {
      return [error instanceof OpenAI.NotFoundError, error.status, error.code];
    }
  },
  async abort() {
    const stream = await client.chat.completions.create({
      ...seeded, max_tokens: 1500, ignore_eos: true, stream: true,
    });
    let count = 0;
    for await (const _ of stream) if (++count === 3) break;
    return stream.controller.signal.aborted;
  },
};

const found = {};
for (const [name, make] of Object.entries(cases)) found[name] = await make();
console.log(JSON.stringify(found));
