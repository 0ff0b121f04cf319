// The data with times in µs and the questions that charts, tips and table ask of it.

function makeModel({ header, columns }) {
  const toUs = (ticks) => Float64Array.from(ticks, (tick) => tick * header.tick_us);
  const names = header.tensor_names.map((name, tensor) =>
    name === null || name === "" ? `tensor ${columns.tensor_id[tensor]}` : clean(name),
  );
  const opNames = header.op_names.map(clean);
  const facts = header.facts;
  const rowOf = new Int32Array(names.length).fill(-1);
  columns.row_tensor.forEach((tensor, row) => (rowOf[tensor] = row));
  const stallsOf = new Map();
  columns.stall_op.forEach((op, index) => {
    if (!stallsOf.has(op)) stallsOf.set(op, []);
    stallsOf.get(op).push(index);
  });
  return {
    ...header,
    ...columns,
    facts,
    names,
    searchText: names.map((name, t) => `${name} ${header.kinds[columns.tensor_kind[t]]}`.toLowerCase()),
    hasPlan: facts.policy !== null,
    ops: columns.op_name.length,
    length: Math.max(facts.iteration_us, 1e-3),
    opStart: toUs(columns.op_start),
    opEnd: toUs(columns.op_end),
    curveTime: toUs(columns.curve_time),
    spanBegin: toUs(columns.span_begin),
    spanEnd: toUs(columns.span_end),
    moveBegin: toUs(columns.move_begin),
    moveEnd: toUs(columns.move_end),
    tierTime: Object.fromEntries(header.tiers.map(({ name }) => [name, toUs(columns[`${name}_time`])])),
    rowOf,
    stallsOf,
    opName: (op) => opNames[columns.op_name[op]],
    kindOf: (tensor) => header.kinds[columns.tensor_kind[tensor]],
  };
}

/** How many of the sorted `values` are ≤ `value`. */
function countUpTo(values, value, from = 0, to = values.length) {
  while (from < to) {
    const middle = (from + to) >> 1;
    if (values[middle] <= value) from = middle + 1;
    else to = middle;
  }
  return from;
}

/** The op that runs at `us`, or waits to (`waits` is true); −1 where there is none. */
function opAt(model, us) {
  const op = countUpTo(model.opStart, us) - 1;
  if (op >= 0 && us < model.opEnd[op]) return { op, waits: false };
  if (op + 1 < model.ops) return { op: op + 1, waits: true };
  return { op: model.ops - 1, waits: false };
}

function opText(model, op) {
  return op < 0 ? "no op" : `op ${formatCount(op)} ${cut(model.opName(op), 60)}`;
}

/** The uses of a row before and after `us`, as op numbers; around the iteration's end too. */
function usesAround(model, row, us) {
  const from = model.access_offset[row];
  const to = model.access_offset[row + 1];
  let next = from;
  while (next < to && model.opEnd[model.access_op[next]] <= us) next += 1;
  const using = next < to && model.opStart[model.access_op[next]] <= us;
  const lasting = model.tensor_persistent[model.row_tensor[row]] === 1;
  const after = using ? next + 1 : next;
  const op = (index) => {
    if (index >= from && index < to) return model.access_op[index];
    return lasting && to > from ? model.access_op[index < from ? to - 1 : from] : -1;
  };
  return { using: using ? model.access_op[next] : -1, before: op(next - 1), after: op(after) };
}

/** What is at (row, us, share of the tensor's pages from the top); −1 if it does not exist then. */
function spanAt(model, row, us, share) {
  const page = share * model.tensor_pages[model.row_tensor[row]];
  let nearest = -1;
  for (let span = model.span_offset[row]; span < model.span_offset[row + 1]; span += 1) {
    if (model.spanBegin[span] > us || model.spanEnd[span] <= us) continue;
    const first = model.span_first[span];
    if (page >= first && page < first + model.span_pages[span]) return span;
    nearest = span;
  }
  return nearest;
}
