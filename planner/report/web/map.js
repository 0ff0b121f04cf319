// Tensors × time: the pages of a tensor from top to bottom of its row, in the colour of where they
// are. What an op uses is dark.

const REST_HEIGHT = 46;
const ORDER_TEXT = { first: "first use", size: "size", name: "name" };

function makeMap(model, view) {
  const rows = makeRows(model);
  byId("heights").value = rows.heights;
  const chart = makeChart(byId("map"), view, {
    height: rows.sight + 6 + 26,
    label: `Where each of ${plural(rows.order.length, "tensor")} is over time. Up and down choose the tensor, Shift and arrows move the cursor, Enter highlights.`,
    under: (u, ctx, plot) => drawMap(ctx, plot, model, view, rows),
    tip: (us, y) => mapTip(model, view, rows, us, y),
    click: (us, y) => {
      const place = seenAt(rows, y, us);
      if (place >= 0) view.choose(model.row_tensor[rows.order[place]]);
    },
    keyY: (step, y) => stepRow(rows, step, y),
  });
  const scroller = byId("map-scroll");
  const again = () => {
    byId("map-tall").style.height = `${rows.total - rows.sight + chart.u.height}px`;
    scroller.style.height = `${chart.u.height}px`;
    chart.u.redraw(false, true);
  };
  const resized = () => {
    chart.u.setSize({ width: chart.u.width, height: rows.sight + 6 + 26 });
    again();
    mapNote(model, view, rows);
  };
  scroller.addEventListener("scroll", () => {
    rows.scroll = Math.max(0, Math.min(scroller.scrollTop, rows.total - rows.sight));
    chart.u.redraw(false, true);
  });
  const sorted = () => {
    sortRows(rows, view.query);
    resized();
  };
  byId("order").addEventListener("change", (event) => ((rows.by = event.target.value), sorted()));
  byId("heights").addEventListener("change", (event) => ((rows.heights = event.target.value), sorted()));
  const taller = (step) => {
    const wanted = Math.min(Math.max(0, rows.step + step), ROW_STEPS.length - 1);
    const share = rows.total ? (rows.scroll + rows.sight / 2) / rows.total : 0;
    rows.step = wanted;
    layRows(rows);
    resized();
    scroller.scrollTop = share * rows.total - rows.sight / 2;
  };
  byId("rows-taller").addEventListener("click", () => taller(1));
  byId("rows-lower").addEventListener("click", () => taller(-1));
  view.on("search", sorted);
  view.on("tensor", () => {
    intoSight(model, view, rows, scroller);
    chart.u.redraw(false, true);
  });
  mapLegend(model);
  again();
  mapNote(model, view, rows);
  makeRest(model, view);
  return { chart, rows, taller };
}

function mapLegend(model) {
  const names = { leaving: "leaving", host: "in host memory", disk: "on disk", coming: "coming", discarded: "discarded, to be made again" };
  const seen = new Set(model.span_place);
  legend("map-legend", [
    ["use", "used by an op"],
    ["device", "on the device, idle"],
    ...model.places.map((place, number) => [place, number]).filter(([, number]) => number > 0 && seen.has(number)).map(([place]) => [place, names[place]]),
  ]);
}

function mapNote(model, view, rows) {
  const shown = rows.order.length;
  const all = model.names.length;
  const parts = [shown === all ? plural(all, "tensor") : `${formatCount(shown)} of ${formatCount(all)} tensors`];
  if (model.rest.tensors) parts.push(`the ${formatCount(model.rest.tensors)} smallest are one strip below`);
  if (!model.access_op.length && model.tensor_accesses.some((count) => count > 0)) parts.push("too many uses to mark them");
  byId("map-note").textContent = parts.join("; ");
}

function intoSight(model, view, rows, scroller) {
  const row = view.tensor < 0 ? -1 : model.rowOf[view.tensor];
  const place = row < 0 ? -1 : rows.place[row];
  if (place < 0) return;
  const top = rows.tops[place];
  if (top < rows.scroll || rows.tops[place + 1] > rows.scroll + rows.sight) scroller.scrollTop = top - rows.sight / 2;
}

function stepRow(rows, step, y) {
  if (!rows.order.length) return y;
  const here = placeAt(rows, y);
  const place = Math.min(Math.max(0, (here < 0 ? 0 : here) + step), rows.order.length - 1);
  const middle = (rows.tops[place] + rows.tops[place + 1]) / 2;
  const scroller = byId("map-scroll");
  if (middle < rows.scroll + 4 || middle > rows.scroll + rows.sight - 4) {
    scroller.scrollTop = middle - rows.sight / 2;
    rows.scroll = Math.max(0, Math.min(scroller.scrollTop, rows.total - rows.sight));
  }
  return middle - rows.scroll;
}

// -- drawing ---------------------------------------------------------------------------------------

