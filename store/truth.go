package store

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"iter"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/tidings/tidings/event"
)

// State is an entity of the truth as it is now: what an event would say of it, but for who did what.
type State[T any] struct {
	TenantID int64
	Object   T
}

// Event is the state as an event, as if it had just been written. It is on no stream and has neither id nor sequence.
func (s State[T]) Event() (event.Event, error) {
	e := event.Event{TenantID: s.TenantID, Version: 1}
	switch o := any(s.Object).(type) {
	case event.Follow:
		e.AggregateType, e.AggregateID, e.Type = event.AggregateFollow, int64(o.FolloweeID), event.Created
		if !o.Active() {
			e.Type = event.Removed
		}
	case event.Comment:
		e.AggregateType, e.AggregateID, e.Type = event.AggregateComment, int64(o.PostID), event.Edited
	case event.Thread:
		e.AggregateType, e.AggregateID, e.Type = event.AggregateThread, int64(o.PostID), event.Updated
	default:
		return e, fmt.Errorf("store: no event tells of a %T", s.Object)
	}
	var err error
	if e.Payload, err = json.Marshal(s.Object); err != nil {
		return e, fmt.Errorf("encode the state of a %s of aggregate %d: %w", e.AggregateType, e.AggregateID, err)
	}
	return e, nil
}

// Events are states as events.
func Events[T any](states iter.Seq2[*State[T], error]) iter.Seq2[event.Event, error] {
	return func(yield func(event.Event, error) bool) {
		for s, err := range states {
			var e event.Event
			if err == nil {
				e, err = s.Event()
			}
			if !yield(e, err) || err != nil {
				return
			}
		}
	}
}

// scanRows is how many rows of the truth are in memory at a time.
const scanRows = 4000

// scan yields the rows of sql, page after page, each a statement of its own: nothing holds a snapshot of the truth for long, and what changes
// meanwhile may be seen as it was or as it is. args makes the arguments that sql continues with behind the last row; sql has a parameter
// limit besides. A limit other than 0 is that of one page, which is all.
func scan[R, T any](ctx context.Context, pool *pgxpool.Pool, sql string, after *State[T], limit int, args func(*State[T]) pgx.StrictNamedArgs, state func(*R) State[T]) iter.Seq2[*State[T], error] {
	return func(yield func(*State[T], error) bool) {
		if after == nil {
			after = new(State[T])
		}
		for page := max(limit, 0); ; {
			if page == 0 {
				page = scanRows
			}
			named := args(after)
			named["limit"] = page
			rows, _ := pool.Query(ctx, sql, named)
			all, err := pgx.CollectRows(rows, pgx.RowToAddrOfStructByPos[R])
			if err != nil {
				yield(nil, fmt.Errorf("read a page of the truth: %w", err))
				return
			}
			for _, row := range all {
				s := state(row)
				if after = &s; !yield(after, nil) {
					return
				}
			}
			if len(all) < page || limit != 0 {
				return
			}
		}
	}
}

type followState struct {
	TenantID int64
	followRow
}

// scanFollowsSQL reads a page of the pairs.
// Index: follows_pkey, one range.   Locks: none.
const scanFollowsSQL = `
SELECT /* store.scan_follows */ tenant_id, follower_id, followee_id, status, version, created_at, positioned_at, updated_at
  FROM follows WHERE (tenant_id, follower_id, followee_id) > (@tenant::bigint, @follower::bigint, @followee::bigint)
 ORDER BY tenant_id, follower_id, followee_id LIMIT @limit`

// ScanFollows yields the pairs of all tenants by follower and followee, from behind after (nil: the first one), at most limit of them (0: all),
// in bounded memory. The pool acts as the system role.
func ScanFollows(ctx context.Context, pool *pgxpool.Pool, after *State[event.Follow], limit int) iter.Seq2[*State[event.Follow], error] {
	return scan(ctx, pool, scanFollowsSQL, after, limit, func(s *State[event.Follow]) pgx.StrictNamedArgs {
		return pgx.StrictNamedArgs{"tenant": s.TenantID, "follower": int64(s.Object.FollowerID), "followee": int64(s.Object.FolloweeID)}
	}, func(r *followState) State[event.Follow] { return State[event.Follow]{r.TenantID, r.wire()} })
}

// Counts are how many active pairs an account is a side of.
type Counts struct {
	TenantID, UserID     int64
	Followers, Following int64
}

