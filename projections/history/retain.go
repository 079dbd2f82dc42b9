package history

import (
	"context"
	"slices"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/store"
	"github.com/tidings/tidings/versioned"
)

// RetainComments does retention for the history of comments: that of a comment which the truth has no more is deleted logically when
// nothing was added to it for terms.After, and that of one which has been deleted or erased for as long is purged, all of it. The history of a comment
// that lives stays, however old. Both pools act as the system role; they may be of two servers. See versioned.Retain.
func RetainComments(ctx context.Context, truth, projection *pgxpool.Pool, terms versioned.Terms) error {
	type key struct {
		tenant  int64
		comment string
	}
	return retain(ctx, Comments(), projection, versioned.Retention[event.Comment]{Terms: terms},
		func(h versioned.Head[event.Comment]) key { return key{h.TenantID, h.Key[0]} },
		func(ctx context.Context, keys []key) (map[key]entityNow, error) {
			refs := make(map[int64][]event.Ref)
			for _, k := range keys {
				refs[k.tenant] = append(refs[k.tenant], event.Ref{Type: event.AggregateComment, Comment: k.comment})
			}
			now := make(map[key]entityNow, len(keys))
			for tenant, some := range refs {
				states, err := store.GetComments(ctx, truth, tenant, some)
				if err != nil {
					return nil, err
				}
				for _, s := range states {
					now[key{tenant, s.Object.CommentID}] = entityNow{s.Object.Version, s.Object.AuthorState != event.AuthorActive}
				}
			}
			return now, nil
		}, func(c event.Comment) int64 { return c.Version })
}

// RetainFollows is RetainComments for the history of follows: a pair that is followed keeps its own.
func RetainFollows(ctx context.Context, truth, projection *pgxpool.Pool, terms versioned.Terms) error {
	type key struct{ tenant, follower, followee int64 }
	return retain(ctx, Follows(), projection, versioned.Retention[event.Follow]{Terms: terms},
		func(h versioned.Head[event.Follow]) key {
			return key{h.TenantID, int64(h.Object.FollowerID), int64(h.Object.FolloweeID)}
		},
		func(ctx context.Context, keys []key) (map[key]entityNow, error) {
			refs := make(map[int64][]event.Ref)
			for _, k := range keys {
				refs[k.tenant] = append(refs[k.tenant], event.Ref{Type: event.AggregateFollow, Follower: event.ID(k.follower), Followee: event.ID(k.followee)})
			}
			now := make(map[key]entityNow, len(keys))
			for tenant, some := range refs {
				states, err := store.GetFollows(ctx, truth, tenant, some)
				if err != nil {
					return nil, err
				}
				for _, s := range states {
					now[key{tenant, int64(s.Object.FollowerID), int64(s.Object.FolloweeID)}] = entityNow{s.Object.Version, !s.Object.Active()}
				}
			}
			return now, nil
		}, func(f event.Follow) int64 { return f.Version })
}

// entityNow is what the truth says of an entity.
type entityNow struct {
	version int64
	gone    bool
}

// retain compares the heads that are old enough with the truth, as read gives it. A version that is on its way to a history keeps it.
func retain[T any, K comparable](ctx context.Context, table *versioned.Table[T], projection *pgxpool.Pool, r versioned.Retention[T],
	key func(versioned.Head[T]) K, read func(context.Context, []K) (map[K]entityNow, error), version func(T) int64) error {
	choose := func(ends func(h versioned.Head[T], now entityNow, there bool) bool) func(context.Context, []versioned.Head[T]) ([]versioned.Head[T], error) {
		return func(ctx context.Context, heads []versioned.Head[T]) ([]versioned.Head[T], error) {
			keys := make([]K, len(heads))
			for i, h := range heads {
				keys[i] = key(h)
			}
			all, err := read(ctx, keys)
			if err != nil {
				return nil, err
			}
			return slices.DeleteFunc(heads, func(h versioned.Head[T]) bool {
				now, there := all[key(h)]
				return !ends(h, now, there)
			}), nil
		}
	}
	r.Invalid = choose(func(_ versioned.Head[T], _ entityNow, there bool) bool { return !there })
	r.Ended = choose(func(h versioned.Head[T], now entityNow, there bool) bool {
		return !there || now.gone && now.version == version(h.Object)
	})
	return table.Retain(ctx, projection, r)
}
