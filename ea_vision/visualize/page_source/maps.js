// The maps of one model on one image, as explore.py packed them: value = low + step * code, -Infinity where a mask hides it.

export const MEAN = "mean"; // of heads
export const ALL = "all"; // the mean of all pixels' queries

export const PARTS = {
  attn: ["attention", "after the softmax: probabilities"],
  logits: ["logits", "what entered the softmax"],
  conv_logits: ["after conv.", "what the evolution's convolution gives, after its ReLU"],
  prev_logits: ["previous", "the logits that the layer before handed on"],
  self_logits: ["own", "the layer's own dot products and position terms"],
  attn_own_alone: ["own alone", "the attention of the layer's own logits alone, at the same scale"],
};
export const CHANGED = "changed"; // attention minus own alone, in units of uniform attention

export const shareOfPhoto = (attention) => (attention <= 0.5 ? 0 : attention >= 2 ? 1 : (Math.log2(attention) + 1) / 2);

export const isAttention = (part) => part.startsWith("attn");

/** Row-major index of the cell of an H x W map that a pixel [y, x] of a height x width input lies in. */
export const cellAt = ([y, x], [H, W], [height, width]) => Math.floor((y * H) / height) * W + Math.floor((x * W) / width);

export const bytesOfBase64 = (text) => Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));

/** Uncompress a zlib stream (RFC 1950), a Uint8Array; a promise of an ArrayBuffer. */
async function inflate(bytes) {
  if (!window.DecompressionStream) throw new Error("it needs a browser of May 2023 or later (DecompressionStream)");
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"))).arrayBuffer();
}

export class Maps {
  /** Inflate all maps of an image; a promise. See the constructor for `model` and `entry`. */
  static async load(model, entry) {
    const streams = await Promise.all(Object.entries(entry.streams).map(async ([part, text]) =>
      [part, await inflate(bytesOfBase64(text))]));
    return new Maps(model, entry, Object.fromEntries(streams));
  }

  /**
   * @param model one of about.models: imgSize, prefix, layers.
   * @param entry the model's share of an image's entry: photo, equation, predictions, featSizes, keys, places, streams.
   * @param buffers part of a stream -> ArrayBuffer.
   */
  constructor(model, entry, buffers) {
    Object.assign(this, { model, entry, buffers });
  }

  has(layer, part) {
    return part in this.entry.places[layer.number];
  }

  /** Parts that some layer has, in the order of PARTS. */
  parts() {
    return Object.keys(PARTS).filter((part) => this.model.layers.some((layer) => this.has(layer, part)));
  }

  /** Whether two parts of a layer are stored as the same map. */
  same(layer, a, b) {
    const [one, two] = [this.entry.places[layer.number][a], this.entry.places[layer.number][b]];
    return one !== undefined && two !== undefined && one[0] === two[0] && one[1] === two[1];
  }

  /** The logits of a layer in the order in which they are computed: [part, heading, sign before it]; no map twice. */
  steps(layer) {
    const own = ["self_logits", "own", "+"];
    const mixed = ["conv_logits", this.model.mixes ? "convolved, both" : "convolved", "\u2192"];
    const steps = [["prev_logits", "previous", ""], ...(this.model.mixes ? [own, mixed] : [mixed, own]),
      ["logits", "logits", "\u2192"]];
    const twice = this.same(layer, "logits", "conv_logits");
    return steps.filter(([part]) => this.has(layer, part) && !(twice && part === "logits"));
  }

  /** By how much a query's attention differs from that of the own logits alone, 0 to 1; undefined where nothing evolves. */
  difference(layer, head, query) {
    if (!this.has(layer, "difference")) return undefined;
    const [stream, offset] = this.entry.places[layer.number].difference, each = this.rowsAHead(layer) + 1;
    const values = new Float32Array(this.buffers[stream], offset, (layer.heads.length + 1) * each), P = this.model.prefix.length;
    const cell = this.cellOf(layer, query), row = query === ALL ? each - 1 : cell < 0 ? -1 - cell : P + cell;
    return values[(head === MEAN ? layer.heads.length : layer.heads.indexOf(head)) * each + row];
  }

  featSize(layer) {
    return this.entry.featSizes[layer.number];
  }

  /** Row-major index of the map's cell that a pixel lies in; of a token before the patches, by name, -1 for the first, and
   * of all pixels -1000. */
  cellOf(layer, query) {
    if (query === ALL) return -1000;
    if (typeof query === "string") return -1 - this.model.prefix.indexOf(query);
    return cellAt(query, this.featSize(layer), this.model.imgSize);
  }

  /** Stored rows of a head: those of the tokens before the patches come first. */
  rowsAHead(layer) {
    return this.model.prefix.length + this.featSize(layer)[0] * this.featSize(layer)[1];
  }

  /**
   * What a query attends to; of all pixels the mean of their queries.
   * @param head number of the head, or MEAN: of the heads that the page has.
   * @param out Float32Array of H * W, filled and returned.
   */
  row(layer, head, part, query, out) {
    out.fill(0);
    const { low, step, mean, codes, hidden } = this.array(layer, part), heads = head === MEAN ? layer.heads : [head];
    const cell = this.cellOf(layer, query);
    for (const one of heads) {
      if (query === ALL) {
        const begin = layer.heads.indexOf(one) * out.length;
        for (let j = 0; j < out.length; j++) out[j] += mean[begin + j] / heads.length;
        continue;
      }
      const index = layer.heads.indexOf(one) * this.rowsAHead(layer)
        + (cell < 0 ? -1 - cell : this.model.prefix.length + cell);
      const base = low[index] / heads.length, slope = step[index] / heads.length, start = index * out.length;
      for (let j = 0; j < out.length; j++) out[j] += codes[start + j] === hidden ? -Infinity : base + slope * codes[start + j];
    }
    return out;
  }

  /** Views into an inflated stream: low, step (K * T), mean (K * N, over the pixels' queries) and codes (K * T * N); T: with
   * the tokens before the patches. hidden: the code of -Infinity; undefined where no value is. */
  array(layer, part) {
    const [stream, offset, hidden] = this.entry.places[layer.number][part], [H, W] = this.featSize(layer);
    const rows = layer.heads.length * this.rowsAHead(layer), buffer = this.buffers[stream];
    return {
      hidden,
      low: new Float32Array(buffer, offset, rows),
      step: new Float32Array(buffer, offset + 4 * rows, rows),
      mean: new Float32Array(buffer, offset + 8 * rows, layer.heads.length * H * W),
      codes: new Uint8Array(buffer, offset + 8 * rows + 4 * layer.heads.length * H * W, rows * H * W),
    };
  }
}

/**
 * Entropy in nats and mean distance from the query in pixels of the input (undefined of a token that has no place), and
 * `outside`, what is missing to a sum of 1: the share of tokens before the patches, and rounding.
 * @param attn probabilities of a row, H * W; what is missing is shared out.
 */
export function measure(attn, cell, [H, W], [height, width]) {
  const row = Math.floor(cell / W), col = cell % W;
  const down = height / H, right = width / W;
  let sum = 0, logs = 0, path = 0;
  for (let i = 0, j = 0; i < H; i++) {
    for (let k = 0; k < W; k++, j++) {
      const p = attn[j];
      if (p <= 0) continue;
      sum += p;
      logs += p * Math.log(p);
      path += p * Math.hypot((i - row) * down, (k - col) * right);
    }
  }
  return { entropy: Math.max(0, Math.log(sum) - logs / sum), distance: cell < 0 ? undefined : path / sum,
    outside: Math.max(0, 1 - sum) };
}
