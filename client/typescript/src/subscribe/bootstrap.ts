import { DiscardPolicy, RetentionPolicy, StorageType, type ConsumerInfo } from '@nats-io/jetstream';
import { ProblemError } from '../errors.js';
import type { Tidings } from '../tidings.js';
import { backoff } from '../transport.js';
import { apiCode, asError, notFound, streamExists, SubscribeError } from './errors.js';
import type { Envelope } from './event.js';
import type { Subscriber } from './handle.js';
import { Reader } from './reader.js';
import { absent, type Stream } from './streams.js';
import { linked, sleep } from './wait.js';

/** Whose exports `handle` reads before the streams. */
export interface Bootstrap {
  /** A client for each tenant whose states you want. Its token needs the role `export`. */
  clients: readonly Pick<Tidings, 'http'>[];
  /** The name of the kind in the path of its export, such as `follows`. */
  plural: string;
}

/** The record of a subscriber's exports. The Go package `subscribe` has the same. */
interface Progress {
  owner?: string; // the instance that reads exports; none if all are read
  exports?: Exported[]; // until all are read
  starts?: Record<string, Start>; // by partition: where the streams that existed continue after the exports
  joined?: boolean; // the durable consumers were created
}

interface Exported {
  tenant: string;
  cursor: string;
  after?: string;
  done?: boolean;
  streams: Position[];
}

interface Position {
  partition: number;
  stream?: string;
  created?: string;
  sequence: string;
}

interface Start {
  created: string;
  sequence: string;
  whole?: boolean; // the stream had ended before the exports began
}

interface Head extends Omit<Exported, 'after' | 'done'> {
  kind: string;
}

interface Line {
  export?: Head;
  end?: 'more' | 'done' | 'problem';
  problem?: { status: number; code: string; title: string };
  after: string;
  type: string;
  subject: string;
  data: unknown;
}

const recheck = 1000; // milliseconds between two looks at the record
const perCall = 16; // states in hand for each place
const casFailed = [10071, 10164]; // the record has another revision; the second is of a replicated stream

/** Another instance reads the exports. */
class ClaimError extends Error {}
/** The exports no longer join the streams. */
class OutdatedError extends Error {}

/**
 * Gives the states of exports to a handler, before the events of the streams. A record in NATS has how far it is, so any
 * instance continues after a crash. Every change of the record compares and swaps. So an instance that was frozen, and has
 * lost its claim, repeats calls at most.
 */
export class Bootstrapper {
  /** There are durable consumers, so readers may start. */
  joined = false;
  readonly #owner = crypto.randomUUID();
  readonly #bucket: string;
  #record: Progress = {};
  #revision = 0; // of the record
  #exists = false; // the record
  #observed = -1; // the revision of another instance's record, and when it was new
  #since = 0;
  #saving: Promise<unknown> = Promise.resolve();

  constructor(private readonly sub: Subscriber, private readonly of: Bootstrap) {
    this.#bucket = `${sub.s.stream}-bootstrap`;
  }

