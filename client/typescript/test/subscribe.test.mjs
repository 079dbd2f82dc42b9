// Tests of handle against the NATS server of `tidings dev`, on streams of their own, to which the test publishes as a relay does.
import { AckPolicy, jetstream, jetstreamManager } from '@nats-io/jetstream';
import { connect, headers } from '@nats-io/transport-node';
import assert from 'node:assert/strict';
import { execFile, spawn } from 'node:child_process';
import { randomUUID } from 'node:crypto';
import { once } from 'node:events';
import { writeFile } from 'node:fs/promises';
import { createConnection, createServer } from 'node:net';
import { createInterface } from 'node:readline';
import { after, before, test as nodeTest } from 'node:test';
import { setTimeout as pause } from 'node:timers/promises';
import { fileURLToPath } from 'node:url';
import { isDeepStrictEqual, promisify } from 'node:util';
import { handle, Health, PermanentError } from '../dist/esm/subscribe/index.js';
import { startDev, tidings as binary } from '../scripts/dev.mjs';
import { natsOptions } from './nats.mjs';
import { generates, ownProject } from './project.mjs';

const test = (name, fn) => nodeTest(name, { timeout: 300_000 }, fn);

let dev, nc, js, jsm;
before(async () => {
  dev = await startDev();
  nc = await connect(natsOptions(dev.nats_url));
  [js, jsm] = [jetstream(nc), await jetstreamManager(nc)];
});
after(async () => {
  await nc?.close();
  await dev?.stop();
});

async function until(wanted) {
  while (!(await wanted())) await pause(20);
}

let rigs = 0;

/** Streams of a test, and a publisher that acts as a relay. */
async function newRig(partitions = 1) {
  if (rigs > 0) await jsm.streams.delete(`RIG${rigs}-dead`).catch(() => {}); // it reserves a GiB of the disk
  const prefix = `rig${++rigs}`;
  const rig = { stream: prefix.toUpperCase(), prefix, open: [], dead: `${prefix.toUpperCase()}-dead`, outbox: 0, quiet: [] };
  rig.options = { stream: rig.stream, prefix, log: { info: keep, warn: keep, error: keep }, takeover: 2000, backOff: () => 50 };
  function keep(message, fields) {
    rig.quiet.push([message, fields]);
  }
  rig.declare = (n, after = []) => jsm.streams.add({
    name: `${rig.stream}-${n}`, subjects: [`${prefix}.${n}.>`], metadata: { slots: '0-31', after: after.join(' ') },
  });
  rig.publish = (id, version, payload = follow(id, version), partition = rig.open[id % rig.open.length]) => {
    const h = headers();
    const all = {
      'ce-specversion': '1.0', 'ce-source': '/tidings', 'ce-id': randomUUID(), 'ce-type': 'tidings.follow.created.v1', 'ce-subject': `${id}`,
      'ce-time': '2026-01-02T03:04:05.000006Z', 'Tidings-Outbox-Id': `${++rig.outbox}`,
    };
    for (const [name, value] of Object.entries(all)) h.set(name, value);
    return js.publish(`${prefix}.${partition}.t1.follow.created`, JSON.stringify(payload), { headers: h });
  };
  rig.publishAll = (version) => Promise.all(ids.map((id) => rig.publish(id, version)));
  rig.resize = async (to) => {
    for (const n of rig.open) {
      const h = headers();
      h.set('Tidings-Closed', '1');
      h.set('ce-source', '/tidings');
      await js.publish(`${prefix}.${n}.closed`, undefined, { headers: h });
      await js.publish(`${prefix}.${n}.t1.follow.created`, 'foreign');
    }
    const next = Math.max(...rig.open) + 1;
    const after = rig.open;
    rig.open = Array.from({ length: to }, (_, i) => next + i);
    for (const n of rig.open) await rig.declare(n, after);
  };
  rig.start = (fn, options = {}, name = 'mailer', connection = nc) => {
    const stop = new AbortController();
    const ended = handle(connection, name, 'follow.created', fn, { ...rig.options, signal: stop.signal, ...options });
    ended.catch(() => {}); // the test looks at it later
    return { ended, stop: () => (stop.abort(), ended) };
  };
  rig.info = (n = rig.open[0], durable = 'mailer-follow-created') => jsm.consumers.info(`${rig.stream}-${n}`, durable);
  rig.settled = () => until(async () => {
    const i = await rig.info().catch(() => undefined);
    return i !== undefined && i.num_pending + i.num_ack_pending === 0;
  });
  rig.letters = async () => {
    const all = [];
    const { state } = await jsm.streams.info(rig.dead).catch(() => ({ state: { first_seq: 1, last_seq: 0 } })); // before the first letter
    for (let seq = Math.max(state.first_seq, 1); seq <= state.last_seq; seq++) {
      const m = await jsm.streams.getMessage(rig.dead, { seq });
      if (m !== null) all.push(m);
    }
    return all;
  };
  for (let n = 0; n < partitions; n++) {
    await rig.declare(n);
    rig.open.push(n);
  }
  return rig;
}

const at = '2026-01-02T03:04:05.000006Z';
const follow = (id, version) => ({
  follower_id: '1', followee_id: `${id}`, status: 'ACTIVE', version, actor: 'test', created_at: at, positioned_at: at, updated_at: at,
});

