// Drives the page at "/" in Debian's Chromium, over the DevTools protocol. Reads from standard input
// {url, keyed_url, seeing_url, foreign_url, key, picture, screenshots, chromium, cases}, and prints the result of each case by its name.
import { readFile } from "node:fs/promises";
import { createRequire } from "node:module";
import { chromium } from "playwright-core";

const axe = await readFile(createRequire(import.meta.url).resolve("axe-core/axe.min.js"), "utf8");
let input = "";
for await (const part of process.stdin) input += part;
const given = JSON.parse(input);
const LIMIT_MS = 30_000;
const WIDTHS = { telephone: [360, 740], tablet: [820, 1180], desktop: [1440, 900] };

const browser = await chromium.launch({
  executablePath: given.chromium,
  args: ["--no-sandbox", "--disable-dev-shm-usage"],
});

// Open a page in a tab of its own; note everything that its policy stops and its script throws.
async function open(url, options = {}) {
  const context = await browser.newContext(options);
  context.setDefaultTimeout(LIMIT_MS);
  const page = await context.newPage();
  page.troubles = [];
  page.hosts = new Set();
  page.on("pageerror", (error) => page.troubles.push(String(error)));
  page.on("console", (message) => {
    const isExpected = /status of (401|403|404|409|429)/.test(message.text());
    if (message.type() === "error" && !isExpected) page.troubles.push(message.text());
  });
  page.on("request", (request) => page.hosts.add(new URL(request.url()).host));
  await page.goto(url);
  return page;
}

async function ready(page) {
  await page.waitForFunction(() => document.querySelector("#model").options.length > 0);
}

// Wait until the newest answer has its figures, and return it.
async function answered(page) {
  await page.waitForFunction(() => document.querySelector("#stop").disabled
    && ![undefined, "…"].includes([...document.querySelectorAll(".figures")].at(-1)?.textContent));
  return page.locator("#turns li.assistant").last();
}

async function say(page, text) {
  await page.fill("#message", text);
  await page.press("#message", "Enter");
}

async function faults(page) {
  await page.evaluate(axe);
  const found = await page.evaluate(() => globalThis.axe.run(document));
  return found.violations
    .filter((one) => ["serious", "critical"].includes(one.impact))
    .map((one) => `${one.id}: ${one.nodes.map((node) => node.html).join(" | ").slice(0, 300)}`);
}

