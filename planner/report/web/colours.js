// The page's colours as a canvas needs them, read again when the browser turns dark or light.

const COLOURS = [
  "panel", "ink", "soft", "line", "grid", "accent", "budget",
  "device", "use", "leaving", "host", "disk", "coming", "discarded",
  "op-a", "op-b", "op-ink", "stall", "stall-line",
  "parameter", "gradient", "optimizer", "activation", "input", "workspace",
];
const colour = {};
const FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif";

function readColours() {
  const style = getComputedStyle(document.documentElement);
  for (const name of COLOURS) colour[name] = style.getPropertyValue(`--${name}`).trim();
  colour.hatch = hatch(colour.stall, colour["stall-line"]);
}

/** Stripes, so that a stall differs from everything else without colour too. */
function hatch(ground, stripe) {
  const tile = document.createElement("canvas");
  tile.width = tile.height = 8;
  const ctx = tile.getContext("2d");
  ctx.fillStyle = ground;
  ctx.fillRect(0, 0, 8, 8);
  ctx.strokeStyle = stripe;
  ctx.lineWidth = 1.4;
  ctx.beginPath();
  for (const shift of [-8, 0, 8]) {
    ctx.moveTo(shift - 2, 10);
    ctx.lineTo(shift + 10, -2);
  }
  ctx.stroke();
  return ctx.createPattern(tile, "repeat");
}
