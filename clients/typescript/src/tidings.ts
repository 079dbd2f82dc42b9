import { batch, type BatchOptions, type Outcome } from './batch.js';
import { ProblemError, problemOf } from './errors.js';
import { createClient, createConfig } from './generated/client/index.js';
import * as generated from './generated/index.js';
import { addKey, isRead, send, type Retries, type Transport } from './transport.js';

export interface TidingsOptions extends Retries {
  /** Where the API is, such as `https://tidings.example.com`. */
  url: string;
  /** The bearer token, or a function that has it, for tokens that are replaced. */
  token: string | (() => string | Promise<string>);
  /** Sent with each request, `Tidings-Actor` for example. */
  headers?: Record<string, string>;
  /** Takes the place of the platform's `fetch`: for tracing, proxies or agents. */
  fetch?: typeof fetch;
}

type OperationOf<Data extends { body: unknown }> = Extract<Data['body'], { operations: readonly unknown[] }>['operations'][number];

/** The operations of the built-in kinds' batches. */
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
 * A client of the API. It has a method for each operation of the OpenAPI document, with its name, which answers the body of a 2xx and
 * throws a `ProblemError` for everything else. Kinds of your own go through `http`.
 *
 * Requests are sent again after 429, 503 and lost connections, as `send` says. A create has an Idempotency-Key.
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
   * The client below, for what the document does not have: `http.put({ url: '/v1/plays/{user_id}/{song_id}', path: { ... } })` answers
   * `{ data, request, response }`. Its interceptors see every request and answer but those of batches.
   */
  get http() {
    return this.client;
  }

  /** A session that begins with the tokens of another one, or with none. */
  session(tokens: Iterable<string> = []): Session {
    return new Session(this.options, tokens);
  }

  /**
   * Writes any number of operations of a kind, by its plural, and gives each outcome as soon as it is known. Operations stand alone: one
   * that is refused has a `problem`. A loop that is left early leaves the rest unwritten.
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

  /** Sees each request before it is sent. */
  protected prepare(_request: Request): void {}

  /** Sees each answer's `Tidings-Token`; without a request it is an operation's of a batch. */
  protected observe(_request: Request | undefined, _token: string | null): void {}
}

const maxTokens = 64; // the API's limit

/**
 * A client whose reads show its own writes, however far behind the projections are: it keeps the `Tidings-Token` of each write, one for
 * each thing written, and sends those of the last 64 things with each read. Make one for each user that you act for.
 */
export class Session extends Tidings {
  readonly #tokens = new Map<string, string>(); // by what was written, the newest last

  constructor(options: TidingsOptions, tokens: Iterable<string> = []) {
    super(options);
    this.merge(tokens);
  }

  /** The tokens, to go on in another process: `tidings.session(tokens)`. */
  get tokens(): string[] {
    return [...this.#tokens.values()];
  }

  /** Takes tokens of writes that others made. */
  merge(tokens: Iterable<string>): void {
    for (const token of tokens) this.#keep(token, token);
  }

  #keep(key: string, token: string): void {
    this.#tokens.delete(key);
    this.#tokens.set(key, token);
    for (const oldest of this.#tokens.keys()) {
      if (this.#tokens.size <= maxTokens) break;
      this.#tokens.delete(oldest);
    }
  }

  protected override prepare(request: Request): void {
    if (this.#tokens.size > 0 && isRead(request) && !request.headers.has('Tidings-Token')) {
      request.headers.set('Tidings-Token', this.tokens.join(','));
    }
  }

  protected override observe(request: Request | undefined, token: string | null): void {
    if (token === null || (request !== undefined && isRead(request))) return;
    const names = request !== undefined && request.method !== 'POST'; // a PUT, PATCH or DELETE names what it writes
    this.#keep(names ? new URL(request.url).pathname : token, token);
  }
}

/** The `If-Match` header of a write that is about this version of an object: `headers: ifMatch(comment)`. */
export function ifMatch(object: { version: number }): { 'If-Match': string } {
  return { 'If-Match': `"${object.version}"` };
}