/** The versions of each aggregate, in the order of their first deliveries. */
function diary() {
  const versions = new Map();
  return {
    versions,
    note: ({ data }) => {
      const list = versions.get(data.followee_id) ?? [];
      if (!list.includes(data.version)) versions.set(data.followee_id, [...list, data.version]);
    },
    has: (ids, version) => () => ids.every((id) => versions.get(`${id}`)?.includes(version)),
  };
}

const ids = Array.from({ length: 40 }, (_, i) => i + 1);

test('an event has its envelope and its payload, and each aggregate has one call at a time, in order', async () => {
  const rig = await newRig();
  const first = await rig.publish(7, 1);
  const got = [];
  const busy = new Set();
  let most = 0;
  const w = rig.start(async (e) => {
    assert.ok(!busy.has(e.aggregateId), 'two events of an aggregate at once');
    busy.add(e.aggregateId);
    most = Math.max(most, busy.size);
    await pause(5);
    busy.delete(e.aggregateId);
    got.push(e);
  }, { takeover: 20_000 });
  for (let v = 1; v <= 5; v++) await rig.publishAll(v);
  await until(() => got.length >= 201);
  await rig.settled();
  await w.stop();
  const { id, ...rest } = got[0];
  assert.match(id, /^[0-9a-f-]{36}$/);
  assert.deepEqual(rest, {
    tenantId: '1', aggregateType: 'follow', aggregateId: '7', type: 'created', version: 1, occurredAt: at, traceparent: undefined,
    stream: `${rig.stream}-0`, sequence: first.seq, data: follow(7, 1), attempt: 1,
  });
  for (const id of ids) {
    assert.deepEqual(got.slice(1).filter((e) => e.aggregateId === `${id}`).map((e) => e.data.version), [1, 2, 3, 4, 5]);
  }
  assert.ok(most > 8 && most <= 16, `${most} calls at once`);
});

test('the consumer and the stream of dead letters are those of the Go package', async () => {
  const rig = await newRig();
  const w = rig.start(() => {});
  await until(() => rig.info().catch(() => undefined));
  const { config } = await rig.info();
  assert.deepEqual(
    [config.durable_name, config.filter_subject, config.ack_policy, config.ack_wait, config.max_ack_pending, config.max_deliver, config.deliver_policy],
    ['mailer-follow-created', `${rig.prefix}.*.*.follow.created`, AckPolicy.Explicit, 2e9, 100_000, -1, 'all'],
  );
  const { stdout } = await promisify(execFile)(binary, ['stream', 'plan', '--for', 'json', '--data', dev.dir]);
  const planned = stdout.trim().split('\n').map((line) => JSON.parse(line)).find((c) => c.name === 'EVENTS-dead');
  const { config: dead } = await jsm.streams.info(rig.dead);
  for (const [member, value] of Object.entries(planned)) {
    if (!['name', 'subjects', 'metadata', 'placement'].includes(member)) assert.ok(value === 0 || isDeepStrictEqual(dead[member], value), member);
  }
  assert.deepEqual(dead.subjects, [`${rig.dead}.*.*`]);
  await w.stop();
});

test('a failed event is retried, and then a dead letter that a retry delivers again', async () => {
  const rig = await newRig();
  const attempts = [];
  const health = new Health();
  let broken = true;
  const w = rig.start((e) => {
    attempts.push([e.aggregateId, e.data.version, e.attempt]);
    if (e.aggregateId === '1' && e.data.version === 1 && broken) throw new Error('no\nmail');
    if (e.aggregateId === '2') throw new PermanentError('never');
  }, { attempts: 3, takeover: 20_000, health });
  const bad = await rig.publish(1, 1);
  await js.publish(`${rig.prefix}.0.t1.follow.created`, 'foreign');
  await rig.publish(1, 2);
  await rig.publish(2, 1);
  await rig.publish(3, 1, { follower_id: 7 }); // its payload does not match its type
  await until(async () => (await rig.letters()).length === 3);
  await rig.settled();
  assert.deepEqual(attempts.filter(([id]) => id === '1'), [['1', 1, 1], ['1', 1, 2], ['1', 1, 3], ['1', 2, 1]]);
  assert.deepEqual(attempts.filter(([id]) => id === '2'), [['2', 1, 1]]);
  const letters = await rig.letters();
  const of = (id) => letters.find((m) => m.header.get('ce-subject') === id);
  const told = (m) => ['Subject', 'Stream', 'Sequence', 'Attempts', 'Error', 'Subscriber'].map((name) => m.header.get(`Tidings-Dead-${name}`));
  assert.deepEqual(told(of('1')), [`${rig.prefix}.0.t1.follow.created`, `${rig.stream}-0`, `${bad.seq}`, '3', 'no mail', 'mailer-follow-created']);
  assert.deepEqual(told(of('2')).slice(3, 5), ['1', 'never']);
  assert.match(told(of('3'))[4], /decode the payload of event .* \(follow\.created\.v1\): actor is missing/);
  assert.equal(of('1').subject, `${rig.dead}.letter.mailer-follow-created`);
  assert.deepEqual(JSON.parse(new TextDecoder().decode(of('1').data)), follow(1, 1));

  broken = false;
  attempts.length = 0;
  const again = headers(); // as Letters.Retry of the Go package does it
  for (const [name, values] of of('1').header) if (!name.startsWith('Nats-')) again.set(name, values[0]);
  await js.publish(`${rig.dead}.retry.mailer-follow-created`, of('1').data, { headers: again, msgID: `retry:${of('1').seq}` });
  await until(() => attempts.length === 1);
  assert.deepEqual(attempts, [['1', 1, 1]]);
  await until(async () => (await rig.letters()).length === 3); // without the request
  assert.deepEqual(health.counts, { handled: 2, failures: 2, deadLetters: 3, foreign: 1, snapshots: 0 });
  await w.stop();
});

