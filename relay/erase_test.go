package relay

import (
	"bytes"
	"context"
	"crypto/rand"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
	"github.com/tidings/tidings/kinds"
	"github.com/tidings/tidings/ops/erasure"
	"github.com/tidings/tidings/projections"
	"github.com/tidings/tidings/projections/history"
	"github.com/tidings/tidings/projections/threadcache"
	"github.com/tidings/tidings/store"
)

// TestAFrozenRelayBringsNothingErasedBack freezes a relay that has claimed an author's events and
// is about to publish them. It erases the author while another relay runs, and thaws the first
// relay.
func TestAFrozenRelayBringsNothingErasedBack(t *testing.T) {
	for what, o := range map[string]options{
		"with one message": {crash: crash{Step: "before commit", Signal: syscall.SIGSTOP, Then: "refused"}, patient: true},
		"with a batch, half of it": {crash: crash{Step: "before commit", Signal: syscall.SIGSTOP, Then: "refused"}, patient: true,
			atomicFrom: batches},
	} {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			db, ctx, secret := testkit.Postgres(t), t.Context(), rand.Text()
			f := &fleet{t: t, url: db.URL, pool: db.Pool(t, postgres.RoleSystem), b: testkit.NATSProcess(t), binary: os.Args[0]}
			s := store.New(db.Pool(t, postgres.RoleAPI), nil)
			write := func(author event.ID, bodies ...string) {
				t.Helper()
				var all []store.NewChild
				for _, body := range bodies {
					all = append(all, store.NewChild{Meta: store.Meta{Actor: "ann"}, Object: "5", AuthorID: author, Body: body})
				}
				out, err := s.CreateChildren(ctx, 1, kinds.Builtin().Children["comment"], all)
				if err != nil || out[0].Err != nil {
					t.Fatal(out, err)
				}
			}
			held := func() (found []string) {
				t.Helper()
				if err := filepath.WalkDir(f.b.Dir(), func(path string, d fs.DirEntry, err error) error {
					if err != nil || d.IsDir() {
						return nil // the server may remove files during the walk
					}
					b, err := os.ReadFile(path)
					if err == nil && bytes.Contains(b, []byte(secret)) {
						found = append(found, path)
					}
					return nil
				}); err != nil {
					t.Fatal(err)
				}
				return found
			}

			write("8", "so that there is a tail")
			first := f.start(options{})
			f.awaitTakeover()
			first.Signal(syscall.SIGTERM)
			first.AwaitEnd()
			write("7", "a "+secret, "b "+secret, "c "+secret)
			zombie := f.start(o)
			zombie.AwaitStopped()
			second := f.start(options{})

			js, err := jetstream.New(f.b.Connect(t))
			if err != nil {
				t.Fatal(err)
			}
			report, err := erasure.Run(ctx, erasure.Deps{Truth: f.pool, Projections: f.pool, Kinds: kinds.Builtin(),
				Fleet:     []projections.Projection{history.New(kinds.Builtin), threadcache.New(kinds.Builtin)},
				JetStream: js, Broker: f.b.Config(), Fence: func(context.Context, pgx.Tx) error { return nil }},
				erasure.Options{TenantID: 1, AuthorID: "7", Actor: "officer", Wait: 30 * time.Second})
			if err != nil || !report.Done || report.Counts[erasure.Stream] != 3 {
				t.Fatal(report, err)
			}

			// Only the frozen relay remains. When it thaws, it publishes the old events, and the
			// stream refuses them.
			second.Signal(syscall.SIGTERM)
			second.AwaitEnd()
			zombie.Signal(syscall.SIGCONT)
			zombie.awaitReached("refused")
			write("8", "afterwards")
			f.awaitTakeover()
			testkit.Eventually(t, "the text to be in no file of the stream",
				func() (bool, error) { return len(held()) == 0, nil })
			var texts, subjects int
			if err := f.pool.QueryRow(ctx, `SELECT count(*) FILTER (WHERE payload::text LIKE '%' || $1 || '%'), count(*)
				FROM outbox_messages`, secret).Scan(&texts, &subjects); err != nil || texts > 0 || subjects != 9 {
				t.Errorf("%d of %d messages have the text, %v", texts, subjects, err)
			}
			stream, err := js.Stream(ctx, f.b.Config().StreamName(0))
			if err != nil {
				t.Fatal(err)
			}
			// The other author's, before and after, the three erasures, and person.erased.
			if got := stream.CachedInfo().State.Msgs; got != 6 {
				t.Errorf("the stream holds %d messages, want 6", got)
			}
		})
	}
}
