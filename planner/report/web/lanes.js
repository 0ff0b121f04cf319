// Ops on top, the channels below them; stalls are striped gaps between ops.

const OP_LANE = 40;
const LANE = 27;
const LANE_NAMES = { "host-out": "to host", "disk-out": "to disk", "disk-in": "from disk", "host-in": "from host", "host-step": "by a step of the host", "run-again": "again" };
const RUN_LABELS = { "host-step": "host's steps", "run-again": "run again" };
const RUNS = { "host-step": "The host steps", "run-again": "The device runs again" };

function makeLanes(model, view) {
  const used = model.lanes.map((name, channel) => [name, channel]).filter(([name]) => model.facts.channels.some((c) => c.name === name));
  const lanes = used.map(([name, channel], index) => ({
    name,
    channel,
    top: OP_LANE + 6 + index * LANE,
    bars: barsOf(model, channel),
    facts: model.facts.channels.find((c) => c.name === name),
  }));
  const plotHeight = OP_LANE + 6 + lanes.length * LANE;
  const chart = makeChart(byId("lanes"), view, {
    height: plotHeight + 6 + 26,
    label: "Ops and transfers over time. Up and down choose the lane, Shift and arrows move the cursor.",
    under: (u, ctx, plot) => drawLanes(u, ctx, plot, model, view, lanes),
    tip: (us, y) => lanesTip(model, view, lanes, us, y),
    click: (us, y) => {
      const bar = barAt(model, lanes, us, y);
      if (bar >= 0 && model.move_tensor[bar] >= 0) view.choose(model.move_tensor[bar]);
    },
    keyY: (step, y) => {
      const stops = [OP_LANE / 2, ...lanes.map((lane) => lane.top + LANE / 2)];
      const here = stops.reduce((best, stop, i) => (Math.abs(stop - y) < Math.abs(stops[best] - y) ? i : best), 0);
      return stops[Math.min(Math.max(0, here + step), stops.length - 1)];
    },
  });
  view.on("tensor", () => chart.u.redraw(false, true));
  legend("lanes-legend", [
    ["op-a", "op"],
    ...(model.hasPlan ? [["stall", "stall: an op waits"]] : []),
    ...(lanes.some((lane) => lane.name.endsWith("out")) ? [["leaving", "page leaves"]] : []),
    ...(lanes.some((lane) => lane.name.endsWith("-in")) ? [["coming", "page comes"]] : []),
    ...(lanes.some((lane) => lane.name in RUNS) ? [["use", "op, again or on the host"]] : []),
  ]);
  return chart;
}

/** Bars of a channel within the iteration, sorted; what goes on into the next one is at its begin. */
function barsOf(model, channel) {
  const begin = [], end = [], index = [];
  for (let bar = 0; bar < model.move_channel.length; bar += 1) {
    if (model.move_channel[bar] !== channel) continue;
    for (let shift = 0; model.moveEnd[bar] - shift > 0; shift += model.length) {
      if (model.moveBegin[bar] - shift >= model.length) continue;
      begin.push(Math.max(0, model.moveBegin[bar] - shift));
      end.push(Math.min(model.length, model.moveEnd[bar] - shift));
      index.push(bar);
    }
  }
  const order = Array.from(begin.keys()).sort((a, b) => begin[a] - begin[b]);
  return {
    begin: Float64Array.from(order, (i) => begin[i]),
    end: Float64Array.from(order, (i) => end[i]),
    index: Int32Array.from(order, (i) => index[i]),
  };
}

function drawLanes(u, ctx, plot, model, view, lanes) {
  const ratio = plot.ratio;
  ctx.textBaseline = "middle";
  ctx.textAlign = "right";
  const at = plot.left - 8 * ratio;
  const name = (text, y, tone, size = 11) => {
    ctx.font = `${size * ratio}px ${FONT}`;
    ctx.fillStyle = tone;
    ctx.fillText(text, at, plot.top + y * ratio);
  };
  name("ops", OP_LANE / 2, colour.ink);
  for (const lane of lanes) {
    name(RUN_LABELS[lane.name] ?? LANE_NAMES[lane.name], lane.top + (narrow() ? 12 : 7), colour.ink);
    if (!narrow()) name(`busy ${lane.facts.busy_share > 0 && lane.facts.busy_share < 0.005 ? "< 1 %" : formatPercent(lane.facts.busy_share, 0)}`, lane.top + 19, colour.soft, 9.5);
  }
  clipToPlot(ctx, plot);
  ctx.fillStyle = colour.grid;
  for (const lane of lanes) ctx.fillRect(plot.left, plot.top + lane.top * ratio, plot.width, (LANE - 5) * ratio);
  drawOps(ctx, plot, model, view);
  for (const lane of lanes) drawBars(ctx, plot, model, view, lane);
}

