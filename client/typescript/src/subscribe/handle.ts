import { jetstream, jetstreamManager, type JetStreamClient, type JetStreamManager } from '@nats-io/jetstream';
import type { NatsConnection, QueuedIterator, Status } from '@nats-io/transport-node';
import { Bootstrapper, type Bootstrap } from './bootstrap.js';
import { asError, SubscribeError } from './errors.js';
import { isDeclared, parse, type DataOf, type Envelope, type Event, type EventType } from './event.js';
import { Reader, type Source } from './reader.js';
import { declareDead, isEnded, isEndedOfTenant, namesOf, numberOf, streamOf, streamOfTenant, type Stream } from './streams.js';
import { linked, moment, orAborted, Slots, sleep } from './wait.js';

/** Your function. Stop when `signal` aborts: at `timeout`, or at the end of `drain`. */
export type Handler<T> = (event: Event<T>, signal: AbortSignal) => unknown;

/** Where `handle` logs; `console` is one. */
export interface Log {
  info(message: string, fields: object): void;
  warn(message: string, fields: object): void;
  error(message: string, fields: object): void;
}

export interface HandleOptions {
  /** Ends `handle`: running calls finish, all other events return to NATS. */
  signal?: AbortSignal;
  /** The types of events of your own kinds and upstreams, such as `play.created`. */
  declared?: readonly string[];
  /** Calls that may run at once in this instance, by default 16. An aggregate has one at a time. */
  concurrency?: number;
  /** Attempts after which an event becomes a dead letter, by default 10. */
  attempts?: number;
  /** The wait in milliseconds after a failed attempt. The default doubles from 1 second to 1 minute. */
  backOff?: (attempt: number) => number;
  /** The limit of one call in milliseconds, by default 60,000. */
  timeout?: number;
  /** Milliseconds without a sign of life after which other instances get an instance's events: 10,000, at least 1,000. */
  takeover?: number;
  /** Milliseconds that running calls get after `signal` has aborted, by default 20,000. */
  drain?: number;
  /**
   * Lets one instance at a time read a partition, so that an aggregate's events come in order, whichever instance gets them.
   * Instances share the partitions evenly.
   */
  inOrder?: boolean;
  /** Makes a new subscriber begin with the events stored then or later, instead of the oldest ones. */
  since?: Date;
  /**
   * Makes a new subscriber begin with the states of exports, and then read the streams where they end. The type must be
   * `KIND.*`. Your function gets each state as an event of the type `snapshot`, without id, time and position. States come
   * at least once, and in no order with events: keep the version that you have, and ignore lower ones. A state is retried
   * until your function succeeds. If events expire before NATS delivers them, all states come again.
   */
  bootstrap?: Bootstrap;
  /** Works in the NATS account of this tenant, with the durable consumers that `tidings nats durable` created. */
  tenant?: string;
  /** The names of the streams (NATS_STREAM), by default `EVENTS`, and of the subjects (NATS_SUBJECT_PREFIX), by default `events`. */
  stream?: string;
  prefix?: string;
  log?: Log;
  health?: Health;
}

/** The state of a subscriber, for a readiness probe. */
export class Health {
  /** Why events wait, by stream; empty while all is well. */
  readonly problems = new Map<string, Error>([['', new Error('not started')]]);
  /** Events that no instance has handled yet. */
  pending = 0;
  /** What this instance has done since it started, for counters of your metrics: Go's `tidings_subscriber_*_total`. */
  readonly counts = { handled: 0, failures: 0, deadLetters: 0, foreign: 0, snapshots: 0 };

  get ready(): boolean {
    return this.problems.size === 0;
  }
}

/**
 * Calls a function with the events of a type, such as `follow.created` or `comment.*`, until `signal` aborts. Each event
 * comes at least once. It is acknowledged after the function's promise is fulfilled, and never before. After a rejection
 * or `timeout` it is retried, and after `attempts`, or a `PermanentError`, it becomes a dead letter on `EVENTS-dead`.
 *
 * Instances of one name share the work, also with those of the Go package `subscribe`. Rejects with a `SubscribeError`.
 */
export function handle<E extends EventType>(
  nc: NatsConnection, name: string, type: E, fn: Handler<DataOf<E>>, options?: HandleOptions): Promise<void>;
