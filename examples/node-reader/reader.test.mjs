// Runs the reader against `tidings dev`. The test stops and starts the reader, and changes the partitions meanwhile.
import assert from 'node:assert/strict';
import { execFile, spawn } from 'node:child_process';
import { once } from 'node:events';
import { createInterface } from 'node:readline';
import { after, before, test as nodeTest } from 'node:test';
import { fileURLToPath } from 'node:url';
import { promisify } from 'node:util';
import { Tidings } from '../../client/typescript/dist/esm/index.js';
import { startDev, tidings as binary } from '../../client/typescript/scripts/dev.mjs';

const test = (name, fn) => nodeTest(name, { timeout: 300_000 }, fn);

let dev, tidings;
before(async () => {
  dev = await startDev();
  tidings = new Tidings({ url: dev.api, token: dev.token });
});
after(() => dev?.stop());

/** Starts a reader and adds the events that it prints to `events`. `has` resolves when there are n events. */
function startReader(events) {
  const reader = spawn(process.execPath, [fileURLToPath(new URL('reader.mjs', import.meta.url)), 'test'], {
    env: { ...process.env, NATS_URL: dev.nats_url },
    stdio: ['ignore', 'pipe', 'inherit'],
  });
  const lines = createInterface({ input: reader.stdout }).on('line', (line) => events.push(JSON.parse(line)));
  const ended = once(reader, 'close');
  return {
    has: async (n) => {
      while (events.length < n) {
        await Promise.race([once(lines, 'line'), ended.then(([code]) => assert.fail(`the reader ended with ${code}`))]);
      }
    },
    stop: async () => {
      reader.kill('SIGTERM');
      assert.deepEqual(await ended, [0, null]);
    },
  };
}

async function write(op, first, count) {
  const operations = Array.from({ length: count }, (_, i) => ({ op, follower_id: `${first + i}`, followee_id: `${(first + i) % 50 + 1}` }));
  for await (const { outcome } of tidings.batch('follows', operations)) assert.ok(outcome.status < 300);
}

test('the reader sees every event, in the order of each follow, over stops and resizes', async () => {
  const events = [];
  let reader = startReader(events);
  await write('put', 1000, 300);
  await reader.has(300);
  await reader.stop();

  await write('remove', 1000, 300); // the reader does not subscribe to these
  await write('put', 1000, 300);
  await promisify(execFile)(binary, ['partitions', 'resize', '--to', '4', '--yes', '--data', dev.dir]);
  await write('remove', 1000, 300);
  await write('put', 1000, 300);
  reader = startReader(events);
  await reader.has(600);
  await promisify(execFile)(binary, ['partitions', 'resize', '--to', '1', '--yes', '--data', dev.dir]);
  await write('put', 2000, 10);
  await reader.has(910);
  await reader.stop();

  const versions = new Map();
  for (const { follow } of events) versions.set(follow.follower_id, [...(versions.get(follow.follower_id) ?? []), follow.version]);
  for (let i = 0; i < 300; i++) assert.deepEqual(versions.get(`${1000 + i}`), [1, 3, 5]);
  assert.equal(new Set(events.map((e) => e.id)).size, 910);
  assert.ok(new Set(events.map((e) => e.stream)).size > 3, 'it read few partitions');
});
