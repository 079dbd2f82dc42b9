// Tests of handle with bootstrap, against `tidings dev`.
import { AckPolicy, DeliverPolicy, jetstream, jetstreamManager } from '@nats-io/jetstream';
import { connect } from '@nats-io/transport-node';
import assert from 'node:assert/strict';
import { spawn } from 'node:child_process';
import { once } from 'node:events';
import { createInterface } from 'node:readline';
import { after, before, test as nodeTest } from 'node:test';
import { setTimeout as pause } from 'node:timers/promises';
import { fileURLToPath } from 'node:url';
import { Tidings } from '../dist/esm/index.js';
import { handle, Health } from '../dist/esm/subscribe/index.js';
import { startDev } from '../scripts/dev.mjs';
import { natsOptions } from './nats.mjs';

const test = (name, fn) => nodeTest(name, { timeout: 120_000 }, fn);

let dev, nc, jsm, tidings;
before(async () => {
  dev = await startDev();
  nc = await connect(natsOptions(dev.nats_url));
  jsm = await jetstreamManager(nc);
  tidings = new Tidings({ url: dev.api, token: dev.token });
});
after(async () => {
  await nc?.close();
  await dev?.stop();
});

async function until(wanted) {
  while (!(await wanted())) await pause(20);
}

const ids = Array.from({ length: 100 }, (_, i) => `${i + 1}`);
const versions = new Map();

/** Removes the follows of these followers and creates them again, or creates them. */
async function write(some = ids) {
  for (const op of ['remove', 'put']) {
    const operations = some.filter((id) => op === 'put' || versions.has(id)).map((follower_id) => ({ op, follower_id, followee_id: '1000' }));
    for await (const { outcome } of tidings.batch('follows', operations)) assert.ok(outcome.status < 300, JSON.stringify(outcome));
  }
  for (const id of some) versions.set(id, (versions.get(id) ?? -1) + 2);
}

const published = async (n) => until(async () => (await jsm.streams.info('EVENTS-0')).state.last_seq >= n);
/** Waits until an export covers the stream: a relay notes a little later what it has published. Returns the last sequence. */
async function exportable() {
  const at = await lastSequence();
  await until(async () => {
    const { data } = await tidings.http.get({ url: '/v1/follows:export', query: { lines: 1 } });
    return Number(JSON.parse(data.split('\n')[0]).export.streams[0].sequence) >= at;
  });
  return at;
}
const lastSequence = async () => (await jsm.streams.info('EVENTS-0')).state.last_seq;

/** Starts a handler; `calls` has [type, follower, version]. */
function start(name, fn = () => {}, options = {}, connection = nc) {
  const stop = new AbortController();
  const calls = [];
  const log = { info() {}, warn() {}, error() {} };
  const ended = handle(connection, name, 'follow.*', async (e) => {
    await fn(e);
    calls.push([e.type, e.data.follower_id, e.data.version]);
  }, { bootstrap: { clients: [tidings], plural: 'follows' }, takeover: 1000, backOff: () => 20, log, signal: stop.signal, ...options });
  ended.catch(() => {});
  return { calls, ended, stop: () => (stop.abort(), ended) };
}

const newest = (calls) => {
  const all = new Map();
  for (const [, id, version] of calls) all.set(id, Math.max(all.get(id) ?? 0, version));
  return all;
};
const complete = (calls) => {
  const all = newest(calls);
  return ids.every((id) => all.get(id) === versions.get(id));
};
const states = (calls) => calls.filter(([type]) => type === 'snapshot').length;
const record = async (name) => {
  const query = { last_by_subj: `$KV.EVENTS-bootstrap.${name}-follow` };
  return (await jsm.streams.getMessage('KV_EVENTS-bootstrap', query).catch(() => null))?.json(); // before the bucket exists
};
const joined = (name) => until(async () => (await record(name))?.joined);

test('a handler begins with the states of an export, and continues on the stream', async () => {
  await write();
  await published(100);
  const covered = await exportable();
  const first = start('cache');
  const second = start('cache');
  await joined('cache');
  const all = () => [...first.calls, ...second.calls];
  assert.equal(states(all()), 100);
  assert.equal(all().length, 100, 'a state came twice, or an event that the export covers');
  assert.ok(states(first.calls) === 0 || states(second.calls) === 0, 'both instances exported');
  const info = await jsm.consumers.info('EVENTS-0', 'cache-follow');
  assert.equal(info.config.opt_start_seq, covered + 1);
  const { owner, exports, starts } = await record('cache'); // as the Go package writes it
  assert.deepEqual([owner, exports, starts['0'].sequence], [undefined, undefined, `${covered}`]);
  assert.match(starts['0'].created, /^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z$/);
  await write(['7']);
  await until(() => complete(all()));
  assert.deepEqual([...new Set(all().slice(100).map(([type]) => type))].filter((type) => type === 'snapshot'), []);
  await Promise.all([first.stop(), second.stop()]);
  const third = start('cache');
  await write(['8']);
  await until(() => newest(third.calls).get('8') === versions.get('8'));
  assert.equal(states(third.calls), 0, 'a restart repeats states');
  await third.stop();
});

