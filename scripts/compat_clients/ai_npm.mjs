// Vercel's AI SDK through @ai-sdk/openai-compatible: generateText and streamText, usage, errors, abort.
import assert from "node:assert/strict";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, streamText } from "ai";

const provider = createOpenAICompatible({ name: "routed", baseURL: `${process.env.COMPAT_URL}/v1`, apiKey: "none", includeUsage: true });
const asked = { model: provider.chatModel(process.env.COMPAT_MODEL), prompt: "What is the capital of France?", maxOutputTokens: 8, temperature: 0, maxRetries: 0 };

const whole = await generateText(asked);
assert.ok(whole.text.length > 0 && whole.usage.outputTokens > 0);
const streamed = streamText(asked);
let said = "";
for await (const piece of streamed.textStream) said += piece;
assert.equal(said, whole.text);
assert.equal((await streamed.usage).outputTokens, whole.usage.outputTokens);
const text = await generateText({ ...asked, model: provider.completionModel(process.env.COMPAT_MODEL), prompt: "The sea" });
assert.ok(text.text.length > 0);
await assert.rejects(generateText({ ...asked, model: provider.chatModel("gpt") }), (error) => error.statusCode === 404);
const stop = new AbortController();
let pieces = 0;
const long = streamText({ ...asked, maxOutputTokens: 500, abortSignal: stop.signal, onError: () => {} });
try {
  for await (const piece of long.textStream) if (piece && ++pieces === 3) stop.abort();
} catch (error) {
  assert.equal(error.name, "AbortError");
}
assert.ok(pieces < 400);
console.log("generateText, streamText with usage, completionModel, a typed 404, abortSignal");
