// Tests of the client against an API that refuses, breaks off or is unavailable. Each test scripts the answers of its server.
import assert from 'node:assert/strict';
import { once } from 'node:events';
import { createServer } from 'node:http';
import { test as nodeTest } from 'node:test';
import { setTimeout as pause } from 'node:timers/promises';
import { ifChanged, isProblem, ProblemError, Tidings, TimeoutError } from '../dist/esm/index.js';

const test = (name, fn) => nodeTest(name, { timeout: 120_000 }, fn);

/** Starts a server that sends these answers in order, and a client of it. An answer is [status, body, headers] or a function. */
async function script(t, answers, options = {}) {
  const requests = [];
  const server = createServer(async (request, response) => {
    let body = '';
    for await (const part of request) body += part;
    requests.push({ method: request.method, url: request.url, headers: request.headers, body });
    const answer = answers.shift() ?? [500, { code: 'internal', status: 500, title: 'one request too many' }];
    if (typeof answer === 'function') return answer(response, body);
    const [status, content, headers] = answer;
    response.writeHead(status, { 'Content-Type': status < 300 ? 'application/json' : 'application/problem+json', ...headers });
    response.end(content === undefined ? undefined : typeof content === 'string' ? content : JSON.stringify(content));
  }).listen(0, '127.0.0.1');
  await once(server, 'listening');
  t.after(() => {
    server.closeAllConnections();
    server.close();
  });
  const tidings = new Tidings({ url: `http://127.0.0.1:${server.address().port}`, token: 'secret', ...options });
  return { tidings, requests };
}

const problem = (status, code, headers) => [status, { type: `/docs#${code}`, title: code, status, code }, headers];
const hangUp = (response) => response.destroy();
const comment = { comment_id: 'c', post_id: '5', version: 3 };
const create = { path: { post_id: '5' }, body: { author_id: '3', body: 'Hello' } };
const edit = { path: { comment_id: 'c' }, body: { body: 'Hello' }, headers: { 'If-Match': '"3"' } };

test('a create is sent again with its key, no sooner than Retry-After says', async (t) => {
  const { tidings, requests } = await script(t, [problem(503, 'overloaded', { 'Retry-After': '1' }), hangUp, [201, comment]]);
  const start = performance.now();
  assert.deepEqual(await tidings.createComment(create), comment);
  assert.ok(performance.now() - start > 1000, 'it did not wait');
  assert.equal(requests.length, 3);
  const keys = new Set(requests.map((r) => r.headers['idempotency-key']));
  assert.equal(keys.size, 1);
  assert.match([...keys][0], /^[!-~]{20,}$/);
  for (const r of requests) assert.deepEqual([r.headers.authorization, JSON.parse(r.body)], ['Bearer secret', create.body]);
});

test("a caller's own key is kept", async (t) => {
  const { tidings, requests } = await script(t, [[201, comment]]);
  await tidings.createComment({ ...create, headers: { 'Idempotency-Key': 'mine' } });
  assert.equal(requests[0].headers['idempotency-key'], 'mine');
});

test('what may be repeated is, after a lost connection, an answer cut off, and unavailable', async (t) => {
  const cut = (response) => {
    response.writeHead(200, { 'Content-Type': 'application/json', 'Content-Length': 100 });
    response.write('{"followers":1,', () => response.destroy());
  };
  const { tidings, requests } = await script(t, [
    hangUp, cut, [200, { followers: 1 }], problem(503, 'unavailable'), [204],
    hangUp, [202, { state: 'PENDING' }], hangUp, [200, { items: [] }],
  ]);
  assert.equal((await tidings.getUserCounts({ path: { user_id: '1' } })).followers, 1);
  await tidings.removeFollow({ path: { follower_id: '1', followee_id: '2' } });
  await tidings.removeUserEdges({ path: { user_id: '1' }, body: {} });
  await tidings.checkFollows({ body: { pairs: [] } });
  assert.equal(requests.length, 9);
  assert.equal(requests[5].url, '/v1/users/1:remove-edges');
});

test('what may not be repeated is not: its outcome is unknown', async (t) => {
  const proxy = [503, 'gone', { 'Content-Type': 'text/plain' }];
  const { tidings, requests } = await script(t, [hangUp, problem(503, 'unavailable'), proxy, hangUp]);
  await assert.rejects(tidings.editComment(edit), TypeError);
  await assert.rejects(tidings.editComment(edit), (e) => isProblem(e, 'unavailable'));
  await assert.rejects(tidings.deleteComment({ path: { comment_id: 'c' }, headers: { 'If-Match': '*' } }), (e) =>
    isProblem(e) && e.code === '' && e.status === 503);
  await assert.rejects(tidings.retryDlqMessage({ path: { message_id: '9' }, body: { reason: 'repaired' } }), TypeError);
  assert.equal(requests.length, 4);
});

