// Colour maps: tables of 256 colours, written into the page by page.py.

import { bytesOfBase64 } from "./bytes.js";

/** Uint32Array of 256 colours, as an ImageData holds them (little-endian RGBA). */
export function colourTable(base64) {
  const bytes = bytesOfBase64(base64);
  return Uint32Array.from({ length: 256 }, (_, i) =>
    (255 << 24 | bytes[3 * i + 2] << 16 | bytes[3 * i + 1] << 8 | bytes[3 * i]) >>> 0);
}

/**
 * Colour a map: values from low to high become entries of the table, written into pixels of a given stride. Of
 * attention, whose low is above 0, their logarithms; 0 has the lowest colour.
 */
export function colourMap(values, [H, W], [low, high], table, pixels, start, stride) {
  const log = low > 0, from = log ? Math.log(low) : low;
  const span = (log ? Math.log(high) : high) - from;
  const factor = span > 0 ? 255 / span : 0;
  for (let i = 0, j = 0; i < H; i++) {
    const base = start + i * stride;
    for (let k = 0; k < W; k++, j++) {
      const value = log ? Math.log(Math.max(values[j], low)) : values[j];
      const index = (value - from) * factor + 0.5;
      pixels[base + k] = table[index < 0 ? 0 : index > 255 ? 255 : index | 0];
    }
  }
}

export function cssColour(table, index) {
  const value = table[index];
  return `rgb(${value & 255} ${(value >> 8) & 255} ${(value >> 16) & 255})`;
}
