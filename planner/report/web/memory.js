// Memory over time, stacked by kind, under the budget.

const MEMORY_HEIGHT = 230;
const FAR = 2.5; // a budget further above what is drawn is told, not drawn

function makeMemory(model, view) {
  const kinds = model.curve.kinds;
  const budget = model.facts.hardware?.device_bytes ?? null;
  const peak = model.curve.peak_bytes;
  const without = unlimited(model);
  const drawn = budget !== null && budget <= Math.max(peak * FAR, without?.peak ?? 0);
  const top = Math.max(peak, drawn ? budget : 0, without?.peak ?? 0, 1) * 1.1;
  // uPlot fills each curve down to 0: the highest sum first, the others over it.
  const stacked = stack(model, kinds.length);
  const stepped = uPlot.paths.stepped({ align: 1 });
  const series = kinds
    .map((kind) => ({
      paths: stepped,
      points: { show: false },
      width: 0,
      fill: () => colour[kind],
      stroke: () => colour[kind],
    }))
    .reverse();
  makeChart(byId("memory"), view, {
    height: MEMORY_HEIGHT,
    label: `Memory on the device over time: at most ${formatBytes(peak)}. Arrows pan, plus and minus zoom, Shift and arrows move the cursor.`,
    data: [stacked.time, ...stacked.sums.toReversed()],
    series: [{}, ...series],
    yRange: () => [0, top],
    yAxis: memoryAxis(),
    draw: (u, ctx, plot) => {
      if (without) drawUnlimited(u, ctx, plot, model, view, without);
      drawMemory(u, ctx, plot, { model, view, budget, drawn, peak });
    },
    tip: (us) => memoryTip(model, view, us, budget),
  });
  legend("memory-legend", kinds.map((kind) => [kind, kind]));
  if (without) byId("memory-legend").append(node("li", {}, "╌ without a limit"));
  for (const tier of model.tiers) makeTier(model, view, tier);
  view.on("cursor", () => memoryReadout(model, view));
  memoryReadout(model, view);
}

/** What would be live without a limit, by op, and its peak in bytes; null where nothing leaves. */
function unlimited(model) {
  if (!model.unlimited?.length) return null;
  const peak = model.unlimited.reduce((most, pages) => Math.max(most, pages), 0) * model.facts.page_size;
  return peak > model.curve.peak_bytes ? { pages: model.unlimited, peak } : null;
}

/** A dashed outline: each op's level from its start to the next one's. One step a pixel is enough. */
function drawUnlimited(u, ctx, plot, model, view, { pages, peak }) {
  const x = xScale(view, plot);
  const y = (count) => u.valToPos(count * model.facts.page_size, "y", true);
  const from = Math.max(0, countUpTo(model.opStart, view.min) - 1);
  ctx.save();
  clipToPlot(ctx, plot);
  ctx.strokeStyle = colour.soft;
  ctx.lineWidth = 1.2 * plot.ratio;
  ctx.setLineDash([2 * plot.ratio, 2 * plot.ratio]);
  ctx.beginPath();
  let drawnTo = -Infinity;
  let most = 0;
  for (let op = from; op < model.ops && model.opStart[op] <= view.max; op += 1) {
    most = Math.max(most, pages[op]);
    const at = x(model.opStart[op]);
    if (at - drawnTo < 1) continue;
    ctx.lineTo(at, y(most));
    drawnTo = at;
    most = 0;
  }
  ctx.stroke();
  ctx.restore();
  ctx.font = `${11 * plot.ratio}px ${FONT}`;
  ctx.textBaseline = "bottom";
  label(ctx, plot, `without a limit ${formatBytes(peak)}`, plot.left + 6 * plot.ratio, plot.top + 15 * plot.ratio, colour.soft, "left");
}

const TIER_NAMES = { host: "host memory", disk: "disk" };

/** A low chart of the bytes in a tier below the device. */
function makeTier(model, view, { name, peak_bytes: peak }) {
  const times = model.tierTime[name];
  const levels = Float64Array.from(model[`${name}_pages`], (pages) => pages * model.facts.page_size);
  const limit = model.facts.hardware[`${name}_bytes`];
  const element = node("div", { class: "chart", id: `tier-${name}` });
  const heading = `${TIER_NAMES[name]}: at most ${formatBytes(peak)}${limit === null ? "" : ` of ${formatBytes(limit)}`}`;
  byId("tier-charts").append(node("h3", {}, heading), element);
  const at = (us) => levels[Math.max(0, countUpTo(times, us) - 1)] ?? 0;
  makeChart(element, view, {
    height: 84,
    axis: false,
    label: `Bytes in ${heading}. Arrows pan, plus and minus zoom.`,
    data: [[...times, model.length], [...levels, levels.at(-1) ?? 0]],
    series: [{}, { paths: uPlot.paths.stepped({ align: 1 }), points: { show: false }, width: 0, fill: () => colour[name], stroke: () => colour[name] }],
    yRange: () => [0, Math.max(peak, 1) * 1.1],
    yAxis: memoryAxis(),
    tip: (us) => [strong(`${formatBytes(at(us))} in ${TIER_NAMES[name]} at ${formatAt(us, view.max - view.min)}`)],
  });
}