export function handle<T>(
  nc: NatsConnection, name: string, type: string, fn: Handler<T>, options: HandleOptions & { declared: readonly string[] }): Promise<void>;
export async function handle<T>(
  nc: NatsConnection, name: string, type: string, fn: Handler<T>, options: HandleOptions = {}): Promise<void> {
  const settings = checked(name, type, options);
  const jsm = await jetstreamManager(nc, { checkAPI: false });
  await new Subscriber(nc, jsm, name, type, settings, async (event, payload, attempt, signal) => {
    await fn({ ...event, data: parse(event, payload) as T, attempt }, signal);
  }).run();
}

const defaults = {
  concurrency: 16, attempts: 10, timeout: 60_000, takeover: 10_000, drain: 20_000, inOrder: false, stream: 'EVENTS', prefix: 'events',
  backOff: (attempt: number) => Math.min(1000 * 2 ** (attempt - 1), 60_000), log: console as Log,
};

export type Settings = HandleOptions & typeof defaults & { health: Health };

function checked(name: string, type: string, options: HandleOptions): Settings {
  const given = Object.fromEntries(Object.entries(options).filter(([, value]) => value !== undefined));
  const s: Settings = { ...defaults, health: new Health(), ...given };
  if (!/^[A-Za-z][A-Za-z0-9_-]{0,31}$/.test(name)) {
    throw new SubscribeError('name', `a name has 1 to 32 letters, digits, - and _, and begins with a letter: ${JSON.stringify(name)}`);
  }
  if (!isDeclared(type, s.declared ?? [])) {
    throw new SubscribeError('type', `there are no events of type ${JSON.stringify(type)}; name those of your own kinds with the option declared`);
  }
  for (const [option, value, least] of [['concurrency', s.concurrency, 1], ['attempts', s.attempts, 1], ['timeout', s.timeout, 1],
    ['takeover', s.takeover, 1000], ['drain', s.drain, 0]] as const) {
    if (!(value >= least)) throw new SubscribeError('option', `${option} is below ${least}`);
  }
  if (s.bootstrap !== undefined && (s.bootstrap.clients.length === 0 || !type.endsWith('.*') || s.since !== undefined || s.tenant !== undefined)) {
    throw new SubscribeError('option', 'bootstrap needs clients and the events KIND.*, and goes without since and tenant');
  }
  return s;
}

const looks = 3; // that see too many turns before an instance passes some: the request of a dead instance still waits at one of them
const assignInterval = 1000; // milliseconds between two checks for new streams and for finished ones

type Call = (event: Envelope, payload: Uint8Array, attempt: number, signal: AbortSignal) => Promise<void>;

/** One instance of a handler. */
export class Subscriber {
  readonly js: JetStreamClient;
  readonly durable: string;
  readonly slots: Slots;
  readonly reading: AbortController; // ends with the caller's signal, or with `failure`
  readonly handling = linked(); // ends after `drain`
  kept = false; // an operator created the consumers, and only an operator changes them
  disconnected = 0; // when the connection to NATS was last lost
  lost = 0; // calls that did not return in time and still run
  readonly kind: string;
  readonly boot: Bootstrapper | undefined;
  readonly #filter: string;
  readonly #readers = new Map<string, Reader>();
  readonly #running = new Set<Promise<void>>();
  readonly #done = new Set<string>(); // streams that have ended and are handled to their ends
  readonly #known = new Map<string, string>(); // when each stream was created
  #failure: SubscribeError | undefined;
  #crowded = 0; // successive looks at which this instance had more than its share of turns

  constructor(readonly nc: NatsConnection, readonly jsm: JetStreamManager, readonly name: string, type: string,
    readonly s: Settings, readonly call: Call) {
    const [kind, of] = type.split('.') as [string, string];
    this.js = jetstream(nc);
    this.durable = s.tenant !== undefined ? `t${s.tenant}_${name}` : of === '*' ? `${name}-${kind}` : `${name}-${kind}-${of}`;
    this.#filter = `${s.prefix}.*.${s.tenant !== undefined ? `t${s.tenant}` : kind === 'heartbeat' ? 'system.*' : '*'}.${type}`;
    this.kind = kind;
    this.boot = s.bootstrap && new Bootstrapper(this, s.bootstrap);
    this.slots = new Slots(s.concurrency);
    this.reading = linked(s.signal);
  }

