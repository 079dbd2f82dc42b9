// The code of docs/typescript.md, word for word, for the compiler to check. `process` is Node's.
declare const process: { env: Record<string, string | undefined> };

import { connect } from '@nats-io/transport-node';
import { handle } from '@tidings/client/subscribe';

const stop = new AbortController();
const nc = await connect({ servers: '127.0.0.1:4222', maxReconnectAttempts: -1, ignoreAuthErrorAbort: true, waitOnFirstConnect: true });
await handle(nc, 'mailer', 'follow.created', async (event, signal) => {
  await fetch('https://mail.example/send', { method: 'POST', signal, body: JSON.stringify({ key: event.id, to: event.data.followee_id }) });
}, { signal: stop.signal });
await nc.close();

import { each, ifMatch, isProblem, Tidings } from '@tidings/client';

const tidings = new Tidings({ url: 'http://127.0.0.1:8080', token: process.env.TOKEN! });

const comment = await tidings.createComment({ path: { post_id: '5' }, body: { author_id: '3', body: 'Hello' } });
try {
  await tidings.editComment({ path: { comment_id: comment.comment_id }, body: { body: 'Hello, all' }, headers: ifMatch(comment) });
} catch (error) {
  if (!isProblem(error, 'version-stale')) throw error;
  console.log('somebody was faster:', error.problem.current);
}
for await (const follower of each((r) => tidings.listUserFollowers(r), { path: { user_id: '42' } })) console.log(follower.user_id);

for await (const { operation, outcome } of tidings.batch('follows', [{ op: 'put', follower_id: '7', followee_id: '42' }])) {
  if (outcome.problem) console.error(operation, outcome.problem.code);
}
