// The facts on top, and the policies side by side.

function makeHead(model) {
  const { facts, files } = model;
  const title = clean(files.trace ?? facts.source ?? "") || "One iteration";
  document.title = `${title} · tensorpager`;
  byId("title").textContent = title;
  byId("subtitle").textContent = [
    facts.source.trim() && clean(facts.source),
    facts.device.trim() && `recorded on ${clean(facts.device)}`,
    plural(facts.ops, "op"),
    plural(facts.tensors, "tensor"),
    `pages of ${shortBytes(facts.page_size)}`,
    model.hasPlan && `plan ${files.plan ? `${clean(files.plan)} ` : ""}by ${clean(facts.policy)}, ${plural(facts.moves, "move")}`,
    facts.hardware && rates(facts.hardware),
  ].filter(Boolean).join(" · ");
  byId("tiles").replaceChildren(...tiles(model).map(([term, figure, more]) =>
    node("div", {}, node("dt", {}, term), node("dd", { class: "figure" }, figure), node("dd", { class: "more" }, more ?? "")),
  ));
  const speed = facts.predicted && formatPercent(facts.ideal_us / Math.max(facts.iteration_us, 1e-9), 1);
  byId("limit").textContent = [speed && `It runs at ${speed} of the speed that it has where nothing ever waits.`, facts.limit, facts.wear].filter(Boolean).join(" ");
  byId("help-block").hidden = model.remedies.length === 0;
  byId("remedies").replaceChildren(...model.remedies.map(({ what, percent_of_ideal: percent }) =>
    node("li", {}, `${what}: `, node("b", {}, `${percent.toFixed(1)} %`)),
  ));
  byId("notes").replaceChildren(...facts.notes.map((note) => node("li", {}, note)));
}

function rates(hardware) {
  const gb = (rate) => Number((rate / 1e9).toPrecision(4));
  return (
    `link ${gb(hardware.d2h_bytes_per_s)} GB/s out, ${gb(hardware.h2d_bytes_per_s)} in` +
    (hardware.disk_bytes === 0
      ? ""
      : `, disk ${gb(hardware.disk_write_bytes_per_s)} write, ${gb(hardware.disk_read_bytes_per_s)} read`)
  );
}

/** Of two bounds the higher one says more: a short search gives a lower one. 0: there is none. */
const bestBound = (model) => Math.max(model.comparison?.bound.iteration_us ?? 0, model.facts.bound_us ?? 0);

const limitText = (bytes) => (bytes === null ? "no limit" : `of ${formatBytes(bytes)}`);

function tiles(model) {
  const { facts } = model;
  const { predicted, hardware } = facts;
  if (!predicted) {
    const peak = formatBytes(model.curve.peak_bytes);
    return [
      ["Iteration", formatUs(facts.ideal_us), "if nothing waits"],
      ["Peak on the device", peak, hardware ? limitText(hardware.device_bytes) : "in whole pages"],
      ["Ops", formatCount(facts.ops)],
      ["Tensors", formatCount(facts.tensors), `${formatCount(facts.persistent_tensors)} persistent`],
    ];
  }
  const bound = bestBound(model);
  return [
    ["Iteration, predicted", formatUs(facts.iteration_us, 4), `ideal ${formatUs(facts.ideal_us, 4)}`],
    ["Speed", formatPercent(facts.ideal_us / Math.max(facts.iteration_us, 1e-9)), "of the ideal"],
    ...(bound ? [["Of what is possible", formatPercent(bound / facts.iteration_us), `no plan is faster than ${formatUs(bound, 4)}`]] : []),
    ["Ops wait", formatUs(predicted.stall_us), plural(model.stall_op.length, "stall")],
    ["Peak on the device", formatBytes(predicted.peak_device_bytes), limitText(hardware.device_bytes)],
    ["Peak in host memory", formatBytes(predicted.peak_host_bytes), limitText(hardware.host_bytes)],
    ...(predicted.peak_disk_bytes ? [["Peak on disk", formatBytes(predicted.peak_disk_bytes), limitText(hardware.disk_bytes)]] : []),
    ["Moved out", formatBytes(predicted.bytes_out), `in ${formatBytes(predicted.bytes_in)}`],
  ];
}

function makePolicies(model) {
  if (!model.comparison) return;
  const { ideal_us: ideal, policies } = model.comparison;
  const bound = bestBound(model);
  byId("policies").hidden = false;
  const heads = ["Policy", "Speed, of the ideal", "Iteration", "Of the bound", "Stalls", "Peak on the device", "Out", "In"];
  const head = node("thead", {}, node("tr", {}, ...heads.map((text, i) => node("th", { scope: "col", class: i < 2 ? "text" : null }, text))));
  const rows = policies.map((row) => policyRow(row, ideal, bound));
  const best = node("tr", {}, node("td", { class: "text" }, "bound"), speedCell(ideal / bound, bound, ideal), node("td", {}, formatUs(bound, 4)), ...heads.slice(3).map(() => node("td")));
  byId("policy-table").replaceChildren(head, node("tbody", {}, ...rows, best));
}

function policyRow(row, ideal, bound) {
  const name = node("td", { class: "text" }, row.policy);
  if (!row.feasible) {
    return node("tr", {}, name, node("td", { class: "text reason", colspan: 7 }, `no plan: ${clean(row.reason)}`));
  }
  const cells = [
    formatUs(row.iteration_us, 4),
    formatPercent(bound / Math.max(row.iteration_us, 1e-9)),
    formatUs(row.stall_us),
    formatBytes(row.peak_device_bytes),
    formatBytes(row.bytes_out),
    formatBytes(row.bytes_in),
  ];
  return node("tr", {}, name, speedCell(ideal / row.iteration_us, bound, ideal), ...cells.map((text) => node("td", {}, text)));
}

/** A bar to 100 % of the ideal with a mark at the bound. */
function speedCell(share, bound, ideal) {
  const bar = node("i");
  bar.style.width = `${Math.min(100, 100 * share)}%`;
  const mark = node("b");
  mark.style.left = `calc(${Math.min(100, (100 * ideal) / bound)}% - 2px)`;
  return node("td", { class: "text" }, node("span", { class: "track", "aria-hidden": "true" }, bar, mark), formatPercent(share));
}
