// Prints every new follow as a line of JSON: node reader.mjs [NAME]
// You may stop it and start it again at any time. Several readers with one NAME share the work.
import { AckPolicy, jetstream, jetstreamManager } from '@nats-io/jetstream';
import { connect } from '@nats-io/transport-node';
import { setTimeout as pause } from 'node:timers/promises';

const name = process.argv[2] ?? 'node-reader';
const subjects = ['events.*.*.follow.created', 'events.*.closed']; // the second is the subject of a stream's closing message
const nc = await connect({ servers: process.env.NATS_URL ?? 'nats://127.0.0.1:4222' });
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
  const streams = [];
  for await (const stream of manager.streams.list('events.>')) streams.push(stream);
  const names = new Set(streams.map((stream) => stream.config.name));
  for (const { config, state } of streams) {
    if (reading.has(config.name) || !/^EVENTS-\d+$/.test(config.name)) continue;
    // The streams in `after` are closed before this one gets its first message. Finish them before this one begins, so
    // that the events of one follow come in order.
    const before = (config.metadata?.after ?? '').split(' ').filter(Boolean).map((n) => `EVENTS-${n}`).filter((s) => names.has(s));
    if (before.length > 0 && (state.last_seq === 0 || !(await Promise.all(before.map(isFinished))).every(Boolean))) continue;
    await manager.consumers.add(config.name, { durable_name: name, filter_subjects: subjects, ack_policy: AckPolicy.Explicit });
    reading.set(config.name, read(config.name).catch(fail));
  }
}

async function isFinished(stream) {
  const info = await manager.consumers.info(stream, name).catch(() => undefined); // no consumer yet: not begun
  return info !== undefined && info.num_pending === 0 && info.num_ack_pending === 0;
}

async function read(stream) {
  const consumer = await js.consumers.get(stream, name);
  while (!stopping) {
    for await (const message of await consumer.fetch({ max_messages: 100, expires: 1000 })) { // a stop waits until these are handled
      const headers = message.headers;
      // Any other message is not an event.
      if (headers?.get('ce-source') === '/tidings' && headers.has('ce-id') && headers.has('Tidings-Outbox-Id')) {
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