test('a dead letter of an erased event does not remain', async () => {
  const rig = await newRig();
  const bucket = `${rig.stream}-erased`;
  await jsm.streams.add({ name: `KV_${bucket}`, subjects: [`$KV.${bucket}.>`], allow_direct: true });
  const { seq } = await rig.publish(1, 1);
  const bits = new Uint8Array(1024);
  bits[seq >> 3] |= 1 << (seq & 7);
  await js.publish(`$KV.${bucket}.${rig.stream}-0.0`, bits);
  const w = rig.start(() => {
    throw new PermanentError('never');
  });
  await rig.publish(2, 1);
  await until(async () => (await jsm.streams.info(rig.dead).catch(() => undefined))?.state.last_seq === 2);
  await rig.settled();
  assert.deepEqual((await rig.letters()).map((m) => m.header.get('ce-subject')), ['2']);
  await w.stop();
});

test('new streams begin after the streams that they replace, over stops and resizes', async () => {
  const rig = await newRig(2);
  const d = diary();
  await rig.publishAll(1);
  let w = rig.start(d.note);
  await until(d.has(ids, 1));
  await w.stop();
  await rig.publishAll(2);
  await rig.resize(3);
  await rig.publishAll(3);
  w = rig.start(async (e) => {
    await pause(e.data.version === 2 ? 5 : 0);
    d.note(e);
  });
  await until(d.has(ids, 3));
  await rig.resize(1);
  await rig.publishAll(4);
  await until(d.has(ids, 4));
  await rig.settled();
  await w.stop();
  for (const id of ids) assert.deepEqual(d.versions.get(`${id}`), [1, 2, 3, 4]);
  assert.equal(rig.quiet.filter(([m]) => m === 'the stream has ended, and all its events are handled').length, 5);
});

for (const inOrder of [false, true]) {
  test(`three instances share a partition, and one dies with events in hand, ${inOrder ? 'in order' : 'shared'}`, async () => {
    const rig = await newRig();
    const d = diary();
    for (let v = 1; v <= 3; v++) await rig.publishAll(v);
    const mortal = await connect(natsOptions(dev.nats_url));
    let hanging = 0;
    const first = rig.start(async (e) => {
      if (e.aggregateId % 4 === 0) {
        hanging++;
        await new Promise(() => {});
      }
      d.note(e);
    }, { inOrder, drain: 0 }, 'mailer', mortal);
    await until(() => hanging >= 10);
    const others = [0, 1].map(() => rig.start(d.note, { inOrder }));
    await mortal.close();
    await assert.rejects(first.ended, { code: 'closed' });
    await rig.publishAll(4);
    await until(d.has(ids, 4));
    await until(d.has(ids, 1));
    await rig.settled();
    for (const w of others) await w.stop();
    for (const id of ids) {
      if (inOrder || id % 4 !== 0) assert.deepEqual(d.versions.get(`${id}`), [1, 2, 3, 4], `followee ${id}`);
    }
  });
}

test('a tenant reads through the consumers that an operator created', async () => {
  const rig = await newRig();
  const durable = async (n, after = '') => {
    await jsm.consumers.add(`${rig.stream}-${n}`, {
      durable_name: 't1_mailer', filter_subject: `${rig.prefix}.*.t1.follow.created`, ack_policy: AckPolicy.Explicit, ack_wait: 2e9,
      metadata: { 'tidings-filter': 'follow.created', 'tidings-after': after },
    });
  };
  const d = diary();
  const w = rig.start(d.note, { tenant: '1' });
  await rig.publishAll(1);
  await until(() => rig.quiet.some(([, { error }]) => /tidings nats durable --name mailer --tenant 1/.test(error?.message)));
  await durable(0);
  await until(d.has(ids, 1));
  await rig.resize(2);
  await rig.publishAll(2);
  await durable(1, '0');
  await durable(2, '0');
  await until(d.has(ids, 2));
  await w.stop();
  for (const id of ids) assert.deepEqual(d.versions.get(`${id}`), [1, 2]);
  assert.ok(rig.quiet.some(([m, { stream }]) => /^the stream has ended/.test(m) && stream === `${rig.stream}-0`));
  const other = rig.start(d.note, { tenant: '1', takeover: 3000 });
  await assert.rejects(other.ended, { code: 'option', message: /was created with --ack-wait 2s and --in-order=false/ });
});

test('a call that takes longer than takeover is not delivered again', async () => {
  const rig = await newRig();
  const attempts = [];
  const all = [0, 1].map(() => rig.start(async (e) => {
    await pause(3000);
    attempts.push(e.attempt);
  }));
  for (let id = 1; id <= 8; id++) await rig.publish(id, 1);
  await until(() => attempts.length >= 8);
  await rig.settled();
  assert.deepEqual(attempts, Array(8).fill(1));
  assert.equal((await rig.info()).num_redelivered, 0);
  for (const w of all) await w.stop();
});

