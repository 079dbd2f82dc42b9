import { AckPolicy, DeliverPolicy, type ConsumerInfo } from '@nats-io/jetstream';
import { createInbox, headers, nanos, type Msg } from '@nats-io/transport-node';
import { backoff } from '../transport.js';
import { absent, isErased, type Stream } from './streams.js';
import { apiCode, asError, notFound, PermanentError, SubscribeError } from './errors.js';
import { decode, isOurs, type Envelope } from './event.js';
import type { Subscriber } from './handle.js';
import { aborted, isWithin, linked, orAborted, sleep, type Moment } from './wait.js';

/** The origin of a reader's messages. `again`: they are retried dead letters. */
export interface Source {
  stream: string;
  subject: string;
  again: boolean;
}

/** A delivered event that is not yet acknowledged. */
interface Message {
  msg: Msg;
  term: AbortSignal; // a call for the message may begin until it aborts
  event: Envelope;
  fault: Error | undefined; // why the event cannot be decoded
  sequence: number;
  stored: bigint; // when, in nanoseconds; with the sequence, it identifies the message
  attempt: number; // the number of the next attempt
  turn: AbortController | undefined; // of a suspected event: aborts when it may be handled
  former: boolean; // of a stream that was recreated: NATS would take an answer for that of a new message
}

const perCall = 16; // events in hand for each place, enough that no place waits for NATS
const pullWait = 3000; // milliseconds that one request for more events waits
const settleEvery = 500;
// After so many deliveries an event is suspected to end its process. NATS also counts what was given back before a call, and all
// other events that a process had in hand when one event ended it.
const deliveries = 10;
const lookedFor = 3000; // milliseconds that a look at the stream vouches for it
const late = 1000; // milliseconds after which the answer to a request is lost
const maxParked = 8 << 20; // bytes behind failing events, and 1 KiB for each event: up to it they take no room from other aggregates
const grace = 5000; // milliseconds to return after the signal has aborted
const group = 'order'; // of a consumer that one instance at a time reads
const maxReason = 4096;

/** Reads one stream. */
export class Reader {
  readonly #stopping: AbortController;
  readonly #undone = new Map<number, Message>();
  readonly #queues = new Map<string, Message[]>(); // by aggregate; the first of each is being handled
  readonly #failing = new Set<string>(); // aggregates: the first of the queue has failed and will be tried again
  readonly #parked = { events: 0, bytes: 0 }; // what waits behind those
  readonly #suspects: Message[] = []; // events that may end the process, in the order of their turns
  #condemned = false; // this process had a guilty one
  readonly #workers = new Set<Promise<void>>();
  #notify: () => void = () => {}; // an event was finished
  #term: AbortController; // this instance may begin calls until it aborts: with reading, or with its turn to read in order
  #looked: Moment = { steady: -Infinity, wall: -Infinity }; // when the last look at the stream began
  #looking: Promise<unknown> | undefined;
  #created = ''; // of the stream, and up to where NATS has delivered it; for bootstrap
  #passed = 0;
  // For inOrder.
  yield = false; // pass the turn to another instance
  others = 0; // instances that wait for a turn at this stream
  #pulls = 0; // requests that began or ended: an odd number while NATS has one
  #pin = ''; // the id of this instance's turn to read
  #latest = 0; // the number of the last delivery
  #behind = false; // the previous turn may have unfinished events, or a delivery was lost
  #held: Message[] = []; // events that wait until NATS has delivered those again
  #missing = 0; // unfinished events of the previous turn that NATS has not delivered again yet
  #repeated = false; // NATS has delivered some of them again

  constructor(private readonly sub: Subscriber, private readonly of: Source) {
    this.#stopping = linked(sub.reading.signal);
    this.#term = linked(this.#stopping.signal);
  }

  stop(): void {
    this.#stopping.abort();
  }

  get hasTurn(): boolean {
    return this.#pin !== '';
  }

