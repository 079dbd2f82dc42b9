import { ProblemError, parseProblem } from './errors.js';
import type { BatchOutcome } from './generated/index.js';
import { backoff, isLostConnection, newKey, pause, send, type Transport } from './transport.js';

/** An operation of a batch, with its outcome. */
export interface Outcome<O> {
  /** The operation's position, from 0. */
  index: number;
  operation: O;
  /** The answer of the operation's own route. */
  outcome: BatchOutcome;
  /**
   * How often the operation was sent. Above 1, an earlier try may have written it. Then a 412 of an edit or a delete
   * can be about its own success, and `problem.current` shows that.
   */
  tries: number;
}

export interface BatchOptions {
  /** Operations per request: 1 to 1000, by default 1000. */
  size?: number;
  signal?: AbortSignal;
  headers?: Record<string, string>;
}

interface Sent<O> {
  index: number;
  operation: O;
  line: string;
  tries: number;
}

const maxOperations = 1000; // the API's limit
const maxBytes = 1 << 20; // a quarter of the default of API_MAX_BATCH_BYTES

/**
 * Writes operations in one request after the other, and yields each outcome when it arrives. If an answer breaks off or
 * an operation gets `unavailable`, it sends the operations without an outcome again. They keep their order, and creates
 * keep their keys. After `retries` tries in a row without an outcome it throws. Operations without an outcome may or
 * may not be written.
 */
export async function* batch<O extends object>(
  request: (body: string) => Promise<Request>,
  transport: Transport,
  operations: Iterable<O> | AsyncIterable<O>,
  size = maxOperations,
): AsyncGenerator<Outcome<O>, void, undefined> {
  for await (const chunk of chunks(operations, Math.min(size, maxOperations))) yield* writeChunk(request, transport, chunk);
}

async function* chunks<O extends object>(operations: Iterable<O> | AsyncIterable<O>, size: number): AsyncGenerator<Sent<O>[]> {
  let chunk: Sent<O>[] = [];
  let index = 0;
  let bytes = 0;
  const encoder = new TextEncoder();
  for await (const operation of operations) {
    const keyed = 'op' in operation && operation.op === 'create' && !('idempotency_key' in operation);
    const line = JSON.stringify(keyed ? { ...operation, idempotency_key: newKey() } : operation) + '\n';
    const length = encoder.encode(line).byteLength;
    if (chunk.length === size || (chunk.length > 0 && bytes + length > maxBytes)) {
      yield chunk;
      [chunk, bytes] = [[], 0];
    }
    chunk.push({ index: index++, operation, line, tries: 0 });
    bytes += length;
  }
  if (chunk.length > 0) yield chunk;
}

async function* writeChunk<O>(
  request: (body: string) => Promise<Request>,
  transport: Transport,
  chunk: Sent<O>[],
): AsyncGenerator<Outcome<O>> {
  let failures = 0;
  for (let rest = chunk; rest.length > 0; ) {
    const sent = await request(rest.map((o) => o.line).join(''));
    const doubtful = new Set(rest);
    let lost: unknown = new Error('the answer to a batch ended without all outcomes');
    rest.forEach((o) => o.tries++);
    try {
      const response = await send(sent, transport, true);
      if (!response.ok) throw new ProblemError(response, parseProblem(response, await response.text()), sent);
      for await (const outcome of outcomes(response)) {
        const { line, ...told } = outcome;
        const done = rest[(line ?? 0) - 1];
        if (done === undefined) throw new Error(`the answer to ${rest.length} operations has an outcome of line ${line}`);
        if (told.problem?.code === 'unavailable') {
          lost = new ProblemError(response, told.problem, sent);
          continue;
        }
        doubtful.delete(done);
        yield { index: done.index, operation: done.operation, outcome: told, tries: done.tries };
      }
    } catch (error) {
      if (!isLostConnection(error) && !isUnavailable(error)) throw error;
      lost = error;
    }
    failures = doubtful.size < rest.length ? 1 : failures + 1; // progress resets the count
    if (doubtful.size > 0 && failures > (transport.retries ?? 4)) throw lost;
    rest = [...doubtful.keys()];
    if (rest.length > 0) await pause(backoff(failures + 3), sent.signal); // an unavailable database rarely returns within a second
  }
}

// A batch checks this itself: `send` returns a 503 `unavailable`, because its outcome is unknown.
function isUnavailable(error: unknown): boolean {
  return error instanceof ProblemError && error.code === 'unavailable';
}

// The lines of an answer. A last line without a newline was cut off, and is dropped.
async function* outcomes(response: Response): AsyncGenerator<BatchOutcome> {
  const reader = response.body!.pipeThrough(new TextDecoderStream()).getReader();
  let text = '';
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const lines = (text + value).split('\n');
      text = lines.pop()!;
      for (const line of lines) yield JSON.parse(line) as BatchOutcome;
    }
  } finally {
    await reader.cancel().catch(() => {}); // ends the writes if the caller stops early; fails after a broken answer
  }
}
