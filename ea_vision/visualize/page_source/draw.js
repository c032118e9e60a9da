// Drawing on canvases: photos, tiles, query marks. Nothing here knows about the page.

import { colourMap, cssColour } from "./colours.js";

// A frame's lines from below: black and white together stand out from any ground, at 3:1 or more.
const FRAME = [["#000", 6], ["#fff", 4], ["#e8431f", 2]];
const BOX = [["#000", 3], ["#ffd23f", 1.5]];
const SMALL_FRAME = [["#000", 3], ["#fff", 1]];
const FONT = "system-ui, sans-serif";
const GAP = 3;

/** Where the tiles of a grid lie, in CSS pixels. */
export function tileGeometry(width, numRows, numColumns, aspect, numbers) {
  const left = 26, top = 18, minTile = 26, maxTile = numColumns < 6 ? 124 : 92;
  const fitting = Math.floor((width - left) / numColumns) - GAP;
  const tile = Math.max(minTile, Math.min(maxTile, fitting));
  const height = Math.max(1, Math.round(tile * aspect));
  const numLines = numbers ? (tile >= 62 ? 1 : 2) : 0;
  const strip = numLines * 12;
  return {
    left, top, tile, height, numLines, strip,
    stepX: tile + GAP,
    stepY: height + strip + GAP + (numLines ? 3 : 0),
    width: left + numColumns * (tile + GAP),
    totalHeight: top + numRows * (height + strip + GAP + (numLines ? 3 : 0)),
  };
}

/** Fit a canvas's pixels to the screen's and empty it; returns its context, scaled to CSS pixels. */
export function sizeCanvas(canvas, width, height) {
  const ratio = window.devicePixelRatio || 1;
  const pixelWidth = Math.round(width * ratio), pixelHeight = Math.round(height * ratio);
  if (canvas.width !== pixelWidth || canvas.height !== pixelHeight) {
    canvas.width = pixelWidth;
    canvas.height = pixelHeight;
    canvas.style.width = `${width}px`;
    canvas.style.height = `${height}px`;
  }
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  return context;
}

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
    context.strokeStyle = colour;
    context.lineWidth = thick;
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
    context.strokeStyle = colour;
    context.lineWidth = thick;
    context.strokeRect(left, top, right - left, bottom - top);
  }
}

/** One map over the grey photo. */
export function drawMap(context, values, featSize, range, table, grey, opacity, cell, width, height) {
  const [H, W] = featSize;
  const small = new OffscreenCanvas(W, H);
  const data = new ImageData(W, H);
  colourMap(values, featSize, range, table, new Uint32Array(data.data.buffer), 0, W);
  small.getContext("2d").putImageData(data, 0, 0);
  context.imageSmoothingEnabled = grey.width > 64;
  context.drawImage(grey, 0, 0, width, height);
  context.globalAlpha = opacity;
  context.imageSmoothingEnabled = false;
  context.drawImage(small, 0, 0, width, height);
  context.globalAlpha = 1;
  markCell(context, 0, 0, width, height, cell, featSize, FRAME);
}