  get #window(): number {
    return perCall * this.sub.s.concurrency;
  }

  /** Reads until stop. Resolves when every event in hand is handled or given back. */
  async run(): Promise<void> {
    const { signal } = this.#stopping;
    const keeper = setInterval(() => this.#keep(), this.sub.s.takeover / 3);
    for (let failures = 1; !signal.aborted; failures++) {
      const had = { events: 0 };
      try {
        await this.#session(signal, had);
      } catch (error) {
        if (error instanceof SubscribeError) this.sub.fail(error);
        if (signal.aborted) break;
        if (had.events > 0) failures = 1;
        this.sub.trouble(this.of.stream, error);
        await sleep(Math.max(200, backoff(failures)), signal);
      }
    }
    this.#endTurn();
    await Promise.all(this.#workers);
    clearInterval(keeper);
  }

  /** The number of events of the stream that no instance has handled yet. */
  async pending(stream: Stream): Promise<number> {
    const pulls = this.#pulls;
    const info = await this.sub.jsm.consumers.info(this.of.stream, this.sub.durable);
    // Each instance has one request at NATS. This counts one too few if its own began or ended meanwhile, and never one too many.
    this.others = Math.max(0, info.num_waiting - (pulls % 2 === 0 && pulls === this.#pulls ? 0 : 1));
    if (this.sub.boot !== undefined && this.#created === stream.created) {
      // Between two calls it cannot know whether NATS delivered a message before that expired.
      await this.sub.boot.check(stream, this.#created, this.#passed);
      this.#passed = Math.max(this.#passed, info.delivered.stream_seq);
    }
    return info.num_pending + info.num_ack_pending;
  }

  /** Requests events until an error, or until stop. */
  async #session(signal: AbortSignal, had: { events: number }): Promise<void> {
    await this.declare();
    this.sub.trouble(this.of.stream);
    if (this.sub.s.inOrder) this.#endTurn(); // its events went to the sessions before
    while (!signal.aborted) {
      const room = await this.#awaitRoom(signal);
      if (signal.aborted) return;
      if (!(await this.#pull(room, signal, had))) this.#endTurn(); // another instance has the turn
      if (this.yield) await this.#passTurn(signal);
      else await this.#settle();
    }
  }

  /**
   * Takes up to `batch` events as they arrive. Events that arrive after stop go back. Returns false if it is another
   * instance's turn to read.
   */
  async #pull(batch: number, signal: AbortSignal, had: { events: number }): Promise<boolean> {
    const { nc, s, durable } = this.sub;
    const wait = Math.floor(Math.min(pullWait, s.takeover / 3, this.#behind ? settleEvery : pullWait));
    const order = s.inOrder ? { group, ...(this.#pin !== '' && { id: this.#pin }) } : {};
    const inbox = createInbox((nc as unknown as { options: { inboxPrefix?: string } }).options.inboxPrefix);
    const over = linked(signal);
    let left = batch;
    let mine = true;
    let failure: Error | undefined;
    const replies = nc.subscribe(inbox, {
      callback: (error, msg) => {
        if (error === null && msg.subject !== inbox) {
          had.events++;
          if (signal.aborted) ack(msg, '-NAK');
          else this.#take(msg);
          if (--left > 0) return;
        } else {
          const { code, description } = msg?.headers ?? { code: 503, description: 'no responders' };
          if (error === null && code < 400) return;
          if (code === 423) mine = false;
          else if (error !== null || (code !== 404 && code !== 408)) failure ??= error ?? new Error(`read stream ${this.of.stream}: ${code} ${description}`);
        }
        over.abort();
      },
    });
    this.#pulls++;
    try {
      const request = { batch, expires: nanos(wait), ...order };
      nc.publish(`$JS.API.CONSUMER.MSG.NEXT.${this.of.stream}.${durable}`, JSON.stringify(request), { reply: inbox });
      await sleep(wait + late, over.signal);
    } finally {
      this.#pulls++;
      over.abort();
      void replies.drain().catch(() => {}); // takes the events that are on their way
    }
    if (failure !== undefined) throw failure;
    return mine;
  }

  /**
   * Waits until there is room for some events, and returns their number. A reader in order requests at least one event
   * now and then, to keep its turn.
   */
  async #awaitRoom(signal: AbortSignal): Promise<number> {
    const until = performance.now() + this.sub.s.takeover / 3;
    for (;;) {
      const n = this.#window - this.#undone.size + (this.#parked.bytes <= maxParked ? this.#parked.events : 0);
      if (this.#repeated) return Math.max(1, Math.min(this.#missing, this.#window));
      if (this.#behind || (this.sub.s.inOrder && this.#pin === '')) return 1; // the first tells whether there are unfinished ones
      if (n > 0 && n >= this.#window / 4) return n;
      const rest = until - performance.now();
      if (signal.aborted || rest <= 0) return Math.max(n, 1);
      const room = linked(signal);
      this.#notify = () => room.abort();
      await sleep(rest, room.signal);
      room.abort();
    }
  }

  /** Creates the durable consumer, or updates an existing one to the options. Its start never changes. */
  async declare(): Promise<void> {
    const { jsm, s, durable, name } = this.sub;
    const { stream, subject, again } = this.of;
    const settings = {
      ack_wait: nanos(s.takeover), max_ack_pending: 100_000, max_deliver: -1,
      ...(s.inOrder && { priority_policy: 'pinned_client' as const, priority_groups: [group], priority_timeout: nanos(s.takeover) }),
    };
    const have = await jsm.consumers.info(stream, durable).catch(absent(notFound.consumer));
    const after = again ? 0 : await this.#checkPosition(have?.delivered.stream_seq ?? 0);
    if (have === undefined) {
      if (s.tenant !== undefined || this.sub.kept) {
        throw new Error(`there is no consumer ${durable} on stream ${stream}: the relay creates it, or \`tidings nats durable\``);
      }
      await jsm.consumers.add(stream, {
        durable_name: durable, filter_subject: subject, ack_policy: AckPolicy.Explicit, description: `Tidings subscriber ${name}`,
        deliver_policy: DeliverPolicy.All, ...settings,
        ...(s.since !== undefined && !again && { deliver_policy: DeliverPolicy.StartTime, opt_start_time: s.since.toISOString() }),
        ...(after > 0 && { deliver_policy: DeliverPolicy.StartSequence, opt_start_seq: after + 1 }),
      });
      return;
    }
    const was = have.config;
    if (was.filter_subject !== subject || was.ack_policy !== AckPolicy.Explicit) {
      throw new SubscribeError('filter', `the consumer ${durable} of stream ${stream} is not this subscriber's: its filter is ${was.filter_subject}`);
    }
    const inOrder = was.priority_policy === 'pinned_client';
    if (was.metadata?.['tidings-filter']) {
      this.sub.kept = true;
      if (was.ack_wait !== settings.ack_wait || inOrder !== s.inOrder) {
        throw new SubscribeError('option', `the consumer ${durable} of stream ${stream} was created with --ack-wait ${was.ack_wait! / 1e9}s and ` +
          `--in-order=${inOrder}: the options takeover and inOrder must say the same`);
      }
    } else if (was.ack_wait !== settings.ack_wait || was.max_ack_pending !== settings.max_ack_pending ||
      was.max_deliver !== settings.max_deliver || inOrder !== s.inOrder || (inOrder && was.priority_timeout !== settings.ack_wait)) {
      const none = { priority_policy: 'none' as const, priority_groups: [], priority_timeout: 0 };
      await jsm.consumers.update(stream, durable, { ...(inOrder && none), ...settings });
    }
  }

  /**
   * Makes an instance read exports if the stream no longer has the events after the consumer's position. Returns the
   * sequence after which a new consumer begins; 0 without exports.
   */
  async #checkPosition(delivered: number): Promise<number> {
    const { boot } = this.sub;
    if (boot === undefined) return 0;
    const now = (await this.sub.list()).find((s) => s.name === this.of.stream);
    if (now === undefined) throw new Error(`the stream ${this.of.stream} is gone`);
    const start = boot.startOf(now).sequence;
    const passed = Math.max(start, delivered, this.#created === now.created ? this.#passed : 0);
    await boot.check(now, this.#created || now.created, passed);
    [this.#created, this.#passed] = [now.created, passed];
    return start;
  }

  /** Calls the function with a state of an export until it succeeds. Returns false if the signal aborts before. */
  async snapshot(event: Envelope, data: Uint8Array, term: AbortSignal): Promise<boolean> {
    const { s, slots, handling } = this.sub;
    const of = `the state of ${event.aggregateType} ${event.aggregateId} of tenant ${event.tenantId}`;
    const m: Message = { msg: { data } as Msg, event, fault: undefined, sequence: 0, stored: 0n, attempt: 1, term, turn: undefined, former: false };
    for (; await slots.take(term); m.attempt++) {
      const error = await this.#invoke(m);
      if (error === undefined) {
        s.health.counts.snapshots++;
        this.sub.trouble(of);
        return true;
      }
      if (handling.signal.aborted) break;
      s.health.counts.failures++;
      this.sub.trouble(of, new Error(`handle ${of}: ${error.message}`, { cause: error }));
      await sleep(s.backOff(m.attempt), term);
    }
    s.health.problems.delete(of); // another instance may handle the state
    return false;
  }

  /** Adds a delivered message to those in hand. */
  #take(msg: Msg): void {
    const { stream, again } = this.of;
    const h = msg.headers ?? headers();
    const { sequence, stored, delivered, number } = position(msg);
    this.#behind ||= this.sub.s.inOrder && number !== this.#latest + 1; // the events of lost deliveries come again: later ones wait
    this.#latest = number;
    if (!again && !isOurs(msg.headers)) {
      this.sub.s.health.counts.foreign++;
      this.sub.log('warn', 'skipping a message that no relay published', { stream, sequence, subject: msg.subject });
      ack(msg, '+ACK');
      return;
    }
    const { event, fault } = again
      ? decode(h.get('Tidings-Dead-Subject'), h, h.get('Tidings-Dead-Stream'), Number(h.get('Tidings-Dead-Sequence')))
      : decode(msg.subject, h, stream, sequence);
    const have = this.#undone.get(sequence);
    if (have?.stored === stored) return; // delivered again because NATS did not get the progress in time
    if (have !== undefined) this.#disown(stored);
    const pin = h.get('Nats-Pin-Id');
    if (this.sub.s.inOrder && pin !== this.#pin) {
      this.#endTurn();
      [this.#pin, this.#behind, this.#term] = [pin, true, linked(this.#stopping.signal)];
    }
    const m: Message = { msg, event, fault, sequence, stored, attempt: delivered, term: this.#term.signal, turn: undefined, former: false };
    this.#undone.set(sequence, m);
    if (this.#behind) {
      this.#repeated ||= delivered > 1;
      this.#held.push(m);
    } else {
      this.#dispatch(m);
    }
  }

  /** The stream was created then: messages in hand from before are of its predecessor, and NATS gets no answers for them. */
  recreated(created: string): void {
    this.#disown(BigInt(Date.parse(created)) * 1_000_000n);
  }

  /** A look at the stream, which has succeeded, began at this time. */
  saw(at: Moment): void {
    this.#looked = at;
  }

  /**
   * Waits until it is known that the stream was not recreated meanwhile. An instance that was frozen or cut off may have missed that, and
   * its answer would be taken for that of a new message. Returns false if drain ends before, or the connection is closed.
   */
  async #isSure(): Promise<boolean> {
    const { nc, handling } = this.sub;
    const { stream, again } = this.of;
    for (let failures = 1; ; failures++) {
      // The client keeps answers for its next connection, so a look from before the last one was lost vouches for nothing.
      if (again || (this.#looked.steady > this.sub.disconnected && isWithin(lookedFor, this.#looked))) return true;
      if (handling.signal.aborted || nc.isClosed()) return false;
      this.#looking ??= this.sub.look(stream).finally(() => { this.#looking = undefined; });
      try {
        await orAborted(this.#looking, handling.signal);
        if (!handling.signal.aborted) return true; // also after a slow look
      } catch {
        await sleep(backoff(failures), handling.signal);
      }
    }
  }

  /** Answers NATS about a message in hand, for good. If NATS does not get that, the message comes again. */
  async #answer(m: Message, what: string): Promise<void> {
    if (await this.#isSure()) answer(m, what);
  }

  /** The stream is gone, and a new one of its name gets a new reader. */
  gone(): void {
    this.#disown();
    this.stop();
  }

  #disown(before?: bigint): void {
    for (const m of this.#undone.values()) {
      if (before !== undefined && m.stored >= before) continue;
      m.former = true;
      this.#undone.delete(m.sequence);
    }
    this.#held = this.#held.filter((m) => !m.former);
  }

  /**
   * Waits for the turn of a suspected message. Such a message is handled while no other one is, in the order of the stream. So if
   * the process ends again, the first one that comes next is guilty, and each process condemns only one. Without that, one event
   * would make dead letters of all that come with it. Returns undefined if the term ends before.
   */
  async #isGuilty(m: Message): Promise<boolean | undefined> {
    await orAborted(aborted(m.turn!.signal), m.term);
    if (m.term.aborted) return undefined;
    const guilty = !this.#condemned && m.attempt > Math.max(this.sub.s.attempts, deliveries) + 1;
    this.#condemned ||= guilty;
    return guilty;
  }

  /** Lets the next suspected message take its turn. */
  #release(m: Message): void {
    const i = this.#suspects.indexOf(m);
    if (i >= 0) this.#suspects.splice(i, 1);
    if (i === 0) this.#suspects[0]?.turn!.abort();
  }

  /** Queues a message behind those of its aggregate. */
  #dispatch(m: Message): void {
    if (m.attempt > Math.max(this.sub.s.attempts, deliveries)) {
      m.turn = new AbortController();
      if (this.#suspects.push(m) === 1) m.turn.abort();
    }
    const key = aggregateOf(m);
    const queue = this.#queues.get(key);
    if (queue !== undefined) {
      queue.push(m);
      if (this.#failing.has(key)) this.#park(1, [m]);
      return;
    }
    this.#queues.set(key, [m]);
    const worker = this.#work(key).finally(() => this.#workers.delete(worker));
    this.#workers.add(worker);
  }

  /** Handles the messages of an aggregate until the queue is empty. Gives back messages whose term ends before. */
  async #work(key: string): Promise<void> {
    const queue = this.#queues.get(key)!;
    for (let m = queue[0]; m !== undefined; m = queue[0]) {
      if (!(await this.#handle(m))) answer(m, '-NAK'); // if that is lost, NATS delivers the message after takeover
      if (!m.former) this.#undone.delete(m.sequence);
      this.#release(m);
      queue.shift();
      if (this.#failing.delete(key)) this.#park(-1, queue);
      this.#notify();
    }
    this.#queues.delete(key);
  }

  /** Counts messages that wait behind a failing one, or with -1 no longer do. */
  #park(by: 1 | -1, messages: Message[]): void {
    for (const m of messages) {
      this.#parked.events += by;
      this.#parked.bytes += by * (1024 + m.msg.data.length);
    }
  }

  /** Makes room for other aggregates while a message waits for its next attempt. */
  #failed(m: Message): void {
    const key = aggregateOf(m);
    if (this.#failing.has(key)) return;
    this.#failing.add(key);
    this.#park(1, this.#queues.get(key)!.slice(1));
    this.#notify();
  }

  /** Calls the function until it succeeds or the message becomes a dead letter. Returns false if the term ends before. */
  async #handle(m: Message): Promise<boolean> {
    const { s, slots, handling } = this.sub;
    let fault: unknown = m.fault;
    if (fault === undefined && m.turn !== undefined) {
      const guilty = await this.#isGuilty(m);
      if (guilty === undefined) return false;
      if (guilty) fault = new Error(`the event was delivered ${m.attempt - 1} times, and no attempt finished: each time the process ended first, or lost NATS`);
    }
    for (; fault === undefined; m.attempt++) {
      if (!(await slots.take(m.term))) return false;
      const error = await this.#invoke(m);
      if (error === undefined) {
        s.health.counts.handled++;
        await this.#answer(m, '+ACK');
        await this.#forget(m.sequence);
        return true;
      }
      if (handling.signal.aborted) return false; // drain is over
      if ((error as Partial<PermanentError>).permanent === true || m.attempt >= s.attempts) return this.#moveToDeadLetters(m, error);
      s.health.counts.failures++;
      this.sub.log('warn', 'handling an event failed, retrying', { ...m.event, attempt: m.attempt, error });
      this.#failed(m);
      await sleep(s.backOff(m.attempt), m.term);
      if (m.term.aborted) return false;
    }
    return this.#moveToDeadLetters(m, asError(fault));
  }

  /** Calls the function with a time limit, and returns its error. A call that does not return keeps its place. */
  async #invoke(m: Message): Promise<Error | undefined> {
    const { s, slots, handling, durable } = this.sub;
    const call = linked(handling.signal);
    const timer = setTimeout(() => call.abort(new Error(`the handler did not return within ${s.timeout} ms`)), s.timeout);
    const returned = new AbortController();
    const done = this.sub.call(m.event, m.msg.data, m.attempt, call.signal).then(() => undefined, asError).finally(() => returned.abort());
    await Promise.race([done, aborted(call.signal)]);
    clearTimeout(timer);
    if (!returned.signal.aborted) await sleep(Math.min(grace, s.timeout), returned.signal);
    if (returned.signal.aborted) {
      call.abort(); // releases the signal of `handling`
      slots.give();
      return done;
    }
    this.sub.countLost(1);
    void done.then(() => {
      slots.give();
      this.sub.countLost(-1);
    });
    if (this.sub.lost === s.concurrency) {
      this.sub.fail(new SubscribeError('stuck', `all ${s.concurrency} places of ${durable} are taken, the last by event ${m.event.id}`));
    }
    return new Error(`the handler did not return in time; it may still run (timeout is ${s.timeout} ms)`);
  }

  /** Makes a message a dead letter, and then ends its delivery. Returns false if the term ends before. */
  async #moveToDeadLetters(m: Message, why: Error): Promise<boolean> {
    const { js, s, durable, dead, handling } = this.sub;
    const old = m.msg.headers ?? headers();
    const letter = headers();
    for (const [name, values] of old) {
      if (!name.startsWith('Nats-')) values.forEach((value) => letter.append(name, value)); // another stream would obey those
    }
    const { stream, sequence } = m.event;
    const subject = this.of.again ? old.get('Tidings-Dead-Subject') : m.msg.subject;
    for (const [name, value] of Object.entries({
      Subject: subject, Stream: stream, Sequence: String(sequence), Attempts: String(m.attempt), Error: oneLine(why.message), Subscriber: durable,
    })) letter.set(`Tidings-Dead-${name}`, value);
    for (let attempt = 1; ; attempt++) {
      try {
        const msgID = `${durable}:${this.of.stream}:${m.sequence}:${old.get('ce-id')}`; // a recreated stream has other events
        const stored = await js.publish(`${dead}.letter.${durable}`, m.msg.data, { headers: letter, msgID });
        await this.#unlessErased(stream, sequence, stored.seq);
        break;
      } catch (error) {
        this.sub.trouble(dead, new Error(`store a dead letter: ${asError(error).message}`));
        await sleep(s.backOff(attempt), m.term);
        if (m.term.aborted || handling.signal.aborted) return false;
      }
    }
    this.sub.trouble(dead);
    s.health.counts.deadLetters++;
    this.sub.log('error', 'an event became a dead letter', { ...m.event, attempts: m.attempt, error: why, runbook: 'SubscriberDeadLetters' });
    await this.#answer(m, `+TERM a dead letter of ${dead}`);
    await this.#forget(m.sequence);
    return true;
  }

  /** Deletes a dead letter again if its event was erased before the letter was stored: the erasure has searched before. */
  async #unlessErased(stream: string, sequence: number, letter: number): Promise<void> {
    if (this.sub.kept) return; // such a subscriber may neither read the record of erasures nor delete
    try {
      if (await isErased(this.sub.jsm, this.sub.s.stream, stream, sequence)) await this.#remove(letter);
    } catch (error) {
      this.sub.log('warn', 'could not look up whether the event of a dead letter was erased', { stream, sequence, letter, error });
    }
  }

  /** Deletes a finished request for another attempt. */
  async #forget(sequence: number): Promise<void> {
    if (this.of.again && !this.sub.kept) await this.#remove(sequence);
  }

  async #remove(sequence: number): Promise<void> {
    try {
      await this.sub.jsm.streams.deleteMessage(this.sub.dead, sequence).catch(absent(notFound.message, notFound.toDelete));
    } catch (error) {
      this.sub.log('warn', 'deleting a message from the stream of dead letters failed', { sequence, error });
    }
  }

  /** Reports the messages in hand to NATS as in progress. */
  #keep(): void {
    for (const m of this.#undone.values()) ack(m.msg, '+WPI');
  }

  /** Ends this instance's turn to read in order. The next turn may be its own: NATS ends the turn of an instance that stalls. */
  #endTurn(): void {
    this.#term.abort();
    for (const m of this.#held) {
      ack(m.msg, '-NAK');
      this.#undone.delete(m.sequence);
    }
    [this.#pin, this.#held, this.#behind, this.#missing, this.#repeated] = ['', [], false, 0, false];
  }

  /**
   * Gives the events in hand back, and requests none until NATS has ended the turn, after takeover, and given it to an
   * instance that waits. A subscriber with credentials may not end it.
   */
  async #passTurn(signal: AbortSignal): Promise<void> {
    this.yield = false;
    this.sub.log('info', 'passing a partition to another instance', { stream: this.of.stream });
    this.#endTurn();
    await sleep(this.sub.s.takeover * 1.5, signal);
  }

  /**
   * Dispatches the held events, once NATS has delivered the unfinished events of the previous turn again, and those of lost
   * deliveries. NATS refuses the requests of an ended turn only while it has events to deliver, or another instance has the turn. So
   * ask whose turn it is: otherwise two instances could hold events and wait for each other's forever.
   */
  async #settle(): Promise<void> {
    if (!this.#behind) return;
    const info = await this.sub.jsm.consumers.info(this.of.stream, this.sub.durable) as ConsumerInfo & {
      priority_groups?: { group: string; pinned_client_id?: string }[];
    };
    if (!info.priority_groups?.some((g) => g.group === group && g.pinned_client_id === this.#pin)) {
      this.#endTurn();
      return;
    }
    this.#missing = info.num_ack_pending - [...this.#undone.values()].filter((m) => !m.term.aborted).length;
    if (this.#missing > 0) return;
    const held = this.#held.sort((a, b) => a.sequence - b.sequence);
    [this.#held, this.#behind, this.#missing, this.#repeated] = [[], false, 0, false];
    held.forEach((m) => this.#dispatch(m));
  }
}

/** The aggregate of a message. Its messages are handled one after the other. */
function aggregateOf({ event }: Message): string {
  return `${event.tenantId} ${event.aggregateType} ${event.aggregateId}`;
}

/** Answers NATS about a delivery. If that is lost, NATS delivers the event again. */
function ack(msg: Msg, what: string): void {
  try {
    msg.respond(what);
  } catch {
    // the connection is closed
  }
}

/** Answers NATS about a message in hand. */
function answer(m: Message, what: string): void {
  if (!m.former) ack(m.msg, what);
}

/** The stream sequence of a message, when it was stored, the number of its deliveries and that of this one, from its reply subject. */
function position(msg: Msg): { sequence: number; stored: bigint; delivered: number; number: number } {
  const tokens = msg.reply!.split('.'); // $JS.ACK.[DOMAIN.ACCOUNT.]STREAM.CONSUMER.DELIVERED.SEQUENCE.CONSUMER-SEQUENCE.TIME...
  const at = tokens.length >= 11 ? 6 : 4;
  return { delivered: Number(tokens[at]), sequence: Number(tokens[at + 1]), number: Number(tokens[at + 2]), stored: BigInt(tokens[at + 3]!) };
}

/** Makes a text valid as the value of a header. */
function oneLine(text: string): string {
  return new TextDecoder().decode(new TextEncoder().encode(text).slice(0, maxReason)).replace(/\p{Cc}/gu, ' ');
}
