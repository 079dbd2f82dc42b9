import { batch, type BatchOptions, type Outcome } from './batch.js';
import { ProblemError, problemOf } from './errors.js';
import { createClient, createConfig } from './generated/client/index.js';
import * as generated from './generated/index.js';
import { addKey, isRead, send, type Retries, type Transport } from './transport.js';

export interface TidingsOptions extends Retries {
  /** The address of the API, for example `https://tidings.example.com`. */
  url: string;
  /** The bearer token, or a function that returns the current one. */
  token: string | (() => string | Promise<string>);
  /** Headers of every request, for example `Tidings-Actor`. */
  headers?: Record<string, string>;
  /** Replaces the platform's `fetch`, for tracing, proxies or agents. */
  fetch?: typeof fetch;
}

type OperationOf<Data extends { body: unknown }> = Extract<Data['body'], { operations: readonly unknown[] }>['operations'][number];

/** The operations in batches of the built-in kinds. */
export interface BatchOperations {
  comments: OperationOf<generated.BatchCommentsData>;
  follows: OperationOf<generated.BatchFollowsData>;
  likes: OperationOf<generated.BatchLikesData>;
  memberships: OperationOf<generated.BatchMembershipsData>;
  messages: OperationOf<generated.BatchMessagesData>;
  reviews: OperationOf<generated.BatchReviewsData>;
  shares: OperationOf<generated.BatchSharesData>;
}

/**
 * A client of the API. It has a method for each operation of the OpenAPI document, with the operation's name. A method
 * returns the body of a 2xx, and throws a `ProblemError` for every other answer. Use `http` for kinds of your own.
 *
 * The client sends requests again after 429, 503 and lost connections (see `send`). A create has an Idempotency-Key.
 */
export class Tidings extends generated.Operations {
  protected readonly options: TidingsOptions;
  readonly #transport: Transport;

  constructor(options: TidingsOptions) {
    super({
      client: createClient(createConfig({
        baseUrl: options.url.replace(/\/+$/, ''),
        headers: options.headers,
        throwOnError: true,
        fetch: (request) => this.#send(request as Request), // as the generated client calls it
      })),
    });
    this.options = options;
    this.#transport = { ...options, fetch: options.fetch ?? ((request) => fetch(request)) };
    this.client.interceptors.error.use((error, response, request) =>
      response === undefined || response.ok ? error : new ProblemError(response, problemOf(response, error), request));
  }

  /**
   * The generated client, for routes that the document does not have: `http.put({ url: '/v1/plays/{user_id}/{song_id}',
   * path: { ... } })` returns `{ data, request, response }`. Its interceptors see all requests and answers except those
   * of batches.
   */
  get http() {
    return this.client;
  }

  /** A new session, with the tokens of another session if given. */
  session(tokens: Iterable<string> = []): Session {
    return new Session(this.options, tokens);
  }

  /**
   * Writes any number of operations of a kind, by its plural, and yields each outcome when it arrives. Each operation
   * succeeds or fails alone: a refused one has a `problem`. If the caller leaves the loop early, the remaining
   * operations are not written.
   */
  batch<K extends keyof BatchOperations>(
    plural: K, operations: Iterable<BatchOperations[K]> | AsyncIterable<BatchOperations[K]>, options?: BatchOptions,
  ): AsyncGenerator<Outcome<BatchOperations[K]>, void, undefined>;
  batch<O extends { op: string }, K extends string>(
    plural: K extends keyof BatchOperations ? never : K, operations: Iterable<O> | AsyncIterable<O>, options?: BatchOptions,
  ): AsyncGenerator<Outcome<O>, void, undefined>;
  async *batch<O extends object>(plural: string, operations: Iterable<O> | AsyncIterable<O>, options: BatchOptions = {}) {
    const { baseUrl } = this.client.getConfig();
    const request = (body: string) => this.#authorized(new Request(`${baseUrl}/v1/${encodeURIComponent(plural)}:batch`, {
      method: 'POST',
      body,
      signal: options.signal,
      headers: { ...this.options.headers, ...options.headers, 'Content-Type': 'application/x-ndjson' },
    }));
    for await (const outcome of batch(request, this.#transport, operations, options.size)) {
      this.observe(undefined, outcome.outcome.token ?? null);
      yield outcome;
    }
  }

  async #send(request: Request): Promise<Response> {
    addKey(request);
    this.prepare(await this.#authorized(request));
    const response = await send(request, this.#transport);
    this.observe(request, response.headers.get('Tidings-Token'));
    return response;
  }

  async #authorized(request: Request): Promise<Request> {
    const { token } = this.options;
    request.headers.set('Authorization', `Bearer ${typeof token === 'string' ? token : await token()}`);
    return request;
  }

  /** Called with each request before it is sent. */
  protected prepare(_request: Request): void {}

  /** Called with each answer's `Tidings-Token`. An operation of a batch has no request. */
  protected observe(_request: Request | undefined, _token: string | null): void {}
}

