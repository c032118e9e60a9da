// Drawing on canvases: colours, photos, tiles, query marks, text. Nothing here knows about the page.

import { bytesOfBase64, isAttention } from "./maps.js";

// A frame's lines from below: black and white together stand out from any ground, at 3:1 or more.
const FRAME = [["#000", 6], ["#fff", 4], ["#e8431f", 2]];
const BOX = [["#000", 3], ["#ffd23f", 1.5]];
const SMALL_FRAME = [["#000", 3], ["#fff", 1]];
const GAP = 3;

// ---- colours --------------------------------------------------------------------------------------------------------

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
function colourMap(values, [H, W], [low, high], table, pixels, start, stride) {
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

// ---- canvases, text -------------------------------------------------------------------------------------------------

let fineness = 0; // pixels of a canvas for a CSS pixel; 0: the screen's

export const setFineness = (pixels) => { fineness = pixels; };

/** Fit a canvas's pixels to the screen's and empty it; returns its context, scaled to CSS pixels. */
export function sizeCanvas(canvas, width, height) {
  const ratio = fineness || window.devicePixelRatio || 1;
  const pixelWidth = Math.round(width * ratio), pixelHeight = Math.round(height * ratio);
  if (canvas.width !== pixelWidth || canvas.height !== pixelHeight) {
    Object.assign(canvas, { width: pixelWidth, height: pixelHeight });
    Object.assign(canvas.style, { width: `${width}px`, height: `${height}px` });
  }
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  return context;
}

export function setFont(context, size, colour, align = "left", baseline = "top", weight = "") {
  Object.assign(context, { font: `${weight} ${size}px system-ui, sans-serif`, fillStyle: colour, textAlign: align,
    textBaseline: baseline });
}

/** A text as lines no wider than `width` in the context's font, broken between words. */
function linesOf(context, text, width) {
  const lines = [""];
  for (const word of text.split(" ")) {
    const longer = `${lines.at(-1)} ${word}`.trim();
    if (!lines.at(-1) || context.measureText(longer).width <= width) lines[lines.length - 1] = longer;
    else lines.push(word);
  }
  return lines;
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
  const canvas = new OffscreenCanvas(image.naturalWidth, image.naturalHeight);
  const context = canvas.getContext("2d");
  context.drawImage(image, 0, 0);
  const data = context.getImageData(0, 0, canvas.width, canvas.height);
  for (let i = 0; i < data.data.length; i += 4) {
    const grey = 0.299 * data.data[i] + 0.587 * data.data[i + 1] + 0.114 * data.data[i + 2];
    data.data[i] = data.data[i + 1] = data.data[i + 2] = grey;
  }
  context.putImageData(data, 0, 0);
  return canvas;
}

/** The photo with the query's cell of the finest map outlined. */
export function drawPhoto(context, image, width, height, cell, [H, W]) {
  context.imageSmoothingEnabled = image.naturalWidth > 64;
  context.drawImage(image, 0, 0, width, height);
  markCell(context, 0, 0, width, height, cell, [H, W], FRAME);
}

/** Boxes of found objects, x1 y1 x2 y2 in pixels of the network's input of H x W, on a photo of width x height. */
export function drawBoxes(context, boxes, [H, W], width, height) {
  for (const [colour, thick] of BOX) {
    Object.assign(context, { strokeStyle: colour, lineWidth: thick });
    for (const [x1, y1, x2, y2] of boxes) {
      context.strokeRect((x1 * width) / W, (y1 * height) / H, ((x2 - x1) * width) / W, ((y2 - y1) * height) / H);
    }
  }
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

/** One map over the grey photo. */
export function drawMap(context, { values, range, table, cell }, featSize, grey, opacity, width, height) {
  const [H, W] = featSize;
  const small = new OffscreenCanvas(W, H), data = new ImageData(W, H);
  colourMap(values, featSize, range, table, new Uint32Array(data.data.buffer), 0, W);
  small.getContext("2d").putImageData(data, 0, 0);
  overlay(context, grey, [small, 0, 0, W, H], opacity, 0, 0, width, height);
  markCell(context, 0, 0, width, height, cell, featSize, FRAME);
}

/** A map, [canvas, x, y, width, height], over the grey photo. */
function overlay(context, grey, map, opacity, x, y, width, height) {
  if (opacity < 1) {
    context.imageSmoothingEnabled = grey.width > 64;
    context.drawImage(grey, x, y, width, height);
  }
  context.globalAlpha = opacity;
  context.imageSmoothingEnabled = false;
  context.drawImage(...map, x, y, width, height);
  context.globalAlpha = 1;
}

/** The place of a map that there is not, and why, where that has room. */
export function drawMissing(context, x, y, width, height, ink, why = "") {
  Object.assign(context, { strokeStyle: ink.faint, lineWidth: 1 });
  context.setLineDash([2, 3]);
  context.strokeRect(x + 0.5, y + 0.5, width - 1, height - 1);
  context.setLineDash([]);
  setFont(context, 10, ink.faint, "center", "middle");
  const lines = linesOf(context, why, width - 6);
  if (lines.some((line) => context.measureText(line).width > width - 2) || 12 * lines.length > height) return;
  lines.forEach((line, i) => context.fillText(line, x + width / 2, y + height / 2 + 12 * (i - (lines.length - 1) / 2)));
}

// ---- tiles ----------------------------------------------------------------------------------------------------------

/**
 * Where the tiles of a grid lie, in CSS pixels.
 * @param size width of all; rows, columns; aspect: height of a tile over its width; largest: of a tile; high: of all, so
 *   that a sheet is seen as a whole, as far as tiles of 26 pixels allow it: small ones have no numbers below.
 */
export function tileGeometry({ width, rows, columns, aspect, largest, high = Infinity }) {
  const left = 26, top = 18, gap = 3;
  const fitting = Math.min(largest, Math.floor((width - left) / columns) - GAP, Math.floor((high / rows - gap) / aspect));
  const tile = Math.max(26, fitting);
  const height = Math.max(1, Math.round(tile * aspect));
  const numLines = tile < 40 && high < Infinity ? 0 : tile >= 62 ? 1 : 2;
  const strip = numLines * 12;
  const stepY = height + strip + GAP + (numLines ? 3 : 0);
  return { left, top, tile, height, numLines, strip, stepX: tile + GAP, stepY,
    totalHeight: top + rows * stepY };
}

/** All tiles of a model. The maps are coloured side by side in one small image, then enlarged onto the canvas. */
export class TilePainter {
  /** @param sizes featSize of each row of tiles; numColumns of them. */
  constructor(sizes, numColumns) {
    this.sizes = sizes;
    this.cellHeight = Math.max(...sizes.map(([H]) => H));
    this.cellWidth = Math.max(...sizes.map(([, W]) => W));
    this.atlas = new OffscreenCanvas(this.cellWidth * numColumns, this.cellHeight * sizes.length);
    this.context = this.atlas.getContext("2d");
    this.image = new ImageData(this.atlas.width, this.atlas.height);
    this.pixels = new Uint32Array(this.image.data.buffer);
  }

  /**
   * @param tiles rows of { present, why, values, range, table, cell, part, entropy, distance }.
   * @param look { grey, opacity, ink: { text, faint }, rows, columns: texts, links: [[row, from, to], ...] of columns,
   *   shows: row number -> whether it can be seen, others are left empty }.
   */
  paint(context, geometry, tiles, look) {
    const { left, top, tile, height, stepX, stepY } = geometry;
    const forEachTile = (paint) => tiles.forEach((row, r) => {
      if (look.shows(r)) row.forEach((one, c) => paint(one, left + c * stepX, top + r * stepY, r, c));
    });
    forEachTile((one, x, y, r, c) => {
      if (!one.present) return;
      const start = r * this.cellHeight * this.atlas.width + c * this.cellWidth;
      colourMap(one.values, this.sizes[r], one.range, one.table, this.pixels, start, this.atlas.width);
    });
    this.context.putImageData(this.image, 0, 0);
    this.paintLabels(context, geometry, look);
    forEachTile((one, x, y, r, c) => {
      if (!one.present) {
        drawMissing(context, x, y, tile, height, look.ink, one.why);
        return;
      }
      const [H, W] = this.sizes[r];
      overlay(context, look.grey, [this.atlas, c * this.cellWidth, r * this.cellHeight, W, H],
        isAttention(one.part) ? look.opacity : 1, x, y, tile, height); // logits are bare
      markCell(context, x, y, tile, height, one.cell, this.sizes[r], SMALL_FRAME);
    });
    for (const link of look.links) if (look.shows(link[0])) this.paintLink(context, geometry, link, look.ink);
    if (geometry.numLines) forEachTile((one, x, y) => this.paintNumbers(context, geometry, one, x, y, look.ink));
  }

  paintLabels(context, { left, top, tile, height, stepX, stepY }, { rows, columns, ink }) {
    setFont(context, 11, ink.text, "center", "middle");
    const widest = Math.max(...columns.map((text) => context.measureText(text).width));
    if (widest > tile + 2) setFont(context, Math.max(8, 11 * tile / widest), ink.text, "center", "middle");
    columns.forEach((text, c) => context.fillText(text, left + c * stepX + tile / 2, top / 2, tile + 2));
    setFont(context, 11, ink.text, "right", "middle");
    rows.forEach((text, r) => context.fillText(text, left - 6, top + r * stepY + height / 2, left - 6));
  }

  /** A line from what a row hands on to the previous logits of the row below. */
  paintLink(context, { left, top, tile, height, stepX, stepY }, [row, from, to], ink) {
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

  paintNumbers(context, { tile, height, numLines }, one, left, top, ink) {
    if (!one.present || one.entropy === undefined || one.fixed.part && one.part !== "attn") return;
    setFont(context, 10, ink.text, "center");
    const numbers = [one.entropy.toFixed(2), one.distance?.toFixed(1) ?? "–"];
    const lines = numLines === 1 ? [numbers.join(" · ")] : numbers;
    lines.forEach((text, i) => context.fillText(text, left + tile / 2, top + height + 3 + 11 * i, tile));
  }
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
