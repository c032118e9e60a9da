// Drawing on canvases: colours, photos, tiles, query marks, text. Nothing here knows about the page.

import { CHANGED, bytesOfBase64, isAttention, shareOfPhoto } from "./maps.js";

// A frame's lines from below: black and white together stand out from any ground, at 3:1 or more.
export const FRAME = [["#000", 6], ["#fff", 4], ["#0072b2", 2]];
const SMALL_FRAME = [["#000", 3], ["#fff", 1]];
const BOX = [["#000", 3], ["#ffd23f", 1.5]];
const FOG = Math.round(0.83 * 255); // grey
const LINE = [["#fff", 3], ["#d55e00", 1.6]];

// ---- colours --------------------------------------------------------------------------------------------------------

/** Uint32Array of 256 colours, as an ImageData holds them (little-endian RGBA). */
export function colourTable(base64) {
  const bytes = bytesOfBase64(base64);
  return Uint32Array.from({ length: 256 }, (_, i) =>
    (255 << 24 | bytes[3 * i + 2] << 16 | bytes[3 * i + 1] << 8 | bytes[3 * i]) >>> 0);
}

/** As `colourTable`, the fog: opaque at the lower end, clear at the upper one. */
export function fogTable() {
  return Uint32Array.from({ length: 256 }, (_, i) => ((255 - i) << 24 | FOG << 16 | FOG << 8 | FOG) >>> 0);
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

/** A grey copy of an image, at half its contrast: maps are laid over it. */
export function greyCopy(image) {
  const canvas = new OffscreenCanvas(image.naturalWidth, image.naturalHeight), context = canvas.getContext("2d");
  context.drawImage(image, 0, 0);
  context.globalCompositeOperation = "saturation";
  context.fillStyle = "#808080";
  context.fillRect(0, 0, canvas.width, canvas.height);
  Object.assign(context, { globalCompositeOperation: "source-over", globalAlpha: 0.5 });
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

/** The line at uniform attention: where half of the photo is left, between the middles of cells; beyond the outer ones the
 * map goes on unchanged. uniform: the attention that counts as 1. */
function drawLine(context, { values, featSize: [H, W] }, uniform, width, height) {
  const at = (i, j) => shareOfPhoto(values[Math.min(Math.max(i, 0), H - 1) * W + Math.min(Math.max(j, 0), W - 1)] / uniform) - 0.5;
  context.beginPath();
  for (let i = -1; i < H; i++) {
    for (let j = -1; j < W; j++) {
      const corners = [[i, j], [i, j + 1], [i + 1, j + 1], [i + 1, j]], cuts = [];
      corners.forEach(([y, x], k) => {
        const [down, right] = corners[(k + 1) % 4], from = at(y, x), to = at(down, right), part = from / (from - to);
        if ((from < 0) !== (to < 0)) cuts.push([x + part * (right - x), y + part * (down - y)]);
      });
      cuts.forEach(([x, y], k) => context[k % 2 ? "lineTo" : "moveTo"](((x + 0.5) * width) / W, ((y + 0.5) * height) / H));
    }
  }
  for (const [strokeStyle, lineWidth] of LINE) {
    Object.assign(context, { strokeStyle, lineWidth: width > 100 ? lineWidth : lineWidth / 2 });
    context.stroke();
  }
}

/** + and - on cells whose change is more than uniform attention, where they are large enough to be read. */
function drawSigns(context, { values, featSize: [H, W] }, width, height) {
  const size = Math.min(18, width / W, height / H);
  if (size < 6) return;
  values.forEach((value, cell) => {
    if (Math.abs(value) <= 1) return;
    setFont(context, size, Math.abs(value) > 2 ? "#fff" : "#000", "center", "middle", "bold");
    context.fillText(value > 0 ? "+" : "\u2212", (((cell % W) + 0.5) * width) / W, ((Math.floor(cell / W) + 0.5) * height) / H);
  });
}

/**
 * A tile's map: attention as fog on the photo, or in colours over the grey one; what changed over the grey one; logits bare;
 * a dashed place for none.
 * @param tile { present, why, pixels, data, values, range, table, cell, featSize, part }; pixels: a canvas of featSize,
 *   as its context, and data what lies on it.
 * @param look { photo: a copy of the tile's size, in colour for fog, else grey, fog: whether attention is fog, opacity, ink }.
 */
export function drawMap(context, tile, { photo, fog, opacity, ink }, width, height) {
  if (!tile.present) {
    Object.assign(context, { strokeStyle: ink.faint, lineWidth: 1 });
    context.setLineDash([2, 3]);
    context.strokeRect(0.5, 0.5, width - 1, height - 1);
    context.setLineDash([]);
    return;
  }
  colourMap(tile, new Uint32Array(tile.data.data.buffer));
  tile.pixels.putImageData(tile.data, 0, 0);
  const foggy = isAttention(tile.part) && fog, onPhoto = isAttention(tile.part) || tile.part === CHANGED;
  if (onPhoto) context.drawImage(photo, 0, 0, width, height);
  context.globalAlpha = onPhoto && !foggy ? opacity : 1;
  context.imageSmoothingEnabled = foggy;
  context.drawImage(tile.pixels.canvas, 0, 0, width, height);
  context.globalAlpha = 1;
  if (foggy && width >= 48) drawLine(context, tile, 2 * tile.range[0], width, height);
  if (tile.part === CHANGED) drawSigns(context, tile, width, height);
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
