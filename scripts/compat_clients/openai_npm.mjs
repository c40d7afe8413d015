// OpenAI's npm client: lists, completions, chat at once and streamed, logprobs, n, errors as objects, abort, and rows decoded.
import assert from "node:assert/strict";
import OpenAI from "openai";
import { rowsOf } from "./rows.mjs";

const model = process.env.COMPAT_MODEL;
const client = new OpenAI({ baseURL: `${process.env.COMPAT_URL}/v1`, apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: "What is the capital of France?" }];

assert.deepEqual((await client.models.list()).data.map((one) => one.id), [model]);
const prompted = { model, prompt: "The sea", max_tokens: 4, n: 2, seed: 1, logprobs: 1, return_routed_experts: true };
const [text, again] = [await client.completions.create(prompted), await client.completions.create(prompted)];
assert.equal(text.choices.length, 2);
text.choices.forEach((choice, index) => {
  assert.equal(choice.logprobs.tokens.join(""), choice.text);
  assert.equal(choice.logprobs.token_logprobs.length, 4);
  assert.equal(choice.text, again.choices[index].text);
  const total = text.usage.prompt_tokens + 4;
  assert.deepEqual(rowsOf(choice, total), rowsOf(again.choices[index], total));
});

const asked = { model, messages, max_tokens: 8, temperature: 0 };
const whole = await client.chat.completions.create({ ...asked, logprobs: true, top_logprobs: 2, return_routed_experts: true });
const rows = rowsOf(whole.choices[0], whole.usage.total_tokens);
const told = whole.choices[0].logprobs.content;
assert.equal(told.length, whole.usage.completion_tokens);
for (const one of told) assert.equal(one.logprob, Math.max(...one.top_logprobs.map((top) => top.logprob)), "greedy");
let said = "";
let usage = null;
let last = null;
const streaming = { ...asked, stream: true, stream_options: { include_usage: true }, return_routed_experts: true };
for await (const chunk of await client.chat.completions.create(streaming)) {
  assert.notEqual(chunk.choices[0]?.delta?.content, null);
  said += chunk.choices[0]?.delta?.content ?? "";
  if (chunk.choices[0]?.finish_reason) last = chunk.choices[0];
  usage = chunk.usage ?? usage;
}
assert.equal(said, whole.choices[0].message.content);
assert.equal(usage.total_tokens, whole.usage.total_tokens);
assert.deepEqual(rowsOf(last, usage.total_tokens), rows);
const events = client.chat.completions.stream(asked);
assert.equal((await events.finalChatCompletion()).choices[0].message.content, said);
await assert.rejects(client.completions.create({ model, prompt: "a", temperature: -1 }), (error) => error.status === 400 && error.param === "temperature");
await assert.rejects(client.completions.create({ model: "gpt", prompt: "a" }), (error) => error.status === 404 && error.code === "model_not_found");
const stop = new AbortController();
let chunks = 0;
const long = await client.chat.completions.create({ ...asked, max_tokens: 500, ignore_eos: true, stream: true }, { signal: stop.signal });
for await (const chunk of long) if (chunk.choices.length && ++chunks === 3) stop.abort();
assert.ok(chunks < 400, `aborted, and yet ${chunks} chunks came`);
console.log("models, completions (n, seed, logprobs), chat at once and streamed with usage, .stream(), errors as objects, AbortController; rows decoded: streamed = at once");
