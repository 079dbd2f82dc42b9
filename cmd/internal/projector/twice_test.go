package projector_test

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"

	"github.com/tidings/tidings/cmd/internal/fleet"
	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/broker"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
	"github.com/tidings/tidings/kinds"
	"github.com/tidings/tidings/kinds/catalog"
	"github.com/tidings/tidings/projections"
	"github.com/tidings/tidings/store"
)

// songKinds are kinds of an installation.
const songKinds = `objects: {song: songs}
edges:
  play: {plural: plays, from: user, to: song, forward: plays, reverse: players,
    attributes: {mood: {enum: [calm, loud], required: true, filter: true}}}
children:
  verdict: {plural: verdicts, parent: song, attributes: {stars: {type: integer, minimum: -3, maximum: 3, required: true, aggregate: true}}}
`

// writeEverything writes edges and children of several kinds in several versions, and settings of a
// thread.
func writeEverything(t *testing.T, s *store.Store, set *kinds.Set) {
	t.Helper()
	meta := store.Meta{Actor: "test"}
	check := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	for n, attributes := range []string{`{"mood":"calm"}`, `{"mood":"loud"}`, `{"mood":"calm"}`} {
		for kind, with := range map[string]string{"follow": "", "play": attributes} {
			var puts, removes []store.EdgeWrite
			for from := range int64(6) {
				w := store.EdgeWrite{Meta: meta, From: event.IDOf(from + 1), To: event.IDOf(20 + from%2)}
				if int(from)%3 == n {
					removes = append(removes, w)
				}
				if with != "" {
					w.Attributes = json.RawMessage(with)
				}
				puts = append(puts, w)
			}
			_, err := s.PutEdges(t.Context(), tenant, set.Edges[kind], puts)
			check(err)
			_, err = s.RemoveEdges(t.Context(), tenant, set.Edges[kind], removes)
			check(err)
		}
	}
	for kind, attributes := range map[string]string{"comment": "", "verdict": `{"stars":2}`} {
		var ids []string
		for n := range 8 {
			c := store.NewChild{Meta: meta, Object: "5", AuthorID: event.IDOf(n + 1), Body: fmt.Sprint("body ", n)}
			if attributes != "" {
				c.Attributes = json.RawMessage(attributes)
			}
			if kind == "comment" && n > 0 {
				c.ReplyTo = ids[n/2]
			}
			out, err := s.CreateChildren(t.Context(), tenant, set.Children[kind], []store.NewChild{c})
			check(err)
			check(out[0].Err)
			ids = append(ids, out[0].Child.ID)
		}
		for n, id := range ids {
			_, err := s.EditChildren(t.Context(), tenant, set.Children[kind],
				[]store.ChildEdit{{Meta: meta, ID: id, IfVersion: store.AnyVersion, Body: new(fmt.Sprint("edit ", n))}})
			check(err)
			if n%3 == 2 {
				_, err = s.DeleteChildren(t.Context(), tenant, set.Children[kind],
					[]store.ChildDelete{{Meta: meta, ID: id, IfVersion: store.AnyVersion}})
				check(err)
			}
		}
	}
	for _, title := range []string{"one", "two"} {
		_, err := s.SetThreads(t.Context(), tenant, set.Children["comment"],
			[]store.ThreadSettings{{Meta: meta, Object: "5", Title: title}})
		check(err)
	}
}

// TestEveryProjectionGivenEveryEventTwiceEndsInTheSameTables applies what the store and a relay put
// on a stream: each event once, each event twice in one batch, and all of them again.
func TestEveryProjectionGivenEveryEventTwiceEndsInTheSameTables(t *testing.T) {
	l := newLine(t)
	if _, err := catalog.Apply(t.Context(), catalog.Databases{Truth: l.pool, Projections: l.pool},
		catalog.Request{Kinds: testkit.Kinds(t, songKinds), Actor: "test"}); err != nil {
		t.Fatal(err)
	}
	set := testkit.Kinds(t, songKinds)
	writeEverything(t, store.New(l.api, nil), set)
	testkit.Eventually(t, "everything to be published", func() (published bool, err error) {
		err = l.pool.QueryRow(t.Context(), `SELECT NOT EXISTS (SELECT FROM outbox_messages WHERE processed_at IS NULL)`).Scan(&published)
		return published, err
	})
	var events []event.Event
	for seq := uint64(1); ; seq++ {
		m, err := broker.Next(t.Context(), l.js, l.cfg.StreamName(0), seq)
		if err != nil {
			t.Fatal(err)
		}
		if m == nil {
			break
		}
		e, err := event.Decode(m.Subject, m.Header, m.Data)
		if err != nil {
			t.Fatal(err)
		}
		e.Seq = m.Seq
		events = append(events, e)
	}
	for _, p := range fleet.Projections(func() *kinds.Set { return set }) {
		t.Run(p.Name(), func(t *testing.T) {
			wanted := slices.DeleteFunc(slices.Clone(events), func(e event.Event) bool { return !p.Wants(e.AggregateType) })
			apply := func(events []event.Event, size int) {
				t.Helper()
				for batch := range slices.Chunk(events, size) {
					if err := postgres.InTx(t.Context(), l.pool, pgx.TxOptions{}, func(tx pgx.Tx) error {
						return p.Apply(t.Context(), tx, slices.Clone(batch))
					}); err != nil {
						t.Fatal(err)
					}
				}
			}
			tables := p.Tables()
			if len(tables) == 0 {
				for _, kind := range []string{"follow", "play", "comment", "verdict"} { // a record
					tables = append(tables, kind+"_history")
				}
			}
			apply(wanted, 7)
			once := l.rows(t, tables)
			if len(wanted) < 20 || len(once) == 0 {
				t.Fatalf("%d events make %d rows", len(wanted), len(once))
			}
			apply(wanted, 7)
			if diff := cmp.Diff(once, l.rows(t, tables)); diff != "" {
				t.Errorf("rows after all events came again (-once +again):\n%s", diff)
			}
			for _, table := range tables {
				if _, err := l.pool.Exec(t.Context(), `DELETE FROM `+table); err != nil {
					t.Fatal(err)
				}
			}
			var twice []event.Event
			for _, e := range wanted {
				twice = append(twice, e, e)
			}
			apply(twice, 14) // the batches begin and end with the same events as before
			if diff := cmp.Diff(once, l.rows(t, tables)); diff != "" {
				t.Errorf("rows of events that came twice (-once +twice):\n%s", diff)
			}
			if len(p.Tables()) == 0 {
				return
			}
			if n, err := p.Verify(t.Context(), l.pool, l.pool, func(d projections.Difference) { t.Error(d) }); err != nil || n == 0 {
				t.Errorf("verified %d: %v", n, err)
			}
		})
	}
}

// rows returns the rows of the tables as text, without what the database makes: the time at which a
// count changed, and the ids of a history's versions.
func (l line) rows(t *testing.T, tables []string) (all []string) {
	t.Helper()
	for _, table := range tables {
		without := ""
		switch {
		case table == "edge_counts":
			without = " - 'updated_at'"
		case strings.HasSuffix(table, "_history"):
			without = " - 'version_id' #- '{metadata,version_id}'"
		}
		rows, _ := l.pool.Query(t.Context(),
			fmt.Sprintf(`SELECT '%[1]s ' || (to_jsonb(r)%[2]s)::text FROM %[1]s r ORDER BY 1`, table, without))
		some, err := pgx.CollectRows(rows, pgx.RowTo[string])
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, some...)
	}
	return all
}