  get #subject(): string {
    return `$KV.${this.#bucket}.${this.sub.durable}`;
  }

  /** Creates the bucket of the records, with the replicas and the placement of a partition's stream. */
  async declare(like: Stream): Promise<void> {
    const { jsm } = this.sub;
    const name = `KV_${this.#bucket}`;
    if (await jsm.streams.info(name).catch(absent(notFound.stream))) return;
    await jsm.streams.add({
      name, description: 'Tidings: how far subscribers have read exports', subjects: [`$KV.${this.#bucket}.>`],
      retention: RetentionPolicy.Limits, storage: StorageType.File, num_replicas: Math.max(like.replicas, 1),
      ...(like.tags.length > 0 && { placement: { cluster: '', tags: like.tags } }),
      max_msgs_per_subject: 1, discard: DiscardPolicy.New, allow_rollup_hdrs: true, deny_delete: true, allow_direct: true,
    }).catch(absent(streamExists)); // another process was faster
  }

  /** Reads exports whenever the record says so, until the signal aborts. */
  async run(signal: AbortSignal): Promise<void> {
    for (let failures = 0; !signal.aborted; ) {
      try {
        await this.#step(signal);
        failures = 0;
      } catch (error) {
        if (signal.aborted) return;
        if (error instanceof SubscribeError) return this.sub.fail(error);
        if (isRefused(error)) return this.sub.fail(new SubscribeError('refused', `export ${this.of.plural}: ${error.message}`, { cause: error }));
        if (!(error instanceof ClaimError)) {
          this.sub.trouble('exports', error);
          await sleep(backoff(++failures), signal);
          continue;
        }
      }
      this.sub.trouble('exports');
      await sleep(recheck, signal);
    }
  }

  async #step(signal: AbortSignal): Promise<void> {
    await this.#read();
    if (!this.joined && (!this.#exists || this.#record.joined)) {
      const exists = await this.#hasConsumers();
      if (exists && !this.#exists) {
        await this.#read();
        if (this.#exists) return; // another instance has begun since
      }
      if (exists) {
        this.joined = true;
        this.sub.s.health.problems.delete('bootstrap');
      } else if (this.#record.owner === undefined) { // a new subscriber, or one whose durable consumers were deleted
        await this.#save(() => ({ owner: this.#owner }));
      }
    }
    if (await this.#claim()) await this.#exportAll(signal);
  }

  /** Reports whether this instance reads exports. Takes over the claim of an instance without a sign of life. */
  async #claim(): Promise<boolean> {
    const { owner } = this.#record;
    if (owner === undefined || owner === this.#owner) return owner !== undefined;
    if (this.#revision !== this.#observed) {
      [this.#observed, this.#since] = [this.#revision, performance.now()];
      return false;
    }
    if (performance.now() - this.#since < this.sub.s.takeover) return false;
    await this.#save((p) => ({ ...p, owner: this.#owner }));
    return true;
  }

  /** Reads the record from its leader. */
  async #read(): Promise<void> {
    const read = async () => {
      const m = await this.sub.jsm.streams.getMessage(`KV_${this.#bucket}`, { last_by_subj: this.#subject });
      this.#exists = m !== null && !m.header?.get('KV-Operation');
      this.#revision = m?.seq ?? 0;
      this.#record = this.#exists ? m!.json<Progress>() : {};
    };
    return this.#alone(read);
  }

  /** Changes the record. Throws a ClaimError if another instance has changed it. */
  async #save(change: (p: Progress) => Progress): Promise<void> {
    return this.#alone(async () => {
      const next = change(structuredClone(this.#record));
      try {
        const stored = await this.sub.js.publish(this.#subject, JSON.stringify(next), { expect: { lastSubjectSequence: this.#revision } });
        [this.#record, this.#revision, this.#exists] = [next, stored.seq, true];
      } catch (error) {
        throw casFailed.includes(apiCode(error) ?? 0) ? new ClaimError('another instance reads the exports') : error;
      }
    });
  }

  /** Calls fn when all earlier calls have ended. */
  #alone<T>(fn: () => Promise<T>): Promise<T> {
    const done = this.#saving.then(fn);
    this.#saving = done.catch(() => {});
    return done;
  }

  #consumerOf(stream: string): Promise<ConsumerInfo | undefined> {
    return this.sub.jsm.consumers.info(stream, this.sub.durable).catch(absent(notFound.consumer, notFound.stream)) as Promise<ConsumerInfo | undefined>;
  }

  async #hasConsumers(): Promise<boolean> {
    for (const { name } of await this.sub.list()) {
      const have = await this.#consumerOf(name);
      if (have?.config.metadata?.['tidings-filter']) {
        throw new SubscribeError('option', `an operator created the consumer ${this.sub.durable} of stream ${name}, so bootstrap cannot`);
      }
      if (have !== undefined) return true;
    }
    return false;
  }

  /** Exports while it renews the claim. It ends when another instance has the claim. */
  async #exportAll(signal: AbortSignal): Promise<void> {
    const claim = linked(signal);
    const keeper = setInterval(() => void this.#save((p) => p).catch((error) => {
      if (error instanceof ClaimError) claim.abort(error);
    }), this.sub.s.takeover / 3);
    try {
      for (const client of this.of.clients) await this.#export(client, claim.signal);
      await this.#join();
    } catch (error) {
      if (claim.signal.reason instanceof ClaimError) throw claim.signal.reason;
      if (error instanceof OutdatedError) await this.#save(({ exports: _, ...p }) => p);
      throw error;
    } finally {
      clearInterval(keeper);
      claim.abort();
    }
  }

  /** Asks for one line first, because only an answer says whose export it is. */
  async #export(client: Pick<Tidings, 'http'>, signal: AbortSignal): Promise<void> {
    const { head } = await this.#page(client, { lines: 1 }, signal);
    let at = this.#record.exports?.find((e) => e.tenant === head.tenant);
    if (at === undefined) {
      at = { tenant: head.tenant, cursor: head.cursor, streams: head.streams };
      this.sub.log('info', 'reading an export', { tenant: head.tenant, kind: head.kind });
    }
    for (let kept = at; ; ) {
      await this.#save((p) => ({ ...p, exports: [...(p.exports ?? []).filter((e) => e.tenant !== kept.tenant), kept] }));
      if (kept.done) return;
      const { states, done } = await this.#page(client, { cursor: kept.cursor, after: kept.after, lines: perCall * this.sub.s.concurrency }, signal);
      if (!(await this.#pass(kept.tenant, states, signal))) throw asError(signal.reason ?? this.sub.handling.signal.reason);
      kept = { ...kept, ...(states.length > 0 && { after: states.at(-1)!.after }), ...(done && { done }) };
    }
  }

  async #page(client: Pick<Tidings, 'http'>, query: Record<string, unknown>, signal: AbortSignal): Promise<{ head: Head; states: Line[]; done: boolean }> {
    try {
      const { data } = await client.http.get({ url: `/v1/${encodeURIComponent(this.of.plural)}:export`, query, signal, throwOnError: true });
      const lines = (data as string).split('\n').filter(Boolean).map((line) => JSON.parse(line) as Line);
      const [first, last] = [lines.shift(), lines.pop()];
      if (first?.export === undefined || last?.end === undefined) throw new Error('the answer of the export is not whole');
      if (first.export.kind !== this.sub.kind) {
        throw new SubscribeError('option', `${this.of.plural} are states of ${first.export.kind}, and not of ${this.sub.kind}`);
      }
      if (last.problem !== undefined && isOutdated(last.problem)) throw new OutdatedError(last.problem.title);
      if (last.problem !== undefined && lines.length === 0) throw new Error(`the export ends with ${last.problem.code}`);
      return { head: first.export, states: lines, done: last.end === 'done' };
    } catch (error) {
      throw error instanceof ProblemError && isOutdated(error) ? new OutdatedError(error.message, { cause: error }) : error;
    }
  }

  /** Calls the function with all states, with those of an aggregate one after the other. */
  async #pass(tenantId: string, states: Line[], signal: AbortSignal): Promise<boolean> {
    const reader = new Reader(this.sub, { stream: '', subject: '', again: false });
    const queues = new Map<string, Line[]>();
    for (const state of states) queues.set(state.subject, [...(queues.get(state.subject) ?? []), state]);
    const passed = await Promise.all([...queues.values()].map(async (queue) => {
      for (const { type, subject, data } of queue) {
        const event: Envelope = {
          id: '', tenantId, aggregateType: this.sub.kind, aggregateId: subject, type: 'snapshot', version: Number(type.slice(type.lastIndexOf('.v') + 2)),
          occurredAt: '', traceparent: undefined, stream: '', sequence: 0,
        };
        if (!(await reader.snapshot(event, new TextEncoder().encode(JSON.stringify(data)), signal))) return false;
      }
      return true;
    }));
    reader.stop();
    return passed.every(Boolean);
  }

  /** Creates the durable consumers where the exports end, and ends the claim. */
  async #join(): Promise<void> {
    const streams = await this.sub.list();
    const starts = await this.#starts(streams);
    await this.#save((p) => ({ ...p, starts }));
    for (const { name, number, created } of streams) {
      const { whole, sequence } = starts[number]!;
      if (whole) continue;
      const reader = this.sub.readerOf(name);
      await reader.declare();
      reader.stop();
      const now = (await this.sub.list()).find((s) => s.number === number);
      if (now?.created !== created || now.first > Number(sequence) + 1) {
        throw new OutdatedError(`${name} begins with sequence ${now?.first}, and the exports end with ${sequence}`);
      }
    }
    await this.#save(() => ({ starts, joined: true }));
    this.joined = true;
    this.sub.s.health.problems.delete('bootstrap');
    this.sub.log('info', 'the exports are handled, continuing on the streams');
  }

  async #starts(streams: Stream[]): Promise<Record<string, Start>> {
    const all = (this.#record.exports ?? []).map((e) => e.streams);
    for (const p of all.flat()) {
      const now = streams.find((s) => s.number === p.partition);
      if (p.stream && (now === undefined || micro(now.created) !== micro(p.created!))) throw new OutdatedError(`${p.stream} is gone or was recreated`);
    }
    const starts: Record<string, Start> = {};
    for (const { name, number, created, last } of streams) {
      const at = Math.min(...all.map((positions) => coveredBy(positions, number)));
      starts[number] = { created: micro(created), sequence: String(at === Infinity ? last : at) };
      if (at === Infinity && (await this.#consumerOf(name)) === undefined) starts[number].whole = true;
    }
    return starts;
  }

  /** The position up to which the exports cover a stream, also before they are read. */
  startOf(s: Stream): { sequence: number; whole: boolean } {
    const at = this.#record.starts?.[s.number];
    const known = at !== undefined && micro(at.created) === micro(s.created);
    return { sequence: known ? Number(at.sequence) : 0, whole: known && at.whole === true };
  }

  /**
   * Makes an instance read new exports if a stream has dropped events before NATS delivered them, or was recreated. NATS
   * has delivered those up to `covered` of the stream that was created then.
   */
  async check(s: Stream, created: string, covered: number): Promise<void> {
    const fine = () => this.#record.owner !== undefined || !this.#lacks(s, created, covered);
    if (fine()) return;
    await this.#read(); // another instance may have read exports since
    if (fine()) return;
    this.sub.log('warn', 'events expired before they were handled, or the stream was recreated; reading exports again',
      { stream: s.name, created: s.created, first: s.first, after: covered });
    await this.#save(({ exports: _, ...p }) => ({ ...p, owner: this.#owner, joined: true }));
  }

  #lacks(s: Stream, created: string, covered: number): boolean {
    const at = this.#record.starts?.[s.number];
    if (at !== undefined && micro(at.created) === micro(s.created)) return s.first > Math.max(Number(at.sequence), covered) + 1;
    return at !== undefined || created !== s.created || s.first > covered + 1;
  }
}

/** The sequence up to which an export covers a partition's stream. An unlisted stream with a lower number than a listed one is covered. */
function coveredBy(positions: Position[], partition: number): number {
  const listed = positions.find((p) => p.partition === partition);
  if (listed !== undefined) return Number(listed.sequence);
  return positions.some((p) => p.partition > partition) ? Infinity : 0;
}

/** A time to the microsecond. */
function micro(time: string): string {
  const [seconds, fraction = ''] = time.replace(/Z$/, '').split('.') as [string, string?];
  return `${seconds}.${fraction.padEnd(6, '0').slice(0, 6)}Z`;
}

const isOutdated = (problem: { code: string }) => problem.code === 'export-outdated';

/** Reports an answer of the API that no retry changes. */
function isRefused(error: unknown): error is ProblemError {
  return error instanceof ProblemError && error.status >= 400 && error.status < 500 && error.status !== 408 && error.status !== 429;
}
