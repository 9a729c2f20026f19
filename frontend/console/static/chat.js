// A chat with one model, or with two side by side, over /v1/chat/completions' form.

import { html, useEffect, useLayoutEffect, useReducer, useRef, useState } from "./htm-preact.js";
import { call, eventsOf, store } from "./connection.js";
import { statusName } from "./models.js";
import { counted, number } from "./text.js";

const MAX_TOKENS = 2000;  // that are listed with their times
const NUMBERS = ["temperature", "top_p", "max_tokens", "seed"];
const NAMES = { temperature: "Temperature", top_p: "Top p", max_tokens: "Maximum tokens", seed: "Seed" };

class Answer {
  constructor() {
    Object.assign(this, { role: "assistant", content: "", reasoning: "", tools: [], tokens: [], finish: "", error: "",
      usage: null, first: null, last: null, began: performance.now(), ended: false, stopped: false });
  }

  // Takes a chunk of a stream, or a whole answer.
  take(chunk, now) {
    if (chunk.error) throw new Error(chunk.error.message ?? JSON.stringify(chunk.error));
    if (chunk.usage) this.usage = chunk.usage;
    const choice = chunk.choices?.[0];
    if (!choice) return;
    const delta = choice.delta ?? choice.message ?? {};
    const text = delta.content ?? "";
    this.content += text;
    this.reasoning += delta.reasoning_content ?? "";
    for (const part of delta.tool_calls ?? []) this.addTool(part);
    if (choice.finish_reason) this.finish = choice.finish_reason;
    if (text || delta.reasoning_content || delta.tool_calls) this.count(text, choice.logprobs?.content, now);
  }

  count(text, listed, now) {
    const gap = this.last === null ? now - this.began : now - this.last;
    this.first ??= now;
    this.last = now;
    const tokens = listed?.length ? listed : [{ token: text, logprob: null }];
    tokens.forEach((token, index) => {
      if (this.tokens.length < MAX_TOKENS) this.tokens.push({ ...token, ms: index ? 0 : gap });
    });
  }

  addTool(part) {
    const tool = (this.tools[part.index ?? this.tools.length] ??= { id: "", name: "", arguments: "" });
    tool.id ||= part.id ?? "";
    tool.name += part.function?.name ?? "";
    tool.arguments += part.function?.arguments ?? "";
  }

  // Whether it failed, or was stopped, before the model wrote anything.
  get unanswered() {
    return Boolean(this.error || this.stopped) && !this.content && !this.tools.length;
  }

  message() {
    const calls = this.tools.map((tool) => ({ id: tool.id, type: "function",
      function: { name: tool.name, arguments: tool.arguments } }));
    return { role: "assistant", content: this.content, ...(calls.length ? { tool_calls: calls } : {}) };
  }
}

// The messages of a chat for the next request, without questions that got no answer.
function messagesOf(entries) {
  return entries.filter((entry, place) => !(entry.unanswered || entries[place + 1]?.unanswered))
    .map((entry) => (entry instanceof Answer ? entry.message() : entry));
}

function parsed(title, text) {
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new Error(`${title} not valid JSON: ${error.message}`);
  }
}

function numberOf(name, text) {
  const value = Number(text);
  if (!Number.isFinite(value)) throw new Error(`${NAMES[name]} is "${text}"; it takes a number such as 0.5`);
  return value;
}

function bodyOf(model, settings, messages) {
  const body = { model, messages, stream: settings.stream };
  if (settings.stream) body.stream_options = { include_usage: true };
  for (const name of NUMBERS) if (settings[name].trim()) body[name] = numberOf(name, settings[name]);
  if (settings.stop) body.stop = settings.stop.split("\n").filter(Boolean);
  if (settings.tools.trim()) body.tools = parsed("The tools are", settings.tools);
  if (settings.format === "json_object") body.response_format = { type: "json_object" };
  if (settings.format === "json_schema") {
    const schema = parsed("The schema is", settings.schema);
    body.response_format = { type: "json_schema", json_schema: { name: "answer", schema } };
  }
  if (settings.logprobs) Object.assign(body, { logprobs: true, top_logprobs: 3 });
  return body;
}

