// The page at / in headless Chromium: generate, stop, errors, reload, two runs, chat, themes, phone and wide screen.
// What the page shows is compared with the answers of the HTTP API.
//
// Screenshots of the README, with a server of the demo model at COMPAT_URL and the packages that scripts/compat installs beside this file:
//   scripts/compat --only page --keep FOLDER
//   COMPAT_URL=http://127.0.0.1:30000 node FOLDER/page/page_browser.mjs --screenshots docs/images [--chromium /usr/bin/chromium]
// The committed files are then reduced to 256 colours: Image.open(file).convert("RGB").quantize(256).save(file, optimize=True) of Pillow.
import assert from "node:assert/strict";
import { execFileSync, spawnSync } from "node:child_process";
import fs from "node:fs";
import os from "node:os";
import path from "node:path";
import { parseArgs } from "node:util";
import packaged from "@sparticuz/chromium";
import { chromium } from "playwright-core";

const { values: options } = parseArgs({ options: { screenshots: { type: "string" }, chromium: { type: "string" } } });
const url = process.env.COMPAT_URL;
const PHONE = { width: 390, height: 844 };
const WIDE = { width: 1440, height: 900 };
const browser = await chromium.launch({
  executablePath: options.chromium ?? (await packaged.executablePath()),
  args: ["--no-sandbox"],  // the package's own list has --single-process, which ends the browser with its first page
  headless: true,
});

// ---- Helpers ---------------------------------------------------------------------------------------------------------
async function open({ viewport = WIDE, colorScheme = "light", expected = [], intercept = async () => {}, ...context } = {}) {
  const page = await browser.newPage({ viewport, colorScheme, ...context });
  page.foreign = [];
  page.errors = [];
  page.on("request", (request) => {
    if (!request.url().startsWith(url) && !request.url().startsWith("blob:")) page.foreign.push(request.url());
  });
  page.on("console", (message) => {
    if (message.location().url.endsWith("/favicon.ico")) return;  // the page has no icon: its policy would have to allow one
    if (message.type() === "error" && !expected.some((text) => message.text().includes(text))) page.errors.push(message.text());
  });
  page.on("pageerror", (error) => page.errors.push(String(error)));
  await intercept(page);
  await page.goto(url + "/");
  return page;
}
async function close(page) {
  const width = await page.evaluate(() => document.documentElement.scrollWidth - document.documentElement.clientWidth);
  assert.ok(width <= 0, `${width} px wider than the screen of ${page.viewportSize().width} px`);
  assert.deepEqual(page.foreign, [], "requests to other origins");
  assert.deepEqual(page.errors, [], "errors in the console");
  await page.close();
}
const ready = (page) => page.waitForFunction(() => !document.querySelector("#run").disabled);
const pick = (page, name, value) => page.check(`input[name=${name}][value=${value}]`, { force: true });
const frames = (page) => page.evaluate(() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done))));
async function finished(page) {
  await ready(page);
  await frames(page);
}
async function generate(page) {
  await ready(page);
  await page.click("#run");
  await finished(page);
}
async function fill(page, values) {
  for (const [id, value] of Object.entries(values)) await page.fill(`#${id}`, String(value));
}
const readRun = (page, name) =>
  page.evaluate((panel) => {
    const tokens = [...document.querySelectorAll(`#run${panel} .text > *`)];
    return {
      texts: tokens.map((token) => token.textContent),
      tints: tokens.map((token) => token.style.backgroundColor),
      experts: tokens.map((token) => token.dataset.expert),
      otherTokens: tokens.map((token) => token.classList.contains("other-token")),
      otherExperts: tokens.map((token) => token.classList.contains("other-experts")),
      error: document.querySelector(`#run${panel} .note`).textContent,
      summary: document.querySelector(`#run${panel} .numbers-of-run`).textContent,
    };
  }, name);
