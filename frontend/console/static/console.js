// The frame of the page: its parts by the fragment of the address, the key, and the theme.

import { html, render, useEffect, useReducer, useRef, useState } from "./htm-preact.js";
import { connect, setKey, store } from "./connection.js";
import { Chat } from "./chat.js";
import { Live } from "./live.js";
import { Model, Models, Outcome } from "./models.js";
import { RequestPage, Requests } from "./requests.js";
import { counted, moment, number } from "./text.js";

const THEME = "lmi-server theme";
const PARTS = [["models", "Models"], ["live", "Live"], ["requests", "Requests"], ["chat", "Chat"]];

function useStore() {
  const [, update] = useReducer((count) => count + 1, 0);
  useEffect(() => {
    store.listeners.add(update);
    update();  // the server may have answered before this effect ran
    return () => store.listeners.delete(update);
  }, []);
}

function useFragment() {
  const [fragment, setFragment] = useState(location.hash.slice(1));
  useEffect(() => {
    const listener = () => setFragment(location.hash.slice(1));
    addEventListener("hashchange", listener);
    listener();  // it may have changed before this effect ran
    return () => removeEventListener("hashchange", listener);
  }, []);
  return fragment;
}

function setTheme(name) {
  if (name) localStorage.setItem(THEME, name);
  else localStorage.removeItem(THEME);
  if (name) document.documentElement.dataset.theme = name;
  else delete document.documentElement.dataset.theme;
  dispatchEvent(new Event("theme"));  // the charts draw their colours themselves
}

function Theme() {
  const [name, choose] = useState(localStorage.getItem(THEME) ?? "");
  return html`<select aria-label="Theme" value=${name}
    onChange=${(event) => { choose(event.target.value); setTheme(event.target.value); }}>
    <option value="">System theme</option><option value="light">Light</option><option value="dark">Dark</option>
  </select>`;
}

function Key() {
  const dialog = useRef();
  const wanted = store.state === "key";
  useEffect(() => {
    if (wanted && !dialog.current.open) dialog.current.showModal();
  }, [wanted, store.refusals]);
  const use = (event) => {
    event.preventDefault();
    dialog.current.close();
    setKey(event.target.elements.key.value.trim());
  };
  return html`<button onClick=${() => dialog.current.showModal()}>Key</button>
    <dialog ref=${dialog} aria-labelledby="key-title"><form onSubmit=${use}>
      <h2 id="key-title">Management key</h2>
      ${wanted && html`<p class="error" role="alert">${store.error}</p>`}
      <label class="wide">One of management_api_keys
        <input name="key" type="password" autocomplete="off" pattern="\\s*[!-~]*\\s*"
          title="Letters, digits and signs of ASCII" /></label>
      <p class="note">It stays in this tab until you close it.</p>
      <div class="row"><button class="main">Use this key</button>
        <button type="button" onClick=${() => dialog.current.close()}>Cancel</button></div>
    </form></dialog>`;
}

function Status() {
  const models = [...store.models.values()];
  const withStatus = (status) => models.filter((model) => model.status === status).length;
  const failed = withStatus("FAILED");
  const text = { open: "", connecting: store.time ? "No connection" : "Connecting", key: "A key is needed" }[store.state];
  return html`<span role="status" class=${text || failed ? "error" : "quiet"}>
    ${text || `${withStatus("Healthy")} of ${counted(models.length, "model")} can serve${failed ? `, ${number(failed)} failed` : ""}`}
  </span>`;
}

function Stale() {
  return html`<p class="banner error" role="alert">${`The server does not answer. Everything here is as it was at ${
    moment(store.time)}.`}</p>`;
}

const SHOWN = { models: Models, model: Model, live: Live, requests: Requests, request: RequestPage, chat: null };
const ABOVE = { model: "models", request: "requests" };  // the part that a page is in

function decoded(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;  // an address that somebody typed
  }
}

function App() {
  useStore();
  const fragment = useFragment();
  const [named, ...rest] = fragment.split("/");
  const part = Object.hasOwn(SHOWN, named) ? named : "models";
  const shown = SHOWN[part];
  const label = decoded(rest.join("/"));
  const stale = store.state !== "open" && store.time !== null;
  useEffect(() => { document.title = `${label || part} - lmi-server`; }, [fragment]);
  return html`<a class="skip" href="#main" onClick=${(event) => {
      event.preventDefault();
      document.getElementById("main").focus();
    }}>Skip to content</a>
    <header>
      <h1>lmi-server <span class="quiet">${store.server?.version ?? ""}</span></h1>
      <nav aria-label="Parts">${PARTS.map(([name, title]) => html`<a href=${`#${name}`}
        aria-current=${(ABOVE[part] ?? part) === name ? "page" : null}>${title}</a>`)}</nav>
      <span class="spring"></span><${Status} /><${Theme} /><${Key} />
    </header>
    <main id="main" tabindex="-1" class=${stale ? "stale" : ""}>
      ${stale && html`<${Stale} />`}
      <${Outcome} />
      ${shown && html`<${shown} key=${label} label=${label} />`}
      <div hidden=${part !== "chat"}><${Chat} /></div>
    </main>`;
}

setTheme(localStorage.getItem(THEME) ?? "");
const place = document.getElementById("console");
place.replaceChildren();
render(html`<${App} />`, place);
connect();