test('a state is retried until it is handled', async () => {
  const health = new Health();
  let healed = false;
  const w = start('slow', (e) => {
    if (e.data.follower_id === '5' && !healed) throw Object.assign(new Error('no room'), { permanent: true });
  }, { health, attempts: 2 });
  await until(() => health.problems.get('the state of follow 1000 of tenant 1')?.message.includes('no room'));
  assert.ok(health.problems.has('bootstrap'));
  await assert.rejects(jsm.consumers.info('EVENTS-0', 'slow-follow'));
  await until(() => health.counts.failures > 2);
  healed = true;
  await until(() => complete(w.calls));
  await until(() => health.ready);
  assert.equal(health.counts.snapshots, 100);
  await w.stop();
});

test('a process that is killed within its exports loses nothing', async () => {
  const calls = [];
  for (let round = 0; round < 4; round++) {
    const child = spawn(process.execPath, [fileURLToPath(new URL('cache.mjs', import.meta.url))], {
      env: { ...process.env, NATS_URL: dev.nats_url, API_URL: dev.api, TOKEN: dev.token, NAME: 'killed' }, stdio: ['ignore', 'pipe', 'inherit'],
    });
    const ended = once(child, 'exit');
    let left = 5 + 11 * round;
    for await (const line of createInterface(child.stdout)) {
      calls.push(JSON.parse(line));
      if (--left === 0) child.kill('SIGKILL');
    }
    assert.deepEqual(await ended, [null, 'SIGKILL']);
    await write(['1', '2', '3']);
  }
  const w = start('killed');
  await until(() => complete([...calls, ...w.calls]));
  await joined('killed');
  await write(['4']);
  await until(() => newest(w.calls).get('4') === versions.get('4'));
  await w.stop();
  assert.ok(calls.length > 50);
});

test('an instance does not join while another one that began a moment before reads the exports', async () => {
  let begun = false;
  const later = Object.create(nc, { request: { value: async (subject, ...rest) => {
    if (!begun && subject === '$JS.API.CONSUMER.INFO.EVENTS-0.second-follow') { // it has found no record
      begun = true;
      await jetstream(nc).publish('$KV.EVENTS-bootstrap.second-follow', JSON.stringify({ owner: 'another instance' }));
      await jsm.consumers.add('EVENTS-0', {
        durable_name: 'second-follow', filter_subject: 'events.*.*.follow.*', ack_policy: AckPolicy.Explicit, deliver_policy: DeliverPolicy.New,
      });
    }
    return nc.request(subject, ...rest);
  } } });
  const health = new Health();
  const first = [];
  const w = start('second', (e) => { if (first.length === 0) first.push([e.type, health.problems.has('bootstrap')]); }, { health }, later);
  await joined('second');
  await w.stop();
  assert.deepEqual(first, [['snapshot', true]]);
});

test('new exports follow events that expired', async () => {
  const before = start('down');
  await joined('down');
  await before.stop();
  const at = await lastSequence();
  await write(['9', '10']);
  await published(at + 4);
  const { state } = await jsm.streams.info('EVENTS-0');
  for (let sequence = state.first_seq; sequence <= state.last_seq; sequence++) {
    await jsm.streams.deleteMessage('EVENTS-0', sequence).catch(() => {}); // another one was erased
  }
  const after = start('down');
  await until(() => states(after.calls) === 100 && newest(after.calls).get('10') === versions.get('10'));
  await until(async () => (await record('down')).owner === undefined);
  await write(['9']);
  await until(() => newest(after.calls).get('9') === versions.get('9'));
  await after.stop();
});

test('what does not fit is refused', async () => {
  const bootstrap = { clients: [tidings], plural: 'follows' };
  const run = (type, options) => handle(nc, 'refused', type, () => {}, options);
  for (const [type, options] of [['follow.created', { bootstrap }], ['follow.*', { bootstrap: { clients: [], plural: 'follows' } }],
    ['follow.*', { bootstrap, since: new Date() }], ['follow.*', { bootstrap, tenant: '1' }],
    ['comment.*', { bootstrap }]]) {
    await assert.rejects(run(type, options), { name: 'SubscribeError', code: 'option' });
  }
  const stranger = new Tidings({ url: dev.api, token: 'wrong' });
  await assert.rejects(run('follow.*', { bootstrap: { clients: [stranger], plural: 'follows' } }), { name: 'SubscribeError', code: 'refused' });
});
