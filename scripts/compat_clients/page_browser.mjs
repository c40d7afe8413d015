// The page at / in headless Chromium: streamed text as text, tinted by the experts that the API tells, the heat map of their counts,
// no request off origin, no console error, by mouse and by keyboard, on a narrow screen.
import assert from "node:assert/strict";
import chromium from "@sparticuz/chromium";
import { chromium as driver } from "playwright-core";

const url = process.env.COMPAT_URL;
const prompt = 'The sea <img src="x" onerror="document.title=1"> was <b>calm</b>';
const browser = await driver.launch({ executablePath: await chromium.executablePath(), args: chromium.args, headless: true });
try {
  const page = await browser.newPage({ viewport: { width: 360, height: 740 }, colorScheme: "dark" });
  const foreign = [];
  const complaints = [];
  page.on("request", (one) => {
    if (!one.url().startsWith(url)) foreign.push(one.url());
  });
  page.on("console", (one) => {
    if (one.type() === "error") complaints.push(one.text());
  });
  page.on("pageerror", (error) => complaints.push(String(error)));
  await page.goto(url + "/");
  await page.waitForFunction(() => document.querySelector("#model").textContent.includes("experts"));
  await page.fill("#prompt", prompt);
  await page.fill("#tokens", "24");
  await page.fill("#temperature", "0");
  await page.focus("#run");
  await page.keyboard.press("Enter");
  await page.waitForFunction(() => !document.querySelector("#save").disabled && !document.querySelector("#run").disabled);
  await page.evaluate(() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done))));
  const seen = await page.evaluate(() => ({
    texts: [...document.querySelector("#text").children].map((one) => one.textContent),
    tints: [...document.querySelector("#text").children].map((one) => one.style.backgroundColor),
    elements: document.querySelector("#text").querySelectorAll(":not(button)").length,
    images: document.querySelectorAll("img, b").length,
    title: document.title,
    error: document.querySelector("#error").textContent,
    heat: [...document.querySelectorAll("#heat tr")].map((line) => [...line.querySelectorAll("td")].map((cell) => cell.title)),
    overflow: document.documentElement.scrollWidth - document.documentElement.clientWidth,
  }));

  // The same request without the page: greedy, so that it says the same.
  const asked = { text: prompt, sampling_params: { max_new_tokens: 24, temperature: 0 }, return_logprob: true, logprob_start_len: 0 };
  const rowsAsked = { return_routed_experts: true, routed_experts_layers: "moe" };
  const answer = await fetch(`${url}/generate`, {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify({ ...asked, ...rowsAsked }),
  });
  const meta = (await answer.json()).meta_info;
  const raw = Uint8Array.from(Buffer.from(meta.routed_experts, "base64"));
  const ids = new Int32Array(raw.buffer);
  const [rows, layers, topK] = meta.routed_experts_info.shape;
  const tokens = [...meta.input_token_logprobs, ...meta.output_token_logprobs].map((one) => one[2]);
  assert.deepEqual(seen.texts, tokens);
  assert.equal(rows, tokens.length - 1);
  const firsts = [...Array(rows).keys()].map((row) => ids[row * layers * topK]);
  assert.equal(seen.tints[rows], "", "the last token was never fed");
  const byTint = new Map();
  firsts.forEach((expert, row) => {
    assert.notEqual(seen.tints[row], "");
    assert.equal(byTint.get(expert) ?? seen.tints[row], seen.tints[row], "one tint an expert");
    byTint.set(expert, seen.tints[row]);
  });
  assert.equal(new Set(byTint.values()).size, byTint.size, "experts of their own have tints of their own");
  let cells = 0;
  for (let layer = 0; layer < layers; layer++) {
    const counts = new Array(seen.heat[layer].length).fill(0);
    for (let row = 0; row < rows; row++) for (let k = 0; k < topK; k++) counts[ids[(row * layers + layer) * topK + k]]++;
    counts.forEach((count, expert) => {
      assert.ok(seen.heat[layer][expert].includes(`expert ${expert}: ${count} of ${rows * topK}`), seen.heat[layer][expert]);
      cells++;
    });
  }
  await page.click("#text button:nth-child(2)");
  assert.ok((await page.textContent("#told")).includes("layer"));
  assert.deepEqual([seen.elements, seen.images, seen.error], [0, 0, ""], "what a model says is text");
  assert.notEqual(seen.title, "1");
  assert.ok(seen.overflow <= 0, `${seen.overflow} px wider than the screen`);
  assert.deepEqual(foreign, []);
  assert.deepEqual(complaints, []);
  console.log(`${tokens.length} tokens and ${cells} cells of the heat map as the API tells them; text is text; nothing off origin, no console error`);
} finally {
  await browser.close();
}
