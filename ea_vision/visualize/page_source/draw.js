// Drawing on canvases: colours, photos, tiles, query marks, text. Nothing here knows about the page.

import { bytesOfBase64, isAttention } from "./maps.js";

// A frame's lines from below: black and white together stand out from any ground, at 3:1 or more.
export const FRAME = [["#000", 6], ["#fff", 4], ["#e8431f", 2]];
const SMALL_FRAME = [["#000", 3], ["#fff", 1]];
const BOX = [["#000", 3], ["#ffd23f", 1.5]];
const DARKEST = 0.1; // factor of the photo's colours at half of uniform attention; at twice it is 1

// ---- colours --------------------------------------------------------------------------------------------------------

/** Uint32Array of 256 colours, as an ImageData holds them (little-endian RGBA). */
export function colourTable(base64) {
  const bytes = bytesOfBase64(base64);
  return Uint32Array.from({ length: 256 }, (_, i) =>
    (255 << 24 | bytes[3 * i + 2] << 16 | bytes[3 * i + 1] << 8 | bytes[3 * i]) >>> 0);
}

/** As `colourTable`, the greys by which light multiplies a photo. */
export function lightTable() {
  const grey = (i) => Math.round(255 * (DARKEST + ((1 - DARKEST) * i) / 255));
  return Uint32Array.from({ length: 256 }, (_, i) => (255 << 24 | grey(i) << 16 | grey(i) << 8 | grey(i)) >>> 0);
}

/**
 * Colour a map into pixels: values from low to high become entries of the table. Of attention, whose low is above 0,
 * their logarithms; 0 has the lowest colour. What a mask hides from logits (-Infinity) stays transparent.
 */
function colourMap({ values, range: [low, high], table }, pixels) {
  const log = low > 0, from = log ? Math.log(low) : low;
  const factor = 255 / ((log ? Math.log(high) : high) - from);
  for (let j = 0; j < values.length; j++) {
    const value = log ? Math.log(Math.max(values[j], low)) : values[j];
    const index = (value - from) * factor + 0.5;
    pixels[j] = values[j] === -Infinity ? 0 : table[index < 0 ? 0 : index > 255 ? 255 : index | 0];
  }
}

// ---- canvases, text -------------------------------------------------------------------------------------------------

let fineness = 0; // pixels of a canvas for a CSS pixel; 0: the screen's

export const setFineness = (pixels) => { fineness = pixels; };

/** Fit a canvas's pixels to the screen's and empty it; returns its context, scaled to CSS pixels. */
export function sizeCanvas(canvas, width, height) {
  const ratio = fineness || window.devicePixelRatio || 1;
  const wide = Math.round(width * ratio), high = Math.round(height * ratio);
  if (canvas.width !== wide || canvas.height !== high) Object.assign(canvas, { width: wide, height: high });
  Object.assign(canvas.style, { width: `${width}px`, height: `${height}px` });
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  return context;
}

export function setFont(context, size, colour, align = "left", baseline = "top", weight = "") {
  Object.assign(context, { font: `${weight} ${size}px system-ui, sans-serif`, fillStyle: colour, textAlign: align,
    textBaseline: baseline });
}

/** Copy what an element shows to where the page has it: canvases, words, and the outlines of what is selected. */
export function copyElement(context, node, accent) {
  for (const canvas of node.querySelectorAll("canvas")) {
    const { left, top, width, height } = canvas.getBoundingClientRect();
    if (width) context.drawImage(canvas, left, top, width, height);
  }
  const texts = document.createTreeWalker(node, NodeFilter.SHOW_TEXT), range = document.createRange();
  while (texts.nextNode()) {
    const text = texts.currentNode, style = getComputedStyle(text.parentElement);
    setFont(context, parseFloat(style.fontSize), style.color, "left", "middle", style.fontWeight);
    for (const word of text.data.matchAll(/\S+/g)) {
      range.setStart(text, word.index);
      range.setEnd(text, word.index + word[0].length);
      const { left, top, width, height } = range.getBoundingClientRect();
      if (width) context.fillText(word[0], left, top + height / 2);
    }
  }
  Object.assign(context, { strokeStyle: accent, lineWidth: 3 });
  for (const selected of node.querySelectorAll("[aria-pressed=true]")) {
    const { left, top, width, height } = selected.getBoundingClientRect();
    context.strokeRect(left - 1.5, top - 1.5, width + 3, height + 3);
  }
}

// ---- photos and maps ------------------------------------------------------------------------------------------------

/** A grey copy of an image: maps are laid over it. */
export function greyCopy(image) {
  const canvas = new OffscreenCanvas(image.naturalWidth, image.naturalHeight), context = canvas.getContext("2d");
  context.drawImage(image, 0, 0);
  context.globalCompositeOperation = "saturation";
  context.fillStyle = "#888";
  context.fillRect(0, 0, canvas.width, canvas.height);
  return canvas;
}

