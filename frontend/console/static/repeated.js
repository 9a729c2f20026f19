// A call that is made again and again while a part of the page is shown.

import { html, useEffect, useState } from "./htm-preact.js";
import { call, store } from "./connection.js";

const REFRESH_MS = 2000;

// The result is null before the first answer. Without `repeats` the call is made once, and again after a lost connection.
export function useRepeated(path, query, repeats) {
  const [found, setFound] = useState(null);
  const [error, setError] = useState("");
  const key = JSON.stringify([path, query, repeats]);
  useEffect(() => {
    const controller = new AbortController();
    let timer = 0;
    const ask = async () => {
      try {
        if (!document.hidden) setFound(await (await call(path, { query, signal: controller.signal })).json());
        setError("");
      } catch (raised) {
        if (!controller.signal.aborted) setError(raised.message);
      }
      if (repeats && !controller.signal.aborted) timer = setTimeout(ask, REFRESH_MS);
    };
    ask();
    return () => { controller.abort(); clearTimeout(timer); };
  }, [key, store.connections]);
  return [found, error];
}

export const Problem = ({ error }) =>
  error && store.state === "open" && html`<p class="error" role="alert">${error}</p>`;