async function answer(text, sampling) {  // the same request without the page
  const body = { text, sampling_params: sampling, return_logprob: true, logprob_start_len: 0, return_routed_experts: true, routed_experts_layers: "moe" };
  const response = await fetch(`${url}/generate`, { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) });
  const { meta_info: meta, output_ids: outputIds } = await response.json();
  const ids = new Int32Array(Uint8Array.from(Buffer.from(meta.routed_experts, "base64")).buffer);
  const [numRows, layers, topK] = meta.routed_experts_info.shape;
  const experts = (row, layer) => [...ids.subarray((row * layers + layer) * topK, (row * layers + layer + 1) * topK)];
  const tokens = [...meta.input_token_logprobs, ...meta.output_token_logprobs];
  return { texts: tokens.map((token) => token[2]), tokenIds: tokens.map((token) => token[1]), outputIds, promptLength: meta.prompt_tokens, numRows, layers, topK, experts, encoded: meta.routed_experts };
}
async function aborts() {
  const text = await (await fetch(`${url}/metrics`)).text();
  return Number(/^routed_experts_requests_finished_total\{outcome="abort"\} (\S+)/m.exec(text)?.[1] ?? 0);
}
async function control(route, body) {
  const response = await fetch(`${url}/${route}`, { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) });
  assert.equal(response.status, 200, `${route}: ${await response.text()}`);
}
// Text whose contrast with the background behind it is below 4.5 (WCAG AA).
const lowContrast = (page) =>
  page.evaluate(() => {
    const context = Object.assign(document.createElement("canvas"), { width: 1, height: 1 }).getContext("2d", { willReadFrequently: true });
    const over = (colors) => {
      context.clearRect(0, 0, 1, 1);
      for (const color of colors) { context.fillStyle = color; context.fillRect(0, 0, 1, 1); }
      return [...context.getImageData(0, 0, 1, 1).data].slice(0, 3);
    };
    const luminance = (color) => color.map((c) => c / 255).map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)).reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
    return [...document.querySelectorAll("body *")].flatMap((node) => {
      const own = [...node.childNodes].some((child) => child.nodeType === 3 && child.textContent.trim());
      if (!own || node.closest("script, [hidden], template, .out-of-sight, :disabled, :disabled + span, select") || !node.checkVisibility()) return [];
      const behind = [];
      for (let parent = node; parent; parent = parent.parentElement) behind.unshift(getComputedStyle(parent).backgroundColor);
      const [a, b] = [luminance(over([...behind, getComputedStyle(node).color])), luminance(over(behind))];
      const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
      return ratio < 4.5 ? [`${ratio.toFixed(2)} ${node.className || node.tagName}: ${node.textContent.slice(0, 30)}`] : [];
    });
  });
const unlabelled = (page) =>
  page.evaluate(() => [...document.querySelectorAll("button, input, textarea, select, [tabindex]")].filter((node) => {
    const name = node.ariaLabel || node.textContent.trim() || [...(node.labels ?? [])].map((label) => label.textContent.trim()).join("");
    return !node.closest("[hidden]") && !name;
  }).map((node) => node.outerHTML.slice(0, 80)));

