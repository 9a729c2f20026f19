"use strict";
// Draws each plot of the page, and draws it anew when the system changes between light and dark.
(() => {
  const plots = JSON.parse(document.getElementById("plots").textContent);
  const height = 280;
  const drawn = new Map();

  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const number = (value) => value == null ? "–" : Number(value.toPrecision(5)).toLocaleString();

  function series(plot) {
    return plot.series.map(([label], index) => {
      const stroke = colour(`--s${index % 8}`);
      const dots = { show: true, size: 6, fill: stroke };
      const style = { lines: {}, points: { paths: () => null, points: dots }, both: { points: dots } }[plot.style];
      return { label, stroke, width: 1.5, spanGaps: true, value: (_, value) => number(value), ...style };
    });
  }

  function axis(label) {
    const line = { stroke: colour("--line"), width: 1 };
    return { label, stroke: colour("--faint"), grid: line, ticks: line };
  }

  function draw(figure, plot) {
    drawn.get(figure)?.destroy();
    const options = {
      width: figure.clientWidth, height,
      scales: { x: { time: false }, y: { range: { min: { pad: 0, soft: 0, mode: 1 }, max: { pad: 0.1, soft: 0.001, mode: 2 } } } },
      axes: [axis(plot.x_label), { ...axis(plot.y_label), size: 70 }],
      series: [{ label: plot.x_label, value: (_, value) => number(value) }, ...series(plot)],
    };
    drawn.set(figure, new uPlot(options, [plot.x, ...plot.series.map(([, values]) => values)], figure));
  }

  const figures = [...document.querySelectorAll("figure[data-plot]")];
  const all = () => figures.forEach((figure) => draw(figure, plots[figure.dataset.plot]));
  const resized = new ResizeObserver((entries) => {
    for (const { target } of entries) {
      const plot = drawn.get(target);
      if (plot && plot.width !== target.clientWidth) plot.setSize({ width: target.clientWidth, height });
    }
  });
  all();
  figures.forEach((figure) => resized.observe(figure));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", all);
})();