// CountFollowsSQL counts both sides of every active pair, by tenant and account. The server sorts it, on its disk where it must.
const CountFollowsSQL = `
SELECT /* store.count_follows */ tenant_id, user_id, sum(follower)::bigint, sum(following)::bigint
  FROM (SELECT tenant_id, followee_id AS user_id, 1 AS follower, 0 AS following FROM follows WHERE status = 'ACTIVE'
        UNION ALL
        SELECT tenant_id, follower_id, 0, 1 FROM follows WHERE status = 'ACTIVE') sides
 GROUP BY tenant_id, user_id ORDER BY tenant_id, user_id`

type commentState struct {
	TenantID int64
	commentRow
}

func (r *commentState) state() State[event.Comment] {
	c := r.wire()
	if !event.BodyTravels(c.AuthorState, c.ModerationState) {
		c.Body = "" // the truth keeps it, no event has it
	}
	return State[event.Comment]{r.TenantID, c}
}

// scanThreadsSQL reads a page of the comments, archived or not, in the order of their threads.
// Index: comments_path_key and comments_archive_path_key, one range each, merged.   Locks: none.
const scanThreadsSQL = `
SELECT /* store.scan_threads */ c.tenant_id, ` + commentColumns + `
  FROM all_comments c WHERE (c.tenant_id, c.post_id, c.path) > (@tenant::bigint, @post::bigint, @path::text COLLATE "C")
 ORDER BY c.tenant_id, c.post_id, c.path LIMIT @limit`

// scanCommentsSQL reads a page of the comments by id.
// Index: comments_pkey and comments_archive_pkey, one range each, merged.   Locks: none.
const scanCommentsSQL = `
SELECT /* store.scan_comments */ c.tenant_id, ` + commentColumns + `
  FROM all_comments c WHERE (c.tenant_id, c.comment_id) > (@tenant::bigint, @comment::uuid) ORDER BY c.tenant_id, c.comment_id LIMIT @limit`

// ScanComments is ScanFollows for comments, archived or not, by id.
func ScanComments(ctx context.Context, pool *pgxpool.Pool, after *State[event.Comment], limit int) iter.Seq2[*State[event.Comment], error] {
	return scan(ctx, pool, scanCommentsSQL, after, limit, func(s *State[event.Comment]) pgx.StrictNamedArgs {
		return pgx.StrictNamedArgs{"tenant": s.TenantID, "comment": cmp.Or(s.Object.CommentID, "00000000-0000-0000-0000-000000000000")}
	}, (*commentState).state)
}

// scanThreadSQL reads a page of the comments of one post likewise.
// Index: comments_path_key and comments_archive_path_key, one range each, merged.   Locks: none.
const scanThreadSQL = `
SELECT /* store.scan_thread */ c.tenant_id, ` + commentColumns + `
  FROM all_comments c WHERE c.tenant_id = @tenant::bigint AND c.post_id = @post::bigint AND c.path > @path::text COLLATE "C" ORDER BY c.path LIMIT @limit`

// ScanThreads is ScanComments in the order of posts and their threads, so that parents come before their replies.
func ScanThreads(ctx context.Context, pool *pgxpool.Pool, after *State[event.Comment], limit int) iter.Seq2[*State[event.Comment], error] {
	return scan(ctx, pool, scanThreadsSQL, after, limit, placeArgs, (*commentState).state)
}

// ScanThread is ScanThreads of one post.
func ScanThread(ctx context.Context, pool *pgxpool.Pool, tenant, post int64) iter.Seq2[*State[event.Comment], error] {
	return scan(ctx, pool, scanThreadSQL, &State[event.Comment]{tenant, event.Comment{PostID: event.ID(post)}}, 0, placeArgs, (*commentState).state)
}

func placeArgs(s *State[event.Comment]) pgx.StrictNamedArgs {
	return pgx.StrictNamedArgs{"tenant": s.TenantID, "post": int64(s.Object.PostID), "path": s.Object.Path}
}

type settingsState struct {
	TenantID int64
	Object   event.Thread
}

// scanSettingsSQL reads a page of what is set for threads. What retention deleted or purged were the defaults, at a version that stays.
// Index: threads_head_idx, threads_purged_pkey, one range each.   Locks: none.
const scanSettingsSQL = `
SELECT /* store.scan_settings */ tenant_id, object
  FROM (SELECT tenant_id, post_id, object FROM threads WHERE version_state IN ('LATEST', 'DELETED')
         UNION ALL
        SELECT tenant_id, post_id, jsonb_build_object('post_id', post_id::text, 'version', version) FROM threads_purged p
         WHERE NOT EXISTS (SELECT FROM threads t WHERE t.tenant_id = p.tenant_id AND t.post_id = p.post_id)) t
 WHERE (tenant_id, post_id) > (@tenant::bigint, @post::bigint)
 ORDER BY tenant_id, post_id LIMIT @limit`

