import type * as events from './events/types.gen.js';

/** The payloads of the events of the built-in kinds, by type. */
export interface Events {
  'comment.created': events.CommentCreatedEvent;
  'comment.deleted': events.CommentDeletedEvent;
  'comment.edited': events.CommentEditedEvent;
  'comment.erased': events.CommentErasedEvent;
  'comment.moderated': events.CommentModeratedEvent;
  'follow.created': events.FollowCreatedEvent;
  'follow.removed': events.FollowRemovedEvent;
  'heartbeat.sent': events.HeartbeatSentEvent;
  'like.created': events.LikeCreatedEvent;
  'like.removed': events.LikeRemovedEvent;
  'like_comment.created': events.LikeCommentCreatedEvent;
  'like_comment.removed': events.LikeCommentRemovedEvent;
  'membership.created': events.MembershipCreatedEvent;
  'membership.removed': events.MembershipRemovedEvent;
  'membership.updated': events.MembershipUpdatedEvent;
  'message.created': events.MessageCreatedEvent;
  'message.deleted': events.MessageDeletedEvent;
  'message.edited': events.MessageEditedEvent;
  'message.erased': events.MessageErasedEvent;
  'message.moderated': events.MessageModeratedEvent;
  'person.erased': events.PersonErasedEvent;
  'review.created': events.ReviewCreatedEvent;
  'review.deleted': events.ReviewDeletedEvent;
  'review.edited': events.ReviewEditedEvent;
  'review.erased': events.ReviewErasedEvent;
  'review.moderated': events.ReviewModeratedEvent;
  'share.created': events.ShareCreatedEvent;
  'share.removed': events.ShareRemovedEvent;
  'thread.updated': events.ThreadUpdatedEvent;
  'vote.created': events.VoteCreatedEvent;
  'vote.removed': events.VoteRemovedEvent;
  'vote.updated': events.VoteUpdatedEvent;
}