test('a stop lets running calls finish and returns all other events at once', async () => {
  const rig = await newRig();
  for (let v = 1; v <= 3; v++) for (let id = 1; id <= 4; id++) await rig.publish(id, v);
  const d = diary();
  let begun = 0;
  const w = rig.start(async (e) => {
    begun++;
    await pause(300);
    d.note(e);
  }, { takeover: 60_000, concurrency: 4, attempts: 1 });
  await until(() => begun === 4);
  await w.stop();
  assert.equal(begun, 4);
  const next = rig.start(d.note, { takeover: 60_000, attempts: 1 }); // what was given back before a call has not failed
  await until(() => d.has([1, 2, 3, 4], 2)() && d.has([1, 2, 3, 4], 3)()); // long before takeover
  await next.stop();
  for (let id = 1; id <= 4; id++) assert.equal(d.versions.get(`${id}`).length, 3);
});

test('what waits behind a failing event delays no other aggregate', async () => {
  const rig = await newRig();
  for (let v = 1; v <= 60; v++) await rig.publish(1, v); // more than an instance with one place holds
  const others = ids.slice(1, 12);
  for (const id of others) await rig.publish(id, 1);
  const d = diary();
  let mended = false;
  const w = rig.start((e) => {
    if (e.aggregateId === '1' && !mended) throw new Error('not yet');
    d.note(e);
  }, { takeover: 60_000, concurrency: 1, attempts: 1_000_000 });
  await until(d.has(others, 1));
  for (const id of others) await rig.publish(id, 2);
  await until(d.has(others, 2));
  assert.equal(d.versions.get('1'), undefined);
  mended = true;
  await until(d.has([1], 60));
  await w.stop();
  assert.deepEqual(d.versions.get('1'), Array.from({ length: 60 }, (_, i) => i + 1));
});

test('calls that do not return end the subscriber when they take all places', async () => {
  const rig = await newRig();
  const health = new Health();
  assert.equal(health.ready, false);
  for (let id = 1; id <= 3; id++) await rig.publish(id, 1);
  const signals = [];
  const w = rig.start((e, signal) => {
    signals.push(signal);
    return new Promise(() => {});
  }, { concurrency: 2, timeout: 200, health });
  await assert.rejects(w.ended, { code: 'stuck', message: /all 2 places of mailer-follow-created are taken/ });
  assert.deepEqual(signals.map((s) => s.aborted), [true, true]);
  assert.match(health.problems.get('calls of mailer-follow-created').message, /2 calls of mailer-follow-created do not return/);
});

test('wrong arguments are refused', async () => {
  const none = () => {};
  const code = (code) => ({ name: 'SubscribeError', code });
  await assert.rejects(handle(nc, '7', 'follow.created', none), code('name'));
  await assert.rejects(handle(nc, 'mailer', 'follow.made', none), code('type'));
  await assert.rejects(handle(nc, 'mailer', 'play.*', none, { declared: ['song.created'] }), code('type'));
  await assert.rejects(handle(nc, 'mailer', 'follow.created', none, { takeover: 999 }), code('option'));
  await assert.rejects(handle(nc, 'mailer', 'follow.created', none, { stream: 'NONE', prefix: 'none' }), code('no-streams'));
  const stopped = AbortSignal.abort();
  await handle(nc, 'mailer', 'play.*', none, { declared: ['play.created'], signal: stopped });
});

test('a consumer that is not made for the subscriber is refused', async () => {
  const rig = await newRig();
  const durable = (name, filter, metadata) => jsm.consumers.add(`${rig.stream}-0`, {
    durable_name: `${name}-follow-created`, filter_subject: filter, ack_policy: AckPolicy.Explicit, ack_wait: 5e9, metadata,
  });
  await durable('other', `${rig.prefix}.*.*.like.created`);
  await durable('kept', `${rig.prefix}.*.*.follow.created`, { 'tidings-filter': 'follow.created' });
  await assert.rejects(rig.start(() => {}, {}, 'other').ended, { code: 'filter' });
  await assert.rejects(rig.start(() => {}, {}, 'kept').ended, { code: 'option' });
});

test('a subscriber begins at since', async () => {
  const rig = await newRig();
  await rig.publish(1, 1);
  const since = new Date((await jsm.streams.getMessage(`${rig.stream}-0`, { seq: 1 })).time.getTime() + 1);
  await until(() => new Date() > since);
  await rig.publish(2, 1);
  const d = diary();
  const w = rig.start(d.note, { since });
  await until(d.has([2], 1));
  await w.stop();
  assert.deepEqual([...d.versions.keys()], ['2']);
});

test('a recreated stream is read from its beginning', async () => {
  const rig = await newRig();
  const d = diary();
  const w = rig.start(d.note);
  await rig.publish(1, 1);
  await until(d.has([1], 1));
  await jsm.streams.delete(`${rig.stream}-0`);
  await until(() => rig.quiet.some(([m]) => /^the stream is gone/.test(m)));
  await rig.declare(0);
  await rig.publish(2, 1);
  await until(d.has([2], 1));
  await w.stop();
  await jsm.streams.delete(`${rig.stream}-0`);
  await rig.declare(0); // before the subscriber sees that it is gone
  await rig.publish(3, 1);
  const again = rig.start(d.note);
  await until(d.has([3], 1));
  await again.stop();
});

