// Calls to the daemon that served this page. The API key, where one is needed, is kept in this tab's session storage.

const KEY = "expertd.key";
const TIMEOUT_MS = 10_000;

export class Unauthorized extends Error {}
export class Missing extends Error {}
/** No answer, or not one of the daemon's. */
export class Away extends Error {}

export class Api {
  get key() {
    return sessionStorage.getItem(KEY) ?? "";
  }

  set key(value) {
    sessionStorage.setItem(KEY, value);
  }

  /** The JSON at a path. Throws Unauthorized, Missing or Away. */
  async json(path) {
    const answer = await this.#ask(path, { accept: "application/json" });
    return answer.json();
  }

  /** Bytes with their tag and headers; null while the tag is still the one given. */
  async bytes(path, tag) {
    const headers = { accept: "application/octet-stream" };
    if (tag) headers["if-none-match"] = tag;
    const answer = await this.#ask(path, headers);
    if (answer.status === 304) return null;
    return { body: new Uint8Array(await answer.arrayBuffer()), tag: answer.headers.get("etag"), headers: answer.headers };
  }

  async #ask(path, headers) {
    if (this.key) headers.authorization = `Bearer ${this.key}`;
    let answer;
    try {
      answer = await fetch(path, { headers, cache: "no-store", signal: AbortSignal.timeout(TIMEOUT_MS) });
    } catch (error) {
      throw new Away(String(error));
    }
    if (answer.status === 401) throw new Unauthorized();
    if (answer.status === 404) throw new Missing(path);
    if (!answer.ok && answer.status !== 304) throw new Away(`${answer.status} at ${path}`);
    return answer;
  }
}

/** Asks for a key until one is given; `refused` says that the last one did not do. */
export function askForKey(api, refused) {
  const dialog = document.getElementById("key-dialog");
  const field = document.getElementById("key");
  document.getElementById("key-wrong").hidden = !refused;
  field.value = "";
  return new Promise((resolve) => {
    dialog.addEventListener(
      "close",
      () => {
        if (field.value) api.key = field.value;
        resolve();
      },
      { once: true },
    );
    dialog.showModal();
    field.focus();
  });
}
