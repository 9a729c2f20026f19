// How the page talks to the server: calls with the key, and the events that keep `store` as the server is.

const base = new URL(".", import.meta.url);  // /console/, behind whatever prefix
const root = new URL("../", base);
const KEY = "lmi-server management key";
const RETRY_MS = 1000;
const LINES = 500;  // of the log
const POINTS = 375;  // of a chart: five minutes, one in 0.8 seconds
const CHARTED = 50;  // models whose values are kept

export const MEASURES = ["tokens", "requests", "running", "queue", "ttft", "itl", "kv", "hits"];

export const store = {
  state: "connecting",  // open, connecting, or key: the server wants one
  error: "",
  refusals: 0,  // of keys
  server: null,
  models: new Map(),  // by label
  totals: {},
  log: [],
  histories: new Map([["", []]]),  // by label, "" for all models: points of the last minutes
  listeners: new Set(),
};

export function changed() {
  for (const listener of store.listeners) listener();
}

export class CallError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

// The key stays in this tab: a closed tab forgets it.
export function key() {
  return sessionStorage.getItem(KEY) ?? "";
}

export function setKey(text) {
  if (text) sessionStorage.setItem(KEY, text);
  else sessionStorage.removeItem(KEY);
  reconnect();
}

function headers(more = {}) {
  return key() ? { authorization: `Bearer ${key()}`, ...more } : more;
}

async function errorOf(response) {
  const text = await response.text();
  let message = text;
  try {
    const body = JSON.parse(text);
    message = body.error?.message ?? body.message ?? body.error ?? text;
  } catch { /* not JSON: the text says it */ }
  return new CallError(response.status, String(message) || `HTTP ${response.status}`);
}

// Fetches a path of the management API, or of the console if it begins with "console/".
export async function call(path, { method = "GET", query = {}, body, signal } = {}) {
  const url = new URL(path, root);
  for (const [name, value] of Object.entries(query)) if (value !== "") url.searchParams.set(name, value);
  const sent = body === undefined ? {} : { "content-type": "application/json" };
  const response = await fetch(url, { method, headers: headers(sent), body: body && JSON.stringify(body), signal });
  if (!response.ok) throw await errorOf(response);
  return response;
}

// Yields the data of each server-sent event of an answer.
export async function* eventsOf(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const parts = (rest + value).split(/\r?\n\r?\n/);
      rest = parts.pop();
      for (const part of parts) {
        const lines = part.split(/\r?\n/).filter((line) => line.startsWith("data:"));
        if (lines.length) yield lines.map((line) => line.slice(5).trimStart()).join("\n");
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

// --- what changes ---

let following = null;

function reconnect() {
  following?.abort();
  following = new AbortController();
  follow(following.signal);
}

async function follow(signal) {
  while (!signal.aborted) {
    try {
      const response = await fetch(new URL("live", base), { headers: headers(), signal });
      if (!response.ok) throw await errorOf(response);
      for await (const data of eventsOf(response)) take(JSON.parse(data));
      store.state = "connecting";
    } catch (error) {
      if (signal.aborted) return;
      store.state = error.status === 401 ? "key" : "connecting";
      store.error = error.message;
      if (store.state === "key") store.refusals += 1;
    }
    changed();
    if (store.state === "key") return;  // until one is given
    await new Promise((resume) => setTimeout(resume, RETRY_MS));
  }
}

function take(message) {
  if (store.server?.since !== message.server.since) store.log = [];  // the server has started anew
  Object.assign(store, { state: "open", error: "", server: message.server, totals: message.totals });
  if (message.whole) store.models = new Map();
  for (const row of message.models) store.models.set(row.label, row);
  const last = store.log.at(-1)?.[0] ?? 0;
  const lines = message.log.filter(([number]) => number > last);
  if (lines.length) store.log = [...store.log, ...lines].slice(-LINES);
  remember("", message.totals, message.time);
  for (const [label, row] of store.models) {
    if ("tokens" in row && (store.histories.has(label) || store.histories.size <= CHARTED)) {
      remember(label, row, message.time);
    }
  }
  for (const label of store.histories.keys()) {
    if (label && !store.models.has(label)) store.histories.delete(label);
  }
  changed();
}

function remember(label, row, time) {
  const points = store.histories.get(label) ?? [];
  points.push({ time, ...Object.fromEntries(MEASURES.map((name) => [name, row[name] ?? null])) });
  if (points.length > POINTS) points.shift();
  store.histories.set(label, points);
}

export function connect() {
  reconnect();
}
