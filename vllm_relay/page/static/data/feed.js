// SPDX-License-Identifier: Apache-2.0
// What the server says, as it says it, or as a recording did.

const RETRY_S = [1, 2, 4, 8, 15, 30];
const SILENT_S = 35; // a server that is there speaks each 10 s
const KEY = "relay-api-key";

export const apiKey = () => sessionStorage.getItem(KEY);
export const keepApiKey = (key) => sessionStorage.setItem(KEY, key);

// A request to a route under /relay/, with the key if there is one.
export function ask(path, options = {}) {
  const headers = { ...options.headers };
  if (apiKey()) headers.Authorization = `Bearer ${apiKey()}`;
  if (options.body) headers["Content-Type"] = "application/json";
  return fetch(path, { ...options, headers, cache: "no-store" });
}

// The server's own words about what it refused.
export async function reasonOf(response) {
  const text = await response.text();
  try {
    const { error, detail } = JSON.parse(text);
    return String(error?.message ?? error ?? detail ?? text);
  } catch {
    return text.slice(0, 300) || `status ${response.status}`;
  }
}

// The lines of a stream of text, each looked at once however long it is.
async function* linesOf(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  const parts = [];
  try {
    while (true) {
      const { value, done } = await reader.read();
      if (done) return;
      let begin = 0;
      for (let end; (end = value.indexOf("\n", begin)) >= 0; begin = end + 1) {
        parts.push(value.slice(begin, end));
        yield parts.join("").replace(/\r$/, "");
        parts.length = 0;
      }
      if (begin < value.length) parts.push(value.slice(begin));
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

// The events of a text/event-stream, as {event, data}; comments as null.
export async function* eventsOf(body) {
  let event = "message";
  const data = [];
  for await (const line of linesOf(body)) {
    if (line.startsWith("event:")) event = line.slice(6).trim();
    else if (line.startsWith("data:")) data.push(line.slice(5));
    else if (line.startsWith(":")) yield null;
    else if (line === "" && data.length) {
      yield { event, data: JSON.parse(data.join("\n")) };
      event = "message";
      data.length = 0;
    }
  }
}

// Reads the feed until it is stopped, and connects again whenever that ends.
//
// onEvent({event, data}); onState({kind, ...}): connecting, live, lost {retry_s, reason},
// key {reason} (the server wants another), off {reason} (it has no page).
export class Feed {
  #abort = null;
  #failures = 0;
  #timer = 0;

  constructor(onEvent, onState) {
    this.onEvent = onEvent;
    this.onState = onState;
  }

  // Begins anew, with the key and the wishes of now.
  start({ texts }) {
    this.stop();
    this.texts = texts;
    this.#connect();
  }

  stop() {
    clearTimeout(this.#timer);
    this.#abort?.abort();
    this.#abort = null;
  }

  async #connect() {
    const abort = new AbortController();
    this.#abort = abort;
    this.onState({ kind: "connecting", failures: this.#failures });
    let reason = "the server closed the connection";
    let silent = 0;
    const listen = () => {
      clearTimeout(silent);
      silent = setTimeout(() => {
        reason = `the server has been silent for ${SILENT_S} s`;
        abort.abort();
      }, SILENT_S * 1000);
    };
    try {
      listen();
      const path = `forest/events${this.texts ? "?texts=1" : ""}`;
      const response = await ask(path, { signal: abort.signal });
      if (!response.ok) {
        const said = await reasonOf(response);
        const kind = { 401: "key", 403: "key", 404: "off", 501: "off" }[response.status];
        if (kind) return this.onState({ kind, reason: said });
        throw new Error(said);
      }
      for await (const event of eventsOf(response.body)) {
        if (this.#abort !== abort) return;
        listen();
        if (!event) continue;
        if (event.event === "error") throw new Error(event.data.message);
        this.#failures = 0;
        this.onState({ kind: "live" });
        this.onEvent(event);
      }
    } catch (error) {
      if (error.name !== "AbortError") reason = error.message;
    } finally {
      clearTimeout(silent);
    }
    if (this.#abort !== abort) return;
    abort.abort();
    const retry_s = RETRY_S[Math.min(this.#failures++, RETRY_S.length - 1)];
    this.onState({ kind: "lost", retry_s, reason });
    this.#timer = setTimeout(() => this.#connect(), retry_s * 1000 * (0.8 + 0.4 * Math.random()));
  }
}

// The events of a recording, a JSON object {t, event, data} a line; t in seconds.
export async function recordedEvents(path) {
  if (new URL(path, location.href).origin !== location.origin)
    throw new Error(`${path}: expected a file of this server, such as static/demo.jsonl`);
  const response = await fetch(path);
  if (!response.ok) throw new Error(`${path}: ${await reasonOf(response)}`);
  const lines = (await response.text()).split("\n").filter((line) => line.trim());
  return lines.map((line, place) => {
    try {
      return JSON.parse(line);
    } catch {
      throw new Error(`${path}, line ${place + 1}: expected an object {"t", "event", "data"}`);
    }
  });
}
