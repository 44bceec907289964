// One answer: its tokens as spans, what is known of each, and what they say about speed.

const SHOWN = 8; // steps over which the rate is taken
const NAMES = { stop: "ended", length: "at max tokens", tool_calls: "calls a tool", abort: "aborted" };

/** Adds a message to the conversation; returns its element and the element of its text. */
export function addMessage(log, role, title) {
  const element = document.createElement("article");
  element.className = `message ${role}`;
  const head = document.createElement("h3");
  head.textContent = title;
  const body = document.createElement("div");
  body.className = "body";
  element.append(head, body);
  log.append(element);
  log.scrollTop = log.scrollHeight;
  return { element, body };
}

const percent = (logprob) => {
  const value = 100 * Math.exp(logprob);
  return value >= 99.95 ? "100 %" : `${value < 0.1 ? value.toPrecision(1) : value.toFixed(1)} %`;
};
const visible = (token) => {
  if (token.bytes) return `bytes ${token.bytes.map((byte) => byte.toString(16).padStart(2, "0")).join(" ")}`;
  return token.text.replaceAll("\n", "⏎").replaceAll("\t", "⇥");
};

export class Answer {
  constructor(log, detail, tip, origins) {
    Object.assign(this, { log, detail, tip, origins });
    this.tokens = [];
    this.spans = [];
    this.decoder = new TextDecoder("utf-8", { ignoreBOM: true });
    this.steps = []; // tokens of each step so far: {drafted, own}
    this.times = []; // [milliseconds, tokens so far] per chunk
    this.text = "";
    this.seed = null; // null = greedy
    this.facts = null; // what the last chunk said of the whole answer
    this.finish = null;
    const { element, body } = addMessage(log, "assistant", "Model");
    Object.assign(this, { element, body });
    element.classList.add("running");
    body.tabIndex = 0;
    body.setAttribute("role", "group");
    body.setAttribute("aria-label", "Answer. Arrow keys go from token to token.");
    body.addEventListener("pointerover", (event) => this.point(event.target));
    body.addEventListener("pointerleave", () => this.leave());
    body.addEventListener("focus", () => this.tokens.length && this.choose(Math.max(0, this.at)));
    body.addEventListener("blur", () => this.leave());
    body.addEventListener("keydown", (event) => this.key(event));
    this.at = -1;
  }

  /** Takes in one chunk of the stream. */
  take(chunk) {
    const choice = chunk.choices?.[0];
    const tokens = chunk.foretell?.tokens ?? [];
    const follows = this.follows();
    this.text += choice?.delta?.content ?? "";
    for (const token of tokens) this.add(token);
    if (!tokens.length && choice?.delta?.content) this.body.append(choice.delta.content);
    if (tokens.length) this.times.push([performance.now(), this.tokens.length]);
    this.finish = choice?.finish_reason ?? this.finish;
    if (chunk.foretell?.stats) this.facts = chunk.foretell;
    if (follows) this.log.scrollTop = this.log.scrollHeight;
  }

  /** Whether the end of the conversation is in sight. */
  follows() {
    return this.log.scrollHeight - this.log.scrollTop - this.log.clientHeight < 40;
  }

  add(token) {
    const span = document.createElement("span");
    span.className = "token";
    span.textContent = this.shown(token);
    const origin = this.origins.indexOf(token.origin);
    if (token.drafted) span.dataset.origin = String(Math.max(0, Math.min(origin, 3)));
    span.dataset.index = String(this.tokens.length);
    this.tokens.push(token);
    this.spans.push(span);
    this.body.append(span);
    if (token.place === 1 || !this.steps.length) this.steps.push({ drafted: 0, own: 0 });
    this.steps.at(-1)[token.drafted ? "drafted" : "own"] += 1;
  }

  /** What a token adds to the text: nothing for a special one; bytes show once they are characters. */
  shown(token) {
    if (token.special) return "";
    const bytes = token.bytes ? new Uint8Array(token.bytes) : new TextEncoder().encode(token.text);
    return this.decoder.decode(bytes, { stream: true });
  }

  /** Bytes that never became a character show as one; a stop string may end the text within a token. */
  settle() {
    this.spans.at(-1).textContent += this.decoder.decode();
    let surplus = this.spans.reduce((sum, span) => sum + span.textContent.length, 0) - this.text.length;
    for (const span of this.spans.toReversed()) {
      if (surplus <= 0 || !this.body.textContent.startsWith(this.text)) break;
      const kept = Math.max(0, span.textContent.length - surplus);
      surplus -= span.textContent.length - kept;
      span.textContent = span.textContent.slice(0, kept);
    }
  }

