// The page's data as bytes: base64 texts, some of them compressed.

/** Uint8Array of a base64 text. */
export function bytesOfBase64(text) {
  const binary = atob(text);
  const bytes = new Uint8Array(binary.length);
  for (let i = 0; i < binary.length; i++) bytes[i] = binary.charCodeAt(i);
  return bytes;
}

/** Uncompress a zlib stream (RFC 1950), a Uint8Array; a promise of an ArrayBuffer. */
export async function inflate(bytes) {
  if (!window.DecompressionStream) throw new Error("it needs a browser of May 2023 or later (DecompressionStream)");
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Response(stream).arrayBuffer();
}