// ---- Checks ----------------------------------------------------------------------------------------------------------
async function showsOneRun() {
  const prompt = 'The sea <img src="x" onerror="document.title=1"> was <b>calm</b>\n';
  const page = await open({ viewport: PHONE, colorScheme: "dark" });
  await page.waitForFunction(() => document.querySelector("#facts").textContent.includes("experts"));
  await fill(page, { prompt, tokens: 24, temperature: 0 });
  await page.focus("#prompt");
  await page.keyboard.press("Control+Enter");
  await page.waitForFunction(() => !document.querySelector("#save").disabled);
  await finished(page);
  const shown = await readRun(page, "A");
  const expected = await answer(prompt, { max_new_tokens: 24, temperature: 0 });
  assert.deepEqual(shown.texts, expected.texts);
  assert.equal(expected.numRows, expected.texts.length - 1);
  assert.equal(shown.tints[expected.numRows], "", "the last token has no row");
  const tints = new Map();
  for (let row = 0; row < expected.numRows; row++) {
    const expert = expected.experts(row, 0)[0];
    assert.equal(shown.experts[row], String(expert));
    assert.notEqual(shown.tints[row], "");
    assert.equal(tints.get(expert) ?? shown.tints[row], shown.tints[row], "one tint per expert");
    tints.set(expert, shown.tints[row]);
  }
  assert.equal(new Set(tints.values()).size, tints.size, "every expert has its own tint");

  // All cells of the map, by keyboard.
  const moe = (await (await fetch(`${url}/v1/models`)).json()).data[0].moe;
  await page.focus("#map");
  let cells = 0;
  for (let layer = 0; layer < expected.layers; layer++) {
    const counts = new Array(moe.num_experts).fill(0);
    for (let row = 0; row < expected.numRows; row++) for (const expert of expected.experts(row, layer)) counts[expert]++;
    for (let step = 0; step < moe.num_experts; step++) {
      const expert = layer % 2 ? moe.num_experts - 1 - step : step;
      await page.keyboard.press(step ? (layer % 2 ? "ArrowLeft" : "ArrowRight") : layer ? "ArrowDown" : "ArrowRight");
      await frames(page);
      const cell = await page.textContent("#cell");
      assert.ok(cell.startsWith(`Layer ${moe.moe_layer_ids[layer]}, expert ${expert}: ${counts[expert]} of ${expected.numRows * expected.topK},`), cell);
      const users = await page.evaluate(() => [...document.querySelectorAll("#runA .text > *")].map((token) => token.classList.contains("user")));
      for (let row = 0; row < expected.numRows; row++) assert.equal(users[row], expected.experts(row, layer).includes(expert), cell);
      cells++;
    }
  }
  await page.keyboard.press("Enter");  // the cell's layer becomes the layer of the text
  assert.equal(await page.textContent("#layername"), String(moe.moe_layer_ids.at(-1)));

  // Tokens by keyboard and by touch: all layers and the logprob.
  await page.focus("#runA .text > :first-child");
  for (const key of ["ArrowRight", "ArrowRight", "ArrowDown", "ArrowUp", "Enter"]) await page.keyboard.press(key);
  await frames(page);
  const position = await page.evaluate(() => [...document.activeElement.parentElement.children].indexOf(document.activeElement));
  const table = await page.evaluate(() => [...document.querySelectorAll("#token tbody tr")].map((line) => [...line.querySelectorAll(".expert")].map((chip) => Number(chip.textContent))));
  assert.deepEqual(table, moe.moe_layer_ids.map((_, layer) => expected.experts(position, layer)));
  assert.match(await page.textContent("#token"), /Prompt token \d+ · id \d+ · logprob -?\d/);
  assert.ok(await page.isVisible("#inspector"));
  assert.deepEqual(await lowContrast(page), []);
  await page.keyboard.press("Escape");
  await frames(page);
  assert.ok(!(await page.isVisible("#inspector")), "Escape closes the sheet of a phone");
  const elements = await page.evaluate(() => [document.querySelectorAll(".text :not(span), img").length, document.title]);
  assert.deepEqual(elements, [0, "Playground · routed_experts"], "text of the model is not markup");
  assert.deepEqual(await unlabelled(page), []);
  await close(page);
  return `${expected.texts.length} tokens and ${cells} cells of the map as the API has them`;
}

async function comparesTwoRuns() {
  const page = await open();
  const prompt = "Once upon a time there was a small fox";
  const sampling = { max_new_tokens: 32, temperature: 0.9, top_p: 0.95 };
  await fill(page, { prompt, tokens: 32, temperature: 0.9, topp: 0.95, seed: 1 });
  await page.check("#compare");
  await fill(page, { seed2: 2 });
  await generate(page);
  const [a, b] = [await answer(prompt, { ...sampling, seed: 1 }), await answer(prompt, { ...sampling, seed: 2 })];
  const shown = { a: await readRun(page, "A"), b: await readRun(page, "B") };
  assert.deepEqual([shown.a.texts, shown.b.texts], [a.texts, b.texts]);
  const [overlap, equal] = [[0, 0], []];
  for (let i = 0; i < a.texts.length; i++) {
    equal[i] = i < b.texts.length && a.tokenIds[i] === b.tokenIds[i];
    assert.equal(shown.a.otherTokens[i], !equal[i], `mark of token ${i}`);
    const paired = i < a.numRows && i < b.numRows;
    const share = (layer) => a.experts(i, layer).filter((id) => b.experts(i, layer).includes(id)).length / a.topK;
    assert.equal(shown.a.otherExperts[i], equal[i] && paired && share(0) < 1, `experts of token ${i}`);
    if (paired) for (let layer = 0; layer < a.layers; layer++) { overlap[0] += share(layer); overlap[1]++; }
  }
  const first = equal.indexOf(false);
  assert.ok(first >= a.promptLength, "two seeds differ after the prompt");
  const tiles = await page.textContent("#differencetiles");
  assert.ok(tiles.includes(`generated ${first - a.promptLength + 1}`), tiles);
  assert.ok(tiles.includes(`${((100 * overlap[0]) / overlap[1]).toFixed(1)}\u00a0%`), `${overlap} ${tiles}`);
  await page.hover(`#runB .text > :nth-child(${first + 1})`);
  await frames(page);
  assert.equal(await page.locator("#runA .text > .paired").count(), 1);
  assert.ok((await page.locator("#token .alone").count()) > 0, "experts of one run only are framed");
  for (const colorScheme of ["light", "dark"]) {
    await page.emulateMedia({ colorScheme });
    await frames(page);
    assert.deepEqual(await lowContrast(page), [], colorScheme);
  }

  await pick(page, "differs", "prompt");
  await fill(page, { prompt2: "Once upon a time there was a small cat", temperature: 0 });
  await page.selectOption("#order", "turn");
  await generate(page);
  const greedy = { ...sampling, temperature: 0 };
  const [fox, cat] = [await answer(prompt, greedy), await answer("Once upon a time there was a small cat", greedy)];
  assert.deepEqual([(await readRun(page, "A")).texts, (await readRun(page, "B")).texts], [fox.texts, cat.texts]);
  assert.ok((await page.textContent("#differencetiles")).includes("prompt 9"));
  for (const source of ["b", "difference"]) {
    await pick(page, "source", source);
    await frames(page);
  }
  await page.hover("#map", { position: { x: 60, y: 10 } });
  await frames(page);
  assert.match(await page.textContent("#cell"), /A \d+ of \d+, .*; B \d+ of \d+, /);
  await close(page);
  return `two runs with ${equal.filter((same) => !same).length} other tokens`;
}

