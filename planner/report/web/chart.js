// What all charts share: one x axis, one cursor, one way to zoom, a tip, and drawing on a canvas.

const charts = [];
const narrow = () => window.innerWidth < 640;
const gutter = () => (narrow() ? 66 : 112); // left of every plot, so that times are in line

const RIGHT = 18; // so that the last time on the axis is whole

/** All charts are as wide as the one that has a scroll bar beside it. */
const chartWidth = () => Math.max(240, byId("map-scroll").clientWidth);

/** Splits of the time axis in its own unit, uPlot's choice of increments. */
function timeAxis(view, titled) {
  return {
    show: titled,
    stroke: () => colour.soft,
    font: `11px ${FONT}`,
    size: 26,
    gap: 3,
    space: narrow() ? 64 : 96,
    grid: { stroke: () => colour.grid, width: 1 },
    ticks: { stroke: () => colour.grid, width: 1, size: 4 },
    values: (u, splits) => {
      const [scale, unit] = timeUnit(view.max);
      const step = splits.length > 1 ? (splits[1] - splits[0]) / scale : 1;
      const places = Math.max(0, Math.min(6, Math.ceil(-Math.log10(step) - 1e-6)));
      return splits.map((us) => `${(us / scale).toFixed(places)} ${unit}`);
    },
    incrs: [1, 2, 5].flatMap((f) => Array.from({ length: 14 }, (_, power) => f * 10 ** (power - 3))).sort((a, b) => a - b),
  };
}

/** The y axis of a chart that labels its rows itself: only room. */
const NO_AXIS = { show: false };

/**
 * A chart in `element`. `options`: height; label (for those who do not see it); data and series if
 * uPlot draws curves; draw(u, ctx, plot) for what it does not, `plot` in canvas pixels;
 * tip(us, y) what the tip says, y in CSS pixels, or null; click(us, y); keyY(step), where the
 * keyboard's cursor goes when an arrow goes up or down; axis: whether it shows times.
 */
function makeChart(element, view, options) {
  const data = options.data ?? [[0, view.max], [null, null]];
  const u = new uPlot(
    {
      width: chartWidth(),
      height: options.height,
      padding: [6, RIGHT, options.axis === false ? 4 : 0, options.yAxis ? 0 : gutter],
      legend: { show: false },
      cursor: {
        y: false,
        points: { show: false },
        drag: { x: true, y: false, setScale: false, dist: 4 },
        bind: { dblclick: () => () => (view.reset(), null) },
      },
      scales: {
        x: { time: false, range: () => [view.min, view.max] },
        y: { range: () => options.yRange?.() ?? [0, 1] },
      },
      axes: [timeAxis(view, options.axis !== false), options.yAxis ?? NO_AXIS],
      series: options.series ?? [{}, { show: false }],
      hooks: {
        setSelect: [(self) => select(self, view)],
        setScale: [(self, key) => key === "x" && (element.dataset.range = `${self.scales.x.min} ${self.scales.x.max}`)],
        ...(options.under ? { drawAxes: [(self) => clipped(self, options.under)] } : {}),
        ...(options.draw ? { draw: [(self) => clipped(self, options.draw)] } : {}),
      },
    },
    data,
    element,
  );
  const chart = { u, element, view, ...options };
  charts.push(chart);
  element.setAttribute("tabindex", "0");
  element.setAttribute("role", "application");
  element.setAttribute("aria-label", options.label);
  u.root.querySelector("canvas").setAttribute("aria-hidden", "true");
  listen(chart);
  view.on("range", () => u.setScale("x", { min: view.min, max: view.max }));
  view.on("cursor", () => placeCursor(chart));
  new ResizeObserver(() => resize(chart)).observe(element);
  return chart;
}

function clipped(u, draw) {
  const ratio = uPlot.pxRatio;
  const { left, top, width, height } = u.bbox;
  u.ctx.save();
  draw(u, u.ctx, { left, top, width, height, ratio });
  u.ctx.restore();
}

/** Restricts drawing to the plot itself; labels in the gutter are drawn before. */
function clipToPlot(ctx, plot) {
  ctx.beginPath();
  ctx.rect(plot.left, plot.top, plot.width, plot.height);
  ctx.clip();
}