  get dead(): string {
    return `${this.s.stream}-dead`;
  }

  async run(): Promise<void> {
    const statuses = this.nc.status() as QueuedIterator<Status>;
    void this.#watch(statuses);
    await this.#run().finally(() => statuses.stop());
  }

  async #run(): Promise<void> {
    const { signal } = this.reading;
    void this.nc.closed().then((why) => this.fail(new SubscribeError('closed', 'the connection to NATS is closed', { cause: why })));
    try {
      if (await this.#awaitStreams()) this.#read({ stream: this.dead, subject: `${this.dead}.retry.${this.durable}`, again: true });
      if (this.boot !== undefined && !signal.aborted) {
        const run = this.boot.run(signal).finally(() => this.#running.delete(run));
        this.#running.add(run);
      }
      while (!signal.aborted) {
        await orAborted(this.#assign(), signal);
        await sleep(assignInterval, signal);
      }
    } finally {
      this.reading.abort(); // releases the caller's signal
    }
    const drain = setTimeout(() => this.handling.abort(new Error('the subscriber ends')), this.s.drain);
    await Promise.all(this.#running);
    clearTimeout(drain);
    if (this.#failure === undefined && this.lost > 0) this.#failure = new SubscribeError('stuck', `${this.lost} calls of ${this.durable} do not return`);
    if (this.#failure !== undefined) throw this.#failure;
  }

  /** Ends the subscriber with an error. */
  fail(error: SubscribeError): void {
    if (this.reading.signal.aborted) return;
    this.#failure = error;
    this.reading.abort();
  }

  /** Counts the calls that do not return. */
  countLost(change: number): void {
    const key = `calls of ${this.durable}`;
    this.lost += change;
    if (this.lost === 0) this.s.health.problems.delete(key);
    else this.s.health.problems.set(key, new Error(`${this.lost} calls of ${this.durable} do not return`));
  }

  log(level: keyof Log, message: string, fields: object = {}): void {
    this.s.log[level](message, { subscriber: this.durable, ...fields });
  }

  /** Records why a stream does not continue, and logs each reason once. Without an error it continues. */
  trouble(of: string, error?: unknown): void {
    const { problems } = this.s.health;
    const before = problems.get(of);
    if (error === undefined) {
      if (problems.delete(of)) this.log('info', 'handling events again', { stream: of });
      return;
    }
    const problem = asError(error);
    problems.set(of, problem);
    if (before?.message !== problem.message) this.log('warn', 'events wait, retrying', { stream: of, error: problem });
  }

  /** Waits for NATS, and for the streams. Returns false if the signal aborts before. */
  async #awaitStreams(): Promise<boolean> {
    for (const { signal } = this.reading; !signal.aborted; await sleep(assignInterval, signal)) {
      try {
        const all = await this.list();
        if (all.length > 0) {
          if (this.s.tenant === undefined) await declareDead(this.jsm, this.dead, all[0]!);
          await this.boot?.declare(all[0]!);
          this.s.health.problems.clear();
          if (this.boot !== undefined) this.s.health.problems.set('bootstrap', new Error('the first exports are not handled yet'));
          return true;
        }
        if (this.s.tenant === undefined) throw new SubscribeError('no-streams', `${this.nc.getServer()} has no stream named ${this.s.stream}-<number>`);
        throw new Error(`there are no consumers ${this.durable}: run \`tidings nats durable --name ${this.name} --tenant ${this.s.tenant}\``);
      } catch (error) {
        if (error instanceof SubscribeError) throw error;
        this.trouble('', error);
      }
    }
    return false;
  }

  /** The streams of all partitions. */
  async list(): Promise<Stream[]> {
    const all: Stream[] = [];
    for (const [name, number] of await namesOf(this.jsm, this.s.stream, this.s.prefix)) {
      const s = await this.look(name, number);
      if (s !== undefined) all.push(s);
    }
    return all;
  }

  /** Looks at a stream, and tells its reader. Returns undefined if there is none. */
  async look(name: string, number = numberOf(this.s.stream, name)!): Promise<Stream | undefined> {
    const asked = moment();
    const s = await (this.s.tenant === undefined ? streamOf(this.jsm, name, number) : streamOfTenant(this.jsm, name, number, this.durable));
    if (s !== undefined) {
      this.#logRecreated(s);
      this.#readers.get(name)?.saw(asked);
    }
    return s;
  }

  async #watch(statuses: AsyncIterable<Status>): Promise<void> {
    for await (const { type } of statuses) if (type === 'disconnect') this.disconnected = performance.now();
  }

  #read(source: Source): void {
    const reader = new Reader(this, source);
    this.#readers.set(source.stream, reader);
    const run = reader.run().finally(() => this.#running.delete(run));
    this.#running.add(run);
  }

  /** A reader of a stream that does not run. */
  readerOf(stream: string): Reader {
    return new Reader(this, { stream, subject: this.#filter, again: false });
  }

  /** Starts a reader on each stream whose predecessors are done, and stops readers of finished streams. */
  async #assign(): Promise<void> {
    let streams: Stream[];
    try {
      streams = await this.list();
    } catch (error) {
      if (!this.reading.signal.aborted) this.trouble(this.s.stream, error);
      return; // a missing stream may be a predecessor of another
    }
    this.trouble(this.s.stream);
    const there = new Set(streams.map((s) => s.number));
    this.#stopGone(there);
    if (this.boot?.joined === false) return;
    let pending = 0;
    const reading: Reader[] = [];
    for (const s of streams) {
      if (this.boot?.startOf(s).whole) this.#done.add(s.name);
      if (this.#done.has(s.name) || this.reading.signal.aborted) continue;
      const reader = this.#readers.get(s.name);
      if (reader !== undefined) {
        reading.push(reader);
        const n = await reader.pending(s).catch(() => undefined);
        pending += n ?? 0;
        if (n === 0) await this.#finish(s, streams, reader).catch(() => {}); // asked again in a second
      } else if (!s.after.some((n) => there.has(n) && !this.#done.has(`${this.s.stream}-${n}`))) {
        this.#read({ stream: s.name, subject: this.#filter, again: false });
      }
    }
    this.s.health.pending = pending;
    if (this.s.inOrder) this.#shareTurns(reading);
  }

  /**
   * Passes turns to other instances if this instance has more than its share of the streams, rounded up. NATS gives a
   * turn to the instance whose request is first, and so it gives the turns of all partitions to the first that starts.
   */
  #shareTurns(readers: Reader[]): void {
    const instances = Math.max(1, ...readers.map((r) => 1 + r.others));
    const turns = readers.filter((r) => r.hasTurn);
    const excess = turns.length - Math.ceil(readers.length / instances);
    this.#crowded = excess > 0 ? this.#crowded + 1 : 0;
    if (this.#crowded < looks) return;
    this.#crowded = 0;
    for (const r of turns.filter((r) => r.others > 0).slice(0, excess)) r.yield = true;
  }

  #logRecreated(s: Stream): void {
    const before = this.#known.get(s.name);
    this.#known.set(s.name, s.created);
    if (before === undefined || before === s.created) return;
    this.#done.delete(s.name);
    this.#readers.get(s.name)?.recreated(s.created);
    this.log('error', 'the stream was recreated, reading it from its beginning; events left on the former stream are not handled',
      { stream: s.name, before, now: s.created, runbook: 'SubscriberStreamLost' });
  }

  #stopGone(there: Set<number>): void {
    for (const name of this.#known.keys()) {
      if (there.has(numberOf(this.s.stream, name)!)) continue;
      this.#known.delete(name);
      this.#readers.get(name)?.gone();
      this.#readers.delete(name);
      if (!this.#done.has(name)) {
        this.log('error', 'the stream is gone; events left on it are not handled', { stream: name, runbook: 'SubscriberStreamLost' });
      }
      this.s.health.problems.delete(name);
    }
  }

  #stop(name: string): void {
    this.#readers.get(name)?.stop();
    this.#readers.delete(name);
  }

  async #finish(s: Stream, all: Stream[], reader: Reader): Promise<void> {
    const ended = this.s.tenant === undefined ? await isEnded(this.jsm, this.s.prefix, s, all) : isEndedOfTenant(s, all);
    if (!ended || (await reader.pending(s)) > 0) return; // it was closed meanwhile, after further events
    this.#done.add(s.name);
    this.#stop(s.name);
    this.log('info', 'the stream has ended, and all its events are handled', { stream: s.name });
  }
}