for (const seen of [false, true]) {
  test(`an event of a recreated stream is not taken for one in hand${seen ? ', after its predecessor was seen to be gone' : ''}`, async () => {
    const rig = await newRig();
    const d = diary();
    const gates = ['1', '2'].map(() => ({}));
    for (const g of gates) g.open = new Promise((resolve) => { g.leave = resolve; });
    let entered;
    const inside = new Promise((resolve) => { entered = resolve; });
    const w = rig.start(async (e) => {
      entered();
      await gates[e.aggregateId - 1].open;
      d.note(e);
      throw new PermanentError('no such user');
    });
    await rig.publish(1, 1);
    await inside;
    await jsm.streams.delete(`${rig.stream}-0`);
    if (seen) await until(() => rig.quiet.some(([m]) => /^the stream is gone/.test(m)));
    await rig.declare(0);
    await rig.publish(2, 1); // with the sequence of the event in hand, by which a consumer knows an acknowledgment
    await until(async () => (await rig.info().catch(() => undefined))?.delivered.stream_seq === 1);
    gates[0].leave();
    await until(() => rig.quiet.some(([m]) => /^an event became a dead letter/.test(m)));
    for (let looks = 0; looks < 3; looks++) assert.equal((await rig.info()).num_ack_pending, 1, 'an answer ended the delivery of the new event');
    gates[1].leave();
    await until(d.has([2], 1));
    await until(async () => (await rig.letters()).length === 2);
    await w.stop();
  });
}

/** An address of NATS whose connections fall silent with `stall`, or end with `cut`: those made after that are silent too. */
async function newLink(t) {
  const nats = new URL(dev.nats_url);
  const link = { connections: [], silent: false };
  const join = ([near, far]) => near.pipe(far).pipe(near);
  const server = createServer((near) => {
    const far = createConnection(nats.port, nats.hostname);
    for (const [one, other] of [[near, far], [far, near]]) one.on('error', () => {}).on('close', () => other.destroy());
    link.connections.push([near, far]);
    if (!link.silent) join([near, far]);
  }).listen(0, '127.0.0.1');
  await once(server, 'listening');
  link.url = Object.assign(new URL(nats), { host: `127.0.0.1:${server.address().port}` }).href;
  link.stall = () => {
    link.silent = true;
    for (const [near, far] of link.connections) {
      near.unpipe(far);
      far.unpipe(near);
    }
  };
  link.cut = () => {
    link.stall();
    for (const [near] of link.connections.splice(0)) near.destroy();
  };
  link.heal = () => {
    link.silent = false;
    link.connections.forEach(join);
  };
  t.after(() => {
    link.cut();
    server.close();
  });
  return link;
}

for (const fault of ['stall', 'cut', 'sleep']) {
  test(`an answer that waited is not taken for that of an event of a recreated stream: ${fault}`, async (t) => {
    const rig = await newRig();
    const link = await newLink(t);
    const bad = await connect(natsOptions(link.url));
    const health = new Health();
    const d = diary();
    const takeover = 60_000;
    let leave, entered, taken;
    const [held, inside, inHand] = [
      new Promise((resolve) => { leave = resolve; }), new Promise((resolve) => { entered = resolve; }), new Promise((resolve) => { taken = resolve; }),
    ];
    const cutOff = rig.start(async (e) => {
      if (e.aggregateId === '1') await (entered(), held);
      else d.note(e);
    }, { takeover, health }, 'mailer', bad);
    await rig.publish(1, 1);
    await inside;
    await until(() => health.pending === 1); // it has looked at the stream since
    link[fault === 'cut' ? 'cut' : 'stall']();
    if (fault === 'cut') {
      await until(() => link.connections.length > 0); // the client keeps the answer for this one
      leave();
    }
    await jsm.streams.delete(`${rig.stream}-0`);
    await rig.declare(0);
    await rig.publish(2, 1); // with the sequence of the event in hand
    const other = rig.start((e, signal) => new Promise((_, reject) => {
      taken();
      signal.addEventListener('abort', () => reject(signal.reason));
    }), { takeover, drain: 0 });
    await inHand;
    if (fault === 'stall') await until(() => !health.ready); // its last look vouches for nothing any more
    if (fault === 'sleep') { // the machine sleeps for an hour: performance.now does not count that
      const { now } = Date;
      t.after(() => { Date.now = now; });
      Date.now = () => now() + 3_600_000;
    }
    leave();
    link.heal();
    await until(() => health.ready && rig.quiet.some(([m]) => /^the stream was recreated/.test(m)));
    await bad.flush();
    assert.equal((await rig.info()).num_ack_pending, 1, 'the answer ended the delivery of the new event');
    await other.stop(); // gives it back
    await until(d.has([2], 1));
    await cutOff.stop();
    await bad.close();
  });
}

test('a closed connection ends the subscriber at once, also with an answer to send', async () => {
  const rig = await newRig();
  const mortal = await connect(natsOptions(dev.nats_url));
  let leave, entered;
  const [held, inside] = [new Promise((resolve) => { leave = resolve; }), new Promise((resolve) => { entered = resolve; })];
  await rig.publish(1, 1);
  const w = rig.start(() => (entered(), held), { drain: 3_600_000 }, 'mailer', mortal);
  await inside;
  await mortal.close();
  leave();
  await assert.rejects(w.ended, { code: 'closed' });
});