function drawOps(ctx, plot, model, view) {
  const X = xScale(view, plot);
  const { ratio } = plot;
  const top = plot.top + 2 * ratio;
  const height = (OP_LANE - 4) * ratio;
  const stalls = makeCoverage(plot);
  const from = Math.max(0, countUpTo(model.opEnd, view.min) - 1);
  ctx.font = `${11 * ratio}px ${FONT}`;
  ctx.textAlign = "left";
  for (let op = from; op < model.ops && (op === 0 || model.opEnd[op - 1] <= view.max); op += 1) {
    // Ops narrower than a pixel are drawn together as long as none of them waits.
    let last = op;
    const x0 = X(model.opStart[op]);
    while (last + 1 < model.ops && X(model.opEnd[last + 1]) - x0 < 1.2 && !model.stallsOf.has(last + 1)) last += 1;
    if (model.stallsOf.has(op)) {
      const waits = X(op ? model.opEnd[op - 1] : 0);
      if (x0 - waits < FINE) stalls.add(waits, x0);
      else {
        ctx.fillStyle = x0 - waits > 5 * ratio ? colour.hatch : colour.stall;
        ctx.fillRect(waits, top, x0 - waits, height);
      }
    }
    const width = X(model.opEnd[last]) - x0;
    ctx.fillStyle = op % 2 ? colour["op-a"] : colour["op-b"];
    ctx.fillRect(x0, top, width, height);
    if (width > 36 * ratio) opLabel(ctx, plot, model.opName(op), x0, width, top + height / 2);
    op = last;
  }
  stalls.paint(ctx, colour.stall, top, height);
}

function opLabel(ctx, plot, name, x, width, y) {
  const left = Math.max(x, plot.left) + 5 * plot.ratio;
  const room = Math.min(x + width, plot.left + plot.width) - left - 4 * plot.ratio;
  const text = fitting(ctx, name, room);
  if (text.length < Math.min(4, name.length)) return;
  ctx.fillStyle = colour["op-ink"];
  ctx.fillText(text, left, y);
}

function drawBars(ctx, plot, model, view, lane) {
  const X = xScale(view, plot);
  const { bars } = lane;
  const top = plot.top + lane.top * plot.ratio;
  const height = (LANE - 5) * plot.ratio;
  const tone = lane.name in RUNS ? colour.use : lane.name.endsWith("out") ? colour.leaving : colour.coming;
  const seams = plot.ratio;
  const fine = makeCoverage(plot);
  const dimmed = view.tensor >= 0 ? 0.35 : 1;
  for (let i = Math.max(0, countUpTo(bars.end, view.min) - 1); i < bars.begin.length && bars.begin[i] < view.max; i += 1) {
    const x0 = X(bars.begin[i]);
    const width = X(bars.end[i]) - x0;
    const chosen = view.tensor >= 0 && model.move_tensor[bars.index[i]] === view.tensor;
    if (width < FINE && !chosen) {
      fine.add(x0, x0 + width);
      continue;
    }
    ctx.globalAlpha = chosen ? 1 : dimmed;
    ctx.fillStyle = tone;
    ctx.fillRect(x0, top, width > 4 * seams ? width - seams : width, height);
    if (chosen) {
      ctx.strokeStyle = colour.ink;
      ctx.lineWidth = 2 * plot.ratio;
      ctx.strokeRect(x0, top + plot.ratio, Math.max(width, 1), height - 2 * plot.ratio);
    }
  }
  ctx.globalAlpha = 1;
  fine.paint(ctx, tone, top, height, dimmed);
}

// -- bars of less than a few pixels ------------------------------------------------------------------

const FINE = 3; // canvas pixels
const FAINTEST = 0.3;

/** How much of each column of pixels is covered. Each is painted once, as strong as it is covered;
    one coat per bar would round itself to colours that mean nothing. */
function makeCoverage({ left, width }) {
  const share = new Float32Array(Math.ceil(width) + 2);
  return {
    add(x0, x1) {
      const from = Math.max(0, x0 - left), to = Math.min(share.length, x1 - left);
      for (let column = Math.floor(from); column < to; column += 1) {
        share[column] += Math.min(to, column + 1) - Math.max(from, column);
      }
    },
    paint(ctx, tone, top, height, strength = 1) {
      ctx.fillStyle = tone;
      share.forEach((part, column) => {
        if (part <= 0) return;
        ctx.globalAlpha = strength * Math.min(1, Math.max(FAINTEST, part));
        ctx.fillRect(Math.floor(left) + column, top, 1, height);
      });
      ctx.globalAlpha = 1;
    },
  };
}