test('a conditional write is sent again when nothing was done', async (t) => {
  const refusals = [problem(429, 'rate-limited'), problem(503, 'overloaded'), problem(503, 'thread-returning')];
  const { tidings, requests } = await script(t, [...refusals, [200, comment]]);
  assert.deepEqual(await tidings.editComment(edit), comment);
  assert.equal(requests.length, 4);
});

test('tries end, and a Retry-After that is too long ends them at once', async (t) => {
  const away = Array.from({ length: 3 }, () => problem(503, 'overloaded'));
  const long = problem(429, 'rate-limited', { 'Retry-After': '3600', 'X-Request-Id': 'r1' });
  const { tidings, requests } = await script(t, [...away, long], { retries: 2 });
  await assert.rejects(tidings.getUserCounts({ path: { user_id: '1' } }), (e) => isProblem(e, 'overloaded') && e.status === 503);
  assert.equal(requests.length, 3);
  await assert.rejects(tidings.getUserCounts({ path: { user_id: '1' } }), (e) =>
    e instanceof ProblemError && e.requestId === 'r1' && e.code === 'rate-limited');
});

test('an API that sends nothing for the limit has a timeout, and what may be repeated is', async (t) => {
  const silent = () => {};
  const half = (response) => response.writeHead(200, { 'Content-Type': 'application/json' }).write('{"followers":');
  const answers = [silent, half, [200, { followers: 1 }], silent, silent];
  const { tidings, requests } = await script(t, answers, { timeout: 2000, retries: 2 });
  assert.equal((await tidings.getUserCounts({ path: { user_id: '1' } })).followers, 1);
  assert.equal(requests.length, 3);
  await assert.rejects(tidings.editComment(edit), (e) =>
    e instanceof TimeoutError && e.message === 'PATCH /v1/comments/c: the API sent nothing for 2 s');
  assert.equal(requests.length, 4);
  await assert.rejects(tidings.session().http.get({ url: '/v1/users/1/counts', signal: AbortSignal.timeout(100) }), (e) =>
    e instanceof DOMException && !(e instanceof TimeoutError)); // the caller's own limit remains the caller's
  assert.equal(requests.length, 5);
});

test('an answer that keeps arriving is not cut, and a batch goes on behind one that stops', async (t) => {
  const drip = (type, parts) => async (response) => {
    response.writeHead(200, { 'Content-Type': type });
    for (const part of parts) {
      response.write(part);
      await pause(1000);
    }
    return response;
  };
  const end = (answer) => async (response) => (await answer(response)).end();
  const ok = (...lines) => lines.map((line) => `{"line":${line},"status":204}\n`);
  const { tidings, requests } = await script(t, [
    end(drip('application/x-ndjson', ['{"a":', '1}\n{', '"end":', '"done"}', '\n'])),
    drip('application/x-ndjson', ok(1, 2, 3, 4)), // without its end
    [200, ok(1).join(''), { 'Content-Type': 'application/x-ndjson' }],
  ], { timeout: 3000, retries: 1 });
  assert.equal((await tidings.http.get({ url: '/v1/follows:export' })).data, '{"a":1}\n{"end":"done"}\n');
  assert.equal(requests.length, 1);
  const operations = [2, 3, 4, 5, 6].map((id) => ({ op: 'put', follower_id: '1', followee_id: `${id}` }));
  const tries = [];
  for await (const outcome of tidings.batch('follows', operations)) {
    if (tries.length === 0) await pause(3500); // the caller's own time does not count
    tries.push(outcome.tries);
  }
  assert.deepEqual(tries, [1, 1, 1, 1, 2]);
});

test('the limit is 30 seconds unless it is changed, and 0 is none', async (t) => {
  t.mock.timers.enable({ apis: ['setTimeout'] });
  const ended = [];
  for (const [name, options] of Object.entries({ default: {}, none: { timeout: 0 } })) {
    const never = () => new Promise(() => {}); // it ignores the signal
    new Tidings({ url: 'http://127.0.0.1', token: 't', retries: 0, fetch: never, ...options })
      .getUserCounts({ path: { user_id: '1' } }).catch((e) => ended.push(name, e.name));
  }
  const settle = () => new Promise(setImmediate);
  await settle();
  t.mock.timers.tick(29_999);
  await settle();
  assert.deepEqual(ended, []);
  t.mock.timers.tick(1);
  await settle();
  assert.deepEqual(ended, ['default', 'TimeoutError']);
  t.mock.timers.tick(2 ** 31);
  await settle();
  assert.equal(ended.length, 2);
});