const rows = (page) => page.locator("#requests tr");
const cases = {
  async conversation() {
    const page = await open(given.url);
    await ready(page);
    await page.selectOption("#model", "talker");
    await say(page, "Hello");
    const first = await answered(page);
    const text = await first.locator(":scope > .text").textContent();
    const thought = await first.locator(".reasoning").getAttribute("open");
    const hidden = await first.locator(".reasoning .text").isVisible();
    await first.locator("summary").click();
    const reasoning = await first.locator(".reasoning .text").innerText();
    const figures = await first.locator(".figures").innerText();
    await page.locator("summary").first().click();
    await page.fill("#system", "Be brief.");
    await page.fill("#max_tokens", "3");
    const sent = page.waitForRequest((request) => request.url().endsWith("/completions"));
    await say(page, "And then?");
    const body = (await sent).postDataJSON();
    const second = await answered(page);
    const limited = await second.locator(".figures").innerText();
    await page.click("#again");
    await answered(page);
    const troubles = [...page.troubles];
    const written = await page.evaluate(() => {
      try {
        document.createElement("p").innerHTML = "<b>text</b>";
        return "written";
      } catch (error) {
        return error.name;
      }
    });
    return {
      written,
      text, folded: thought === null && !hidden, reasoning, figures, limited,
      roles: body.messages.map((one) => one.role), max_tokens: body.max_tokens,
      turns: await page.locator("#turns li").count(),
      injected: await page.evaluate(() => globalThis.stolen ?? null),
      elements: await page.locator("#turns img, #turns script").count(),
      troubles,
      hosts: [...page.hosts].filter((host) => host !== new URL(given.url).host),
    };
  },
  async stop() {
    const page = await open(given.url);
    await ready(page);
    await page.selectOption("#model", "slow");
    await say(page, "Go on for ever");
    await page.waitForFunction(() => document.querySelectorAll("#turns .assistant > .text")[0]?.textContent.length > 10);
    await page.press("#message", "Escape");
    const answer = await answered(page);
    const figures = await answer.locator(".figures").innerText();
    await say(page, "Again");
    await page.waitForFunction(() => document.querySelectorAll("#turns .assistant > .text")[1]?.textContent.length > 10);
    await page.click("#stop");
    await answered(page);
    await say(page, "Once more");
    await page.waitForFunction(() => document.querySelectorAll("#turns .assistant > .text")[2]?.textContent.length > 10);
    await page.click("#clear");
    await page.fill("#message", "In a new chat");
    await page.click("#send");
    await page.waitForFunction(() => document.querySelector("#turns .assistant > .text")?.textContent.length > 10);
    await page.click("#stop");
    await answered(page);
    return { figures, canSend: await page.isEnabled("#send"), troubles: page.troubles };
  },
  async picture() {
    const page = await open(given.url);
    await ready(page);
    await page.selectOption("#model", "talker");
    const blind = await page.isVisible("#picture");
    await page.selectOption("#model", "seeing");
    await page.setInputFiles("#picture", given.picture);
    await page.waitForSelector("#pictures img");
    await page.fill("#max_tokens", "4").catch(() => {});
    const sent = page.waitForRequest((request) => request.url().endsWith("/completions"));
    await page.fill("#message", "What is this?");
    await page.evaluate(() => { document.querySelector("#settings").open = true; });
    await page.fill("#max_tokens", "4");
    await page.click("#send");
    const parts = (await sent).postDataJSON().messages[0].content;
    const answer = await answered(page);
    return {
      blind, types: parts.map((part) => part.type), url: parts[0].image_url.url.slice(0, 22),
      figures: await answer.locator(".figures").innerText(),
      failed: await answer.locator(".bad").count(),
      shown: await page.locator("#turns .user img").evaluate((one) => one.naturalWidth),
      troubles: page.troubles,
    };
  },
  async seen() {
    const page = await open(given.seeing_url);
    await ready(page);
    await page.setInputFiles("#picture", given.picture);
    await page.waitForSelector("#pictures img");
    await page.evaluate(() => { document.querySelector("#settings").open = true; });
    await page.fill("#temperature", "0");
    await page.fill("#message", "Describe the picture.");
    await page.click("#send");
    const answer = await answered(page);
    return { text: await answer.locator(":scope > .text").textContent(), troubles: page.troubles };
  },
  async abort() {
    const page = await open(given.url);
    await ready(page);
    await page.selectOption("#model", "slow");
    await say(page, "Go on for ever");
    await page.click("#to-server");
    await rows(page).first().waitFor();
    const id = await rows(page).first().locator("th").innerText();
    await page.waitForFunction(() => document.querySelector("#requests td:nth-of-type(4)")?.textContent > 2);
    const cells = await rows(page).first().locator("td").allInnerTexts();
    await page.click(`[aria-label="Explain ${id}"]`);
    await page.waitForSelector("#explain-dialog[open]");
    await page.waitForFunction(() => document.querySelector("#explanation").textContent);
    const explained = await page.locator("#explanation").innerText();
    await page.keyboard.press("Escape");
    await page.focus(`[aria-label="Abort ${id}"]`);
    await page.waitForTimeout(2500); // the row stays, and with it the focus
    const kept = await page.evaluate(() => document.activeElement.ariaLabel);
    await page.keyboard.press("Enter");
    await page.waitForFunction(() => !document.querySelector("#requests tr"));
    await page.waitForFunction(() => document.querySelector("#notice").textContent);
    const lines = await page.locator("polyline").evaluateAll((all) => all.map((one) => one.getAttribute("points").split(" ").length));
    const models = await page.locator("#models tr").allInnerTexts();
    const notice = await page.innerText("#notice");
    await page.click("#to-chat");
    const failed = await page.locator("#turns").innerText();
    return {
      id, kept, phase: cells[2], model: cells[1], explained, lines, models, notice, failed,
      troubles: page.troubles,
    };
  },
  async key() {
    const page = await open(given.keyed_url);
    await page.waitForSelector("#key-dialog[open]");
    await page.fill("#key", "wrong");
    await page.keyboard.press("Enter");
    await page.waitForSelector("#key-dialog[open]");
    const wrong = await page.innerText("#key-told");
    await page.goto(`${given.keyed_url}/#server`);
    await page.waitForFunction(() => document.querySelector("#notice").textContent);
    const figures = await page.locator("#models tr").count();
    if (!(await page.locator("#key-dialog[open]").count())) await page.click("#key-button");
    await page.fill("#key", given.key);
    await page.keyboard.press("Enter");
    await page.waitForSelector("#models tr");
    await page.click("#to-chat");
    await ready(page);
    await say(page, "Hello");
    const answer = await answered(page);
    const kept = await page.evaluate(() => ({
      session: Object.values(sessionStorage), local: localStorage.length, cookie: document.cookie,
      url: location.href,
    }));
    const other = await page.context().newPage();
    await other.goto(given.keyed_url);
    await other.waitForSelector("#key-dialog[open]");
    await page.click("#key-button");
    await page.click("#key-forget");
    await page.waitForSelector("#key-dialog[open]");
    return {
      wrong, figures, kept, failed: await answer.locator(".bad").count(), asked_again: true,
      forgotten: await page.evaluate(() => sessionStorage.length), troubles: page.troubles,
    };
  },
  async keyboard() {
    const page = await open(given.url);
    await ready(page);
    const names = [];
    await page.evaluate(() => document.activeElement.blur());
    for (let step = 0; step < 12; step += 1) {
      await page.keyboard.press("Tab");
      names.push(await page.evaluate(() => {
        const one = document.activeElement;
        if (one === document.body) return "the end";
        const outline = getComputedStyle(one).outlineStyle;
        return `${one.id || one.className || one.tagName}${outline === "none" ? " (no outline)" : ""}`;
      }));
    }
    return names;
  },
  async foreign() {
    // A page of another origin, whose script asks for everything; and a name that leads here.
    const page = await open(given.foreign_url);
    const asked = await page.evaluate(async (url) => {
      const found = {};
      for (const [path, options] of [
        ["/triolet/statistics", {}],
        ["/triolet/abort", { method: "POST", body: "{\"request_ids\": [\"a\"]}" }],
        ["/triolet/abort", { method: "POST", body: "{\"request_ids\": [\"a\"]}", headers: { "Content-Type": "application/json" } }],
        ["/v1/models", {}],
      ]) found[`${path} ${Object.keys(options.headers ?? {})}`] = await fetch(url + path, options).then((one) => one.status, () => "stopped");
      return found;
    }, given.url);
    const framed = await page.evaluate(async (url) => {
      const frame = document.createElement("iframe");
      frame.src = url;
      document.body.append(frame);
      await new Promise((resolve) => { frame.onload = resolve; setTimeout(resolve, 3000); });
      return frame.contentDocument === null ? "other" : "own";
    }, given.url);
    const frames = page.frames().slice(1).map((one) => one.url());
    return { asked, framed, frames };
  },
  async rebound() {
    const bound = await chromium.launch({
      executablePath: given.chromium,
      args: ["--no-sandbox", "--host-resolver-rules=MAP evil.example 127.0.0.1"],
    });
    const page = await bound.newPage();
    const port = new URL(given.url).port;
    const answer = await page.goto(`http://evil.example:${port}/`);
    const status = await page.evaluate(() => fetch("/triolet/statistics").then((one) => one.status));
    await bound.close();
    return [answer.status(), status];
  },
  async faults() {
    const found = [];
    for (const colorScheme of ["light", "dark"]) {
      for (const [name, [width, height]] of Object.entries(WIDTHS)) {
        const isPhone = name === "telephone";
        const page = await open(given.url, {
          colorScheme, viewport: { width, height }, hasTouch: isPhone, isMobile: isPhone,
        });
        await ready(page);
        await page.selectOption("#model", "talker");
        await say(page, "Hello");
        await answered(page);
        await page.selectOption("#model", "seeing");
        await page.setInputFiles("#picture", given.picture);
        await page.waitForSelector("#pictures img");
        await page.locator("summary").first().click();
        for (const view of ["chat", "key", "server", "explain"]) {
          if (view === "key") await page.click("#key-button");
          if (view === "server") {
            await page.keyboard.press("Escape");
            await page.selectOption("#model", "slow");
            await page.locator("#clear").click();
            if (await page.isDisabled("#send")) found.push("a new chat cannot be sent to");
            await say(page, "Go on");
            await page.click("#to-server");
            await rows(page).first().waitFor();
            await page.waitForTimeout(2500);
          }
          if (view === "explain") {
            await page.locator("#requests button").first().click();
            await page.waitForSelector("#explain-dialog[open]");
          }
          const where = `${view} ${name} ${colorScheme}`;
          for (const one of await faults(page)) found.push(`${where}: ${one}`);
          const wide = await page.evaluate(() => document.documentElement.scrollWidth - innerWidth);
          if (wide > 0) found.push(`${where}: ${wide} pixels too wide`);
          const path = `${given.screenshots}/${view}-${name}-${colorScheme}.png`;
          await page.screenshot({ path, fullPage: view === "server" });
        }
        if (page.troubles.length) found.push(...page.troubles);
        await page.context().close();
      }
    }
    return found;
  },
};

const found = {};
for (const name of given.cases) {
  try {
    found[name] = await cases[name]();
  } catch (error) {
    found[name] = `failed: ${error.message}`.slice(0, 1500);
  }
}
await browser.close();
console.log(JSON.stringify(found));