/** Canvas pixels of a time; linear, so that a million bars need no call into the library. */
function xScale(view, plot) {
  const perUs = plot.width / (view.max - view.min);
  return (us) => plot.left + (us - view.min) * perUs;
}

function select(u, view) {
  const { left, width } = u.select;
  if (width < 4) return;
  const from = u.posToVal(left, "x");
  const to = u.posToVal(left + width, "x");
  u.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
  view.show(from, to);
}

function resize({ u, height }) {
  const width = chartWidth();
  if (width === u.width) return;
  u.setSize({ width, height: u.height ?? height });
}

function redrawAll() {
  for (const { u } of charts) u.redraw(false, true);
}

function placeCursor({ u, view }) {
  const us = view.cursor;
  const seen = us !== null && us >= view.min && us <= view.max;
  u.setCursor({ left: seen ? u.valToPos(us, "x") : -10, top: seen ? 1 : -10 }, false);
}

// -- pointer ---------------------------------------------------------------------------------------

function listen(chart) {
  const { u, view } = chart;
  const place = (event) => {
    const box = u.over.getBoundingClientRect();
    const x = Math.min(Math.max(0, event.clientX - box.left), box.width);
    return { us: u.posToVal(x, "x"), y: event.clientY - box.top };
  };
  u.over.addEventListener("pointermove", (event) => {
    const { us, y } = place(event);
    chart.y = y;
    view.point(us);
    showTip(chart.tip(us, y), event.clientX, event.clientY);
  });
  u.over.addEventListener("pointerleave", () => {
    hideTip();
    view.point(null);
  });
  let pressed = null;
  u.over.addEventListener("pointerdown", (event) => (pressed = [event.clientX, event.clientY]));
  u.over.addEventListener("click", (event) => {
    const moved = pressed && Math.hypot(event.clientX - pressed[0], event.clientY - pressed[1]) > 4;
    if (moved || event.detail > 1) return;
    const { us, y } = place(event);
    chart.click?.(us, y);
  });
  u.over.addEventListener("wheel", (event) => wheel(event, view, place(event).us, u), { passive: false });
}

/** Ctrl and the wheel (a pinch on a touchpad) zoom, Shift and the wheel or a sideways one pan. */
function wheel(event, view, us, u) {
  const sideways = event.shiftKey ? event.deltaY || event.deltaX : event.deltaX;
  if (event.ctrlKey || event.metaKey) {
    view.zoom(Math.exp(Math.max(-60, Math.min(60, event.deltaY)) * 0.01), us);
  } else if (Math.abs(sideways) > (event.shiftKey ? 0 : Math.abs(event.deltaY))) {
    view.pan(sideways / u.over.clientWidth);
  } else {
    return;
  }
  event.preventDefault();
}

// -- the tip ---------------------------------------------------------------------------------------

function showTip(content, x, y) {
  const tip = byId("tip");
  if (content === null) {
    hideTip();
    return;
  }
  tip.replaceChildren(...content);
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  const left = x + 16 + box.width > window.innerWidth ? x - 16 - box.width : x + 16;
  const top = y + 18 + box.height > window.innerHeight ? y - 12 - box.height : y + 18;
  tip.style.left = `${Math.max(4, left)}px`;
  tip.style.top = `${Math.max(4, top)}px`;
}

function hideTip() {
  byId("tip").hidden = true;
}

/** Shows the tip where the keyboard's cursor is, and says it to those who listen. */
function readOut(chart) {
  const { u, view } = chart;
  if (view.cursor === null) return;
  const box = u.over.getBoundingClientRect();
  const y = chart.y ?? box.height / 2;
  chart.y = y;
  const content = chart.tip(view.cursor, y);
  showTip(content, box.left + u.valToPos(view.cursor, "x"), box.top + y);
  const said = (content ?? []).map((part) => part.textContent ?? part).join(". ");
  byId("live").textContent = said || formatAt(view.cursor, view.max - view.min);
}

const line = (text, kind) => node("div", { class: kind }, text);
const strong = (text) => node("strong", {}, text);
