// uPlot reads the browser's language when it loads, and fails if that is none (Chromium says en-US@posix without a locale).
// Its numbers are English now, as the page is.
Object.defineProperty(navigator, "language", { value: "en", configurable: true });
