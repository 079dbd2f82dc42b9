//go:build faults

package subscribe_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"math/rand/v2"
	"os"
	"os/exec"
	"syscall"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/nats-io/nats.go"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/testkit"
	"github.com/tidings/tidings/kinds"
	"github.com/tidings/tidings/kinds/kindfile"
	"github.com/tidings/tidings/subscribe"
	"github.com/tidings/tidings/subscribe/projector"
)

// clubEnv makes this binary a program of the book club.
const clubEnv = "TIDINGS_TEST_BOOK_CLUB"

// clubProgram is a program of the book club: the mailer without a database, and the read model of
// trending books with one.
type clubProgram struct{ NATS, Database string }

const clubKinds = `
objects:
  book: {plural: books}
edges:
  reading: {plural: readings, from: user, to: book, forward: readings, reverse: readers}
children:
  note: {plural: notes, parent: book}
`

const trendingSQL = `
INSERT INTO trending VALUES ($1, $2, $3) ON CONFLICT (book) DO UPDATE
   SET readers = trending.readers + excluded.readers, notes = trending.notes + excluded.notes`

func init() {
	if os.Getenv(clubEnv) == "" {
		return
	}
	testkit.EndWithTest(nil)
	fmt.Fprintln(os.Stderr, "the program ended:", runClub(context.Background()))
	os.Exit(1)
}

func runClub(ctx context.Context) error {
	var in clubProgram
	err := json.Unmarshal([]byte(os.Getenv(clubEnv)), &in)
	all, refused := kindfile.Extend(kinds.Builtin(), []byte(clubKinds))
	nc, unconnected := nats.Connect(in.NATS)
	if err := errors.Join(err, refused, unconnected); err != nil {
		return err
	}
	opts := []subscribe.Option{subscribe.Kinds(all), subscribe.Takeover(time.Second),
		subscribe.Log(slog.New(slog.NewTextHandler(os.Stderr, nil)))}
	if in.Database == "" {
		return subscribe.Handle(ctx, nc, "club", "note.created", func(_ context.Context, e subscribe.Event[event.Child]) error {
			return nc.Publish("mails", []byte(e.Data.ID))
		}, append(opts, subscribe.InOrder(), subscribe.Attempts(100))...)
	}
	pool, err := pgxpool.New(ctx, in.Database)
	if err != nil {
		return err
	}
	return projector.Project(ctx, nc, pool, "trending", func(ctx context.Context, tx pgx.Tx, batch []event.Event) error {
		var q pgx.Batch
		for i := range batch {
			readers, notes := 0, 1
			if batch[i].AggregateType == "reading" {
				e, err := subscribe.Decode[event.Edge](all, &batch[i])
				if err != nil {
					return err
				}
				if readers, notes = -1, 0; e.Active() {
					readers = 1
				}
			}
			q.Queue(trendingSQL, batch[i].AggregateID, readers, notes)
		}
		return tx.SendBatch(ctx, &q).Close()
	}, append(opts, subscribe.Only("reading", "note"), subscribe.Batch(20))...)
}

// club writes what happens in the club, and knows what the programs must have made of it.
type club struct {
	*rig
	rng     *rand.Rand
	kinds   *kinds.Set
	reading map[[2]event.ID]int64 // versions, by user and book; odd if the user reads the book
	notes   []string
	want    map[event.ID][2]int // the readers and notes of each book
}

