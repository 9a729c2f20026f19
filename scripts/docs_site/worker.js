// Browsers start no worker for a page that is opened from the disk. This class runs a worker's script in a frame, so that
// the search works there, too.
"use strict";

if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    #frame = document.createElement("iframe");
    #loaded;

    constructor(url) {
      super();
      this.#frame.hidden = true;
      document.body.append(this.#frame);
      const inside = this.#frame.contentWindow;
      const answer = (data) => {
        const event = new MessageEvent("message", { data });
        this.dispatchEvent(event);
        this.onmessage?.(event);
      };
      inside.postMessage = (data) => answer(structuredClone(data));
      inside.importScripts = (...urls) =>
        urls.reduce((before, each) => before.then(() => this.#load(each)), Promise.resolve());
      this.#loaded = this.#load(url);
    }

    #load(url) {
      return new Promise((resolve, reject) => {
        const script = this.#frame.contentDocument.createElement("script");
        script.src = new URL(url, location.href).href;
        script.onload = resolve;
        script.onerror = reject;
        this.#frame.contentDocument.body.append(script);
      });
    }

    postMessage(data) {
      const event = new MessageEvent("message", { data: structuredClone(data) });
      this.#loaded.then(() => this.#frame.contentWindow.dispatchEvent(event));
    }

    terminate() {
      this.#frame.remove();
    }
  };
}
