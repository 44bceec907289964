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
    const reply = await fetch("stats", { cache: "no-store" });
    if (!reply.ok) throw new Error(`GET /stats answered ${reply.status}`);
    const first = state.server === null;
    state.server = await reply.json();
    if (first) introduce(state.server);
    by("banner").hidden = true;
    drawAcceptance(by("acceptance"), by("acceptance-note"), state.server.totals);
  } catch (error) {
    by("trouble").textContent = `The server cannot be reached (${error.message}).`;
    by("banner").hidden = false;
  }
}

function introduce(server) {
  by("model").textContent = `${server.model}, drafter ${server.drafter}, verified by ${server.rule}`;
  by("drafter").replaceChildren(...server.drafters.map((name) => {
    return new Option(name === "none" ? "none (plain decoding)" : name, name);
  }));
  const entry = (text, origin) => {
    const item = document.createElement("li");
    const sample = document.createElement("span");
    sample.className = "token";
    if (origin >= 0) sample.dataset.origin = String(Math.min(origin, 3));
    sample.textContent = text;
    item.append(sample);
    return item;
  };
  by("legend").replaceChildren(entry("the model itself", -1), ...server.origins.map((name, i) => entry(name, i)));
  drawRate(by("rate"), by("rate-note"), [], server.plain_tokens_per_s);
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
    return `the server answered ${reply.status}`;
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
    foretell: { tokens: true, drafter: by("drafter").value },
  };
  if (by("seed").value) body.seed = by("seed").valueAsNumber;
  return body;
}

async function ask(messages, answer, signal) {
  const reply = await fetch("v1/chat/completions", {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify(request(messages)),
    signal,
  });
  if (!reply.ok) throw new Error(await reasonOf(reply));
  for await (const chunk of events(reply)) {
    if (chunk.error) throw new Error(chunk.error.message);
    answer.take(chunk);
    drawRate(by("rate"), by("rate-note"), answer.rates(), state.server.plain_tokens_per_s);
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
  const answer = new Answer(by("log"), by("detail"), by("tip"), state.server.origins);
  by("prompt").value = "";
  setRunning(new AbortController());
  try {
    await ask(asked, answer, state.running.signal);
    answer.end(null, state.server.plain_tokens_per_s);
  } catch (error) {
    const stopped = error.name === "AbortError";
    answer.end(stopped ? "Stopped." : `Failed: ${error.message}.`, state.server.plain_tokens_per_s, !stopped);
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
by("retry").addEventListener("click", refresh);
refresh();
setInterval(() => {
  if (!document.hidden) refresh();
}, POLL_MS);
by("prompt").focus();
