// Prints every new follow as a line of JSON: node reader.mjs [NAME]
// Stop it and start it again as you like. Several under one NAME share the work.
import { AckPolicy, jetstream, jetstreamManager } from '@nats-io/jetstream';
import { connect } from '@nats-io/transport-node';
import { setTimeout as pause } from 'node:timers/promises';

const name = process.argv[2] ?? 'node-reader';
const subjects = ['events.*.*.follow.created', 'events.*.closed']; // the second is of a stream's last message, which ends it
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

// Each partition is a stream. A resize closes all of them and makes others, so this looks for streams again and again.
async function readNewStreams() {
  const streams = [];
  for await (const stream of manager.streams.list('events.>')) streams.push(stream);
  const names = new Set(streams.map((stream) => stream.config.name));
  for (const { config, state } of streams) {
    if (reading.has(config.name) || !/^EVENTS-\d+$/.test(config.name)) continue;
    // What a stream comes after is closed before it gets its first message, and is finished here before it is begun: so
    // the events of one follow come in order.
    const before = (config.metadata?.after ?? '').split(' ').filter(Boolean).map((n) => `EVENTS-${n}`).filter((s) => names.has(s));
    if (before.length > 0 && (state.last_seq === 0 || !(await Promise.all(before.map(isFinished))).every(Boolean))) continue;
    await manager.consumers.add(config.name, { durable_name: name, filter_subjects: subjects, ack_policy: AckPolicy.Explicit });
    reading.set(config.name, read(config.name).catch(fail));
  }
}

async function isFinished(stream) {
  const info = await manager.consumers.info(stream, name).catch(() => undefined); // no consumer yet: not even begun
  return info !== undefined && info.num_pending === 0 && info.num_ack_pending === 0;
}

async function read(stream) {
  const consumer = await js.consumers.get(stream, name);
  while (!stopping) {
    for await (const message of await consumer.fetch({ max_messages: 100, expires: 1000 })) { // a stop finishes these
      const headers = message.headers;
      if (headers?.get('ce-source') === '/tidings' && headers.has('ce-id') && headers.has('Tidings-Outbox-Id')) { // else it is no event
        await handle({ id: headers.get('ce-id'), stream, sequence: message.seq, follow: message.json() });
      }
      message.ack(); // after the effect: an event that was not acknowledged comes again
    }
  }
}

// Your effect comes here. Events may come twice: keep the follow's version with the effect, and discard what is not above it.
async function handle(event) {
  console.log(JSON.stringify(event));
}

function fail(error) {
  console.error(error);
  process.exitCode = 1;
  stopping = true;
}
