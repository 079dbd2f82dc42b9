package store_test

import (
	"context"
	"fmt"
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/testkit"
	"github.com/tidings/tidings/store"
)

// deed is a write of an entity that no other deed touches. A repeat changes nothing.
type deed struct {
	what   string
	do     func(ctx context.Context, f fixture) error
	exists string // counts what the first write makes
	events string // counts its events
}

// deeds needs the ids of a comment under 201 and of one under 202.
func deeds(edited, deleted string) (all []deed) {
	first := func(out []store.ChildOutcome, err error) error {
		for _, o := range out {
			if err == nil {
				err = o.Err
			}
		}
		return err
	}
	edges := func(what string, remove bool, tenant int64, from ...event.ID) {
		var writes []store.EdgeWrite
		for _, from := range from {
			writes = append(writes, store.EdgeWrite{Meta: meta(), From: from, To: "2"})
		}
		status, version := "ACTIVE", 1
		if remove {
			status, version = "REMOVED", 2
		}
		mine := fmt.Sprintf(`tenant_id = %d AND %%s BETWEEN '%s' AND '%s'`, tenant, from[0], from[len(from)-1])
		all = append(all, deed{what: what, do: func(ctx context.Context, f fixture) error {
			if remove {
				_, err := f.RemoveEdges(ctx, tenant, follows, writes)
				return err
			}
			_, err := f.PutEdges(ctx, tenant, follows, writes)
			return err
		}, exists: fmt.Sprintf(`SELECT count(*) / %d FROM follows WHERE status = '%s' AND %s`, len(from), status,
			fmt.Sprintf(mine, "follower_id")),
			events: fmt.Sprintf(`SELECT count(*) / %d FROM outbox_messages WHERE aggregate_type = 'follow'
				AND payload ->> 'version' = '%d' AND %s`, len(from), version, fmt.Sprintf(mine, `payload ->> 'follower_id'`))})
	}
	edges("an edge", false, tenant, "100")
	edges("an edge of another tenant", false, tenant+1, "100")
	edges("edges in one call", false, tenant, "110", "111", "112")
	edges("the removal of an edge", true, tenant, "120")
	comment := func(what string, object event.ID, do func(ctx context.Context, f fixture) error, state string, version int) {
		all = append(all, deed{what, do, fmt.Sprintf(`SELECT count(*) FROM comments WHERE post_id = '%s' AND %s`, object, state),
			fmt.Sprintf(`SELECT count(*) FROM outbox_messages WHERE aggregate_type = 'comment' AND aggregate_id = '%s'
				AND payload ->> 'version' = '%d'`, object, version)})
	}
	create := func(object event.ID) func(ctx context.Context, f fixture) error {
		return func(ctx context.Context, f fixture) error {
			return first(f.CreateChildren(ctx, tenant, commentKind,
				[]store.NewChild{{Meta: meta(), Object: object, AuthorID: object, Body: "hello", Key: "key"}}))
		}
	}
	comment("a comment with a key", "200", create("200"), "true", 1)
	comment("an edit", "201", func(ctx context.Context, f fixture) error {
		return first(f.EditChildren(ctx, tenant, commentKind,
			[]store.ChildEdit{{Meta: meta(), ID: edited, IfVersion: store.AnyVersion, Body: new("changed")}}))
	}, "body = 'changed'", 2)
	comment("a deletion", "202", func(ctx context.Context, f fixture) error {
		return first(f.DeleteChildren(ctx, tenant, commentKind,
			[]store.ChildDelete{{Meta: meta(), ID: deleted, IfVersion: store.AnyVersion}}))
	}, "author_state = 'DELETED'", 2)
	all = append(all, deed{"the settings of a thread", func(ctx context.Context, f fixture) error {
		out, err := f.SetThreads(ctx, tenant, commentKind, []store.ThreadSettings{{Meta: meta(), Object: "300", Title: "title"}})
		if err == nil {
			err = out[0].Err
		}
		return err
	}, `SELECT count(*) FROM threads WHERE post_id = '300'`,
		`SELECT count(*) FROM outbox_messages WHERE aggregate_type = 'thread' AND aggregate_id = '300'`})
	all = append(all, deed{"a removal of all edges", func(ctx context.Context, f fixture) error {
		_, err := f.RequestRemoval(ctx, tenant, store.RemovalRequest{Meta: meta(), Object: "user", ID: "400", Kinds: []string{"follow"},
			Direction: store.DirectionBoth})
		return err
	}, `SELECT count(*) FROM edge_removals WHERE object_id = '400'`, `SELECT 1`})
	return all
}

// signalWaiting returns a function that signals each process that waits for a standby.
func signalWaiting(function string) func(t *testing.T, _ *testkit.Pair, owner *pgxpool.Pool) {
	return func(t *testing.T, _ *testkit.Pair, owner *pgxpool.Pool) {
		sql := fmt.Sprintf(`SELECT %s(pid) FROM pg_stat_activity WHERE wait_event = 'SyncRep'`, function)
		if _, err := owner.Exec(t.Context(), sql); err != nil {
			t.Error(err)
		}
	}
}
