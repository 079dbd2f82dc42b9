// Prints each new follow as a line of JSON, until SIGTERM.
import { connect } from '@nats-io/transport-node';
import { handle } from '../dist/esm/subscribe/index.js';
import { natsOptions } from './nats.mjs';

const stop = new AbortController();
process.once('SIGTERM', () => stop.abort());
const nc = await connect(natsOptions(process.env.NATS_URL));
const log = { info() {}, warn: console.error, error: console.error };
await handle(nc, 'printer', 'follow.created', (e) => console.log(JSON.stringify({ follow: e.data, stream: e.stream })),
  { signal: stop.signal, takeover: 2000, log });
await nc.close();
