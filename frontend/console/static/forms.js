// Forms whose submission is a call.

import { html, useState } from "./htm-preact.js";

// A form whose submission is a call; it shows what came of it.
export function Action({ title, run, button, children, danger }) {
  const [state, setState] = useState({ busy: false, error: "", done: "" });
  const submit = async (event) => {
    event.preventDefault();
    const given = Object.fromEntries([...new FormData(event.target)].map(([name, text]) => [name, text.trim()]));
    setState({ busy: true, error: "", done: "" });
    try {
      setState({ busy: false, error: "", done: (await run(given)) ?? "" });
    } catch (error) {
      setState({ busy: false, error: error.message, done: "" });
    }
  };
  return html`<form onSubmit=${submit} aria-label=${title}>
    <div class="row">${children}
      <button class=${danger ? "danger" : "main"} disabled=${state.busy}>${state.busy ? "…" : button}</button></div>
    ${state.error && html`<p class="error" role="alert">${state.error}</p>`}
    <p class="done" role="status">${state.done}</p>
  </form>`;
}

export const statusOf = async (response) => (await response.json()).status;
