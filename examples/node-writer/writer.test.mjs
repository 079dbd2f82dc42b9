// Declares the event, pays an order against `tidings dev`, and reads the event from the stream.
import assert from 'node:assert/strict';
import { execFileSync, spawn } from 'node:child_process';
import { once } from 'node:events';
import { createInterface } from 'node:readline';
import { after, before, test } from 'node:test';
import { fileURLToPath } from 'node:url';
import pg from 'pg';
import { startDev, tidings as binary } from '../../client/typescript/scripts/dev.mjs';
import { pay } from './writer.mjs';

let dev, client;
before(async () => {
  dev = await startDev();
  const file = fileURLToPath(new URL('order.yaml', import.meta.url));
  const added = JSON.parse(execFileSync(binary, ['upstream', 'add', 'order', '--file', file, '--login', 'shop_app', '--json', '--data', dev.dir]));
  const owner = new pg.Client(dev.database_url);
  await owner.connect();
  await owner.query(`CREATE TABLE orders (id bigint PRIMARY KEY, status text, version bigint); INSERT INTO orders VALUES (7, 'open', 1);
    GRANT SELECT, UPDATE ON orders TO shop_app`);
  await owner.end();
  const url = new URL(dev.database_url);
  [url.username, url.password] = ['shop_app', added.logins[0].password];
  client = new pg.Client(url.href);
  await client.connect();
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