/** The place of a map that there is not. */
export function drawMissing(context, x, y, width, height, ink) {
  context.strokeStyle = ink.faint;
  context.lineWidth = 1;
  context.setLineDash([2, 3]);
  context.strokeRect(x + 0.5, y + 0.5, width - 1, height - 1);
  context.setLineDash([]);
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
   * @param tiles rows of { values, range, table, cell, entropy, distance }, null where the layer lacks the part.
   * @param ink { text, faint }: colours of the theme.
   * @param labels { rows, columns }: their texts.
   * @param shows row number -> whether it can be seen: others are left empty.
   */
  paint(context, geometry, tiles, { grey, opacity, ink, labels, shows }) {
    const { left, top, tile, height, stepX, stepY } = geometry;
    const forEachTile = (paint) => tiles.forEach((row, r) => {
      if (shows(r)) row.forEach((one, c) => paint(one, r, c));
    });
    forEachTile((one, r, c) => {
      if (one) {
        const start = r * this.cellHeight * this.atlas.width + c * this.cellWidth;
        colourMap(one.values, this.sizes[r], one.range, one.table, this.pixels, start, this.atlas.width);
      }
    });
    this.context.putImageData(this.image, 0, 0);

    this.paintLabels(context, geometry, labels, ink);
    forEachTile((one, r, c) => {
      const x = left + c * stepX, y = top + r * stepY;
      if (!one) {
        drawMissing(context, x, y, tile, height, ink);
        return;
      }
      const [H, W] = this.sizes[r];
      if (one.part === "attn" && opacity < 1) { // logits are bare
        context.imageSmoothingEnabled = true;
        context.drawImage(grey, x, y, tile, height);
        context.globalAlpha = opacity;
      }
      context.imageSmoothingEnabled = false;
      context.drawImage(this.atlas, c * this.cellWidth, r * this.cellHeight, W, H, x, y, tile, height);
      context.globalAlpha = 1;
      markCell(context, x, y, tile, height, one.cell, this.sizes[r], SMALL_FRAME);
    });
    if (geometry.numLines) this.paintNumbers(context, geometry, forEachTile, ink);
  }

  paintLabels(context, { left, top, tile, height, stepX, stepY }, labels, ink) {
    context.fillStyle = ink.text;
    context.font = `11px ${FONT}`;
    context.textBaseline = "middle";
    context.textAlign = "center";
    labels.columns.forEach((text, c) => context.fillText(text, left + c * stepX + tile / 2, top / 2, tile + 2));
    context.textAlign = "right";
    labels.rows.forEach((text, r) => context.fillText(text, left - 6, top + r * stepY + height / 2, left - 6));
  }

  paintNumbers(context, { left, top, tile, height, stepX, stepY, numLines }, forEachTile, ink) {
    context.fillStyle = ink.text;
    context.font = `10px ${FONT}`;
    context.textBaseline = "top";
    context.textAlign = "center";
    forEachTile((one, r, c) => {
      if (!one || one.entropy === undefined || (one.fixed.part ?? "attn") !== "attn") return;
      const x = left + c * stepX + tile / 2, y = top + r * stepY + height + 3;
      const entropy = one.entropy.toFixed(2), distance = one.distance?.toFixed(1) ?? "–";
      if (numLines === 1) {
        context.fillText(`${entropy} · ${distance}`, x, y, tile);
      } else {
        context.fillText(entropy, x, y, tile);
        context.fillText(distance, x, y + 11, tile);
      }
    });
  }
}

/** A horizontal colour bar with its ends' values, 26 pixels high; of attention in units of uniform attention, with 1 in
 * the middle; of logits 0 is in the middle. */
export function drawBar(context, table, [low, high], width, ink) {
  const bar = 8;
  for (let x = 0; x < width; x++) {
    context.fillStyle = cssColour(table, Math.round((x / Math.max(1, width - 1)) * 255));
    context.fillRect(x, 0, 1, bar);
  }
  context.fillStyle = ink.text;
  context.font = `11px ${FONT}`;
  context.textBaseline = "top";
  const top = low > 0 ? String(Number(Math.sqrt(high / low).toPrecision(2))) : null; // the ends are 1/top and top
  context.textAlign = "left";
  context.fillText(top ? `1/${top}` : shortNumber(low), 0, bar + 4);
  context.textAlign = "right";
  context.fillText(top ?? shortNumber(high), width, bar + 4);
  context.textAlign = "center";
  if (top) context.fillRect(width / 2 - 0.5, 0, 1.5, bar + 3);
  context.fillText(top ? "1: uniform" : low < 0 && high > 0 ? "0" : "", width / 2, bar + 4);
}

/** Three figures that count: 0.0123, 4.56, -12.3. */
export function shortNumber(value) {
  return value === 0 ? "0" : Math.abs(value) < 1e-3 || Math.abs(value) >= 1e5 ? value.toExponential(1)
    : String(Number(value.toPrecision(3)));
}