test('an event that ends its process takes no others with it', async () => {
  const rig = await newRig();
  await rig.publishAll(1);
  const durable = 'mailer-follow-created';
  await jsm.consumers.add(`${rig.stream}-0`, {
    durable_name: durable, filter_subject: `${rig.prefix}.*.*.follow.created`, ack_policy: AckPolicy.Explicit, max_ack_pending: 100_000,
  });
  const consumer = await js.consumers.get(`${rig.stream}-0`, durable);
  for (let process = 0; process < 11; process++) { // the first event has ended each of them, which had all events in hand
    let n = 0;
    for await (const m of await consumer.fetch({ max_messages: ids.length, expires: 5000 })) {
      m.nak();
      n++;
    }
    assert.equal(n, ids.length);
  }
  const d = diary();
  let [running, most] = [0, 0];
  const w = rig.start(async (e) => {
    most = Math.max(most, ++running);
    await pause(1);
    d.note(e);
    running--;
  });
  await until(async () => d.versions.size + (await rig.letters()).length === ids.length);
  const [letter, ...others] = await rig.letters();
  assert.deepEqual([letter.header.get('ce-subject'), others, most], ['1', [], 1]);
  await w.stop();
});

test('in order, the events after a lost delivery wait for it', async () => {
  const rig = await newRig();
  const d = [];
  let lost = false;
  const lossy = Object.create(nc, { subscribe: { value: (subject, options) => nc.subscribe(subject, options && { ...options, callback: (error, m) => {
    if (!lost && /^\$JS\.ACK\.[^.]*-0\.mailer-follow-created\.1\.3\./.test(m?.reply ?? '')) lost = true; // with its connection, as it were
    else options.callback(error, m);
  } }) } });
  for (let v = 1; v <= 8; v++) await rig.publish(1, v);
  const w = rig.start((e) => void d.push(e.data.version), { inOrder: true, concurrency: 1 }, 'mailer', lossy);
  await until(() => d.length >= 8);
  await w.stop();
  assert.deepEqual([lost, d], [true, [1, 2, 3, 4, 5, 6, 7, 8]]);
});

test('a wall clock that is set back stops no reader', async () => {
  const rig = await newRig();
  for (let v = 1; v <= 40; v++) await rig.publish(1, v);
  let leave;
  const held = new Promise((resolve) => { leave = resolve; });
  const w = rig.start((e) => (e.aggregateId === '1' ? held : undefined), { concurrency: 2 }); // 32 events in hand: there is no room
  await until(async () => (await rig.info().catch(() => undefined))?.num_ack_pending === 32);
  const now = Date.now;
  Date.now = () => now() - 3_600_000;
  try {
    const { num_ack_pending: before } = await rig.info();
    await until(async () => (await rig.info()).num_ack_pending > before); // without room it still asks for one now and then
  } finally {
    Date.now = now;
    leave();
  }
  await w.stop();
});

const here = (path) => fileURLToPath(new URL(path, import.meta.url));
const run = promisify(execFile);

/** A process that handles the follows of the installation, and gives each line that it prints to `line`. */
function startProcess(line, command = process.execPath, args = [here('handler.mjs')]) {
  const child = spawn(command, args, { env: { ...process.env, NATS_URL: dev.nats_url }, stdio: ['ignore', 'pipe', 'inherit'] });
  const ended = once(child, 'close');
  createInterface({ input: child.stdout }).on('line', line);
  return {
    pid: child.pid,
    signal: (signal) => child.kill(signal),
    kill: async (signal) => {
      child.kill(signal);
      return ended;
    },
  };
}

const resize = (to) => run(binary, ['partitions', 'resize', '--to', `${to}`, '--yes', '--data', dev.dir]);

/** Writes the follows of `ids` through the API. `versions` are those of the events follow.created, which it has written. */
function newWriter(followee) {
  const w = { versions: [], write: async () => {
    const { Tidings } = await import('../dist/esm/index.js');
    const tidings = new Tidings({ url: dev.api, token: dev.token });
    for (const op of w.versions.length === 0 ? ['put'] : ['remove', 'put']) {
      const operations = ids.map((id) => ({ op, follower_id: `${id}`, followee_id: followee(id) }));
      for await (const { outcome } of tidings.batch('follows', operations)) assert.ok(outcome.status < 300, JSON.stringify(outcome));
    }
    w.versions.push(2 * w.versions.length + 1);
  } };
  return w;
}

test('processes in order keep the order between them, over a freeze, a death and resizes while they read', async () => {
  const firsts = new Map();
  const by = new Map();
  nc.subscribe('told.ordered', { callback: (_, m) => {
    const { follow, pid } = m.json();
    by.set(pid, (by.get(pid) ?? 0) + 1);
    const list = firsts.get(follow.follower_id) ?? [];
    if (!list.includes(follow.version)) firsts.set(follow.follower_id, [...list, follow.version]);
  } });
  const start = () => startProcess(() => {}, process.execPath, [here('handler.mjs'), 'ordered']);
  const w = newWriter((id) => `${2000 + id}`); // each an aggregate of its own
  const arrived = () => until(() => ids.every((id) => firsts.get(`${id}`)?.includes(w.versions.at(-1))));
  const busy = async (p) => {
    const before = by.get(p.pid) ?? 0;
    for (; (by.get(p.pid) ?? 0) === before; await pause(100)) await w.write();
  };
  await resize(2);
  const [a, b] = [start(), start()];
  await busy(a);
  await busy(b); // each has one of the two partitions
  a.signal('SIGSTOP');
  await w.write();
  await arrived(); // without the frozen process
  await w.write();
  a.signal('SIGCONT');
  await w.write();
  await resize(4);
  await w.write();
  await arrived();
  await busy(a);
  assert.deepEqual(await b.kill('SIGKILL'), [null, 'SIGKILL']);
  await w.write();
  await resize(1);
  await w.write();
  await arrived();
  assert.deepEqual(await a.kill('SIGTERM'), [0, null]);
  for (const id of ids) assert.deepEqual(firsts.get(`${id}`), w.versions, `follower ${id}`);
});

