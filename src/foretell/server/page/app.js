// The chat: settings, sending, stopping, and what the server says of itself. Answers are drawn by answer.js,
// measurements by plots.js. Everything is same-origin; nothing else is ever requested.

import { Answer, addMessage } from "./answer.js";
import { drawAcceptance, drawRate, drawSteps } from "./plots.js";

const POLL_MS = 1500;
const by = (id) => document.getElementById(id);
const state = { messages: [], server: null, running: null, answer: null };

// ---- theme -----------------------------------------------------------------------------------------

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  by("theme").setAttribute("aria-pressed", String(theme === "dark"));
}

function startTheme() {
  const dark = matchMedia("(prefers-color-scheme: dark)");
  setTheme(localStorage.getItem("theme") ?? (dark.matches ? "dark" : "light"));
  dark.addEventListener("change", () => {
    if (!localStorage.getItem("theme")) setTheme(dark.matches ? "dark" : "light");
  });
  by("theme").addEventListener("click", () => {
    const theme = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
    localStorage.setItem("theme", theme);
    setTheme(theme);
  });
}

// ---- the server --------------------------------------------------------------------------------------

async function refresh() {
  try {
    const reply = await fetch("stats", { cache: "no-store", headers: headers() });
    by("key-field").hidden = reply.status !== 401;
    if (!reply.ok) throw new Error(await reasonOf(reply));
    const stats = await reply.json();
    const first = state.server === null;
    state.server = { ...stats.server, plain: plainRate(stats.planner) };
    if (first) introduce(state.server);
    by("banner").hidden = true;
    drawAcceptance(by("acceptance"), by("acceptance-note"), stats.totals);
  } catch (error) {
    by("trouble").textContent = `The server does not answer: ${error.message}.`;
    by("banner").hidden = false;
  }
}

function headers() {
  const key = by("key").value || sessionStorage.getItem("key");
  if (by("key").value) sessionStorage.setItem("key", key);
  return key ? { Authorization: `Bearer ${key}` } : {};
}

/** Tokens per second of plain decoding, by the planner's measured cost of a step of one row; or null. */
function plainRate(planner) {
  const milliseconds = planner.cost_ms?.["1"];
  return milliseconds ? 1000 / milliseconds : null;
}

function introduce(server) {
  const who = server.drafters.join("+");
  by("model").textContent = `${server.model}, drafter ${who || "none"}, verified by ${server.rule}`;
  if (!server.lossless) by("model").textContent += " (LOSSY)";
  by("drafter").replaceChildren(new Option("none (plain decoding)", "none"));
  if (who) by("drafter").prepend(new Option(who, "drafter", true, true));
  const entry = (text, origin) => {
    const item = document.createElement("li");
    const sample = document.createElement("span");
    sample.className = "token";
    if (origin >= 0) sample.dataset.origin = String(Math.min(origin, 3));
    sample.textContent = text;
    item.append(sample);
    return item;
  };
  by("legend").replaceChildren(entry("the model itself", -1), ...server.drafters.map((name, i) => entry(name, i)));
  drawRate(by("rate"), by("rate-note"), [], server.plain);
  drawSteps(by("steps"), by("steps-note"), []);
}

/** Yields the JSON documents of a stream of server-sent events. */
async function* events(reply) {
  const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) throw new Error("the connection ended before the answer did");
    rest += value.replaceAll("\r\n", "\n");
    const blocks = rest.split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) {
      const data = block.split("\n").filter((line) => line.startsWith("data:"))
        .map((line) => line.slice(5).trim()).join("\n");
      if (data === "[DONE]") return;
      if (data) yield JSON.parse(data);
    }
  }
}

async function reasonOf(reply) {
  try {
    return (await reply.json()).error.message;
  } catch {
    return `HTTP status ${reply.status}`;
  }
}

// ---- sending -----------------------------------------------------------------------------------------

function request(messages) {
  const body = {
    model: state.server.model,
    messages,
    stream: true,
    temperature: by("temperature").valueAsNumber,
    max_tokens: by("max-tokens").valueAsNumber,
    foretell: { tokens: true, top: 5, draft: by("drafter").value !== "none" },
  };
  // the server's own seeds have more digits than a number has here
  if (body.temperature > 0) body.seed = by("seed").value ? by("seed").valueAsNumber : Math.floor(Math.random() * 2 ** 32);
  return body;
}

async function ask(messages, answer, signal) {
  const body = request(messages);
  answer.seed = body.seed ?? null;
  const reply = await fetch("v1/chat/completions", {
    method: "POST",
    headers: { "Content-Type": "application/json", ...headers() },
    body: JSON.stringify(body),
    signal,
  });
  if (!reply.ok) throw new Error(await reasonOf(reply));
  for await (const chunk of events(reply)) {
    if (chunk.error) throw new Error(chunk.error.message);
    answer.take(chunk);
    drawRate(by("rate"), by("rate-note"), answer.rates(), state.server.plain);
    drawSteps(by("steps"), by("steps-note"), answer.steps);
  }
}

function setRunning(controller) {
  state.running = controller;
  by("stop").hidden = controller === null;
  by("send").disabled = controller !== null;
  by("fresh").disabled = controller !== null;
  by("log").setAttribute("aria-busy", String(controller !== null));
}

async function send() {
  const text = by("prompt").value;
  if (!text.trim() || state.running) return;
  if (![...document.querySelectorAll(".fields input")].every((field) => field.reportValidity())) return;
  if (state.server === null) await refresh();
  if (state.server === null) return;
  by("hint").hidden = true;
  const asked = [...state.messages, { role: "user", content: text }];
  addMessage(by("log"), "user", "You").body.textContent = text;
  const answer = new Answer(by("log"), by("detail"), by("tip"), state.server.drafters);
  by("prompt").value = "";
  setRunning(new AbortController());
  try {
    await ask(asked, answer, state.running.signal);
    answer.end(null, state.server.plain);
  } catch (error) {
    const stopped = error.name === "AbortError";
    answer.end(stopped ? "Stopped." : `Failed: ${error.message}.`, state.server.plain, !stopped);
    if (!answer.text) by("prompt").value = text; // nothing was answered: it can be sent again
  } finally {
    if (answer.text) state.messages = [...asked, { role: "assistant", content: answer.text }];
    setRunning(null);
    refresh();
  }
}

function startAgain() {
  state.messages = [];
  by("log").replaceChildren(by("hint"));
  by("hint").hidden = false;
  by("prompt").focus();
}

startTheme();
by("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
by("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    send();
  }
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") state.running?.abort();
});
by("stop").addEventListener("click", () => {
  state.running?.abort();
  by("prompt").focus();
});
by("fresh").addEventListener("click", startAgain);
by("banner").addEventListener("submit", (event) => {
  event.preventDefault();
  refresh();
});
refresh();
setInterval(() => {
  if (!document.hidden) refresh();
}, POLL_MS);
by("prompt").focus();
