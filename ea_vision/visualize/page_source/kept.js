// Images that were sent to a server, kept by the browser until that server ends: a reload finds them again.

const NAME = "ea_vision explore";

const asked = (request) => new Promise((resolve, reject) => {
  request.onsuccess = () => resolve(request.result);
  request.onerror = () => reject(request.error);
});

async function store(mode) {
  const opening = indexedDB.open(NAME, 1);
  opening.onupgradeneeded = () => opening.result.createObjectStore("entries", { autoIncrement: true });
  const database = await asked(opening);
  return database.transaction("entries", mode).objectStore("entries");
}

/** Keep an entry of a server, which is known by its session. */
export async function keep(session, entry) {
  await asked((await store("readwrite")).add({ session, entry }));
}

/** The entries of this session in the order they came; those of servers that have ended go. */
export async function keptBefore(session) {
  const entries = await store("readwrite");
  const [keys, values] = await Promise.all([asked(entries.getAllKeys()), asked(entries.getAll())]);
  values.forEach((value, index) => value.session === session || entries.delete(keys[index]));
  return values.filter((value) => value.session === session).map((value) => value.entry);
}