test('readers of kinds of one\'s own have generated types, and are exact over a kill and resizes', async (t) => {
  if (!generates) return t.diagnostic(`Node ${process.versions.node} cannot run the generator: a reader of own kinds is not tested`);
  const file = `${dev.dir}/club.yaml`;
  await writeFile(file, `objects: {book: books}
edges: {reading: {plural: readings, from: user, to: book, forward: readings, reverse: readers}}
children: {note: {plural: notes, parent: book}}
`);
  await run(binary, ['kinds', 'apply', file, '--reason', 'a book club', '--data', dev.dir]);
  const { each, isProblem, Tidings } = await import('../dist/esm/index.js');
  const tidings = new Tidings({ url: dev.api, token: dev.token });
  const list = (list, book_id) => each((r) => tidings.http.get({ ...r, url: `/v1/books/{book_id}/${list}` }).then(({ data }) => data),
    { path: { book_id } });
  const books = ['1', '2', '3', '4'];
  const readings = ids.map((id) => ({ user_id: `${id}`, book_id: books[id % books.length] }));
  const made = []; // the notes
  let versions = 0;
  const write = async () => {
    const op = versions % 2 === 0 ? 'put' : 'remove';
    for await (const { outcome } of tidings.batch('readings', readings.map((r) => ({ op, ...r })))) assert.ok(outcome.status < 300, op);
    for (const book_id of books) {
      made.push((await tidings.http.post({ url: '/v1/books/{book_id}/notes', path: { book_id }, body: { author_id: '7', body: 'well' } })).data.note_id);
    }
    versions++;
  };
  await until(() => tidings.http.get({ url: '/v1/books/{book_id}/notes', path: { book_id: '1' } }).then(() => true,
    (e) => (isProblem(e, 'route-unknown', 'not-found') ? false : Promise.reject(e)))); // the API reads the kinds
  const { project } = await ownProject(dev, 'club.ts');

  const [seen, notes, by] = [new Map(), new Set(), new Map()];
  nc.subscribe('told.club', { callback: (_, m) => {
    const { reading, note, pid } = m.json();
    by.set(pid, (by.get(pid) ?? 0) + 1);
    if (note !== undefined) return notes.add(note.note_id);
    const pair = `${reading.user_id} ${reading.book_id}`;
    const all = seen.get(pair) ?? [];
    if (!all.some(({ version }) => version === reading.version)) seen.set(pair, [...all, reading]); // of a repetition the first counts
  } });
  const start = () => {
    const p = startProcess(() => {}, process.execPath, [`${project}/club.js`, JSON.stringify(natsOptions(dev.nats_url))]);
    t.after(() => p.signal('SIGKILL'));
    return p;
  };
  const arrived = () => until(() => made.every((id) => notes.has(id)) &&
    readings.every((r) => seen.get(`${r.user_id} ${r.book_id}`)?.at(-1).version === versions));
  await resize(2);
  const [a, b] = [start(), start()];
  while (!by.has(a.pid) || !by.has(b.pid)) await write();
  const unfinished = write();
  assert.deepEqual(await a.kill('SIGKILL'), [null, 'SIGKILL']);
  await unfinished;
  await resize(4);
  await write();
  const c = start();
  await arrived();
  assert.deepEqual(await b.kill('SIGKILL'), [null, 'SIGKILL']);
  await write();
  await resize(1);
  if (versions % 2 === 0) await write(); // the readings exist
  await arrived();
  await c.kill('SIGKILL');

  for (const all of seen.values()) assert.deepEqual(all.map(({ version }) => version), Array.from({ length: versions }, (_, i) => i + 1));
  assert.deepEqual([...notes].sort(), made.sort());
  for (const book of books) {
    const readers = [...seen.values()].map((all) => all.at(-1)).filter((r) => r.book_id === book && r.status === 'ACTIVE').map((r) => r.user_id);
    const listed = async () => {
      const all = [];
      for await (const reader of list('readers', book)) all.push(reader.user_id);
      return all;
    };
    await until(async () => isDeepStrictEqual((await listed()).sort(), readers.sort())); // the API's tables follow
  }
});

test('a subscriber in Go and one in TypeScript with its name share the work, and one takes over when the other dies', async () => {
  const mailer = `${dev.dir}/mailer`;
  await run('go', ['build', '-o', mailer, './examples/mailer'], { cwd: here('../../..') });
  const got = { go: new Set(), node: new Set() };
  const w = newWriter((id) => `${3000 + id}`);
  const follows = (version) => ids.map((id) => `${id} ${3000 + id} ${version}`);
  const arrived = () => until(() => w.versions.flatMap(follows).every((f) => got.go.has(f) || got.node.has(f)));
  await resize(2);
  const p = startProcess((line) => {
    const [, to, from, version] = /to user (\d+): user (\d+) follows you \(version (\d+)\)/.exec(line);
    got.go.add(`${from} ${to} ${version}`);
  }, mailer, []);
  await w.write();
  await until(() => follows(1).every((f) => got.go.has(f)));
  const stop = new AbortController();
  const log = { info() {}, warn: console.error, error: console.error };
  const ended = handle(nc, 'mailer', 'follow.created', ({ data: { follower_id, followee_id, version } }) => {
    got.node.add(`${follower_id} ${followee_id} ${version}`);
  }, { signal: stop.signal, inOrder: true, takeover: 2000, attempts: 5, log });
  const share = (all) => follows(w.versions.at(-1)).filter((f) => all.has(f)).length;
  do {
    await w.write();
    await arrived();
  } while (share(got.go) === 0 || share(got.node) === 0); // each has one of the two partitions
  assert.equal(share(got.go) + share(got.node), ids.length, 'an event went to both');
  assert.deepEqual(await p.kill('SIGKILL'), [null, 'SIGKILL']);
  await w.write();
  await arrived();
  assert.ok(follows(w.versions.at(-1)).every((f) => got.node.has(f)));
  stop.abort();
  await ended;
});

