// The code of docs/typescript.md, word for word, for the compiler to check. `process` is Node's.
declare const process: { env: Record<string, string | undefined> };

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