test('an object that has not changed is undefined, not an error', async (t) => {
  const { tidings, requests } = await script(t, [[304], [200, { ...comment, version: 4 }], problem(404, 'not-found')]);
  const again = () => ifChanged((r) => tidings.getComment(r), { path: { comment_id: 'c' }, headers: { 'Tidings-Actor': 'a' } }, comment);
  assert.equal(await again(), undefined);
  assert.equal((await again()).version, 4);
  await assert.rejects(again(), (e) => isProblem(e, 'not-found'));
  for (const { url, headers } of requests) {
    assert.deepEqual([url, headers['if-none-match'], headers['tidings-actor']], ['/v1/comments/c', '"3"', 'a']);
  }
});

test('what the caller aborts is not sent again', async (t) => {
  const late = new AbortController();
  const abort = new AbortController();
  const later = (response) => {
    const [status, body, headers] = problem(503, 'overloaded', { 'Retry-After': '300' });
    response.writeHead(status, { 'Content-Type': 'application/problem+json', ...headers }).end(JSON.stringify(body));
    setTimeout(() => late.abort(new Error('late')), 200); // the client waits for the time of Retry-After by then
  };
  const { tidings, requests } = await script(t, [later, () => abort.abort(new Error('enough'))], { maxWait: 600_000 });
  await assert.rejects(tidings.getUserCounts({ path: { user_id: '1' }, signal: late.signal }), { message: 'late' });
  await assert.rejects(tidings.getUserCounts({ path: { user_id: '1' }, signal: abort.signal }), { message: 'enough' });
  assert.equal(requests.length, 2);
});

test('a problem has what the API said, a proxy has its status', async (t) => {
  const stale = {
    type: '/docs#version-stale', title: 'stale', status: 412, code: 'version-stale', detail: 'it has version 4',
    errors: [{ header: 'If-Match', detail: 'too old' }], current: { version: 4 },
  };
  const { tidings } = await script(t, [[412, stale], [502, '<h1>Bad Gateway</h1>', { 'Content-Type': 'text/html' }]]);
  await assert.rejects(tidings.editComment(edit), (e) => {
    assert.equal(e.message, 'PATCH /v1/comments/c: 412 version-stale: it has version 4; If-Match too old');
    return isProblem(e, 'not-found', 'version-stale') && e.problem.current.version === 4;
  });
  await assert.rejects(tidings.getUserCounts({ path: { user_id: '1' } }), (e) => e.status === 502 && e.code === '' && !isProblem(e, 'not-found'));
});

test('a batch goes on behind an answer that broke off', async (t) => {
  const lines = (...all) => all.map((o) => JSON.stringify(o) + '\n').join('');
  const head = (response) => response.writeHead(200, { 'Content-Type': 'application/x-ndjson' });
  const { tidings, requests } = await script(t, [
    problem(503, 'unavailable'),
    (response) => head(response).write(lines({ line: 1, status: 201 }) + '{"line":2,', () => response.destroy()),
    [200, lines({ line: 1, status: 201 }, { line: 2, status: 503, problem: { code: 'unavailable', status: 503 } })],
    [200, lines({ line: 1, status: 422, problem: { code: 'body-empty' } })],
    [200, lines({ line: 1, status: 201 })],
  ]);
  const bodies = ['a', 'b', '', 'd'];
  const operations = bodies.map((body) => ({ op: 'create', post_id: '5', author_id: '3', body }));
  const seen = [];
  for await (const { index, operation, outcome, tries } of tidings.batch('comments', operations, { size: 3 })) {
    assert.equal(operation, operations[index]);
    seen.push([index, outcome.status, tries]);
  }
  assert.deepEqual(seen, [[0, 201, 2], [1, 201, 3], [2, 422, 4], [3, 201, 1]]);
  const sent = requests.map((r) => r.body.trim().split('\n').map((line) => JSON.parse(line)));
  assert.deepEqual(sent.map((all) => all.map((o) => o.body)), [['a', 'b', ''], ['a', 'b', ''], ['b', ''], [''], ['d']]);
  assert.equal(new Set(sent.flat().map((o) => o.idempotency_key)).size, 4, 'a key for each create, the same over all tries');
  assert.equal(requests[0].headers['content-type'], 'application/x-ndjson');
});

