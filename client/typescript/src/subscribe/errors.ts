/**
 * - `name`, `type`, `option`: an argument of `handle` is invalid, or `takeover` or `inOrder` is not that of an operator's consumer.
 * - `filter`: the durable consumer of this name exists with another filter. Take another name.
 * - `no-streams`: NATS answers, but has no streams of events. It is the wrong server, or no relay has run yet.
 * - `refused`: the API refuses the export of `bootstrap`; the cause is its `ProblemError`.
 * - `closed`: the connection to NATS is closed for good. Restart the process.
 * - `stuck`: calls of your function do not return, although their signals have ended. Restart the process.
 */
export type SubscribeErrorCode = 'name' | 'type' | 'option' | 'filter' | 'no-streams' | 'refused' | 'closed' | 'stuck';

/** The reason why `handle` ended. Branch on `code`. */
export class SubscribeError extends Error {
  override readonly name = 'SubscribeError';
  readonly code: SubscribeErrorCode;

  constructor(code: SubscribeErrorCode, message: string, options?: ErrorOptions) {
    super(message, options);
    this.code = code;
  }
}

/** Thrown by your function, it makes the event a dead letter at once, because no retry can help. */
export class PermanentError extends Error {
  override readonly name: string = 'PermanentError';
  readonly permanent = true;
}

/** The error code of JetStream, such as `notFound.stream`; undefined for other errors. */
export function apiCode(error: unknown): number | undefined {
  const { name, code } = error as { name?: string; code?: unknown };
  return name !== undefined && typeof code === 'number' ? code : undefined;
}

export const notFound = { stream: 10059, consumer: 10014, message: 10037, toDelete: 10043 };
export const streamExists = 10058;

export function asError(error: unknown): Error {
  return error instanceof Error ? error : new Error(String(error));
}
