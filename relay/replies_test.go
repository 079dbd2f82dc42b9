package relay

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
	"github.com/tidings/tidings/kinds"
	"github.com/tidings/tidings/store"
)

// lateSQL makes some transactions commit late, after they have taken their outbox ids.
const lateSQL = `
CREATE FUNCTION late() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
  IF NEW.id % 7 = 0 THEN PERFORM pg_sleep(0.04); END IF;
  RETURN NULL;
END $$;
CREATE CONSTRAINT TRIGGER late AFTER INSERT ON outbox_messages DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION late()`

// thread has the comments that writers may reply to and edit.
type thread struct {
	mu  sync.Mutex
	ids []string
}

func (c *thread) add(id string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.ids = append(c.ids, id)
}

// any returns a comment, most often one that was written just now, or "" if there is none.
func (c *thread) any(rng *rand.Rand) string {
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.ids) == 0 {
		return ""
	}
	return c.ids[len(c.ids)-1-rng.IntN(min(3, len(c.ids)))]
}

// writeReplies writes n comments and edits. Most comments reply to another one.
func writeReplies(ctx context.Context, s *store.Store, c *thread, object event.ID, rng *rand.Rand, n int) error {
	kind, meta := kinds.Builtin().Children["comment"], store.Meta{Actor: "test"}
	for i := range n {
		to := c.any(rng)
		if to != "" && rng.IntN(4) == 0 {
			out, err := s.EditChildren(ctx, 1, kind, []store.ChildEdit{{Meta: meta, ID: to, IfVersion: store.AnyVersion,
				Body: new(fmt.Sprintf("edit %d %d", i, rng.Uint64()))}})
			if err != nil || out[0].Err != nil {
				return errors.Join(err, out[0].Err)
			}
			continue
		}
		if rng.IntN(8) == 0 {
			to = ""
		}
		out, err := s.CreateChildren(ctx, 1, kind, []store.NewChild{{Meta: meta, Object: object, AuthorID: "1", ReplyTo: to,
			Body: "hello"}})
		if err != nil {
			return err
		}
		if out[0].Err != nil {
			return out[0].Err
		}
		c.add(out[0].Child.ID)
	}
	return nil
}

// TestAReplyFollowsItsParentBesideLateCommits writes threads through the store, while some
// transactions commit after others that have higher outbox ids. Each reply must be behind its
// parent on the stream, and each edit behind the version before it.
func TestAReplyFollowsItsParentBesideLateCommits(t *testing.T) {
	t.Parallel()
	db, b, ctx := testkit.Postgres(t), testkit.NATS(t), t.Context()
	if _, err := db.Pool(t, postgres.RoleOwner).Exec(ctx, lateSQL); err != nil {
		t.Fatal(err)
	}
	pool := db.Pool(t, postgres.RoleSystem)
	start(t, newRelay(t, pool, b))
	start(t, newRelay(t, pool, b))
	rng := seeded(t)
	const objects, writers, writes = 3, 2, 60
	done := make(chan error, objects*writers)
	for object := range int64(objects) {
		var c thread
		for range writers {
			s, seed := store.New(db.Pool(t, postgres.RoleAPI), nil), rng.Uint64() // a store commits one transaction after another
			go func() { done <- writeReplies(ctx, s, &c, event.IDOf(object+1), newRand(seed), writes) }()
		}
	}
	for range objects * writers {
		if err := <-done; err != nil {
			t.Fatal(err)
		}
	}
	awaitDrained(t, ctx, pool, time.Minute)

	var rows, late int
	if err := pool.QueryRow(ctx, `SELECT count(*), count(*) FILTER (WHERE stream_seq < highest)
		FROM (SELECT stream_seq, max(stream_seq) OVER (PARTITION BY partition ORDER BY id) AS highest FROM outbox_messages) m`).
		Scan(&rows, &late); err != nil {
		t.Fatal(err)
	}
	if rows != objects*writers*writes || late == 0 {
		t.Fatalf("%d rows, of which %d are on the stream before one with a lower id: want %d and some", rows, late, objects*writers*writes)
	}
	versions, replies := map[string]int64{}, 0
	for _, m := range readStream(t, ctx, b) {
		var c event.Comment
		if err := m.DecodePayload(&c); err != nil {
			t.Fatal(err)
		}
		if c.Version != versions[c.CommentID]+1 {
			t.Errorf("message %d has version %d of comment %s, behind version %d", m.Seq, c.Version, c.CommentID, versions[c.CommentID])
		}
		versions[c.CommentID] = c.Version
		if m.Type != event.Created || c.ParentID == "" {
			continue
		}
		replies++
		if versions[c.ParentID] == 0 {
			t.Errorf("message %d is a reply to %s, which no message before it created", m.Seq, c.ParentID)
		}
	}
	if replies < rows/4 {
		t.Errorf("%d replies among %d events", replies, rows)
	}
	t.Logf("%d events, %d replies, %d published before a lower id", rows, replies, late)
}
