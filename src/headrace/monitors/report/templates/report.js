// Draws the charts of report.html from the inlined JSON. All text goes in as textContent.
"use strict";
(() => {
  const charts = JSON.parse(document.getElementById("chart-data").textContent);
  const PLOT_HEIGHT = 210;
  const COLOURS = 8;
  const MARKED_POINTS = 40; // up to so many points, each one is marked
  const drawn = [];

  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  // 0.213, 12.4, 8.1k, 3e-4: short enough for an axis, the same everywhere.
  const figure = (value) => {
    if (value === null || value === undefined) return "–";
    const size = Math.abs(value);
    if (size !== 0 && size < 1e-3) return value.toExponential(2).replace(/\.?0+e/, "e");
    if (size >= 1e4) return new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 3 }).format(value);
    return String(Number(value.toPrecision(4)));
  };

  // Ticks of one axis share their decimals: as many as the distance between two of them needs.
  const tickTexts = (_plot, ticks, _axis, _space, step) => {
    const largest = Math.max(...ticks.map(Math.abs));
    if (largest < 1e-2 || largest >= 1e4) return ticks.map(figure);
    let decimals = 0;
    while (decimals < 6 && Math.abs(step * 10 ** decimals - Math.round(step * 10 ** decimals)) > 1e-6) decimals += 1;
    return ticks.map((tick) => tick.toFixed(decimals));
  };

  // Curves stacked from the first up; a value that was not recorded adds nothing.
  const stack = (curves) => {
    let below = null;
    return curves.map((curve) => {
      below = curve.values.map((value, i) => (value ?? 0) + (below ? below[i] : 0));
      return below;
    });
  };

  const yRange = (scale) => (_plot, low, high) => {
    if (low === null || high === null) return [0, 1];
    if (scale === "unit") return [0, 1];
    const room = (high - low) * 0.08 || Math.abs(high) * 0.1 || 1;
    return scale === "zero" ? [0, high > 0 ? high * 1.08 : 1] : [low - room, high + room];
  };

  const xRange = (_plot, low, high) => (low === high ? [low - 1, high + 1] : [low, high]);

  // Room for the longest label, at 12 px about 7 px a character.
  const axisSize = (_plot, labels) => Math.max(36, 14 + 7 * Math.max(0, ...(labels || []).map((text) => text.length)));

  const legendOf = (list, chart) => {
    const figures = chart.curves.map((curve, i) => {
      const item = document.createElement("li");
      const swatch = document.createElement("i");
      swatch.style.background = `var(--s${i % COLOURS})`;
      const name = document.createElement("span");
      name.className = "name";
      name.textContent = curve.label;
      const value = document.createElement("span");
      value.className = "figure";
      item.append(swatch, name, value);
      list.append(item);
      return value;
    });
    const at = document.createElement("li");
    at.className = "at";
    list.append(at);
    return (index) => {
      const shown = index ?? chart.steps.length - 1;
      figures.forEach((element, i) => { element.textContent = figure(chart.curves[i].values[shown]); });
      at.textContent = `step ${chart.steps[shown]}`;
    };
  };

  const axis = (more) => ({
    stroke: css("--muted"),
    font: `12px ${css("--sans")}`,
    grid: { stroke: css("--grid"), width: 1 },
    ticks: { show: false },
    ...more,
  });

  const optionsOf = (chart, width, show) => {
    const series = chart.curves.map((curve, i) => {
      const colour = css(`--s${i % COLOURS}`);
      return {
        label: curve.label,
        stroke: colour,
        width: chart.stacked ? 1 : 1.75,
        fill: chart.stacked ? colour + "b0" : undefined,
        spanGaps: true,
        points: { show: chart.steps.length <= MARKED_POINTS, size: 6, fill: colour },
      };
    });
    return {
      width,
      height: PLOT_HEIGHT,
      padding: [8, 20, 0, 0],
      legend: { show: false },
      cursor: { y: false, drag: { x: true, y: false }, sync: { key: "step", scales: ["x", null] }, points: { size: 7 } },
      scales: { x: { time: false, range: xRange }, y: { range: yRange(chart.scale) } },
      series: [{ label: "step" }, ...series],
      // In a stack each area ends at the curve below it; the lowest one ends at 0.
      bands: chart.stacked ? series.slice(1).map((_, i) => ({ series: [i + 2, i + 1] })) : [],
      axes: [
        axis({ size: 28, gap: 4, space: 44, incrs: [1, 2, 5, 10, 20, 25, 50, 100, 200, 250, 500, 1e3, 2e3, 2.5e3, 5e3, 1e4, 2e4, 5e4, 1e5] }),
        axis({ size: axisSize, gap: 6, space: 34, values: tickTexts }),
      ],
      hooks: { setCursor: [(plot) => show(plot.cursor.left >= 0 ? plot.cursor.idx : null)] },
    };
  };

  const dataOf = (chart) => [
    chart.steps,
    ...(chart.stacked ? stack(chart.curves) : chart.curves.map((curve) => curve.values)),
  ];

  const draw = (element) => {
    const chart = charts[Number(element.dataset.chart)];
    const list = element.parentElement.querySelector(".legend");
    list.replaceChildren();
    element.replaceChildren();
    const show = legendOf(list, chart);
    show(null);
    return new uPlot(optionsOf(chart, element.clientWidth, show), dataOf(chart), element);
  };

  const elements = [...document.querySelectorAll("[data-chart]")];
  const drawAll = () => {
    drawn.splice(0).forEach((plot) => plot.destroy());
    elements.forEach((element) => drawn.push(draw(element)));
  };

  drawAll();
  new ResizeObserver(() => {
    drawn.forEach((plot, i) => {
      const width = elements[i].clientWidth;
      if (width > 0 && width !== plot.width) plot.setSize({ width, height: PLOT_HEIGHT });
    });
  }).observe(document.querySelector("main"));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
  document.documentElement.dataset.charts = String(drawn.length);
})();