  /** Tokens per second after every chunk but the first, over the last few. */
  rates() {
    return this.times.slice(1).map(([at, count], index) => {
      const [before, had] = this.times[Math.max(0, index + 1 - SHOWN)];
      return at > before ? (1000 * (count - had)) / (at - before) : 0;
    });
  }

  /** Ends the answer; `note` says why it is not whole. */
  end(note, plain, failed = false) {
    this.element.classList.remove("running");
    const follows = this.follows();
    if (this.tokens.length) this.settle();
    if (note) {
      const line = document.createElement("p");
      line.className = failed ? "failed" : "quiet foot";
      if (failed) line.setAttribute("role", "alert");
      line.textContent = note;
      this.element.append(line);
    }
    if (!this.facts) return;
    const { stats: [stats], lossless } = this.facts;
    const parts = [`${this.tokens.length} tokens`, `${stats.tokens_per_s.toFixed(1)} tokens/s`];
    if (plain) parts.push(`${(stats.tokens_per_s / plain).toFixed(2)}× plain`);
    parts.push(`${stats.accepted} of ${stats.drafted} drafted kept`, `AL ${stats.al.toFixed(2)}`);
    parts.push(lossless ? "lossless" : "LOSSY", this.seed === null ? "greedy" : `seed ${this.seed}`);
    parts.push(NAMES[this.finish] ?? String(this.finish));
    const foot = document.createElement("p");
    foot.className = "quiet foot";
    foot.textContent = parts.join(" · ");
    this.element.append(foot);
    if (follows) this.log.scrollTop = this.log.scrollHeight;
  }

  key(event) {
    const move = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    const ends = { Home: 0, End: this.tokens.length - 1 };
    if (!this.tokens.length || (!move && !(event.key in ends))) return;
    event.preventDefault();
    const wanted = move ? this.at + move : ends[event.key];
    this.choose(Math.min(this.tokens.length - 1, Math.max(0, wanted)));
  }

  point(target) {
    if (target.dataset?.index) this.choose(Number(target.dataset.index), true);
  }

  choose(index, pointed = false) {
    this.spans[this.at]?.classList.remove("chosen");
    this.at = index;
    const span = this.spans[index];
    span.classList.add("chosen");
    if (!pointed) span.scrollIntoView({ block: "nearest" });
    this.describe(this.tokens[index], index);
    const box = span.getClientRects()[0] ?? span.getBoundingClientRect();
    this.tip.hidden = false;
    const left = Math.min(box.left, innerWidth - this.tip.offsetWidth - 8);
    this.tip.style.left = `${Math.max(8, left)}px`;
    this.tip.style.top = `${box.top - this.tip.offsetHeight - 6 < 0 ? box.bottom + 6 : box.top - this.tip.offsetHeight - 6}px`;
  }

  leave() {
    this.spans[this.at]?.classList.remove("chosen");
    this.tip.hidden = true;
  }

  describe(token, index) {
    const who = token.drafted
      ? `drafted by ${token.origin}, place ${token.place} in its draft`
      : `the model's own, place ${token.place} in its step`;
    const known = token.logprob !== undefined;
    this.tip.replaceChildren(`${who}${known ? `, ${percent(token.logprob)}` : ""}`);
    if (token.top?.length) this.tip.append(alternatives(token));
    const line = (name, value) => {
      const p = document.createElement("p");
      const strong = document.createElement("strong");
      strong.textContent = `${name} `;
      p.append(strong, value);
      return p;
    };
    const code = document.createElement("code");
    code.textContent = visible(token);
    const rows = [line(`${index + 1}.`, code), line("Id", String(token.id)), line("Origin", who)];
    if (known) rows.push(line("Probability", percent(token.logprob)));
    if (token.top?.length) rows.push(alternatives(token));
    this.detail.replaceChildren(...rows);
  }
}

function alternatives(token) {
  const table = document.createElement("table");
  table.innerHTML = "<thead><tr><th scope='col'>Alternatives</th><th scope='col' colspan='2'></th></tr></thead>";
  const rows = document.createElement("tbody");
  for (const other of token.top) {
    const row = rows.insertRow();
    const code = document.createElement("code");
    code.textContent = visible(other);
    row.insertCell().append(code);
    const number = row.insertCell();
    number.className = "number";
    number.textContent = percent(other.logprob);
    const meter = row.insertCell();
    meter.className = "meter";
    const bar = document.createElement("div");
    bar.style.width = `${100 * Math.exp(other.logprob)}%`;
    meter.append(bar);
  }
  table.append(rows);
  return table;
}