async function ask(body, answer, signal, update) {
  try {
    const response = await call("console/chat/completions", { method: "POST", body, signal });
    if (body.stream) {
      for await (const data of eventsOf(response)) {
        if (data === "[DONE]") break;
        answer.take(JSON.parse(data), performance.now());
        update();
      }
    } else {
      answer.take(await response.json(), performance.now());
    }
  } catch (error) {
    if (signal.aborted) answer.stopped = true;
    else answer.error = error.message;
  }
  answer.ended = true;
  update();
}

const SETTINGS = { system: "", temperature: "", top_p: "", max_tokens: "", seed: "", stop: "", tools: "", schema: "{}",
  format: "text", stream: true, logprobs: false };

// Returns the names that the models have, each with its best state: that of a version which can serve, if one can.
function choicesOf(rows) {
  const found = new Map();
  for (const row of rows) if (found.get(row.name) !== "Healthy") found.set(row.name, row.status);
  return [...found].map(([name, status]) => ({ name, status }));
}

// Returns the model of each of two chats: the one that is chosen, or the first that the other chat has not.
function chosen([first, second], choices) {
  const able = choices.filter(({ status }) => status === "Healthy").map(({ name }) => name);
  const besides = (other) => able.find((name) => name !== other) ?? able[0] ?? "";
  const left = first ?? besides(second);
  return [left, second ?? besides(left)];
}

const TYPED = "\0";  // no model is called so

// All models, and a field for what else a request may name: an adapter, or another name of a model.
function ModelField({ title, name, choices, choose }) {
  const [typed, setTyped] = useState(false);
  const pick = (event) => {
    const isTyped = event.target.value === TYPED;
    setTyped(isTyped);
    choose(isTyped ? "" : event.target.value);
  };
  return html`<label>${title}<select value=${typed ? TYPED : name} onChange=${pick}>
      ${!typed && !choices.some((choice) => choice.name === name) && html`<option value=${name}>${name}</option>`}
      ${choices.map((choice) => html`<option key=${choice.name} value=${choice.name}
        disabled=${choice.status !== "Healthy"}>${choice.name}${choice.status === "Healthy" ? ""
          : ` (${statusName(choice.status).toLowerCase()})`}</option>`)}
      <option value=${TYPED}>Another name, or an adapter</option></select></label>
    ${typed && html`<label>${`${title}, name`}<input value=${name} onInput=${(event) => choose(event.target.value)} /></label>`}`;
}

