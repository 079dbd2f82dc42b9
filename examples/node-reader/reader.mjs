// Prints every new follow as a line of JSON: node reader.mjs [NAME]
// You may stop it and start it again at any time. Several readers with one NAME share the work.
// With TENANT it reads that tenant's follows in the tenant's NATS account, with the credentials file NATS_CREDENTIALS.
import { AckPolicy, jetstream, jetstreamManager } from '@nats-io/jetstream';
import { connect, credsAuthenticator } from '@nats-io/transport-node';
import { readFileSync } from 'node:fs';
import { setTimeout as pause } from 'node:timers/promises';

const { TENANT: tenant, NATS_CREDENTIALS: credentials } = process.env;
const name = (tenant ? `t${tenant}_` : '') + (process.argv[2] ?? 'node-reader');
const subjects = ['events.*.*.follow.created', 'events.*.closed']; // the second is the subject of a stream's closing message
const url = new URL(process.env.NATS_URL ?? 'nats://127.0.0.1:4222');
const nc = await connect({
  servers: url.host, // the client does not understand a URL with a password
  user: decodeURIComponent(url.username),
  pass: decodeURIComponent(url.password),
  inboxPrefix: `_INBOX_${name}`,
  ...(credentials && { authenticator: (nonce) => credsAuthenticator(readFileSync(credentials))(nonce) }), // the file of the moment
});
const js = jetstream(nc);
const manager = await jetstreamManager(nc);
const reading = new Map(); // by stream
let stopping = false;

for (const signal of ['SIGINT', 'SIGTERM']) process.once(signal, () => (stopping = true));
while (!stopping) {
  await readNewStreams();
  await pause(500);
}
await Promise.all(reading.values());
await nc.drain();

// Each partition is a stream. A resize closes all streams and creates others, so search for new streams repeatedly.
async function readNewStreams() {
  const streams = await (tenant ? streamsOfTenant() : streamsOfAll());
  const names = new Set(streams.map((stream) => stream.config.name));
  for (const { config, state } of streams) {
    if (reading.has(config.name) || !/^EVENTS-\d+$/.test(config.name)) continue;
    // The streams in `after` are closed before this one gets its first message. Finish them before this one begins, so
    // that the events of one follow come in order.
    const before = (config.metadata?.after ?? '').split(' ').filter(Boolean).map((n) => `EVENTS-${n}`).filter((s) => names.has(s));
    if (before.length > 0 && (state.last_seq === 0 || !(await Promise.all(before.map(isFinished))).every(Boolean))) continue;
    if (!tenant) await manager.consumers.add(config.name, { durable_name: name, filter_subjects: subjects, ack_policy: AckPolicy.Explicit });
    reading.set(config.name, read(config.name).catch(fail));
  }
}

async function streamsOfAll() {
  const streams = [];
  for await (const stream of manager.streams.list('events.>')) streams.push(stream);
  return streams;
}

// A tenant sees its consumers alone. `tidings nats durable` and the relays create them, with the predecessors of the stream.
async function streamsOfTenant() {
  const streams = [];
  for await (const stream of manager.streams.names('events.>')) {
    const info = await consumerOf(stream);
    if (!info) continue;
    const metadata = { after: info.config.metadata?.['tidings-after'] };
    streams.push({ config: { name: stream, metadata }, state: { last_seq: Math.max(info.delivered.stream_seq, info.num_pending) } });
  }
  return streams;
}

async function isFinished(stream) {
  const info = await consumerOf(stream);
  if (!info) return Boolean(tenant); // of a tenant: the stream is gone; otherwise its reading has not begun
  if (info.num_pending > 0 || info.num_ack_pending > 0) return false;
  // A stream without events of the tenant is finished with its predecessors.
  for (const n of (info.config.metadata?.['tidings-after'] ?? '').split(' ').filter(Boolean)) {
    if (!(await isFinished(`EVENTS-${n}`))) return false;
  }
  return true;
}

async function consumerOf(stream) {
  try {
    return await manager.consumers.info(stream, name);
  } catch (error) {
    if (error.code === 10014 || error.code === 10059) return undefined; // JetStream has no such consumer, or no such stream
    throw error;
  }
}

async function read(stream) {
  const consumer = await js.consumers.get(stream, name);
  while (!stopping) {
    for await (const message of await consumer.fetch({ max_messages: 100, expires: 1000 })) { // a stop waits until these are handled
      const headers = message.headers;
      // Any other message is not an event.
      if (headers?.has('ce-source') && headers.has('ce-id') && headers.has('Tidings-Outbox-Id')) {
        await handle({ id: headers.get('ce-id'), stream, sequence: message.seq, follow: message.json() });
      }
      message.ack(); // after the effect: JetStream delivers an unacknowledged event again
    }
  }
}

// Put your effect here. An event may come twice or late. Store created_at and version of each follow with your effect, and
// apply an event only if its pair (created_at, version) is higher: a later created_at, or an equal one and a higher version.
// The version alone is not enough: a follow that is created again after an erasure begins at version 1, with a later created_at.
async function handle(event) {
  console.log(JSON.stringify(event));
}

function fail(error) {
  console.error(error);
  process.exitCode = 1;
  stopping = true;
}