function drawMap(ctx, plot, model, view, rows) {
  const { ratio } = plot;
  const first = Math.max(0, countUpTo(rows.tops, rows.scroll) - 1);
  const tones = model.places.map((place) => colour[place]);
  const X = xScale(view, plot);
  const Y = (place) => plot.top + (rows.tops[place] - rows.scroll) * ratio;
  rowNames(ctx, plot, model, rows, first);
  clipToPlot(ctx, plot);
  const end = countUpTo(rows.tops, rows.scroll + rows.sight, first, rows.order.length);
  for (let place = first; place < end; place += 1) {
    const top = Math.round(Y(place));
    let last = place;
    while (last + 1 < end && Math.round(Y(last + 2)) <= top + 1) last += 1;
    const height = Math.max(1, Math.round(Y(last + 1)) - top);
    const seam = height >= 6 * ratio ? ratio : 0;
    for (const row of bySize(model, rows.order.slice(place, last + 1))) {
      drawSpans(ctx, plot, model, view, row, top, height - seam, X, tones);
      drawUses(ctx, plot, model, view, row, top, height - seam, X);
    }
    place = last;
  }
  outline(ctx, plot, model, view, rows, Y);
}

/** Rows that share a line of pixels: the largest is drawn last, and is the one that is seen. */
function bySize(model, rows) {
  const size = (row) => model.tensor_bytes[model.row_tensor[row]];
  return rows.length > 1 ? rows.sort((a, b) => size(a) - size(b)) : rows;
}

function rowNames(ctx, plot, model, rows, first) {
  const { ratio } = plot;
  ctx.font = `${10 * ratio}px ${FONT}`;
  ctx.textAlign = "right";
  ctx.textBaseline = "middle";
  ctx.fillStyle = colour.soft;
  const room = plot.left - 12 * ratio;
  const tiny = rows.total < rows.order.length * 11 && !narrow();
  if (tiny) {
    ctx.fillText(`${formatCount(rows.order.length)} rows by`, plot.left - 8 * ratio, plot.top + 8 * ratio);
    ctx.fillText(ORDER_TEXT[rows.by], plot.left - 8 * ratio, plot.top + 21 * ratio);
  }
  for (let place = first; place < rows.order.length && rows.tops[place] < rows.scroll + rows.sight; place += 1) {
    if (rows.tops[place + 1] - rows.tops[place] < 11) continue;
    const y = (rows.tops[place] + rows.tops[place + 1]) / 2 - rows.scroll;
    if (y < (tiny ? 34 : 4) || y > rows.sight - 2) continue;
    ctx.fillText(fitting(ctx, model.names[model.row_tensor[rows.order[place]]], room), plot.left - 8 * ratio, plot.top + y * ratio);
  }
}

/** Each pixel shows the page and the time at its middle: edges are rounded, and what would be less
    than a pixel is left to the zoom. Blending hundreds of slices would give colours that mean
    nothing. */
function drawSpans(ctx, plot, model, view, row, top, height, X, tones) {
  const pages = model.tensor_pages[model.row_tensor[row]] || 1;
  for (let span = model.span_offset[row]; span < model.span_offset[row + 1]; span += 1) {
    const begin = model.spanBegin[span], end = model.spanEnd[span];
    if (end < view.min || begin > view.max) continue;
    const first = model.span_first[span];
    const y0 = Math.round((height * first) / pages);
    const y1 = Math.round((height * (first + model.span_pages[span])) / pages);
    const x0 = Math.round(X(Math.max(begin, view.min))), x1 = Math.round(X(Math.min(end, view.max)));
    if (y1 === y0 || x1 === x0) continue;
    ctx.fillStyle = tones[model.span_place[span]];
    ctx.fillRect(x0, top + y0, x1 - x0, y1 - y0);
  }
}

/** What an op uses is at least a pixel wide. */
function drawUses(ctx, plot, model, view, row, top, height, X) {
  ctx.fillStyle = colour.use;
  let drawn = -Infinity;
  for (let i = model.access_offset[row]; i < model.access_offset[row + 1]; i += 1) {
    const op = model.access_op[i];
    if (model.opEnd[op] < view.min || model.opStart[op] > view.max) continue;
    const x0 = Math.round(Math.max(X(model.opStart[op]), plot.left - 2));
    const x1 = Math.max(Math.round(Math.min(X(model.opEnd[op]), plot.left + plot.width + 2)), x0 + 1);
    if (x1 <= drawn) continue;
    ctx.fillRect(Math.max(x0, drawn), top, x1 - Math.max(x0, drawn), height);
    drawn = x1;
  }
}

