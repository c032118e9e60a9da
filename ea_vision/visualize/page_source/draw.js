// Drawing on canvases: colours, photos, tiles, query marks, text. Nothing here knows about the page.

import { bytesOfBase64, isAttention } from "./maps.js";

// A frame's lines from below: black and white together stand out from any ground, at 3:1 or more.
export const FRAME = [["#000", 6], ["#fff", 4], ["#e8431f", 2]];
const SMALL_FRAME = [["#000", 3], ["#fff", 1]];
const BOX = [["#000", 3], ["#ffd23f", 1.5]];
const GAP = 3, LEFT = 26, TOP = 18; // pixels between tiles, and before them for the layers' and the columns' names

// ---- colours --------------------------------------------------------------------------------------------------------

/** Uint32Array of 256 colours, as an ImageData holds them (little-endian RGBA). */
export function colourTable(base64) {
  const bytes = bytesOfBase64(base64);
  return Uint32Array.from({ length: 256 }, (_, i) =>
    (255 << 24 | bytes[3 * i + 2] << 16 | bytes[3 * i + 1] << 8 | bytes[3 * i]) >>> 0);
}

/**
 * Colour a map into pixels: values from low to high become entries of the table. Of attention, whose low is above 0,
 * their logarithms; 0 has the lowest colour.
 */
function colourMap({ values, range: [low, high], table }, pixels) {
  const log = low > 0, from = log ? Math.log(low) : low;
  const factor = 255 / ((log ? Math.log(high) : high) - from);
  for (let j = 0; j < values.length; j++) {
    const value = log ? Math.log(Math.max(values[j], low)) : values[j];
    const index = (value - from) * factor + 0.5;
    pixels[j] = table[index < 0 ? 0 : index > 255 ? 255 : index | 0];
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

/** A copy of a picture as fine as tiles need it: it is scaled once, not for each of them. */
function scaledCopy(picture, width, height) {
  const copy = new OffscreenCanvas(Math.round(width), Math.round(height)), context = copy.getContext("2d");
  context.imageSmoothingEnabled = picture.width > 64;
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
 * A tile's map: attention over the grey photo, logits bare; where there is none a dashed place, and why.
 * @param tile { present, why, pixels, data, values, range, table, cell, featSize, part }; pixels: a canvas of featSize,
 *   as its context, and data what lies on it.
 */
export function drawMap(context, tile, { grey, opacity, ink }, x, y, width, height, frame = SMALL_FRAME) {
  if (!tile?.present) {
    Object.assign(context, { strokeStyle: ink.faint, lineWidth: 1 });
    context.setLineDash([2, 3]);
    context.strokeRect(x + 0.5, y + 0.5, width - 1, height - 1);
    context.setLineDash([]);
    setFont(context, 10, ink.faint, "center", "middle");
    if (tile?.why && width > 60) context.fillText(tile.why, x + width / 2, y + height / 2, width - 6);
    return;
  }
  const attention = isAttention(tile.part);
  colourMap(tile, new Uint32Array(tile.data.data.buffer));
  tile.pixels.putImageData(tile.data, 0, 0);
  context.imageSmoothingEnabled = grey.width > 64;
  if (attention) context.drawImage(grey, x, y, width, height);
  context.globalAlpha = attention ? opacity : 1;
  context.imageSmoothingEnabled = false;
  context.drawImage(tile.pixels.canvas, x, y, width, height);
  context.globalAlpha = 1;
  markCell(context, x, y, width, height, tile.cell, tile.featSize, frame);
}

// ---- tiles ----------------------------------------------------------------------------------------------------------

/**
 * Where the tiles of a grid lie, in CSS pixels.
 * @param size width of all; rows, columns; aspect: height of a tile over its width; largest: of a tile; high: of all, so
 *   that a sheet is seen as a whole, as far as tiles of 26 pixels allow it: small ones have no numbers below.
 */
export function tileGeometry({ width, rows, columns, aspect, largest, high = Infinity }) {
  const wide = Math.floor((width - LEFT) / columns) - GAP, fitting = Math.floor((high / rows - GAP) / aspect);
  const tile = Math.max(26, Math.min(largest, wide, fitting)), height = Math.max(1, Math.round(tile * aspect));
  const numLines = tile < 40 && high < Infinity ? 0 : tile >= 62 ? 1 : 2, strip = 12 * numLines;
  return { left: LEFT, top: TOP, tile, height, numLines, strip, stepX: tile + GAP,
    stepY: height + strip + GAP + (numLines ? 3 : 0) };
}

/**
 * All tiles of a model, with the names of rows and columns and the numbers below.
 * @param tiles rows of tiles, see drawMap.
 * @param look { grey, opacity, ink: { text, faint, accent }, rows, columns: texts, links: [[row, from, to], ...] of
 *   columns }.
 */
export function drawTiles(context, geometry, tiles, look) {
  const { left, top, tile, height, stepX, stepY } = geometry, { rows, columns, ink } = look;
  const grey = scaledCopy(look.grey, tile * context.getTransform().a, height * context.getTransform().a);
  setFont(context, 11, ink.text, "center", "middle");
  columns.forEach((text, c) => context.fillText(text, left + c * stepX + tile / 2, top / 2, tile + 2));
  setFont(context, 11, ink.text, "right", "middle");
  rows.forEach((text, r) => context.fillText(text, left - 6, top + r * stepY + height / 2, left - 6));
  const forEachTile = (act) => tiles.forEach((row, r) => row.forEach((one, c) => act(one, left + c * stepX, top + r * stepY)));
  forEachTile((one, x, y) => drawMap(context, one, { ...look, grey }, x, y, tile, height));
  setFont(context, 10, ink.text, "center");
  forEachTile((one, x, y) => drawNumbers(context, geometry, one, x + tile / 2, y + height + 3));
  for (const link of look.links) drawLink(context, geometry, link, ink);
}

/** A line from what a row hands on to the previous logits of the row below. */
function drawLink(context, { left, top, tile, height, stepX, stepY }, [row, from, to], ink) {
  const y = top + row * stepY + height, below = top + (row + 1) * stepY, middle = (y + below) / 2;
  const [start, end] = [from, to].map((column) => left + column * stepX + tile / 2);
  Object.assign(context, { strokeStyle: ink.accent, fillStyle: ink.accent, lineWidth: 1.5 });
  context.beginPath();
  for (const point of [[start, y], [start, middle], [end, middle], [end, below - 1]]) context.lineTo(...point);
  context.stroke();
  context.beginPath();
  for (const point of [[end - 4, below - 5], [end + 4, below - 5], [end, below]]) context.lineTo(...point);
  context.fill();
}

/** Entropy and distance of a tile's attention, below it. */
function drawNumbers(context, { tile, numLines }, one, x, y) {
  if (!numLines || !one.present || one.entropy === undefined || one.fixed.part && one.part !== "attn") return;
  const numbers = [one.entropy.toFixed(2), one.distance?.toFixed(1) ?? "–"];
  const lines = numLines === 1 ? [numbers.join(" · ")] : numbers;
  lines.forEach((text, i) => context.fillText(text, x, y + 11 * i, tile));
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
