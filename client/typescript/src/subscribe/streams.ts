import { DiscardPolicy, RetentionPolicy, StorageType, type JetStreamManager, type StreamInfo } from '@nats-io/jetstream';
import { apiCode, notFound, streamExists } from './errors.js';

/** A partition's stream. */
export interface Stream {
  name: string;
  number: number;
  created: string;
  /** The numbers of the partitions that it replaces. */
  after: number[];
  /** The oldest sequence. */
  first: number;
  /** The last sequence; 0 before the first message. */
  last: number;
  messages: number;
  replicas: number;
  tags: string[];
}

const maxSilence = 4e9; // nanoseconds that a leader may not hear from a replica that still counts for its quorum

export function numberOf(base: string, name: string): number | undefined {
  const rest = name.startsWith(`${base}-`) ? name.slice(base.length + 1) : '';
  return /^(0|[1-9]\d*)$/.test(rest) ? Number(rest) : undefined;
}

const numbers = (text = '') => text.split(' ').filter(Boolean).map(Number);

/** A partition's stream, as its leader describes it; undefined if there is none. Throws while the stream has no leader. */
export async function streamOf(jsm: JetStreamManager, name: string, number: number): Promise<Stream | undefined> {
  const info = await jsm.streams.info(name).catch(absent(notFound.stream));
  return info && describe(info, number);
}

/** The same as a subscriber's durable consumer describes it, for an account that can read no more. */
export async function streamOfTenant(jsm: JetStreamManager, name: string, number: number, durable: string): Promise<Stream | undefined> {
  const info = await jsm.consumers.info(name, durable).catch(absent(notFound.stream, notFound.consumer));
  if (info === undefined) return undefined;
  const last = Math.max(info.delivered.stream_seq, info.num_pending);
  return { name, number, created: info.created, after: numbers(info.config.metadata?.['tidings-after']), first: 0, last, messages: last, replicas: 0, tags: [] };
}

/** The names of the streams of all partitions, with the partitions' numbers. */
export async function namesOf(jsm: JetStreamManager, base: string, prefix: string): Promise<[string, number][]> {
  const all: [string, number][] = [];
  for await (const name of jsm.streams.names(`${prefix}.>`)) {
    const number = numberOf(base, name);
    if (number !== undefined) all.push([name, number]);
  }
  return all.sort((a, b) => a[1] - b[1]);
}

/** Makes undefined of these errors of JetStream. */
export function absent(...codes: number[]): (error: unknown) => undefined {
  return (error) => {
    if (!codes.includes(apiCode(error) ?? 0)) throw error;
  };
}

function describe({ config, created, state, cluster }: StreamInfo, number: number): Stream {
  if (cluster?.name) {
    const replicas = cluster.replicas ?? [];
    const heard = 1 + replicas.filter((r) => !r.offline && r.active < maxSilence).length;
    if (!cluster.leader || replicas.some((r) => r.name === cluster.leader) || 2 * heard <= replicas.length + 1) {
      throw new Error(`the stream ${config.name} waits for a leader`);
    }
  }
  if (config.metadata?.['slots'] === undefined) throw new Error(`the stream ${config.name} was not made for these events`);
  return {
    name: config.name, number, created, after: numbers(config.metadata['after']), first: state.first_seq, last: state.last_seq, messages: state.messages,
    replicas: config.num_replicas, tags: config.placement?.tags ?? [],
  };
}

/** Reports whether a stream gets no more events: it has its closing message, or that has expired. */
export async function isEnded(jsm: JetStreamManager, prefix: string, stream: Stream, all: Stream[]): Promise<boolean> {
  const subject = `${prefix}.${stream.number}.closed`;
  for (let query: { seq: number; next_by_subj: string } | { last_by_subj: string } = { last_by_subj: subject }; ; ) {
    const m = await jsm.streams.getMessage(stream.name, query);
    if (m === null) break;
    if (m.header?.has('Tidings-Closed') && m.header.get('ce-source') === '/tidings') return true;
    query = { seq: 'seq' in query ? m.seq + 1 : 1, next_by_subj: subject }; // foreign messages have the subject too
  }
  return stream.messages === 0 && stream.last > 0 && all.some((next) => next.last > 0 && next.after.includes(stream.number));
}

/** The same from a tenant's account: relays publish to a stream only after they have closed its predecessors. */
export function isEndedOfTenant(stream: Stream, all: Stream[]): boolean {
  return all.some((next) => next.after.includes(stream.number) && (next.last > 0 || isEndedOfTenant(next, all)));
}

/** Creates the stream of dead letters, with the replicas and the placement of a partition's stream. */
export async function declareDead(jsm: JetStreamManager, name: string, like: Stream): Promise<void> {
  if (await jsm.streams.info(name).catch(absent(notFound.stream))) return;
  await jsm.streams.add({
    name, description: 'Tidings: events that subscribers could not handle', subjects: [`${name}.*.*`],
    retention: RetentionPolicy.Limits, storage: StorageType.File, num_replicas: Math.max(like.replicas, 1),
    ...(like.tags.length > 0 && { placement: { cluster: '', tags: like.tags } }),
    allow_direct: true, deny_purge: true, discard: DiscardPolicy.New, discard_new_per_subject: true,
    max_msgs_per_subject: 10_000, max_bytes: 2 ** 30,
  }).catch(absent(streamExists)); // another process was faster
}

const erasedBlock = 8192; // sequences per key of the record of erasures, one bit each

/** Reports whether the message was erased. */
export async function isErased(jsm: JetStreamManager, base: string, stream: string, sequence: number): Promise<boolean> {
  const bucket = `${base}-erased`;
  const subject = `$KV.${bucket}.${stream}.${Math.floor(sequence / erasedBlock)}`;
  const m = await jsm.streams.getMessage(`KV_${bucket}`, { last_by_subj: subject }).catch(absent(notFound.stream));
  const bit = sequence % erasedBlock;
  return m?.data.length === erasedBlock / 8 && (m.data[bit >> 3]! & (1 << (bit & 7))) !== 0;
}