function outline(ctx, plot, model, view, rows, Y) {
  const row = view.tensor < 0 ? -1 : model.rowOf[view.tensor];
  const place = row < 0 ? -1 : rows.place[row];
  if (place < 0) return;
  const { ratio } = plot;
  const top = Y(place) - 2 * ratio;
  const height = Math.max(Y(place + 1) - Y(place), ratio) + 4 * ratio;
  ctx.lineWidth = 4 * ratio;
  ctx.strokeStyle = colour.panel;
  ctx.strokeRect(plot.left + 2 * ratio, top, plot.width - 4 * ratio, height);
  ctx.lineWidth = 2 * ratio;
  ctx.strokeStyle = colour.accent;
  ctx.strokeRect(plot.left + 2 * ratio, top, plot.width - 4 * ratio, height);
}

// -- the tip ---------------------------------------------------------------------------------------

const PLACE_TEXT = {
  device: "on the device", leaving: "leaving the device", host: "in host memory",
  disk: "on disk", coming: "coming to the device", discarded: "discarded, to be made again",
};

function mapTip(model, view, rows, us, y) {
  const place = seenAt(rows, y, us);
  if (place < 0) return null;
  const row = rows.order[place];
  const tensor = model.row_tensor[row];
  const pages = model.tensor_pages[tensor];
  return [
    strong(cut(model.names[tensor], 120)),
    line(`${model.kindOf(tensor)}, ${formatBytes(model.tensor_bytes[tensor])} in ${plural(pages, "page")}`, "dim"),
    ...placeLines(model, view, row, us, shareAt(rows, place, y)),
    line(`now: ${opText(model, opAt(model, us).op)}`, "dim"),
  ];
}

function placeLines(model, view, row, us, share) {
  const tensor = model.row_tensor[row];
  const uses = usesAround(model, row, us);
  const span = spanAt(model, row, us, share);
  if (span < 0) {
    const born = model.tensor_first_op[tensor];
    return [line(model.opStart[born] > us ? `does not exist yet; made by ${opText(model, born)}` : `no longer exists; last used by ${opText(model, model.tensor_last_op[tensor])}`)];
  }
  const width = view.max - view.min;
  const where = PLACE_TEXT[model.places[model.span_place[span]]];
  const state = model.span_place[span] !== 0 ? where : uses.using >= 0 ? `${where}, used` : `${where}, idle`;
  const since = `${formatAt(model.spanBegin[span], width)} (${opText(model, opAt(model, model.spanBegin[span]).op)})`;
  const until = `${formatAt(model.spanEnd[span], width)} (${opText(model, opAt(model, model.spanEnd[span]).op)})`;
  return [
    line(`${pageText(model, tensor, model.span_first[span], model.span_pages[span])}: ${state}`),
    line(`since ${since}`, "dim"),
    line(`until ${until}`, "dim"),
    ...(uses.before >= 0 ? [line(`last used by ${opText(model, uses.before)}`, "dim")] : []),
    ...(uses.after >= 0 ? [line(`next used by ${opText(model, uses.after)}`, "dim")] : []),
  ];
}

// -- tensors without a row ---------------------------------------------------------------------------

/** One strip for all of them: their bytes by place, mean per stretch of time. */
function makeRest(model, view) {
  if (!model.rest.tensors) return;
  byId("rest-block").hidden = false;
  byId("rest-note").textContent =
    `The ${formatCount(model.rest.tensors)} smallest tensors together, ${formatBytes(model.rest.bytes)}: bytes by place. Each of them is in the table.`;
  const bins = model.rest_bytes.length / model.places.length;
  let top = 1;
  const level = (place, bin) => model.rest_bytes[place * bins + bin];
  const sum = (bin) => model.places.reduce((all, _, place) => all + level(place, bin), 0);
  for (let bin = 0; bin < bins; bin += 1) top = Math.max(top, sum(bin));
  const binAt = (us) => Math.min(bins - 1, Math.max(0, Math.floor((us / model.length) * bins)));
  makeChart(byId("rest"), view, {
    height: REST_HEIGHT,
    axis: false,
    label: "The smallest tensors together: bytes by place over time.",
    under: (u, ctx, plot) => {
      clipToPlot(ctx, plot);
      const X = xScale(view, plot);
      for (let bin = binAt(view.min); bin <= binAt(view.max); bin += 1) {
        let y = plot.top + plot.height;
        model.places.forEach((place, number) => {
          const height = (level(number, bin) / top) * plot.height;
          const from = Math.round(X((bin / bins) * model.length));
          ctx.fillStyle = colour[place];
          ctx.fillRect(from, y - height, Math.round(X(((bin + 1) / bins) * model.length)) - from, height);
          y -= height;
        });
      }
    },
    tip: (us) => {
      const list = node("dl");
      model.places.forEach((place, number) => {
        if (level(number, binAt(us))) list.append(node("dt", {}, swatch(place), PLACE_TEXT[place]), node("dd", {}, formatBytes(level(number, binAt(us)))));
      });
      return [strong(`${formatCount(model.rest.tensors)} smallest tensors`), line(`${formatBytes(sum(binAt(us)))} at ${formatAt(us, view.max - view.min)}`, "dim"), list];
    },
  });
}