function memoryAxis() {
  return {
    stroke: () => colour.soft,
    font: `11px ${FONT}`,
    size: () => gutter(),
    gap: 6,
    grid: { stroke: () => colour.grid, width: 1 },
    ticks: { show: false },
    incrs: Array.from({ length: 50 }, (_, power) => 2 ** power),
    space: 34,
    values: (u, splits) => splits.map(shortBytes),
  };
}

/** Sums over the kinds so far, with a last point at the iteration's end. */
function stack(model, count) {
  const points = model.curveTime.length;
  const times = new Float64Array(points + 1);
  times.set(model.curveTime);
  times[points] = Math.max(model.length, points ? model.curveTime[points - 1] : 0);
  const sums = [];
  let below = new Float64Array(points + 1);
  for (let kind = 0; kind < count; kind += 1) {
    const level = model[`curve_${kind}`];
    const sum = new Float64Array(points + 1);
    for (let i = 0; i < points; i += 1) sum[i] = below[i] + level[i] * model.facts.page_size;
    sum[points] = points ? sum[points - 1] : 0;
    sums.push(sum);
    below = sum;
  }
  return { time: times, sums };
}

function drawMemory(u, ctx, plot, { model, view, budget, drawn, peak }) {
  const ratio = plot.ratio;
  ctx.font = `${11 * ratio}px ${FONT}`;
  ctx.textBaseline = "bottom";
  if (drawn) {
    const y = Math.round(u.valToPos(budget, "y", true));
    ctx.strokeStyle = colour.budget;
    ctx.lineWidth = 1.5 * ratio;
    ctx.setLineDash([6 * ratio, 4 * ratio]);
    ctx.beginPath();
    ctx.moveTo(plot.left, y);
    ctx.lineTo(plot.left + plot.width, y);
    ctx.stroke();
    ctx.setLineDash([]);
    label(ctx, plot, `budget ${formatBytes(budget)}`, plot.left + plot.width - 6 * ratio, y - 3 * ratio, colour.budget, "right");
  } else if (budget !== null) {
    label(ctx, plot, `budget ${formatBytes(budget)}, far above`, plot.left + plot.width - 6 * ratio, plot.top + 15 * ratio, colour.budget, "right");
  }
  const at = model.curve.peak_us;
  if (at < view.min || at > view.max || !peak) return;
  const x = xScale(view, plot)(at);
  const y = u.valToPos(peak, "y", true);
  ctx.fillStyle = colour.ink;
  ctx.beginPath();
  ctx.moveTo(x, y);
  ctx.lineTo(x - 4 * ratio, y - 7 * ratio);
  ctx.lineTo(x + 4 * ratio, y - 7 * ratio);
  ctx.fill();
  const right = x > plot.left + plot.width * 0.6;
  // Below the peak where the budget's name is beside it.
  const close = drawn && Math.abs(y - u.valToPos(budget, "y", true)) < 16 * ratio;
  label(ctx, plot, `highest ${formatBytes(peak)}`, x + (right ? -8 : 8) * ratio, y + (close ? 17 : -3) * ratio, colour.ink, right ? "right" : "left");
}

/** Text on a ground of its own, so that it can be read over any colour. */
function label(ctx, plot, text, x, y, ink, align) {
  const ratio = plot.ratio;
  const width = ctx.measureText(text).width;
  const left = align === "right" ? x - width : x;
  ctx.fillStyle = colour.panel;
  ctx.globalAlpha = 0.82;
  ctx.fillRect(left - 3 * ratio, y - 13 * ratio, width + 6 * ratio, 14 * ratio);
  ctx.globalAlpha = 1;
  ctx.fillStyle = ink;
  ctx.textAlign = "left";
  ctx.fillText(text, left, y);
}

function levelsAt(model, us) {
  const point = countUpTo(model.curveTime, us) - 1;
  return model.curve.kinds.map((kind, number) => [
    kind,
    point < 0 ? 0 : model[`curve_${number}`][point] * model.facts.page_size,
  ]);
}

function memoryTip(model, view, us, budget) {
  const levels = levelsAt(model, us);
  const total = levels.reduce((sum, [, bytes]) => sum + bytes, 0);
  const { op, waits } = opAt(model, us);
  const list = node("dl");
  for (const [kind, bytes] of levels.toReversed()) {
    list.append(node("dt", {}, swatch(kind), kind), node("dd", {}, formatBytes(bytes)));
  }
  const free = budget === null ? null : line(`${formatBytes(budget - total)} of ${formatBytes(budget)} free`, "dim");
  return [
    strong(`${formatBytes(total)} at ${formatAt(us, view.max - view.min)}`),
    line(`${waits ? "waits: " : ""}${opText(model, op)}`, waits ? "bad" : "dim"),
    list,
    ...(free ? [free] : []),
  ];
}

/** The line in the bar: time, op and memory, wherever the cursor is. */
function memoryReadout(model, view) {
  const width = view.max - view.min;
  if (view.cursor === null) {
    const whole = width >= model.length * 0.999999;
    byId("readout").textContent = whole
      ? `${formatUs(model.facts.iteration_us)}, ${plural(model.ops, "op")}`
      : `${formatAt(view.min, width)} to ${formatAt(view.max, width)}`;
    return;
  }
  const total = levelsAt(model, view.cursor).reduce((sum, [, bytes]) => sum + bytes, 0);
  const { op, waits } = opAt(model, view.cursor);
  byId("readout").textContent =
    `${formatAt(view.cursor, width)} · ${waits ? "waits: " : ""}${opText(model, op)} · ${formatBytes(total)}`;
}
