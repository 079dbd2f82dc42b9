// Prints each call of a handler with bootstrap as a line of JSON. Takes a while for each, so that a test can kill it in between.
import { connect } from '@nats-io/transport-node';
import { setTimeout as pause } from 'node:timers/promises';
import { Tidings } from '../dist/esm/index.js';
import { handle } from '../dist/esm/subscribe/index.js';
import { natsOptions } from './nats.mjs';

const nc = await connect(natsOptions(process.env.NATS_URL));
const tidings = new Tidings({ url: process.env.API_URL, token: process.env.TOKEN });
const log = { info() {}, warn: console.error, error: console.error };
await handle(nc, process.env.NAME, 'follow.*', async (e) => {
  await pause(5);
  console.log(JSON.stringify([e.type, e.data.follower_id, e.data.version]));
}, { bootstrap: { clients: [tidings], plural: 'follows' }, takeover: 1000, concurrency: 1, log });