const maxTokens = 64; // the API's limit

/**
 * A client whose reads include its own writes, whatever the lag of the projections. It keeps the `Tidings-Token` of the
 * last write of each entity, and sends the tokens of the last 64 entities with each read. Make one for each user that
 * you act for.
 */
export class Session extends Tidings {
  // Oldest first. A write replaces the writes of its entity that had ended before it began. Of writes that overlap either may be the
  // later one, so all are kept.
  #kept: { entity: string; token: string; ended: number }[] = [];
  #clock = 0; // counts the kept tokens
  readonly #began = new WeakMap<Request, number>();

  constructor(options: TidingsOptions, tokens: Iterable<string> = []) {
    super(options);
    this.merge(tokens);
  }

  /** The tokens, to continue in another process: `tidings.session(tokens)`. */
  get tokens(): string[] {
    return this.#kept.map((k) => k.token);
  }

  /** Adds tokens of other writes. */
  merge(tokens: Iterable<string>): void {
    for (const token of tokens) this.#keep(token, token);
  }

  #keep(entity: string, token: string, began = this.#clock): void {
    const rest = this.#kept.filter((k) => k.token !== token && (k.entity !== entity || k.ended > began));
    this.#kept = [...rest, { entity, token, ended: ++this.#clock }].slice(-maxTokens);
  }

  protected override prepare(request: Request): void {
    this.#began.set(request, this.#clock);
    if (this.#kept.length > 0 && isRead(request) && !request.headers.has('Tidings-Token')) {
      request.headers.set('Tidings-Token', this.tokens.join(','));
    }
  }

  protected override observe(request: Request | undefined, token: string | null): void {
    if (token === null || (request !== undefined && isRead(request))) return;
    const names = request !== undefined && request.method !== 'POST'; // the path of a PUT, PATCH or DELETE names the entity
    this.#keep(names ? new URL(request.url).pathname : token, token, request && this.#began.get(request));
  }
}

const etag = (object: { version: number }) => `"${object.version}"`;

/** The `If-Match` header of a write on this version of an object: `headers: ifMatch(comment)`. */
export function ifMatch(object: { version: number }): { 'If-Match': string } {
  return { 'If-Match': etag(object) };
}

/**
 * Reads an object again. Returns undefined if it still has the version of `have`, which the API does not send then.
 *
 *     const newer = await ifChanged((r) => tidings.getComment(r), { path: { comment_id } }, comment);
 */
export async function ifChanged<const R extends object, O extends { version: number }>(
  read: (request: R) => Promise<O>,
  request: R & { headers?: Record<string, unknown> },
  have: { version: number },
): Promise<O | undefined> {
  try {
    return await read({ ...request, headers: { ...request.headers, 'If-None-Match': etag(have) } });
  } catch (error) {
    if (error instanceof ProblemError && error.status === 304) return undefined;
    throw error;
  }
}
