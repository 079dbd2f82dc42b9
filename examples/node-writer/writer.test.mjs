// Pays an order against `tidings dev`, and reads the event from the stream.
import assert from 'node:assert/strict';
import { spawn } from 'node:child_process';
import { once } from 'node:events';
import { createInterface } from 'node:readline';
import { after, before, test } from 'node:test';
import pg from 'pg';
import { startDev, tidings as binary } from '../../client/typescript/scripts/dev.mjs';
import { pay } from './writer.mjs';

let dev, client;
before(async () => {
  dev = await startDev();
  client = new pg.Client(dev.database_url);
  await client.connect();
  await client.query(`CREATE TABLE orders (id bigint PRIMARY KEY, status text, version bigint); INSERT INTO orders VALUES (7, 'open', 1)`);
});
after(async () => {
  await client?.end();
  await dev?.stop();
});

test('an order is paid once, and its event has the new state', { timeout: 120_000 }, async () => {
  const watch = spawn(binary, ['events', 'watch', '--limit', '1', '--tenant', '1', '--type', 'paid', '--json', '--data', dev.dir]);
  const [says] = await once(createInterface({ input: watch.stderr }), 'line'); // it listens then
  assert.match(says, /Waiting for events/);
  const line = once(createInterface({ input: watch.stdout }), 'line');
  assert.equal(await pay(client, 7, 'public'), true);
  assert.equal(await pay(client, 7, 'public'), false);
  const event = JSON.parse((await line)[0]);
  assert.equal(event.aggregate_id, '7');
  assert.deepEqual(event.payload, { id: '7', status: 'paid', version: 2 });
});
