// Vercel's AI SDK through @ai-sdk/openai-compatible: generateText and streamText, usage, errors, abort, and rows as provider metadata.
import assert from "node:assert/strict";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, streamText } from "ai";
import { rowsOf } from "./rows.mjs";

const kept = (choice) => (choice?.meta_info?.routed_experts === undefined ? undefined : { routed: { meta_info: choice.meta_info } });
const metadataExtractor = {
  extractMetadata: async ({ parsedBody }) => kept(parsedBody.choices[0]),
  createStreamExtractor: () => {
    let found;
    return { processChunk: (chunk) => (found = kept(chunk.choices?.[0]) ?? found), buildMetadata: () => found };
  },
};
const baseURL = `${process.env.COMPAT_URL}/v1`;
const provider = createOpenAICompatible({ name: "routed", baseURL, apiKey: "none", includeUsage: true, metadataExtractor });
const plain = { model: provider.chatModel(process.env.COMPAT_MODEL), prompt: "What is the capital of France?", maxOutputTokens: 8, temperature: 0, maxRetries: 0 };
const asked = { ...plain, providerOptions: { routed: { return_routed_experts: true } } };

const whole = await generateText(asked);
assert.ok(whole.text.length > 0 && whole.usage.outputTokens > 0 && ["stop", "length"].includes(whole.finishReason));
const rows = rowsOf(whole.providerMetadata.routed, whole.usage.totalTokens);
const streamed = streamText(asked);
let said = "";
for await (const piece of streamed.textStream) said += piece;
assert.equal(said, whole.text);
const usage = await streamed.usage;
assert.deepEqual([usage.inputTokens, usage.outputTokens], [whole.usage.inputTokens, whole.usage.outputTokens]);
assert.equal(await streamed.finishReason, whole.finishReason);
assert.deepEqual(rowsOf((await streamed.providerMetadata).routed, usage.totalTokens), rows);
const model = provider.completionModel(process.env.COMPAT_MODEL);
const text = await generateText({ ...plain, model, prompt: "The sea" });
assert.ok(text.usage.outputTokens === 8 || (text.finishReason === "stop" && text.usage.outputTokens > 0));
let joined = "";
for await (const piece of streamText({ ...plain, model, prompt: "The sea" }).textStream) joined += piece;
assert.equal(joined, text.text);
await assert.rejects(generateText({ ...plain, model: provider.chatModel("gpt") }), (error) => error.statusCode === 404);
const stop = new AbortController();
let pieces = 0;
const long = streamText({ ...plain, maxOutputTokens: 500, abortSignal: stop.signal, onError: () => {} });
try {
  for await (const piece of long.textStream) if (piece && ++pieces === 3) stop.abort();
} catch (error) {
  assert.equal(error.name, "AbortError");
}
assert.ok(pieces < 400);
console.log("generateText, streamText with usage, completionModel (streamed too), a typed 404, abortSignal; rows as provider metadata: streamed = at once");