export function Chat() {
  const [, update] = useReducer((count) => count + 1, 0);
  const [settings, setSettings] = useState(SETTINGS);
  const [names, setNames] = useState([null, null]);  // null: the first model that the other chat has not
  const [both, setBoth] = useState(false);
  const [images, setImages] = useState([]);
  const [problem, setProblem] = useState("");
  const chats = useRef([[], []]);
  const running = useRef(null);
  const frame = useRef(0);
  const choices = choicesOf(store.models.values());
  const models = chosen(names, choices);
  // A form that is in view stays there while the answer above it grows.
  const form = useRef();
  const inView = form.current && form.current.getBoundingClientRect().bottom <= innerHeight + 1;
  useLayoutEffect(() => { if (inView) form.current.scrollIntoView({ block: "nearest", behavior: "instant" }); });
  // Tokens may come faster than the page can be drawn.
  const draw = () => { frame.current ||= requestAnimationFrame(() => { frame.current = 0; update(); }); };

  const send = async (event) => {
    event.preventDefault();
    const field = event.target.elements.prompt;
    const text = field.value;
    if (running.current || !(text.trim() || images.length)) return;
    const content = images.length
      ? [{ type: "text", text }, ...images.map((url) => ({ type: "image_url", image_url: { url } }))]
      : text;
    const asked = { role: "user", content };
    let bodies;
    try {
      bodies = (both ? [0, 1] : [0]).map((index) => {
        const system = settings.system.trim() ? [{ role: "system", content: settings.system }] : [];
        return bodyOf(models[index], settings, [...system, ...messagesOf(chats.current[index]), asked]);
      });
    } catch (error) {
      setProblem(error.message);
      return;
    }
    setProblem("");
    field.value = "";
    setImages([]);
    field.focus();  // the button that was pressed is disabled now
    const controller = (running.current = new AbortController());
    update();
    await Promise.all(bodies.map((body, index) => {
      const answer = new Answer();
      chats.current[index].push(asked, answer);
      return ask(body, answer, controller.signal, draw);
    }));
    running.current = null;
    update();
  };
  const stop = () => running.current?.abort();
  const stopByHand = () => { stop(); form.current.elements.prompt.focus(); };
  const clear = () => { stop(); chats.current = [[], []]; update(); };
  useEffect(() => stop, []);

  return html`<h2>Chat</h2>
    <div class="row">
      ${(both ? [0, 1] : [0]).map((index) => html`<${ModelField} key=${index} title=${both ? `Model ${index + 1}` : "Model"}
        name=${models[index]} choices=${choices} choose=${(chosenName) =>
          setNames(names.map((name, place) => (place === index ? chosenName : name)))} />`)}
      <label class="check"><input type="checkbox" checked=${both} onChange=${(event) => setBoth(event.target.checked)} />
        Two models side by side</label>
      <button onClick=${clear}>New chat</button>
    </div>
    <${Settings} settings=${settings} change=${(more) => setSettings({ ...settings, ...more })} />
    <div class="panes">${(both ? [0, 1] : [0]).map((index) => html`<section key=${index} class="pane"
      aria-label=${`${both ? `Chat ${index + 1}` : "Chat"} with ${models[index]}`}>${both && html`<h3>${models[index]}</h3>`}
      ${chats.current[index].map((entry, place) => html`<${Message} key=${place} entry=${entry}
        logprobs=${settings.logprobs} />`)}</section>`)}</div>
    <p class="skip" role="status">${running.current ? "Answering" : "Ready"}</p>
    <form ref=${form} class="panel" onSubmit=${send} aria-label="Message">
      <label class="wide">Message<textarea name="prompt" rows="3" onKeyDown=${(event) => {
        if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
          event.preventDefault();
          event.target.form.requestSubmit();
        }
      }}></textarea></label>
      ${problem && html`<p class="error" role="alert">${problem}</p>`}
      <div class="row">
        <button class="main" disabled=${running.current !== null}>Send</button>
        <button type="button" disabled=${running.current === null} onClick=${stopByHand}>Stop</button>
        <${Pictures} images=${images} setImages=${setImages} />
        <span class="note">Enter sends, Shift and Enter begin a new line.</span>
      </div></form>`;
}

function Settings({ settings, change }) {
  const text = (name) => ({ value: settings[name], onInput: (event) => change({ [name]: event.target.value }) });
  const check = (name) => ({ checked: settings[name], onChange: (event) => change({ [name]: event.target.checked }) });
  return html`<details class="panel"><summary>Parameters</summary>
    <label class="wide">System prompt<textarea rows="2" ...${text("system")}></textarea></label>
    <div class="row">${NUMBERS.map((name) => html`<label key=${name}>${NAMES[name]}
        <input inputmode="decimal" size="6" ...${text(name)} /></label>`)}
      <label>Answer<select value=${settings.format} onChange=${(event) => change({ format: event.target.value })}>
        <option value="text">text</option><option value="json_object">JSON</option>
        <option value="json_schema">JSON of a schema</option></select></label>
      <label class="check"><input type="checkbox" ...${check("stream")} />Stream</label>
      <label class="check"><input type="checkbox" ...${check("logprobs")} />Probabilities of tokens</label></div>
    ${settings.format === "json_schema" && html`<label class="wide">Schema, in JSON
      <textarea rows="4" spellcheck="false" ...${text("schema")}></textarea></label>`}
    <label class="wide">Stop at, one text in each line<textarea rows="1" ...${text("stop")}></textarea></label>
    <label class="wide">Tools, as OpenAI has them: a list in JSON
      <textarea rows="3" spellcheck="false" ...${text("tools")}></textarea></label></details>`;
}

