import { parseProblem } from './errors.js';

export interface Retries {
  /** How often a request is sent again: by default 4; 0: never. */
  retries?: number;
  /** The longest wait in milliseconds, by default 60,000. If `Retry-After` asks for more, the answer is returned. */
  maxWait?: number;
  /**
   * The longest silence of the API in milliseconds, by default 30,000; 0: no limit. A try ends with a `TimeoutError` if
   * the headers of its answer, or the next part of the body, take longer. A long answer that keeps arriving has no limit.
   */
  timeout?: number;
}

/** The API sent nothing for as long as `timeout` says. The outcome of a write is unknown. */
export class TimeoutError extends Error {
  override readonly name = 'TimeoutError';

  constructor(request: Request, ms: number) {
    super(`${request.method} ${new URL(request.url).pathname}: the API sent nothing for ${ms / 1000} s`);
  }
}

/** The way of every request to the API. */
export interface Transport extends Retries {
  fetch: typeof fetch;
}

const creates = /\/v1\/[^/]+\/[^/]+\/[^/:]+$/; // the paths of POSTs that create a child
const reads = /:(check|counts)$/; // the paths of POSTs that only read
const harmless = /:(check|counts|remove-edges)$/; // the paths of POSTs that may be repeated
const permanent = /^(ERR_|CERT_|UNABLE_|DEPTH_|SELF_SIGNED|ENOTFOUND|HOSTNAME_)/; // bad certificates and names, which remain bad

/** Reports whether a request only reads, so that it may have a `Tidings-Token`. */
export function isRead(request: Request): boolean {
  return request.method === 'GET' || request.method === 'HEAD' || (request.method === 'POST' && reads.test(new URL(request.url).pathname));
}

/** Gives a request that creates a child a key, unless the caller did. All tries have the same key. */
export function addKey(request: Request): void {
  if (request.method === 'POST' && !request.headers.has('Idempotency-Key') && creates.test(new URL(request.url).pathname)) {
    request.headers.set('Idempotency-Key', newKey());
  }
}

/** A new idempotency key. It must be unique, but need not be secret. */
export function newKey(): string {
  const uuid = globalThis.crypto?.randomUUID; // absent in Node 18, and in pages loaded over plain HTTP
  return uuid ? uuid.call(globalThis.crypto) : Array.from({ length: 3 }, () => Math.random().toString(36).slice(2)).join('-');
}

// Reports whether a request may be sent again if its outcome is unknown. A conditional request may not: the first try
// may have succeeded, and the API would refuse the second one because of it.
function isRepeatable(request: Request): boolean {
  const { method, headers } = request;
  if (method === 'GET' || method === 'HEAD') return true;
  if (headers.has('If-Match') || headers.has('If-None-Match')) return false;
  if (method === 'PUT' || method === 'DELETE') return true;
  return method === 'POST' && (headers.has('Idempotency-Key') || harmless.test(new URL(request.url).pathname));
}

/**
 * Sends a request. Sends it again after 429 and 503, not before `Retry-After`, and after a lost connection or a timeout
 * if a repeated request is safe. Never repeats a request that the caller aborted. The body of the answer is complete, unless
 * `stream` is set.
 */
export async function send(request: Request, t: Transport, stream = false): Promise<Response> {
  for (let tries = 1; ; tries++) {
    const last = tries > (t.retries ?? 4);
    let wait = backoff(tries);
    try {
      const response = await attempt(last ? request : request.clone(), t);
      const done = stream && response.ok ? response : await buffered(response);
      if (last || (done.status !== 429 && done.status !== 503)) return done;
      if (done.status === 503 && !(await nothingDone(done)) && !isRepeatable(request)) return done;
      wait = Math.max(wait, retryAfter(done));
      if (wait > (t.maxWait ?? 60_000)) return done;
    } catch (error) {
      if (last || !isLostConnection(error) || !isRepeatable(request)) throw error;
    }
    await pause(wait, request.signal);
  }
}

// Sends a request once, and ends it after too long a silence. The time that the caller takes to read does not count. It
// does not rely on the platform's fetch to end, because one of the caller's own may ignore the signal.
async function attempt(request: Request, t: Transport): Promise<Response> {
  const ms = t.timeout ?? 30_000;
  const controller = new AbortController();
  let fail = (_reason: unknown) => {};
  const end = (reason: unknown) => {
    controller.abort(reason);
    fail(reason);
  };
  const within = <T>(work: Promise<T>) => new Promise<T>((resolve, reject) => {
    fail = reject;
    const limited = ms > 0 && ms < 2 ** 31; // the range of setTimeout
    const timer = limited ? setTimeout(() => end(new TimeoutError(request, ms)), ms) : undefined;
    work.then(resolve, reject).finally(() => clearTimeout(timer));
  });
  request.signal.throwIfAborted();
  request.signal.addEventListener('abort', () => end(request.signal.reason), { once: true });

  const response = await within(t.fetch(new Request(request, { signal: controller.signal })));
  const reader = response.body?.getReader();
  if (reader === undefined) return response;
  const pull = async (to: ReadableStreamDefaultController<Uint8Array>) => {
    const { done, value } = await within(reader.read());
    if (done) to.close();
    else to.enqueue(value);
  };
  return new Response(new ReadableStream({ pull, cancel: (reason) => reader.cancel(reason) }, { highWaterMark: 0 }), response);
}

// Reads the body, so that a connection that breaks within it counts as lost. The generated client would return NDJSON
// as a Blob, so it gets NDJSON as text.
async function buffered(response: Response): Promise<Response> {
  const body = await response.arrayBuffer();
  const whole = new Response(body.byteLength > 0 ? body : null, response);
  if (whole.headers.get('Content-Type') === 'application/x-ndjson') whole.headers.set('Content-Type', 'text/plain');
  return whole;
}

/** Reports whether fetch, or reading a body, took too long or failed for a temporary reason. */
export function isLostConnection(error: unknown): boolean {
  if (error instanceof TimeoutError) return true;
  if (!(error instanceof TypeError)) return false; // the caller aborted it, or made a mistake
  const code = (error.cause as { code?: unknown } | undefined)?.code;
  return !(typeof code === 'string' && permanent.test(code));
}

// Reports whether a 503 says that nothing was written. After `unavailable`, or an answer of a proxy, that is unknown.
async function nothingDone(response: Response): Promise<boolean> {
  const { code } = parseProblem(response, await response.clone().text());
  return code === 'overloaded' || code === 'thread-returning';
}

/** The milliseconds that `Retry-After` asks for; 0 without the header. */
export function retryAfter(response: Response): number {
  const value = response.headers.get('Retry-After');
  if (value === null) return 0;
  const ms = /^\d+$/.test(value) ? Number(value) * 1000 : Date.parse(value) - Date.now();
  return Number.isNaN(ms) ? 0 : Math.max(0, ms);
}

/** The wait in milliseconds before try `tries` + 1: 50 to 100, doubled for each further try, at most 5,000. */
export function backoff(tries: number): number {
  return Math.min(100 * 2 ** (tries - 1), 5000) * (0.5 + Math.random() / 2);
}

/** Waits, or throws the signal's reason as soon as the caller aborts. */
export async function pause(ms: number, signal?: AbortSignal): Promise<void> {
  signal?.throwIfAborted();
  await new Promise<void>((resolve, reject) => {
    const abort = () => {
      clearTimeout(timer);
      reject(signal?.reason);
    };
    const timer = setTimeout(() => {
      signal?.removeEventListener('abort', abort);
      resolve();
    }, ms);
    signal?.addEventListener('abort', abort, { once: true });
  });
}