/** The version of each payload, and the types of the members that it always has. */
export const required = {
  'comment.created': { version: 1, members: { actor: 'string', author_id: 'string', author_state: 'string', body: 'string', comment_id: 'string', created_at: 'string', moderation_state: 'string', path: 'string', post_id: 'string', slug: 'string', updated_at: 'string', version: 'number' } },
  'comment.deleted': { version: 1, members: { actor: 'string', author_id: 'string', author_state: 'string', body: 'string', comment_id: 'string', created_at: 'string', moderation_state: 'string', path: 'string', post_id: 'string', slug: 'string', updated_at: 'string', version: 'number' } },
  'comment.edited': { version: 1, members: { actor: 'string', author_id: 'string', author_state: 'string', body: 'string', comment_id: 'string', created_at: 'string', moderation_state: 'string', path: 'string', post_id: 'string', slug: 'string', updated_at: 'string', version: 'number' } },
  'comment.erased': { version: 1, members: { actor: 'string', author_id: 'string', author_state: 'string', body: 'string', comment_id: 'string', created_at: 'string', moderation_state: 'string', path: 'string', post_id: 'string', slug: 'string', updated_at: 'string', version: 'number' } },
  'comment.moderated': { version: 1, members: { actor: 'string', author_id: 'string', author_state: 'string', body: 'string', comment_id: 'string', created_at: 'string', moderation_state: 'string', path: 'string', post_id: 'string', slug: 'string', updated_at: 'string', version: 'number' } },
  'follow.created': { version: 1, members: { actor: 'string', created_at: 'string', followee_id: 'string', follower_id: 'string', positioned_at: 'string', status: 'string', updated_at: 'string', version: 'number' } },
  'follow.removed': { version: 1, members: { actor: 'string', created_at: 'string', followee_id: 'string', follower_id: 'string', positioned_at: 'string', status: 'string', updated_at: 'string', version: 'number' } },
  'heartbeat.sent': { version: 1, members: { interval_seconds: 'number', partition: 'number' } },
  'like.created': { version: 1, members: { actor: 'string', created_at: 'string', positioned_at: 'string', post_id: 'string', status: 'string', updated_at: 'string', user_id: 'string', version: 'number' } },
  'like.removed': { version: 1, members: { actor: 'string', created_at: 'string', positioned_at: 'string', post_id: 'string', status: 'string', updated_at: 'string', user_id: 'string', version: 'number' } },
  'like_comment.created': { version: 1, members: { actor: 'string', comment_id: 'string', created_at: 'string', positioned_at: 'string', status: 'string', updated_at: 'string', user_id: 'string', version: 'number' } },
  'like_comment.removed': { version: 1, members: { actor: 'string', comment_id: 'string', created_at: 'string', positioned_at: 'string', status: 'string', updated_at: 'string', user_id: 'string', version: 'number' } },
  'membership.created': { version: 1, members: { actor: 'string', created_at: 'string', group_id: 'string', positioned_at: 'string', status: 'string', updated_at: 'string', user_id: 'string', version: 'number' } },
  'membership.removed': { version: 1, members: { actor: 'string', created_at: 'string', group_id: 'string', positioned_at: 'string', status: 'string', updated_at: 'string', user_id: 'string', version: 'number' } },
  'membership.updated': { version: 1, members: { actor: 'string', created_at: 'string', group_id: 'string', positioned_at: 'string', status: 'string', updated_at: 'string', user_id: 'string', version: 'number' } },
  'message.created': { version: 1, members: { actor: 'string', author_id: 'string', author_state: 'string', body: 'string', conversation_id: 'string', created_at: 'string', message_id: 'string', moderation_state: 'string', updated_at: 'string', version: 'number' } },
  'message.deleted': { version: 1, members: { actor: 'string', author_id: 'string', author_state: 'string', body: 'string', conversation_id: 'string', created_at: 'string', message_id: 'string', moderation_state: 'string', updated_at: 'string', version: 'number' } },
  'message.edited': { version: 1, members: { actor: 'string', author_id: 'string', author_state: 'string', body: 'string', conversation_id: 'string', created_at: 'string', message_id: 'string', moderation_state: 'string', updated_at: 'string', version: 'number' } },
  'message.erased': { version: 1, members: { actor: 'string', author_id: 'string', author_state: 'string', body: 'string', conversation_id: 'string', created_at: 'string', message_id: 'string', moderation_state: 'string', updated_at: 'string', version: 'number' } },
  'message.moderated': { version: 1, members: { actor: 'string', author_id: 'string', author_state: 'string', body: 'string', conversation_id: 'string', created_at: 'string', message_id: 'string', moderation_state: 'string', updated_at: 'string', version: 'number' } },
  'person.erased': { version: 1, members: { person_id: 'string', requested_at: 'string' } },
  'review.created': { version: 1, members: { actor: 'string', author_id: 'string', author_state: 'string', body: 'string', created_at: 'string', moderation_state: 'string', product_id: 'string', review_id: 'string', updated_at: 'string', version: 'number' } },
  'review.deleted': { version: 1, members: { actor: 'string', author_id: 'string', author_state: 'string', body: 'string', created_at: 'string', moderation_state: 'string', product_id: 'string', review_id: 'string', updated_at: 'string', version: 'number' } },
  'review.edited': { version: 1, members: { actor: 'string', author_id: 'string', author_state: 'string', body: 'string', created_at: 'string', moderation_state: 'string', product_id: 'string', review_id: 'string', updated_at: 'string', version: 'number' } },
  'review.erased': { version: 1, members: { actor: 'string', author_id: 'string', author_state: 'string', body: 'string', created_at: 'string', moderation_state: 'string', product_id: 'string', review_id: 'string', updated_at: 'string', version: 'number' } },
  'review.moderated': { version: 1, members: { actor: 'string', author_id: 'string', author_state: 'string', body: 'string', created_at: 'string', moderation_state: 'string', product_id: 'string', review_id: 'string', updated_at: 'string', version: 'number' } },
  'share.created': { version: 1, members: { actor: 'string', created_at: 'string', positioned_at: 'string', post_id: 'string', status: 'string', updated_at: 'string', user_id: 'string', version: 'number' } },
  'share.removed': { version: 1, members: { actor: 'string', created_at: 'string', positioned_at: 'string', post_id: 'string', status: 'string', updated_at: 'string', user_id: 'string', version: 'number' } },
  'thread.updated': { version: 1, members: { actor: 'string', locked: 'boolean', post_id: 'string', premoderated: 'boolean', updated_at: 'string', version: 'number' } },
  'vote.created': { version: 1, members: { actor: 'string', comment_id: 'string', created_at: 'string', positioned_at: 'string', status: 'string', updated_at: 'string', user_id: 'string', version: 'number' } },
  'vote.removed': { version: 1, members: { actor: 'string', comment_id: 'string', created_at: 'string', positioned_at: 'string', status: 'string', updated_at: 'string', user_id: 'string', version: 'number' } },
  'vote.updated': { version: 1, members: { actor: 'string', comment_id: 'string', created_at: 'string', positioned_at: 'string', status: 'string', updated_at: 'string', user_id: 'string', version: 'number' } },
} as const;
