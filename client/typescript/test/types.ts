// The compiler checks this file; nobody runs it. It has a user's program, and mistakes that the compiler must find.
import { each, ifChanged, ifMatch, isProblem, pages, Tidings, type Comment, type ProblemCode } from '@tidings/client';

import { connect } from '@nats-io/transport-node';
import { handle, PermanentError, type CommentCreatedEvent, type Event } from '@tidings/client/subscribe';

export async function subscriber(signal: AbortSignal): Promise<void> {
  const nc = await connect({ servers: '127.0.0.1:4222' });
  await handle(nc, 'mailer', 'comment.created', async ({ data }: Event<CommentCreatedEvent>) => {
    if (data.author_id === '0') throw new PermanentError('nobody');
  }, { signal });
  await handle(nc, 'mailer', 'follow.*', ({ data }) => {
    const status: 'ACTIVE' | 'REMOVED' = data.status;
    // @ts-expect-error: a follow has no body
    void [status, data.body];
  });
  await handle<{ song_id: string }>(nc, 'mailer', 'play.created', ({ data }) => void data.song_id, { declared: ['play.created'] });
  // @ts-expect-error: no such type of events
  await handle(nc, 'mailer', 'follow.made', () => {});
}

export async function program(tidings: Tidings): Promise<ProblemCode | '' | undefined> {
  const session = tidings.session();
  await session.putFollow({ path: { follower_id: '7', followee_id: '9223372036854775807' } });
  const comment: Comment = await session.createComment({ path: { post_id: '5' }, body: { author_id: '3', body: 'Hello' } });
  await session.editComment({ path: { comment_id: comment.comment_id }, body: { body: 'Hello there' }, headers: ifMatch(comment) });
  const newer: Comment | undefined = await ifChanged((r) => session.getComment(r), { path: { comment_id: comment.comment_id } }, comment);
  // @ts-expect-error: it may be undefined
  newer.version;
  // @ts-expect-error: counts have no version
  await ifChanged((r) => session.getUserCounts(r), { path: { user_id: '7' } }, comment);
  for await (const follower of each((r) => session.listUserFollowers(r), { path: { user_id: '42' }, query: { limit: 200 } })) {
    const id: string = follower.user_id;
    void id;
  }
  for await (const page of pages((r) => tidings.listComments(r), { path: { post_id: '5' }, query: { order: 'newest' } })) {
    const title: string | undefined = page.thread.title;
    void title;
  }
  for await (const { operation, outcome } of tidings.batch('comments', [{ op: 'delete', comment_id: comment.comment_id, if_match: '*' }])) {
    const id: string = operation.op === 'create' ? operation.post_id : operation.comment_id;
    void [id, outcome.status];
  }
  for await (const { operation } of tidings.batch('bookmarks', [{ op: 'put', user_id: '7', page_id: '5' }])) void operation.page_id;
  await tidings.http.put({ url: '/v1/bookmarks/{user_id}/{page_id}', path: { user_id: '7', page_id: '5' } });

  const counted = await tidings.countPosts({ body: { ids: ['5', '6'] } });
  const likers: number | undefined = counted.items[0]?.counts.likers;
  const checked = await tidings.checkPosts({ body: { user_id: '7', ids: ['5', '6'], edges: ['like'] } });
  const liked: boolean | undefined = checked.items[0]?.edges.like?.active;
  const groups = await tidings.checkGroups({ body: { user_id: '7', ids: ['5'] } });
  const role: 'member' | 'moderator' | 'owner' | undefined = groups.items[0]?.edges.membership?.attributes?.role;
  void [likers, liked, role];

  // @ts-expect-error: follows do not lead to posts
  await tidings.checkPosts({ body: { user_id: '7', ids: ['5'], edges: ['follow'] } });
  // @ts-expect-error: an id is a string, so that none of its 64 bits is lost
  await tidings.getUserCounts({ path: { user_id: 9223372036854775807 } });
  // @ts-expect-error: a follow has two ends
  await tidings.putFollow({ path: { follower_id: '7' } });
  // @ts-expect-error: no such order
  await tidings.listComments({ path: { post_id: '5' }, query: { order: 'random' } });
  // @ts-expect-error: no such operation
  tidings.batch('follows', [{ op: 'like', follower_id: '7', followee_id: '42' }]);
  // @ts-expect-error: no such code
  isProblem(undefined, 'no-such-code');
  try {
    await tidings.getComment({ path: { comment_id: comment.comment_id } });
  } catch (error) {
    if (isProblem(error, 'not-found')) return error.code;
    throw error;
  }
  return undefined;
}
