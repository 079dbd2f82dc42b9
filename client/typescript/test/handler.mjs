// Prints each new follow as a line of JSON, until SIGTERM. With a name as its argument it is an instance of that subscriber, in order,
// and publishes the line instead: before the acknowledgment, so that a server has the lines of all processes in their order.
import { connect } from '@nats-io/transport-node';
import { handle } from '../dist/esm/subscribe/index.js';
import { natsOptions } from './nats.mjs';

const stop = new AbortController();
process.once('SIGTERM', () => stop.abort());
const nc = await connect(natsOptions(process.env.NATS_URL));
const log = { info() {}, warn: console.error, error: console.error };
const [name] = process.argv.slice(2);
const tell = (line) => (name === undefined ? console.log(line) : nc.publish(`told.${name}`, line));
await handle(nc, name ?? 'printer', 'follow.created', (e) => tell(JSON.stringify({ follow: e.data, stream: e.stream, pid: process.pid })),
  { signal: stop.signal, takeover: 2000, log, inOrder: name !== undefined, attempts: 100 });
await nc.close();