test('metrics and doctor name a reader that was killed, and one that never acknowledges', async () => {
  await resize(1);
  const w = newWriter((id) => `${4000 + id}`);
  const told = new Set();
  nc.subscribe('told.killed', { callback: (_, m) => told.add(m.json().follow.follower_id) });
  const p = startProcess(() => {}, process.execPath, [here('handler.mjs'), 'killed']);
  await w.write();
  await until(() => told.size === ids.length);
  const names = [];
  for await (const name of jsm.streams.names('events.>')) names.push(name);
  const stream = `EVENTS-${Math.max(...names.map((name) => Number(name.split('-')[1])))}`;
  await jsm.consumers.add(stream, { durable_name: 'deaf', ack_policy: AckPolicy.Explicit, ack_wait: 1e9, filter_subject: 'events.*.*.follow.*' });
  const deaf = await (await js.consumers.get(stream, 'deaf')).consume({ callback: () => {} });
  let text = '';
  const value = (metric, consumer) => {
    const line = new RegExp(`^tidings_durable_${metric}\\{consumer="${consumer}",[^}]*stream="${stream}"\\} (.+)$`, 'm').exec(text);
    return line === null ? undefined : Number(line[1]);
  };
  const measured = (wanted) => until(async () => {
    text = await (await fetch(`${dev.ops}/metrics`)).text();
    return wanted();
  });
  await measured(() => value('pending_messages', 'killed-follow-created') === 0 && value('waiting_pulls', 'killed-follow-created') > 0);
  await p.kill('SIGKILL');
  await w.write();
  // What SubscriberAbsent and SubscriberRedelivers ask for, but for the times that these wait.
  await measured(() => value('pending_messages', 'killed-follow-created') > 0 && value('waiting_pulls', 'killed-follow-created') === 0 &&
    value('idle_seconds', 'killed-follow-created') > 5 && value('redelivered_messages', 'deaf') > 10 && value('ack_floor', 'deaf') === 0);
  assert.equal(value('redelivered_messages', 'killed-follow-created'), 0);
  assert.ok(value('waiting_pulls', 'deaf') > 0);
  const { stdout } = await run(binary, ['doctor', '--json', '--data', dev.dir]).catch((error) => error); // it may find more
  assert.match(stdout, /"subscriber-redelivers"/);
  assert.match(stdout, /it does not acknowledge \d+ messages of EVENTS-\d+, and NATS delivers them again/);
  await deaf.close();
  await jsm.consumers.delete(stream, 'deaf');
});

test('a process survives what happens to NATS, and its successor what happens to it', async (t) => {
  const events = [];
  const versions = () => {
    const all = new Map();
    for (const { follow } of events) {
      const list = all.get(follow.follower_id) ?? [];
      if (!list.includes(follow.version)) all.set(follow.follower_id, [...list, follow.version]);
    }
    return all;
  };
  const w = newWriter(() => '1000');
  const { write } = w;
  const arrived = () => until(() => ids.every((id) => versions().get(`${id}`)?.includes(w.versions.at(-1))));
  const line = (text) => {
    const event = JSON.parse(text);
    if (event.follow.followee_id === '1000') events.push(event); // other tests write too
  };
  let p = startProcess(line);
  await write();
  await arrived();

  for (const seconds of [2, 20]) {
    await t.test(`NATS stands still for ${seconds} seconds`, async () => {
      dev.freeze();
      await pause(seconds * 1000);
      dev.thaw();
      await write();
      await arrived();
    });
  }
  await t.test('NATS is killed and restarted', async () => {
    await dev.kill();
    await pause(3000);
    await dev.restart();
    await write();
    await arrived();
  });
  await t.test('the process is killed', async () => {
    await write();
    assert.deepEqual(await p.kill('SIGKILL'), [null, 'SIGKILL']);
    await write();
    p = startProcess(line);
    await arrived();
  });
  await t.test('streams are lost, and replaced by a repair', async () => {
    const own = await jetstreamManager(nc);
    for await (const name of own.streams.names('events.>')) if (/^EVENTS-\d+$/.test(name)) await own.streams.delete(name);
    const repair = ['repair', 'stream', '--yes', '--data', dev.dir];
    await until(() => promisify(execFile)(binary, repair).then(() => true, () => pause(500)));
    await write();
    await arrived();
  });
  assert.deepEqual(await p.kill('SIGTERM'), [0, null]);
  // Without inOrder, an event that the killed process had in hand comes after takeover, behind later ones.
  for (const id of ids) assert.deepEqual(versions().get(`${id}`).sort((a, b) => a - b), w.versions, `follower ${id}`);
});