/** A copy of a picture as fine as tiles of this size need it: it is scaled once, not for each of them. */
export function scaledCopy(picture, width, height) {
  const ratio = fineness || window.devicePixelRatio || 1;
  const copy = new OffscreenCanvas(Math.round(width * ratio), Math.round(height * ratio)), context = copy.getContext("2d");
  context.imageSmoothingEnabled = (picture.naturalWidth ?? picture.width) > 64;
  context.imageSmoothingQuality = "high";
  context.drawImage(picture, 0, 0, copy.width, copy.height);
  return copy;
}

/**
 * The photo with boxes of found objects and the query's cell outlined.
 * @param boxes x1 y1 x2 y2 in pixels of the network's input of H x W; cell: of a map of featSize.
 */
export function drawPhoto(context, image, width, height, boxes, [H, W], cell, featSize) {
  context.imageSmoothingEnabled = image.naturalWidth > 64;
  context.drawImage(image, 0, 0, width, height);
  for (const [colour, thick] of BOX) {
    Object.assign(context, { strokeStyle: colour, lineWidth: thick });
    for (const [x1, y1, x2, y2] of boxes) {
      context.strokeRect((x1 * width) / W, (y1 * height) / H, ((x2 - x1) * width) / W, ((y2 - y1) * height) / H);
    }
  }
  markCell(context, 0, 0, width, height, cell, featSize, FRAME);
}

/** A frame around a cell; at the picture's edges it moves inwards, so that all four sides are seen. */
function markCell(context, x, y, width, height, cell, [H, W], frame) {
  if (cell < 0) return; // a token that is no pixel
  const half = frame[0][1] / 2;
  const column = cell % W, row = Math.floor(cell / W);
  const sharp = (place) => Math.round(place - half) + half; // so that lines fill whole pixels
  const left = Math.max(x + half, sharp(x + (column * width) / W - half));
  const top = Math.max(y + half, sharp(y + (row * height) / H - half));
  const right = Math.min(x + width - half, sharp(x + ((column + 1) * width) / W + half));
  const bottom = Math.min(y + height - half, sharp(y + ((row + 1) * height) / H + half));
  for (const [colour, thick] of frame) {
    Object.assign(context, { strokeStyle: colour, lineWidth: thick });
    context.strokeRect(left, top, right - left, bottom - top);
  }
}

/**
 * A tile's map: attention as light on the photo, or in colours over the grey one; logits bare; a dashed place for none.
 * @param tile { present, why, pixels, data, values, range, table, cell, featSize, part }; pixels: a canvas of featSize,
 *   as its context, and data what lies on it.
 * @param look { photo, grey: copies of the tile's size, light: whether attention is light, opacity, ink }.
 */
export function drawMap(context, tile, { photo, grey, light, opacity, ink }, width, height) {
  if (!tile.present) {
    Object.assign(context, { strokeStyle: ink.faint, lineWidth: 1 });
    context.setLineDash([2, 3]);
    context.strokeRect(0.5, 0.5, width - 1, height - 1);
    context.setLineDash([]);
    return;
  }
  colourMap(tile, new Uint32Array(tile.data.data.buffer));
  tile.pixels.putImageData(tile.data, 0, 0);
  const attention = isAttention(tile.part), lit = attention && light;
  if (attention) context.drawImage(lit ? photo : grey, 0, 0, width, height);
  if (lit) context.globalCompositeOperation = "multiply";
  context.globalAlpha = attention && !light ? opacity : 1;
  context.imageSmoothingEnabled = lit;
  context.drawImage(tile.pixels.canvas, 0, 0, width, height);
  Object.assign(context, { globalCompositeOperation: "source-over", globalAlpha: 1 });
  markCell(context, 0, 0, width, height, tile.cell, tile.featSize, width > 100 ? FRAME : SMALL_FRAME);
}

/** A horizontal colour bar with its ends' values, 26 pixels high; of attention in units of uniform attention, with 1 in
 * the middle; of logits 0 is in the middle. */
export function drawBar(context, table, [low, high], width, ink) {
  const bar = 8;
  for (let x = 0; x < width; x++) {
    const value = table[Math.round((x / Math.max(1, width - 1)) * 255)];
    context.fillStyle = `rgb(${value & 255} ${(value >> 8) & 255} ${(value >> 16) & 255})`;
    context.fillRect(x, 0, 1, bar);
  }
  const top = low > 0 ? String(Number(Math.sqrt(high / low).toPrecision(2))) : null; // the ends are 1/top and top
  setFont(context, 11, ink.text);
  if (top) context.fillRect(width / 2 - 0.5, 0, 1.5, bar + 3);
  const texts = [["left", 0, top ? `1/${top}` : shortNumber(low)], ["right", width, top ?? shortNumber(high)],
    ["center", width / 2, top ? "1: uniform" : "0: logits"]];
  for (const [align, x, text] of texts) {
    context.textAlign = align;
    context.fillText(text, x, bar + 4);
  }
}

/** Three figures that count: 0.0123, 4.56, -12.3. */
export function shortNumber(value) {
  return value === 0 ? "0" : Math.abs(value) < 1e-3 || Math.abs(value) >= 1e5 ? value.toExponential(1)
    : String(Number(value.toPrecision(3)));
}