async function codeGivesTheSameAnswer() {
  const page = await open();
  const folder = fs.mkdtempSync(path.join(os.tmpdir(), "page-"));
  // Enough of the OpenAI client to send what the code of the page passes to it.
  fs.writeFileSync(path.join(folder, "openai.py"), `import json, types, urllib.request
class OpenAI:
    def __init__(self, *, base_url, api_key):
        self.url, self.completions = base_url, types.SimpleNamespace(create=self.post("/completions"))
        self.chat = types.SimpleNamespace(completions=types.SimpleNamespace(create=self.post("/chat/completions")))
    def post(self, route):
        def create(*, extra_body, **body):
            data = json.dumps({**body, **extra_body}).encode()
            request = urllib.request.Request(self.url + route, data, {"Content-Type": "application/json"})
            text = urllib.request.urlopen(request).read().decode()
            open("answer.json", "w").write(text)
            choices = json.loads(text)["choices"]
            message = lambda choice: types.SimpleNamespace(**choice.get("message", {}))
            return types.SimpleNamespace(choices=[types.SimpleNamespace(**{**choice, "message": message(choice)}) for choice in choices])
        return create
`);
  if (spawnSync("curl", ["--version"]).error)  // a machine without curl: the same arguments by Python
    fs.writeFileSync(path.join(folder, "curl"), `#!/usr/bin/env python3
import sys, urllib.request
data = sys.argv[sys.argv.index("-d") + 1].encode()
print(urllib.request.urlopen(urllib.request.Request(sys.argv[1], data, {"Content-Type": "application/json"})).read().decode())
`, { mode: 0o755 });
  const prompt = 'It\'s "odd":\n\\ ünd 🦊';
  await fill(page, { prompt, tokens: 12, temperature: 0.8, topp: 0.9, seed: 11 });
  for (const mode of ["text", "chat"]) {
    await pick(page, "mode", mode);
    await generate(page);
    const shown = await readRun(page, "A");
    for (const language of ["curl", "python"]) {
      await pick(page, "language", language);
      const code = await page.textContent("#code");
      const [program, flag] = language === "curl" ? ["bash", "-c"] : ["python3", "-c"];
      const output = execFileSync(program, [flag, code], { cwd: folder, encoding: "utf8", stdio: ["ignore", "pipe", "ignore"], env: { ...process.env, PYTHONPATH: folder, PATH: `${folder}:${process.env.PATH}` } });
      const choice = JSON.parse(language === "curl" ? output : fs.readFileSync(path.join(folder, "answer.json"), "utf8")).choices[0];
      const { routed_experts: encoded, routed_experts_info: layout } = choice.meta_info;
      const ids = new Int32Array(Uint8Array.from(Buffer.from(encoded, "base64")).buffer);
      const [numRows, layers, topK] = layout.shape;
      const experts = [...Array(numRows).keys()].map((row) => String(ids[(row * layers + layout.moe_layer_ids[0]) * topK]));
      assert.deepEqual(experts, shown.experts.slice(0, -1), `${mode} as ${language}`);
      assert.ok(shown.texts.join("").includes((choice.text ?? choice.message.content).trim()), `${mode} as ${language}`);
      if (language === "python") assert.ok(output.includes(`[${layout.shape.join(", ")}]`), output);
    }
  }
  await page.click("#copy");
  await page.waitForFunction(() => document.querySelector("#copy").textContent !== "Copy");
  const [download] = await Promise.all([page.waitForEvent("download"), page.click("#save")]);
  const saved = JSON.parse(fs.readFileSync(await download.path(), "utf8"));
  assert.equal(saved[0].tokens.length, saved[0].rows.length + 1);
  fs.rmSync(folder, { recursive: true });
  await close(page);
  return "curl and Python give the same experts";
}

