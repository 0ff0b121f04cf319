// The rows of the map: which, in what order, how tall, and which part of them is in sight.

const MAP_MOST = 460; // CSS pixels of the map's plot
const ROW_MOST = 22;
const ROW_STEPS = [0, 2, 4, 8, 14, 22, 40]; // least height of a row; 0: all fit in

function makeRows(model) {
  const all = Array.from(model.row_tensor.keys());
  const rows = { model, order: all, by: "first", heights: all.length * 11 > MAP_MOST ? "bytes" : "equal", step: 0, scroll: 0, tops: null, total: 0, sight: 0 };
  sortRows(rows, "");
  return rows;
}

function compareRows(model, by) {
  const tensor = (row) => model.row_tensor[row];
  const bytes = (a, b) => model.tensor_bytes[tensor(b)] - model.tensor_bytes[tensor(a)];
  const first = (a, b) => model.tensor_first_op[tensor(a)] - model.tensor_first_op[tensor(b)];
  const orders = {
    size: (a, b) => bytes(a, b) || first(a, b),
    first: (a, b) => first(a, b) || bytes(a, b),
    name: (a, b) => NAMES.compare(model.names[tensor(a)], model.names[tensor(b)]) || first(a, b),
  };
  return orders[by];
}

const NAMES = new Intl.Collator("en", { numeric: true });

function sortRows(rows, query) {
  const { model } = rows;
  const every = Array.from(model.row_tensor.keys());
  const kept = query ? every.filter((row) => model.searchText[model.row_tensor[row]].includes(query)) : every;
  rows.order = kept.sort(compareRows(model, rows.by));
  rows.place = new Int32Array(every.length).fill(-1);
  rows.order.forEach((row, place) => (rows.place[row] = place));
  layRows(rows);
}

/** Heights, from the top: equal ones, or by bytes with at least a quarter of a pixel. */
function layRows(rows) {
  const { model, order } = rows;
  const count = order.length;
  const fit = Math.min(MAP_MOST, Math.max(90, count * ROW_MOST));
  rows.sight = fit;
  const least = ROW_STEPS[rows.step];
  rows.tops = new Float64Array(count + 1);
  if (rows.heights === "bytes") {
    const bytes = order.map((row) => model.tensor_bytes[model.row_tensor[row]]);
    const sum = bytes.reduce((a, b) => a + b, 0) || 1;
    const total = fit * Math.max(1, rows.step * 3);
    bytes.forEach((size, i) => (rows.tops[i + 1] = rows.tops[i] + (size / sum) * total));
  } else {
    const height = Math.max(least, Math.min(ROW_MOST, fit / Math.max(count, 1)));
    for (let i = 0; i < count; i += 1) rows.tops[i + 1] = rows.tops[i] + height;
  }
  rows.total = rows.tops[count];
  rows.scroll = Math.max(0, Math.min(rows.scroll, rows.total - rows.sight));
}

/** The place in the order at `y` CSS pixels from the plot's top; −1 below the last row. */
function placeAt(rows, y) {
  const place = countUpTo(rows.tops, y + rows.scroll) - 1;
  return place >= 0 && place < rows.order.length ? place : -1;
}

/** The place whose tensor is seen at `y` and `us`: of rows lower than a pixel, which share one, the
    largest tensor that exists then. */
function seenAt(rows, y, us) {
  const place = placeAt(rows, y);
  if (place < 0 || rows.tops[place + 1] - rows.tops[place] >= 1) return place;
  const { model } = rows;
  const from = Math.max(0, placeAt(rows, Math.floor(y)));
  let best = place, rank = -1;
  for (let at = from; at < rows.order.length && rows.tops[at] < Math.floor(y) + 1 + rows.scroll; at += 1) {
    const tensor = model.row_tensor[rows.order[at]];
    const lives = spanAt(model, rows.order[at], us, 0.5) >= 0;
    const size = model.tensor_bytes[tensor] + (lives ? 2 ** 52 : 0);
    if (size > rank) [best, rank] = [at, size];
  }
  return best;
}

/** Where in its row `y` is, from 0 (top) to 1. */
function shareAt(rows, place, y) {
  const top = rows.tops[place];
  const height = rows.tops[place + 1] - top;
  return height > 0 ? Math.min(0.999999, Math.max(0, (y + rows.scroll - top) / height)) : 0;
}