func (c *club) write(events int) {
	c.t.Helper()
	reading, _ := c.kinds.Edge("reading")
	note, _ := c.kinds.Child("note")
	for range events {
		user, book := event.IDOf(c.rng.Int64N(20)), event.IDOf(1+c.rng.Int64N(16))
		now, count := event.Time{Time: time.Now()}, c.want[book]
		e := event.Event{ID: uuid.NewString(), TenantID: 1, AggregateID: book, Version: 1, OccurredAt: now.Time, Type: event.Created}
		var err error
		if c.rng.IntN(2) == 0 {
			child := event.Child{ID: uuid.NewString(), Parent: book, AuthorID: user, Body: "well", AuthorState: event.AuthorActive,
				ModerationState: event.ModerationNone, Version: 1, CreatedAt: now, UpdatedAt: now, Actor: "test"}
			e.AggregateType, c.notes = "note", append(c.notes, child.ID)
			e.Payload, err = child.Encode(note.Names())
			count[1]++
		} else {
			pair := [2]event.ID{user, book}
			c.reading[pair]++
			edge := event.Edge{From: user, To: book, Status: event.StatusActive, Version: c.reading[pair], CreatedAt: now,
				PositionedAt: now, UpdatedAt: now, Actor: "test"}
			count[0]++
			if edge.Version%2 == 0 {
				edge.Status, e.Type = event.StatusRemoved, event.Removed
				count[0] -= 2
			}
			e.AggregateType = "reading"
			e.Payload, err = edge.Encode(reading.Names())
		}
		if err != nil {
			c.t.Fatal(err)
		}
		c.want[book] = count
		c.publish(e)
	}
}

// TestABookClubIsExactOverKillsAndResizes has kinds of its own, an edge and a child. It kills the
// two instances of a mailer and of a read model, again and again, and resizes the partitions.
func TestABookClubIsExactOverKillsAndResizes(t *testing.T) {
	r := newRig(t, 2)
	pool, database := r.schema("club")
	if err := projector.Migrate(t.Context(), pool); err != nil {
		t.Fatal(err)
	}
	if _, err := pool.Exec(t.Context(), `CREATE TABLE trending (book text PRIMARY KEY, readers bigint, notes bigint)`); err != nil {
		t.Fatal(err)
	}
	all, err := kindfile.Extend(kinds.Builtin(), []byte(clubKinds))
	if err != nil {
		t.Fatal(err)
	}
	c := &club{rig: r, rng: rand.New(rand.NewPCG(1, uint64(time.Now().UnixNano()))), kinds: all, reading: map[[2]event.ID]int64{},
		want: map[event.ID][2]int{}}
	mails := make(chan *nats.Msg, 100_000)
	sub, err := r.nc.ChanSubscribe("mails", mails)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = sub.Unsubscribe() }()
	start := func(i int) *testkit.Process {
		in := clubProgram{NATS: r.b.URL}
		if i%2 == 1 {
			in.Database = database
		}
		text, err := json.Marshal(in)
		if err != nil {
			t.Fatal(err)
		}
		cmd := exec.Command(os.Args[0])
		cmd.Env = append(os.Environ(), clubEnv+"="+string(text))
		return testkit.Spawn(t, []string{"mailer", "trending"}[i%2], cmd)
	}
	var programs [4]*testkit.Process
	for i := range programs {
		programs[i] = start(i)
	}
	for round := range 8 {
		c.write(100)
		i := (round + c.rng.IntN(2)*2) % 4 // a mailer and a read model in turn
		programs[i].Signal(syscall.SIGKILL)
		programs[i].AwaitKilled()
		if to := map[int]int{2: 4, 5: 1}[round]; to > 0 {
			r.resize(to)
		}
		c.write(50)
		programs[i] = start(i)
	}
	mailed := map[string]bool{}
	r.await("a mail for each note, and exact counts", func() (bool, error) {
		for len(mails) > 0 {
			mailed[string((<-mails).Data)] = true
		}
		for _, id := range c.notes {
			if !mailed[id] {
				return false, fmt.Errorf("%d of %d notes have mails", len(mailed), len(c.notes))
			}
		}
		got := map[event.ID][2]int{}
		rows, _ := pool.Query(t.Context(), `SELECT book, readers, notes FROM trending`)
		var book event.ID
		var readers, notes int
		_, err := pgx.ForEachRow(rows, []any{&book, &readers, &notes}, func() error {
			got[book] = [2]int{readers, notes}
			return nil
		})
		if err == nil && !maps.Equal(got, c.want) {
			err = fmt.Errorf("the read model has %v, want %v", got, c.want)
		}
		return err == nil, err
	})
}