function Pictures({ images, setImages }) {
  const add = async (event) => {
    const read = (file) => new Promise((resolve, reject) => {
      const reader = new FileReader();
      reader.onload = () => resolve(reader.result);
      reader.onerror = () => reject(reader.error);
      reader.readAsDataURL(file);
    });
    const urls = await Promise.all([...event.target.files].map(read));
    event.target.value = "";
    setImages([...images, ...urls]);
  };
  return html`<label>Images, for models that see<input type="file" accept="image/*" multiple onChange=${add} /></label>
    ${images.length > 0 && html`<button type="button" onClick=${() => setImages([])}>
      Remove ${counted(images.length, "image")}</button>`}`;
}

function Message({ entry, logprobs }) {
  if (entry instanceof Answer) return html`<${Reply} answer=${entry} logprobs=${logprobs} />`;
  const parts = typeof entry.content === "string" ? [{ type: "text", text: entry.content }] : entry.content;
  return html`<article class="message user"><div class="who">You</div>${parts.map((part) =>
    part.type === "text" ? html`<p class="text">${part.text}</p>`
      : html`<img src=${part.image_url.url} alt="What you sent" />`)}</article>`;
}

// What a model wrote is only ever text here.
function Reply({ answer, logprobs }) {
  const coloured = logprobs && answer.tokens.some((token) => token.logprob !== null);
  return html`<article class="message assistant" aria-busy=${!answer.ended}>
    <div class="who">Model</div>
    ${answer.reasoning && html`<details><summary>Reasoning</summary><p class="text">${answer.reasoning}</p></details>`}
    ${coloured && answer.tokens.length < MAX_TOKENS
      ? html`<p class="text">${answer.tokens.map((token) => html`<span class=${`token p${band(token.logprob)}`}
          title=${tokenText(token)}>${token.token}</span>`)}</p>`
      : html`<p class="text">${answer.content}</p>`}
    ${answer.tools.map((tool) => html`<pre><code>${tool.name}(${tool.arguments})</code></pre>`)}
    ${answer.error && html`<p class="error" role="alert">${answer.error}</p>`}
    ${answer.stopped && html`<p class="note">Stopped.</p>`}
    ${answer.first !== null && html`<${Timings} answer=${answer} />`}</article>`;
}

const band = (logprob) => (logprob === null ? "" : Math.min(3, Math.floor(Math.exp(logprob) * 4)));
const likely = (token) => (token.logprob === null ? "–" : `${number(Math.exp(token.logprob) * 100, 1)} %`);
const tokenText = (token) => `${likely(token)}, ${number(token.ms, 1)} ms`;

function Timings({ answer }) {
  const tokens = answer.usage?.completion_tokens ?? answer.tokens.length;
  const seconds = (answer.last - answer.first) / 1000;
  const gaps = answer.tokens.slice(1).map((token) => token.ms).sort((one, other) => one - other);
  const figures = [
    `first token after ${number(answer.first - answer.began)} ms`,
    counted(tokens, "token"),
    ...(seconds > 0 && tokens > 1 ? [`${number((tokens - 1) / seconds, 1)} tokens/s`] : []),
    ...(gaps.length ? [`between tokens ${number(gaps[gaps.length >> 1], 1)} ms, at most ${number(gaps.at(-1), 1)} ms`] : []),
    ...(answer.finish ? [`ended by ${answer.finish}`] : []),
  ];
  const [open, setOpen] = useState(false);
  return html`<p class="note timings">${figures.join(" · ")}</p>
    <details onToggle=${(event) => setOpen(event.target.open)}><summary class="note">Tokens</summary>
      ${open && html`<div class="scroll" tabindex="0" role="region" aria-label="Tokens"><table><thead><tr><th scope="col">Token</th><th scope="col" class="number">ms</th>
        <th scope="col" class="number">Probability</th><th scope="col">Others</th></tr></thead>
        <tbody>${answer.tokens.map((token) => html`<tr><td><code>${JSON.stringify(token.token)}</code></td>
          <td class="number">${number(token.ms, 1)}</td><td class="number">${likely(token)}</td>
          <td class="note">${(token.top_logprobs ?? []).map((other) => `${JSON.stringify(other.token)} ${likely(other)}`)
            .join(", ")}</td></tr>`)}</tbody></table></div>`}</details>`;
}