// -- the tip ---------------------------------------------------------------------------------------

/** The transfer at a place; −1 if nothing moves there. A channel moves one page at a time. */
function barAt(model, lanes, us, y) {
  const lane = lanes.find(({ top }) => y >= top && y < top + LANE);
  if (!lane) return -1;
  const at = countUpTo(lane.bars.begin, us) - 1;
  return at >= 0 && lane.bars.end[at] > us ? lane.bars.index[at] : -1;
}

function lanesTip(model, view, lanes, us, y) {
  if (y < OP_LANE + 2) return opTip(model, view, us);
  const lane = lanes.find(({ top }) => y >= top && y < top + LANE);
  if (!lane) return opTip(model, view, us);
  const bar = barAt(model, lanes, us, y);
  const where = LANE_NAMES[lane.name];
  if (bar < 0) return [strong(lane.name in RUNS ? `${RUNS[lane.name]} nothing` : `Nothing moves ${where}`), line(`at ${formatAt(us, view.max - view.min)}`, "dim")];
  return barTip(model, view, bar, lane);
}

function opTip(model, view, us) {
  const { op, waits } = opAt(model, us);
  if (op < 0) return null;
  const width = view.max - view.min;
  const reasons = (model.stallsOf.get(op) ?? []).map((stall) => {
    const tensor = model.stall_tensor[stall];
    const channel = model.lanes[model.stall_channel[stall]];
    const why = tensor < 0
      ? `free frames: pages on their way ${LANE_NAMES[channel]} hold them`
      : `${cut(model.names[tensor], 60)} ${LANE_NAMES[channel]}`;
    return line(`${waits ? "waits" : "waited"} ${formatUs(model.stall_us[stall])} for ${why}`, "bad");
  });
  return [
    strong(`op ${formatCount(op)} ${cut(model.opName(op), 80)}`),
    line(`runs ${formatUs(model.opEnd[op] - model.opStart[op])} from ${formatAt(model.opStart[op], width)}`),
    ...reasons,
  ];
}

function barTip(model, view, bar, lane) {
  const tensor = model.move_tensor[bar];
  const pages = model.move_pages[bar];
  const us = model.moveEnd[bar] - model.moveBegin[bar];
  const bytes = pages * model.facts.page_size;
  const rate = `${(bytes / us / 1e3).toFixed(2)} GB/s`;
  const when = `${formatUs(us)} from ${formatAt(model.moveBegin[bar], view.max - view.min)}`;
  if (lane.name in RUNS) {
    return [strong(`${RUNS[lane.name]} ${opText(model, model.move_op[bar])}`), line(when, "dim")];
  }
  const from = `${when}, ${rate}`;
  if (tensor < 0) {
    return [strong(`Several transfers ${LANE_NAMES[lane.name]}`), line(`${formatBytes(bytes)} in ${formatCount(pages)} pages; zoom does not part them`), line(from, "dim")];
  }
  const row = model.rowOf[tensor];
  const out = lane.name.endsWith("out");
  const uses = row < 0 ? null : usesAround(model, row, out ? model.moveBegin[bar] % model.length : model.moveEnd[bar] % model.length);
  const use = uses === null ? -1 : out ? uses.before : uses.using >= 0 ? uses.using : uses.after;
  const waited = model.stallsOf.get(use)?.some((stall) => model.stall_tensor[stall] === tensor);
  return [
    strong(cut(model.names[tensor], 90)),
    line(`${pageText(model, tensor, model.move_first[bar], pages)} ${LANE_NAMES[lane.name]}, ${formatBytes(bytes)}`),
    line(from, "dim"),
    line(`queued for ${opText(model, model.move_op[bar])}`, "dim"),
    ...(use >= 0 ? [line(`${out ? "last used by" : waited ? "waited for by" : "next used by"} ${opText(model, use)}`, waited && !out ? "bad" : "dim")] : []),
    ...(model.move_arrived[bar] ? [] : [line("given up: the tensor's life ended first", "dim")]),
  ];
}

function pageText(model, tensor, first, count) {
  const all = model.tensor_pages[tensor];
  if (count >= all) return all === 1 ? "its page" : `all ${formatCount(all)} pages`;
  const range = count === 1 ? `page ${formatCount(first)}` : `pages ${formatCount(first)} to ${formatCount(first + count - 1)}`;
  return `${range} of ${formatCount(all)}`;
}
