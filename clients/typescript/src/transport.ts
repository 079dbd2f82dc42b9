import { parseProblem } from './errors.js';

export interface Retries {
  /** How often a request is sent again; 4 by default, 0 for never. */
  retries?: number;
  /** The longest wait, in milliseconds, that `Retry-After` may ask for; above it the answer is the result. 60,000 by default. */
  maxWait?: number;
}

/** What every request goes through. */
export interface Transport extends Retries {
  fetch: typeof fetch;
}

const creates = /\/v1\/[^/]+\/[^/]+\/[^/:]+$/; // POST of a comment or of a child of any other kind
const reads = /:(check|counts)$/; // of POSTs
const harmless = /:(check|counts|remove-edges)$/; // of POSTs: twice is as once
const permanent = /^(ERR_|CERT_|UNABLE_|DEPTH_|SELF_SIGNED|ENOTFOUND|HOSTNAME_)/; // a certificate or a name that will be as wrong again

/** Says whether a request reads, so that a `Tidings-Token` belongs to it. */
export function isRead(request: Request): boolean {
  return request.method === 'GET' || request.method === 'HEAD' || (request.method === 'POST' && reads.test(new URL(request.url).pathname));
}

/** Gives a request that creates a child a key, unless the caller has: it is the same over all tries. */
export function addKey(request: Request): void {
  if (request.method === 'POST' && !request.headers.has('Idempotency-Key') && creates.test(new URL(request.url).pathname)) {
    request.headers.set('Idempotency-Key', newKey());
  }
}

/** A new idempotency key. It has to be unique, not secret. */
export function newKey(): string {
  const uuid = globalThis.crypto?.randomUUID; // absent in Node 18, and in pages that came by plain HTTP
  return uuid ? uuid.call(globalThis.crypto) : Array.from({ length: 3 }, () => Math.random().toString(36).slice(2)).join('-');
}

// Says whether a request whose outcome is unknown may be sent again. One with a condition may not: a second try could be refused for
// what the first one did.
function isRepeatable(request: Request): boolean {
  const { method, headers } = request;
  if (method === 'GET' || method === 'HEAD') return true;
  if (headers.has('If-Match') || headers.has('If-None-Match')) return false;
  if (method === 'PUT' || method === 'DELETE') return true;
  return method === 'POST' && (headers.has('Idempotency-Key') || harmless.test(new URL(request.url).pathname));
}

/**
 * Sends a request, and again after 429 and 503, no sooner than `Retry-After` says, and after a lost connection, where the outcome of
 * the first try does not matter. What the caller aborted is not sent again. The body of the answer is complete, unless `stream`.
 */
export async function send(request: Request, t: Transport, stream = false): Promise<Response> {
  for (let tries = 1; ; tries++) {
    const last = tries > (t.retries ?? 4);
    let wait = backoff(tries);
    try {
      const response = await t.fetch(last ? request : request.clone());
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

// Reads the body, so that a connection that breaks in its middle counts as lost. Lines of JSON are text to the generated client, which would
// make a Blob of them.
async function buffered(response: Response): Promise<Response> {
  const body = await response.arrayBuffer();
  const whole = new Response(body.byteLength > 0 ? body : null, response);
  if (whole.headers.get('Content-Type') === 'application/x-ndjson') whole.headers.set('Content-Type', 'text/plain');
  return whole;
}

/** Says whether fetch, or the reading of a body, failed for a reason that may pass. */
export function isLostConnection(error: unknown): boolean {
  if (!(error instanceof TypeError)) return false; // aborted by the caller, or a mistake of the caller's
  const code = (error.cause as { code?: unknown } | undefined)?.code;
  return !(typeof code === 'string' && permanent.test(code));
}

// Of a 503 `unavailable` it is unknown, and of one that a proxy wrote.
async function nothingDone(response: Response): Promise<boolean> {
  const { code } = parseProblem(response, await response.clone().text());
  return code === 'overloaded' || code === 'thread-returning';
}

/** The milliseconds that `Retry-After` asks for, 0 without one. */
export function retryAfter(response: Response): number {
  const value = response.headers.get('Retry-After');
  if (value === null) return 0;
  const ms = /^\d+$/.test(value) ? Number(value) * 1000 : Date.parse(value) - Date.now();
  return Number.isNaN(ms) ? 0 : Math.max(0, ms);
}

/** The wait, in milliseconds, before try number `tries` + 1: 50 to 100, then twice as long each time, up to 5 s. */
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
