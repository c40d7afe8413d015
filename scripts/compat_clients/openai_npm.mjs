// OpenAI's npm client: lists, completions, chat at once and streamed, errors as objects, abort, routed experts beside the fields it knows.
import assert from "node:assert/strict";
import OpenAI from "openai";

const model = process.env.COMPAT_MODEL;
const client = new OpenAI({ baseURL: `${process.env.COMPAT_URL}/v1`, apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: "What is the capital of France?" }];

assert.deepEqual((await client.models.list()).data.map((one) => one.id), [model]);
const text = await client.completions.create({ model, prompt: "The sea", max_tokens: 4, n: 2, logprobs: 1 });
assert.equal(text.choices.length, 2);
const asked = { model, messages, max_tokens: 8, temperature: 0 };
const whole = await client.chat.completions.create({ ...asked, return_routed_experts: true });
assert.equal(whole.choices[0].meta_info.routed_experts_info.shape[0], whole.usage.total_tokens - 1);
let said = "";
let usage = null;
for await (const chunk of await client.chat.completions.create({ ...asked, stream: true, stream_options: { include_usage: true } })) {
  assert.notEqual(chunk.choices[0]?.delta?.content, null);
  said += chunk.choices[0]?.delta?.content ?? "";
  usage = chunk.usage ?? usage;
}
assert.equal(said, whole.choices[0].message.content);
assert.equal(usage.total_tokens, whole.usage.total_tokens);
const events = client.chat.completions.stream(asked);
assert.equal((await events.finalChatCompletion()).choices[0].message.content, said);
await assert.rejects(client.completions.create({ model, prompt: "a", temperature: -1 }), (error) => error.status === 400 && error.param === "temperature");
await assert.rejects(client.completions.create({ model: "gpt", prompt: "a" }), (error) => error.status === 404 && error.code === "model_not_found");
const stop = new AbortController();
let chunks = 0;
const long = await client.chat.completions.create({ ...asked, max_tokens: 500, ignore_eos: true, stream: true }, { signal: stop.signal });
for await (const chunk of long) if (chunk.choices.length && ++chunks === 3) stop.abort();
assert.ok(chunks < 400, `aborted, and yet ${chunks} chunks came`);
console.log("models, completions, chat at once and streamed with usage, .stream(), errors as objects, AbortController, rows");
