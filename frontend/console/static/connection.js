// How the page talks to the server: calls with the key, and the events that keep `store` as the server is.

const base = new URL(".", import.meta.url);  // /console/, behind whatever prefix
const root = new URL("../", base);
const KEY = "lmi-server management key";
const RETRY_MS = 1000;
const LINES = 500;  // of the log
const SILENCE_MS = 5000;  // after which a server that sends a message each second counts as gone

export const SPANS = { minutes: 300, hour: 3600 };  // of the charts, in seconds

export const store = {
  state: "connecting",  // open, connecting, or key: the server wants one
  error: "",
  refusals: 0,  // of keys
  server: null,
  time: null,  // of the last message, by the server's clock
  connections: 0,  // that were made
  models: new Map(),  // by label
  totals: {},
  log: [],
  charted: null,  // the label of the model that the charts show, "" for all
  span: "minutes",  // of the charts
  points: [],  // of the charts
  outcome: null,  // of the last registration or unregistration: { label } or { text }
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

// What a browser says of a server that is gone is for programmers ("Failed to fetch").
async function fetched(url, options) {
  try {
    return await fetch(url, options);
  } catch (error) {
    throw options.signal?.aborted ? error : new CallError(0, "The server does not answer.");
  }
}

// Fetches a path of the management API, or of the console if it begins with "console/".
export async function call(path, { method = "GET", query = {}, body, signal } = {}) {
  const url = new URL(path, root);
  for (const [name, value] of Object.entries(query)) if (value !== "") url.searchParams.set(name, value);
  const sent = body === undefined ? {} : { "content-type": "application/json" };
  const response = await fetched(url, { method, headers: headers(sent), body: body && JSON.stringify(body), signal });
  if (!response.ok) throw await errorOf(response);
  return response;
}

// Yields the data of each server-sent event of an answer.
export async function* eventsOf(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read().catch(() => { throw new CallError(0, "The connection broke."); });
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

// Shows what became of something that goes on when its form is left, until the next such thing begins.
export function announce(outcome) {
  store.outcome = outcome;
  changed();
}

// --- the charts ---

// Chooses what the charts show (null: there are none), and gets the points that the server has of it.
export async function chart(label, span = "minutes") {
  if (label !== store.charted || span !== store.span) Object.assign(store, { charted: label, span, points: [] });
  if (label === null) return;
  try {
    const { columns, points } = await (await call("console/history", { query: { model: label, span } })).json();
    if (label !== store.charted || span !== store.span) return;
    const found = points.map((values) => Object.fromEntries(columns.map((name, index) => [name, values[index]])));
    const last = found.at(-1)?.time ?? 0;
    store.points = span === "hour" ? found : [...found, ...store.points.filter((point) => point.time > last)];
    changed();
  } catch { /* the events say that the server is gone; with them the points come again */ }
}

function remember({ tokens, requests, running, queue, kv, hits, ttft, itl }, time) {
  const point = { time, tokens, requests, running, queue, kv, hits,
    ttft_p50: ttft?.[0], ttft_p95: ttft?.[1], ttft_p99: ttft?.[2], itl_p50: itl?.[0], itl_p95: itl?.[1], itl_p99: itl?.[2] };
  store.points = [...store.points.filter((before) => before.time > time - SPANS.minutes), point];
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
    const silence = new AbortController();
    let timer = 0;
    const heard = () => {
      clearTimeout(timer);
      timer = setTimeout(() => silence.abort(), SILENCE_MS);
    };
    try {
      heard();
      const response = await fetch(new URL("live", base),
        { headers: headers(), signal: AbortSignal.any([signal, silence.signal]) });
      if (!response.ok) throw await errorOf(response);
      store.connections += 1;
      for await (const data of eventsOf(response)) {
        heard();
        take(JSON.parse(data));
      }
      store.state = "connecting";
    } catch (error) {
      if (signal.aborted) return;
      store.state = error.status === 401 ? "key" : "connecting";
      store.error = error.message;
      if (store.state === "key") store.refusals += 1;
    } finally {
      clearTimeout(timer);
    }
    changed();
    if (store.state === "key") return;  // until one is given
    await new Promise((resume) => setTimeout(resume, RETRY_MS));
  }
}

function take(message) {
  if (store.server?.since !== message.server.since) store.log = [];  // the server has started anew
  Object.assign(store, { state: "open", error: "", server: message.server, totals: message.totals,
    time: message.time });
  if (message.whole) store.models = new Map();
  for (const row of message.models) store.models.set(row.label, row);
  const last = store.log.at(-1)?.[0] ?? 0;
  const lines = message.log.filter(([number]) => number > last);
  if (lines.length) store.log = [...store.log, ...lines].slice(-LINES);
  if (store.charted !== null && store.span === "minutes") {  // of the hour the server has the points
    remember(store.charted ? store.models.get(store.charted) ?? {} : store.totals, message.time);
  }
  changed();
}

// A browser has six connections to a server for all tabs: a hidden tab needs none for its events.
export function connect() {
  const follow = () => (document.hidden ? following?.abort() : reconnect());
  document.addEventListener("visibilitychange", follow);
  follow();
}