// ScanSettings is ScanFollows for the settings of threads, by post.
func ScanSettings(ctx context.Context, pool *pgxpool.Pool, after *State[event.Thread], limit int) iter.Seq2[*State[event.Thread], error] {
	return scan(ctx, pool, scanSettingsSQL, after, limit, func(s *State[event.Thread]) pgx.StrictNamedArgs {
		return pgx.StrictNamedArgs{"tenant": s.TenantID, "post": int64(s.Object.PostID)}
	}, func(r *settingsState) State[event.Thread] {
		r.Object.Actor = "" // as with comments and follows: the history has it
		return State[event.Thread](*r)
	})
}

// querier is a transaction or a pool.
type querier interface {
	Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error)
}

// GetFollows returns the pairs that refs name, whatever versions they name; nothing of those that the tenant does not have. It reads as q may.
func GetFollows(ctx context.Context, q querier, tenant int64, refs []event.Ref) (all []State[event.Follow], err error) {
	var followers, followees []int64
	for _, r := range refs {
		if r.Type == event.AggregateFollow {
			followers, followees = append(followers, int64(r.Follower)), append(followees, int64(r.Followee))
		}
	}
	if len(followers) == 0 {
		return nil, nil
	}
	rows, _ := q.Query(ctx, getFollowsSQL, pgx.StrictNamedArgs{"tenant": tenant, "followers": followers, "followees": followees})
	got, err := pgx.CollectRows(rows, pgx.RowToStructByPos[followRow])
	if err != nil {
		return nil, fmt.Errorf("read %d follows: %w", len(followers), err)
	}
	for _, r := range got {
		all = append(all, State[event.Follow]{tenant, r.wire()})
	}
	return all, nil
}

// GetComments is GetFollows for comments.
func GetComments(ctx context.Context, q querier, tenant int64, refs []event.Ref) (all []State[event.Comment], err error) {
	var ids []string
	for _, r := range refs {
		if r.Type == event.AggregateComment {
			ids = append(ids, r.Comment)
		}
	}
	if len(ids) == 0 {
		return nil, nil
	}
	got, err := getComments(ctx, q, tenant, ids)
	if err != nil {
		return nil, err
	}
	for _, r := range got {
		s := commentState{tenant, r}
		all = append(all, s.state())
	}
	return all, nil
}

// getSettings is GetFollows for the settings of threads.
func getSettings(ctx context.Context, q querier, tenant int64, refs []event.Ref) (all []State[event.Thread], err error) {
	var posts []int64
	for _, r := range refs {
		if r.Type == event.AggregateThread {
			posts = append(posts, int64(r.Thread))
		}
	}
	if len(posts) == 0 {
		return nil, nil
	}
	_, got, err := getThreads(ctx, q, tenant, posts)
	if err != nil {
		return nil, err
	}
	for _, t := range got {
		if t.Version > 0 {
			all = append(all, State[event.Thread]{tenant, t})
		}
	}
	return all, nil
}

// GetEvents returns what events would say of the entities now, whatever versions the refs name; nothing of entities that the tenant does not
// have. It reads as q may.
func GetEvents(ctx context.Context, q querier, tenant int64, refs []event.Ref) (events []event.Event, err error) {
	follows, err := GetFollows(ctx, q, tenant, refs)
	if err != nil {
		return nil, err
	}
	comments, err := GetComments(ctx, q, tenant, refs)
	if err != nil {
		return nil, err
	}
	settings, err := getSettings(ctx, q, tenant, refs)
	if err != nil {
		return nil, err
	}
	err = errors.Join(appendEvents(&events, follows), appendEvents(&events, comments), appendEvents(&events, settings))
	return events, err
}

// States is GetEvents for the tenant's own eyes.
func (s *Store) States(ctx context.Context, tenant int64, refs []event.Ref) (events []event.Event, err error) {
	err = s.read(ctx, tenant, func(tx pgx.Tx) (err error) {
		events, err = GetEvents(ctx, tx, tenant, refs)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("read the states of %d entities of tenant %d: %w", len(refs), tenant, err)
	}
	return events, nil
}

func appendEvents[T any](to *[]event.Event, states []State[T]) error {
	for _, s := range states {
		e, err := s.Event()
		if err != nil {
			return err
		}
		*to = append(*to, e)
	}
	return nil
}