async function stopsAndReloads() {
  const page = await open();
  const before = await aborts();
  await fill(page, { prompt: "The history of the", tokens: 900, seed: 77, temperature: 1.5 });
  await page.check("#compare");
  await ready(page);
  await page.route("**/generate", (route) => {  // the model does not end, and a pause holds it until it is stopped
    const body = route.request().postDataJSON();
    return route.continue({ postData: { ...body, sampling_params: { ...body.sampling_params, ignore_eos: true } } });
  });
  await page.click("#run");
  assert.equal(await page.textContent("#run"), "Generating…");
  await page.waitForFunction(() => document.querySelectorAll("#runB .text > *").length > 12);
  await control("pause_generation", { mode: "in_place" });
  try {
    assert.ok(await page.evaluate(() => document.querySelector("#runA").classList.contains("streaming")));
    await page.keyboard.press("Escape");
    await finished(page);
  } finally {
    await control("continue_generation", {});
  }
  await page.unroute("**/generate");
  assert.match((await readRun(page, "A")).summary, /stopped by you/);
  const deadline = Date.now() + 10_000;
  while ((await aborts()) < before + 2 && Date.now() < deadline) await new Promise((done) => setTimeout(done, 100));
  assert.ok((await aborts()) >= before + 2, "both requests are aborted on the server");
  await page.click("#theme");
  await page.click("#theme");  // auto, light, dark
  await fill(page, { key: "not-to-be-stored" });
  await page.reload();
  await ready(page);
  const form = await page.evaluate(() => ["prompt", "tokens", "seed", "temperature", "compare", "key", "theme"].map((id) => {
    const field = document.getElementById(id);
    return field.type === "checkbox" ? field.checked : field.value || field.textContent;
  }));
  assert.deepEqual(form, ["The history of the", "900", "77", "1.5", true, "", "Theme: dark"]);
  assert.equal(await page.evaluate(() => getComputedStyle(document.body).backgroundColor), "rgb(14, 19, 27)");
  assert.ok(!(await page.evaluate(() => JSON.stringify([{ ...localStorage }, { ...sessionStorage }]))).includes("not-to-be-stored"));
  await close(page);
  return "stop aborts on the server; a reload keeps the form";
}

async function showsErrors() {
  const page = await open({ expected: ["400", "503", "ERR_"] });
  await ready(page);
  await fill(page, { topp: 7 });
  await generate(page);
  const refused = (await readRun(page, "A")).error;
  assert.match(refused, /refused the request.*top_p is 7.*Field: .*top_p/);
  assert.deepEqual(await lowContrast(page), []);

  await fill(page, { topp: 1 });
  const unavailable = { error: { message: "the model is being loaded", type: "service_unavailable_error", param: null, code: "starting" } };
  await page.route("**/generate", (route) => route.fulfill({ status: 503, json: unavailable }));
  await generate(page);
  assert.match((await readRun(page, "A")).error, /not ready.*the model is being loaded/);
  const event = { text: "x", meta_info: { finish_reason: null, prompt_tokens: 1, output_token_logprobs: [[-1, 5, "x"]], input_token_logprobs: [[null, 4, "y"]] } };
  await page.unroute("**/generate");
  await page.route("**/generate", (route) => route.fulfill({ body: `data: ${JSON.stringify(event)}\n\n` }));
  await generate(page);
  const cut = await readRun(page, "A");
  assert.match(cut.error, /connection was lost/i);
  assert.deepEqual(cut.texts, ["y", "x"], "what came before stays");
  await page.unroute("**/generate");

  await page.route("**/health", (route) => route.abort());
  await page.waitForFunction(() => document.querySelector("#state").textContent === "No connection");
  assert.ok(await page.isDisabled("#run"));
  await page.unroute("**/health");
  await page.route("**/health", (route) => route.fulfill({ status: 503, json: { state: "starting", phase: "load", running: 0, waiting: 0 } }));
  await page.waitForFunction(() => document.querySelector("#notice").textContent.includes("being loaded"));
  await page.unroute("**/health");
  await generate(page);  // it recovers by itself
  assert.equal((await readRun(page, "A")).error, "");
  assert.ok(await page.isHidden("#notice"));
  await close(page);
  return "errors in words";
}

