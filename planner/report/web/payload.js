// The report's data: base64 of a zlib stream of a JSON header and typed arrays; see payload.py.

const ARRAYS = { u1: Uint8Array, u4: Uint32Array, i4: Int32Array, f8: Float64Array };

async function readPayload() {
  if (typeof DecompressionStream === "undefined") {
    throw new Error("This browser is too old for the report; it needs one from 2023 or later.");
  }
  const text = document.getElementById("payload").textContent.trim();
  const packed = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  const buffer = await new Response(stream).arrayBuffer();
  const length = new DataView(buffer).getUint32(0, true);
  const header = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 4, length)));
  const columns = {};
  for (const [name, kind, offset, count] of header.columns) {
    columns[name] = new ARRAYS[kind](buffer, 4 + length + offset, count);
  }
  return { header, columns };
}
