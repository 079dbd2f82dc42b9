// Tests of the client against `tidings dev`.
import assert from 'node:assert/strict';
import { execFile } from 'node:child_process';
import { createHash } from 'node:crypto';
import { mkdtemp, readdir, readFile, rm, writeFile } from 'node:fs/promises';
import { join } from 'node:path';
import { after, before, test as nodeTest } from 'node:test';
import { setTimeout as pause } from 'node:timers/promises';
import { fileURLToPath } from 'node:url';
import { promisify } from 'node:util';
import { codes, each, ifChanged, ifMatch, isProblem, pages, Tidings } from '../dist/esm/index.js';
import { startDev, tidings as binary } from '../scripts/dev.mjs';
import { generates, ownProject } from './project.mjs';

const test = (name, fn) => nodeTest(name, { timeout: 300_000 }, fn);

let dev, tidings, openapi;
before(async () => {
  dev = await startDev();
  tidings = new Tidings({ url: dev.api + '/', token: dev.token, headers: { 'Tidings-Actor': 'node' } });
  openapi = await (await fetch(`${dev.api}/v1/openapi.json`)).text(); // before a test adds a kind
});
after(() => dev?.stop());

const run = (...args) => promisify(execFile)(binary, [...args, '--data', dev.dir]);

/** Repeats a call until its answer is the wanted one. The test's time limit bounds it. */
async function until(ask, wanted) {
  while (!wanted(await ask())) await pause(20);
}

test('ids keep their 64 bits', async () => {
  const [user, other] = ['9223372036854775807', '9007199254740993'];
  const made = await tidings.putFollow({ path: { follower_id: user, followee_id: other } });
  assert.deepEqual([made.follower_id, made.followee_id, made.version], [user, other, 1]);
  const { items } = await tidings.session([]).listFollowVersions({ path: { follower_id: user, followee_id: other } });
  assert.ok(Array.isArray(items));
  await until(() => tidings.listUserFollowers({ path: { user_id: other } }), (page) => page.items.length === 1 && page.items[0].user_id === user);
});

test('a list is read item by item, and page by page from where it was left', async () => {
  const operations = Array.from({ length: 450 }, (_, i) => ({ op: 'put', follower_id: `${1000 + i}`, followee_id: '42' }));
  const statuses = [];
  for await (const { index, outcome } of tidings.batch('follows', operations, { size: 200 })) statuses[index] = outcome.status;
  assert.deepEqual(statuses, operations.map(() => 201));
  await until(() => tidings.getUserCounts({ path: { user_id: '42' } }), (counts) => counts.followers === 450);

  const request = { path: { user_id: '42' }, query: { limit: 200 } };
  const followers = [];
  for await (const follower of each((r) => tidings.listUserFollowers(r), request)) followers.push(follower.user_id);
  assert.deepEqual([...followers].sort(), operations.map((o) => o.follower_id).sort());

  let cursor;
  for await (const page of pages((r) => tidings.listUserFollowers(r), request)) {
    assert.deepEqual(page.items.map((f) => f.user_id), followers.slice(0, 200));
    cursor = page.next;
    break;
  }
  const rest = [];
  for await (const page of pages((r) => tidings.listUserFollowers(r), { ...request, query: { limit: 200, cursor } })) {
    rest.push(...page.items.map((f) => f.user_id));
  }
  assert.deepEqual(rest, followers.slice(200));
});

test('a comment is written, edited behind its version, and withdrawn', async () => {
  const create = { path: { post_id: '5' }, body: { author_id: '3', body: 'Hello' }, headers: { 'Idempotency-Key': 'first' } };
  const comment = await tidings.createComment(create);
  assert.deepEqual(await tidings.createComment(create), comment, 'the same key made another comment');
  const reused = { ...create, body: { author_id: '3', body: 'Bye' } };
  await assert.rejects(tidings.createComment(reused), (e) => isProblem(e, 'idempotency-key-reused'));

  const path = { comment_id: comment.comment_id };
  const reread = () => ifChanged((r) => tidings.getComment(r), { path }, comment);
  assert.equal(await reread(), undefined);
  const edited = await tidings.editComment({ path, body: { body: 'Hello, all' }, headers: ifMatch(comment) });
  assert.deepEqual([edited.version, edited.body], [2, 'Hello, all']);
  assert.deepEqual(await reread(), edited);
  await assert.rejects(tidings.editComment({ path, body: { body: 'Late' }, headers: ifMatch(comment) }), (e) =>
    isProblem(e, 'version-stale') && e.status === 412 && e.problem.current.body === 'Hello, all' && e.requestId !== null);
  await tidings.deleteComment({ path, headers: ifMatch(edited) });
  assert.equal((await tidings.getComment({ path })).state, 'DELETED');
  assert.equal((await tidings.listCommentVersions({ path })).as_of.length > 0, true);
  await assert.rejects(tidings.getComment({ path: { comment_id: '0196b2d4-7c00-7000-8000-000000000001' } }), (e) => isProblem(e, 'not-found'));
});

test('operations of a batch stand alone', async () => {
  const ndjson = async (operations) => {
    const outcomes = [];
    for await (const { outcome } of tidings.batch('comments', operations)) outcomes.push(outcome);
    return outcomes;
  };
  const create = (body) => ({ op: 'create', post_id: '6', author_id: '3', body });
  const made = await ndjson([create('One'), create(''), create('Zwei ✓')]);
  assert.deepEqual(made.map((o) => o.problem?.code ?? o.comment.body), ['One', 'body-empty', 'Zwei ✓']);
  const id = made[0].comment.comment_id;
  const done = await ndjson([{ op: 'edit', comment_id: id, if_match: 1, body: 'Uno' }, { op: 'delete', comment_id: id, if_match: '*' }]);
  assert.deepEqual(done.map((o) => o.status), [200, 204]);
  const { items } = await tidings.batchFollows({ body: { operations: [{ op: 'put', follower_id: '8', followee_id: '8' }] } });
  assert.equal(items[0].problem.code, 'self-follow');
});