test('a batch that gets nowhere ends, as does one that is refused', async (t) => {
  const { tidings, requests } = await script(t, [hangUp, hangUp, problem(413, 'too-many-operations')], { retries: 1 });
  const all = async () => {
    for await (const _ of tidings.batch('follows', [{ op: 'put', follower_id: '1', followee_id: '2' }])) assert.fail('an outcome');
  };
  await assert.rejects(all(), TypeError);
  await assert.rejects(all(), (e) => isProblem(e, 'too-many-operations'));
  assert.equal(requests.length, 3);
});

test('a batch that is left early, or aborted, ends its request', async (t) => {
  let closed;
  const answer = (response) => {
    closed = once(response, 'close');
    response.writeHead(200).write('{"line":1,"status":204}\n');
  };
  const { tidings } = await script(t, [answer, answer]);
  const two = ['2', '3'].map((id) => ({ op: 'put', follower_id: '1', followee_id: id }));
  for await (const { outcome } of tidings.batch('follows', two)) {
    assert.equal(outcome.status, 204);
    break;
  }
  await closed;
  const abort = new AbortController();
  await assert.rejects(async () => {
    for await (const _ of tidings.batch('follows', two, { signal: abort.signal })) abort.abort(new Error('enough'));
  }, { message: 'enough' });
  await closed;
});

test('a session sends the tokens of its last 64 writes with reads', async (t) => {
  const write = (token) => [200, {}, { 'Tidings-Token': token }];
  const { tidings, requests } = await script(t, [
    write('a1'), write('b1'), write('a2'), write('read'), [200, {}], write('c1'), [200, {}],
    [200, Array.from({ length: 64 }, (_, i) => JSON.stringify({ line: i + 1, status: 200, token: `t${i}` }) + '\n').join('')], [200, {}],
  ]);
  const session = tidings.session(['old']);
  const follow = (followee_id) => session.putFollow({ path: { follower_id: '1', followee_id } });
  await follow('2');
  await follow('3');
  await follow('2');
  await session.getFollow({ path: { follower_id: '1', followee_id: '2' } });
  await session.checkFollows({ body: { pairs: [] } });
  await session.createComment(create);
  await session.getUserCounts({ path: { user_id: '1' } });
  const operations = Array.from({ length: 64 }, (_, i) => ({ op: 'put', follower_id: '1', followee_id: `${i + 2}` }));
  for await (const _ of session.batch('follows', operations));
  await session.getUserCounts({ path: { user_id: '1' } });
  const tokens = requests.map((r) => r.headers['tidings-token']);
  assert.deepEqual(tokens.slice(0, 8), [undefined, undefined, undefined, 'old,b1,a2', 'old,b1,a2', undefined, 'old,b1,a2,c1', undefined]);
  assert.deepEqual(tokens[8].split(','), operations.map((_, i) => `t${i}`));
  assert.deepEqual(tidings.session(session.tokens).tokens, session.tokens);
});

test('a session keeps both of two writes whose answers overtake each other', async (t) => {
  let begun, answerFirst;
  const [first, arrived] = [new Promise((resolve) => { answerFirst = resolve; }), new Promise((resolve) => { begun = resolve; })];
  const write = (token) => [200, {}, { 'Tidings-Token': token }];
  const late = async (response) => {
    begun();
    await first;
    response.writeHead(200, { 'Content-Type': 'application/json', 'Tidings-Token': 't1' }).end('{}');
  };
  const { tidings } = await script(t, [late, write('t2'), write('t3')]);
  const session = tidings.session();
  const follow = () => session.putFollow({ path: { follower_id: '1', followee_id: '2' } });
  const slow = follow();
  await arrived;
  await follow();
  answerFirst();
  await slow;
  assert.deepEqual(session.tokens, ['t2', 't1']);
  await follow();
  assert.deepEqual(session.tokens, ['t3']);
});

test('lines of JSON are text, also when they break off first', async (t) => {
  const ndjson = { 'Content-Type': 'application/x-ndjson' };
  const cut = (response) => response.writeHead(200, ndjson).write('{"end":', () => response.destroy());
  const { tidings } = await script(t, [cut, [200, '{"end":"done"}\n', ndjson]]);
  assert.equal((await tidings.http.get({ url: '/v1/follows:export' })).data, '{"end":"done"}\n');
});

test('each request asks for the token of the day', async (t) => {
  let day = 0;
  const { tidings, requests } = await script(t, [[200, {}], [200, '{"line":1,"status":204}\n']], { token: async () => `day${++day}` });
  await tidings.getUserCounts({ path: { user_id: '1' } });
  for await (const _ of tidings.batch('follows', [{ op: 'remove', follower_id: '1', followee_id: '2' }]));
  assert.deepEqual(requests.map((r) => r.headers.authorization), ['Bearer day1', 'Bearer day2']);
});
