// Raw deflate (RFC 1951): by the browser where it can, else by the decoder below.

/** Uint8Array of a base64 text. */
export function bytesOfBase64(text) {
  const binary = atob(text);
  const bytes = new Uint8Array(binary.length);
  for (let i = 0; i < binary.length; i++) bytes[i] = binary.charCodeAt(i);
  return bytes;
}

/** Inflate a Uint8Array; a promise of an ArrayBuffer. */
export async function inflate(bytes) {
  let stream;
  try {
    stream = new DecompressionStream("deflate-raw");
  } catch {
    return inflateHere(bytes); // no DecompressionStream, or one that knows no raw deflate
  }
  return new Response(new Blob([bytes]).stream().pipeThrough(stream)).arrayBuffer();
}

const LENGTH_BASE = [3, 4, 5, 6, 7, 8, 9, 10, 11, 13, 15, 17, 19, 23, 27, 31, 35, 43, 51, 59, 67, 83, 99, 115, 131, 163,
  195, 227, 258];
const LENGTH_EXTRA = [0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3, 4, 4, 4, 4, 5, 5, 5, 5, 0];
const DISTANCE_BASE = [1, 2, 3, 4, 5, 7, 9, 13, 17, 25, 33, 49, 65, 97, 129, 193, 257, 385, 513, 769, 1025, 1537, 2049,
  3073, 4097, 6145, 8193, 12289, 16385, 24577];
const DISTANCE_EXTRA = [0, 0, 0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7, 8, 8, 9, 9, 10, 10, 11, 11, 12, 12, 13, 13];
const CODE_ORDER = [16, 17, 18, 0, 8, 7, 9, 6, 10, 5, 11, 4, 12, 3, 13, 2, 14, 1, 15];
const MAX_CODE = 15; // bits

/** Canonical Huffman code: how many codes have each length, and their symbols in order. */
function huffman(lengths) {
  const counts = new Uint16Array(MAX_CODE + 1);
  for (const length of lengths) counts[length]++;
  counts[0] = 0;
  const next = new Uint16Array(MAX_CODE + 2);
  for (let bits = 1; bits <= MAX_CODE; bits++) next[bits + 1] = next[bits] + counts[bits];
  const symbols = new Uint16Array(lengths.length);
  lengths.forEach((length, symbol) => { if (length) symbols[next[length]++] = symbol; });
  return { counts, symbols };
}

/** The decoder for browsers without DecompressionStream. Returns an ArrayBuffer; throws on broken data. */
export function inflateHere(bytes) {
  let position = 0, held = 0, numHeld = 0;
  let out = new Uint8Array(Math.max(1024, bytes.length * 2)), size = 0;

  function bits(count) {
    while (numHeld < count) {
      if (position >= bytes.length) throw new Error("compressed data end too early");
      held |= bytes[position++] << numHeld;
      numHeld += 8;
    }
    const value = held & ((1 << count) - 1);
    held >>>= count;
    numHeld -= count;
    return value;
  }

  function symbol({ counts, symbols }) {
    let code = 0, first = 0, index = 0;
    for (let length = 1; length <= MAX_CODE; length++) {
      code |= bits(1);
      const count = counts[length];
      if (code - count < first) return symbols[index + code - first];
      index += count;
      first = (first + count) << 1;
      code <<= 1;
    }
    throw new Error("compressed data hold an unknown code");
  }

  function room(more) {
    if (size + more <= out.length) return;
    const larger = new Uint8Array(Math.max(out.length * 2, size + more));
    larger.set(out);
    out = larger;
  }

  function stored() {
    held = numHeld = 0; // the rest of the byte is empty
    const length = bytes[position] | (bytes[position + 1] << 8);
    position += 4; // the length, and the same inverted
    if (position + length > bytes.length) throw new Error("compressed data end too early");
    room(length);
    out.set(bytes.subarray(position, position + length), size);
    position += length;
    size += length;
  }

  function fixedCodes() {
    const lengths = Array.from({ length: 288 }, (_, i) => (i < 144 ? 8 : i < 256 ? 9 : i < 280 ? 7 : 8));
    return [huffman(lengths), huffman(new Array(30).fill(5))];
  }

  function dynamicCodes() {
    const numLengths = bits(5) + 257, numDistances = bits(5) + 1, numCodes = bits(4) + 4;
    const codeLengths = new Array(19).fill(0);
    for (let i = 0; i < numCodes; i++) codeLengths[CODE_ORDER[i]] = bits(3);
    const code = huffman(codeLengths);
    const lengths = [];
    while (lengths.length < numLengths + numDistances) {
      const value = symbol(code);
      if (value < 16) {
        lengths.push(value);
        continue;
      }
      const repeated = value === 16 ? lengths[lengths.length - 1] : 0;
      const times = value === 16 ? 3 + bits(2) : value === 17 ? 3 + bits(3) : 11 + bits(7);
      for (let i = 0; i < times; i++) lengths.push(repeated);
    }
    return [huffman(lengths.slice(0, numLengths)), huffman(lengths.slice(numLengths))];
  }

  function compressed([lengthCode, distanceCode]) {
    for (;;) {
      const value = symbol(lengthCode);
      if (value === 256) return;
      if (value < 256) {
        room(1);
        out[size++] = value;
        continue;
      }
      const length = LENGTH_BASE[value - 257] + bits(LENGTH_EXTRA[value - 257]);
      const index = symbol(distanceCode);
      const from = size - DISTANCE_BASE[index] - bits(DISTANCE_EXTRA[index]);
      if (!(from >= 0)) throw new Error("compressed data refer to what is not there");
      room(length);
      for (let i = 0; i < length; i++) out[size++] = out[from + i];
    }
  }

  for (let last = 0; !last;) {
    last = bits(1);
    const kind = bits(2);
    if (kind === 3) throw new Error("compressed data hold an unknown block");
    if (kind === 0) stored();
    else compressed(kind === 1 ? fixedCodes() : dynamicCodes());
  }
  return out.buffer.slice(0, size);
}