async function needsAKeyOrHasNoCapture() {
  const sent = [];
  const locked = await open({
    expected: ["401"],
    intercept: (page) => page.route(/\/(v1\/models|tokenizer_info|generate)$/, (route) => {
      const { authorization, ...headers } = route.request().headers();
      sent.push(authorization);
      return authorization === "Bearer a-secret" ? route.continue({ headers }) : route.fulfill({ status: 401, json: { error: { message: "no key" } } });
    }),
  });
  await locked.waitForFunction(() => document.querySelector("#state").textContent === "API key needed");
  assert.match(await locked.textContent("#notice"), /needs an API key/);
  await fill(locked, { key: "a-secret" });
  await locked.press("#key", "Tab");
  await generate(locked);
  assert.equal(sent.at(-1), "Bearer a-secret");
  const code = await locked.textContent("#code");
  assert.ok(code.includes("$API_KEY") && !code.includes("a-secret"), "the key is not part of the code");
  await close(locked);

  const bodies = [];
  const plain = await open({
    intercept: async (page) => {
      await page.route("**/v1/models", async (route) => {
        const response = await route.fetch();
        const models = await response.json();
        models.data[0].moe = null;
        await route.fulfill({ response, json: models });
      });
      page.on("request", (request) => { if (request.url().endsWith("/generate")) bodies.push(request.postDataJSON()); });
    },
  });
  await generate(plain);
  assert.match(await plain.textContent("#notice"), /--enable-return-routed-experts/);
  assert.ok(!("return_routed_experts" in bodies[0]) && (await readRun(plain, "A")).texts.length > 9);
  assert.ok(await plain.isHidden("#mapcard"));
  await close(plain);
  return "with a key; without capture";
}

async function takeScreenshots(folder) {
  fs.mkdirSync(folder, { recursive: true });
  const shoot = async (name, context, steps) => {
    const page = await open({ ...context, deviceScaleFactor: context.viewport === PHONE ? 2 : 1 });
    await ready(page);
    await steps(page);
    await page.waitForTimeout(300);
    await page.screenshot({ path: path.join(folder, `playground-${name}.png`) });
    await close(page);
  };
  const story = async (page) => {
    await fill(page, { tokens: 110, seed: 7 });
    await generate(page);
  };
  await shoot("light", { viewport: WIDE }, async (page) => {
    await story(page);
    await page.hover("#runA .text > :nth-child(30)");
  });
  await shoot("dark", { viewport: { width: 1440, height: 1000 }, colorScheme: "dark" }, async (page) => {
    await page.check("#compare");
    await pick(page, "differs", "prompt");
    await fill(page, { tokens: 64, temperature: 0 });
    await generate(page);
    await page.hover("#runA .text > :nth-child(9)");
  });
  await shoot("phone", { viewport: PHONE, isMobile: true, hasTouch: true }, async (page) => {
    await story(page);
    await page.tap("#runA .text > :nth-child(20)");
  });
  return `screenshots in ${folder}`;
}

// ----------------------------------------------------------------------------------------------------------------------
try {
  if (options.screenshots) console.log(await takeScreenshots(path.resolve(options.screenshots)));
  else {
    const results = [];
    for (const check of [showsOneRun, comparesTwoRuns, codeGivesTheSameAnswer, stopsAndReloads, showsErrors, needsAKeyOrHasNoCapture]) results.push(await check());
    console.log(`${results.join("; ")}; text is text; labels and contrast; nothing off origin, no console error`);
  }
} finally {
  await browser.close();
}