test('a session reads its own writes while the consumer stands still', async () => {
  await run('pause', '--consumer', 'followercounts');
  try {
    await until(() => fetch(`${dev.ops}/metrics`).then((r) => r.text()), (text) => /^tidings_consumer_paused\{.*followercounts.*\} 1$/m.test(text));
    for (let id = 78, seen = 2; seen > 0; id += 2) { // the consumer's current batch may still have the first follows
      const session = tidings.session();
      await session.putFollow({ path: { follower_id: '77', followee_id: `${id}` } });
      const second = [{ op: 'put', follower_id: '79', followee_id: `${id}` }];
      for await (const { outcome } of session.batch('follows', second)) assert.equal(outcome.status, 201);
      assert.equal(session.tokens.length, 2);
      seen = (await tidings.getUserCounts({ path: { user_id: `${id}` } })).followers;
      const own = await session.getUserCounts({ path: { user_id: `${id}` } });
      const handedOn = await tidings.session(session.tokens).countUsers({ body: { ids: [`${id}`] } });
      assert.deepEqual([own.followers, handedOn.items[0].counts.followers], [2, 2]);
      const { items: [check] } = await session.checkUsers({ body: { user_id: '77', ids: [`${id}`] } });
      assert.equal(check.edges.follow.active, true);
    }
  } finally {
    await run('resume', '--consumer', 'followercounts');
  }
});

test('kinds of an installation go through http, batch and session, and have generated methods', async (t) => {
  const file = join(dev.dir, 'kinds.yaml');
  const play = '{plural: plays, from: user, to: song, forward: plays, reverse: players, attributes: {device: {enum: [phone, radio]}}}';
  await writeFile(file, `objects: {song: songs}\nedges:\n  play: ${play}\n`);
  await run('kinds', 'apply', file, '--reason', 'songs');
  const session = tidings.session();
  const put = { url: '/v1/plays/{user_id}/{song_id}', path: { user_id: '7', song_id: '9007199254740993' } };
  await until(() => session.http.put(put).catch((e) => (isProblem(e, 'not-found') ? false : Promise.reject(e))), Boolean);
  const operations = [{ op: 'put', user_id: '8', song_id: '9007199254740993' }];
  for await (const { outcome } of session.batch('plays', operations)) assert.equal(outcome.status, 201);
  const players = (r) => session.http.get({ ...r, url: '/v1/songs/{song_id}/players' }).then((answer) => answer.data);
  const ids = [];
  for await (const player of each(players, { path: { song_id: '9007199254740993' }, query: { limit: 1 } })) ids.push(player.user_id);
  assert.deepEqual(ids.sort(), ['7', '8']);

  if (!generates) return t.diagnostic(`Node ${process.versions.node} cannot run the generator: methods of own kinds are not tested`);
  const node = await ownProject(dev, 'own.ts');
  assert.equal(await node('own.js', dev.api, dev.token), '7\nradio\nnot-found\n2\n');
});

test('the page has the code that the compiler has checked', async () => {
  const page = await readFile(new URL('../../../docs/typescript.md', import.meta.url), 'utf8');
  const read = (name) => readFile(new URL(name, import.meta.url), 'utf8');
  const compiled = (await read('page.ts')) + (await read('own.ts')) + (await read('club.ts'));
  const blocks = [...page.matchAll(/^```ts\n(.*?)^```$/gms)].map((m) => m[1]);
  assert.equal(blocks.length, 5);
  for (const block of blocks) assert.ok(compiled.includes(block), block);
});

test('the client is generated from the document that the API serves', async (t) => {
  const generated = fileURLToPath(new URL('../src/generated', import.meta.url));
  const digest = createHash('sha256').update(openapi).digest('hex');
  const kept = (await readFile(join(generated, 'openapi.sha256'), 'utf8')).trim();
  assert.equal(kept, digest, 'the document has changed: run `make generate-ts`');

  const document = JSON.parse(openapi);
  assert.ok(codes.includes('not-found') && codes.length > 30);
  const operations = Object.values(document.paths).flatMap((path) => Object.values(path).map((o) => o.operationId)).filter(Boolean);
  const missing = operations.filter((id) => typeof tidings[id.replace(/-(.)/g, (_, c) => c.toUpperCase())] !== 'function');
  assert.deepEqual(missing, []);

  const [major, minor] = process.versions.node.split('.').map(Number);
  if (major < 20 || (major === 20 && minor < 19)) {
    return t.diagnostic(`Node ${process.versions.node} cannot run the generator: its output is not compared`);
  }
  const { generate } = await import('../scripts/generate.mjs');
  const fresh = await mkdtemp(join(dev.dir, 'generated-'));
  await generate(openapi, fresh);
  const all = await readdir(generated, { recursive: true, withFileTypes: true });
  const files = all.filter((f) => f.isFile()).map((f) => join(f.parentPath ?? f.path, f.name));
  assert.ok(files.length > 10);
  for (const file of files) assert.equal(await readFile(file, 'utf8'), await readFile(file.replace(generated, fresh), 'utf8'), file);
  await rm(fresh, { recursive: true });
});
