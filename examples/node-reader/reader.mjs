// Prints every new follow as a line of JSON: node reader.mjs [NAME]
// You may stop it and start it again at any time. Several readers with one NAME share the work.
// With TENANT it reads that tenant's follows in the tenant's NATS account, with the credentials file NATS_CREDENTIALS.
import { connect, credsAuthenticator } from '@nats-io/transport-node';
import { handle } from '@tidings/client/subscribe';
import { readFileSync } from 'node:fs';

const { TENANT: tenant, NATS_CREDENTIALS: credentials } = process.env;
const name = process.argv[2] ?? 'node-reader';
const url = new URL(process.env.NATS_URL ?? 'nats://127.0.0.1:4222');
const nc = await connect({
  servers: url.host, // the client does not understand a URL with a password
  user: decodeURIComponent(url.username),
  pass: decodeURIComponent(url.password),
  inboxPrefix: `_INBOX_${tenant ? `t${tenant}_` : ''}${name}`,
  maxReconnectAttempts: -1,
  ignoreAuthErrorAbort: true,
  waitOnFirstConnect: true,
  ...(credentials && { authenticator: (nonce) => credsAuthenticator(readFileSync(credentials))(nonce) }), // the file of the moment
});

const stop = new AbortController();
for (const signal of ['SIGINT', 'SIGTERM']) process.once(signal, () => stop.abort());
// Standard output is for the events.
const log = { info: console.error, warn: console.error, error: console.error };
await handle(nc, name, 'follow.created', print, { signal: stop.signal, tenant: tenant || undefined, log });
await nc.drain();

// Put your effect here. An event may come twice or late. Store created_at and version of each follow with your effect, and
// apply an event only if its pair (created_at, version) is higher: a later created_at, or an equal one and a higher version.
// The version alone is not enough: a follow that is created again after an erasure begins at version 1, with a later created_at.
async function print({ id, stream, sequence, data: follow }) {
  console.log(JSON.stringify({ id, stream, sequence, follow }));
}
