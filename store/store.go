package store

import (
	"context"
	"errors"
	"fmt"
	"math/bits"
	"strings"
	"sync"
	"sync/atomic"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"golang.org/x/sync/singleflight"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/tracing"
	"github.com/tidings/tidings/internal/versioned"
	"github.com/tidings/tidings/kinds"
	"github.com/tidings/tidings/outbox"
)

// Errors of single items. The API maps them to problems.
var (
	// ErrNotFound reports an entity that the tenant does not have.
	ErrNotFound = errors.New("store: not found")
	// ErrInvalid reports a value that the caller should have refused, for example an id with a
	// blank.
	ErrInvalid = errors.New("store: invalid value")
)

// Meta names the actor and the trace of a write.
type Meta struct {
	Actor       string // the cause of the change, in events and history; required
	TraceParent string // W3C traceparent of the request, or empty

	tenant int64 // of a write in a group
}

// Store writes and reads the truth. It is safe for concurrent use.
type Store struct {
	pool    *pgxpool.Pool
	wake    func(slot int)
	slug    func() string // returns a random slug; a test makes it collide
	threads *versioned.Table[event.Thread]

	edges      edgeKinds
	slots      *slots   // for single writes, which commit in groups
	childKinds sync.Map // *childKind by childShape

	returnBudget time.Duration      // the constant; tests shorten it
	moveRows     int                // the constant; tests lower it
	returns      singleflight.Group // keyed by tenant, kind and object
	returned     atomic.Int64       // number of threads
}

// New returns a Store on pool, whose connections act as postgres.RoleAPI. After each commit the
// Store calls wake with every slot that got events (broker.Waker); wake must not block. If wake is
// nil, the relay finds the events when it polls.
func New(pool *pgxpool.Pool, wake func(slot int)) *Store {
	if wake == nil {
		wake = func(int) {}
	}
	s := &Store{pool: pool, wake: wake, slug: newSlug, threads: threads(), slots: newSlots(pool),
		returnBudget: returnBudget, moveRows: moveRows}
	return s
}

// Delivered returns how far the events of all tenants have been delivered.
func (s *Store) Delivered(ctx context.Context) (outbox.Delivered, error) {
	return outbox.ReadDelivered(ctx, s.pool)
}

// unit is one write transaction, with the events of the states that it has written. They are
// appended to the outbox last.
type unit struct {
	pgx.Tx
	events []event.Event
	turn   int // the number of the round that runs, from 0
}

// write runs fn in a read-write transaction of the tenants and wakes the relay after the commit. fn
// may run more than once, so it must reset its outcomes each time.
func (s *Store) write(ctx context.Context, at place, fn func(tx *unit) error) error {
	var events []event.Event
	var created tracing.Creation
	work := func(tx pgx.Tx) (postgres.Landed, error) {
		u := unit{Tx: tx}
		if err := fn(&u); err != nil {
			return nil, err
		}
		events = u.events
		if len(events) == 0 { // nothing has changed
			return nil, nil
		}
		created = tracing.From(ctx).Create(ctx, events)
		landed := func(ctx context.Context, tx pgx.Tx) (bool, error) { return outbox.Appended(ctx, tx, events) }
		return landed, outbox.Append(ctx, tx, events)
	}
	if err := postgres.WriteInTenants(ctx, s.pool, at.tenants, at.lockTimeout, work); err != nil {
		return narrowed(err)
	}
	created.End()
	var touched uint32 // a bit per slot
	for i := range events {
		touched |= 1 << events[i].Slot
	}
	for ; touched != 0; touched &= touched - 1 {
		s.wake(bits.TrailingZeros32(touched))
	}
	return nil
}

// narrowed returns an error that is ErrInvalid if the tables refuse an id that its object's form
// allowed until a moment ago: the process does not know the narrower form yet.
func narrowed(err error) error {
	if name := postgres.CheckName(err); strings.HasSuffix(name, "_"+kinds.Integer) || strings.HasSuffix(name, "_"+kinds.UUID) {
		return fmt.Errorf("%w: %w", ErrInvalid, err)
	}
	return err
}

func (s *Store) read(ctx context.Context, tenant int64, fn func(tx pgx.Tx) error) error {
	return postgres.ProbeInTenant(ctx, s.pool, tenant, fn)
}

// rounds splits the indexes 0..n-1 for which key reports ok into rounds; a set-based statement
// writes one round. No key occurs twice in a round, and equal keys keep their order. Items that
// want the same place (nil: none) keep their order too, but several of them may be in one round.
func rounds[K comparable](n int, key func(i int) (k K, place any, ok bool)) [][]int {
	var all [][]int
	seen, wanted := make(map[K]int, n), make(map[any]int)
	for i := range n {
		k, place, ok := key(i)
		if !ok {
			continue
		}
		r := seen[k]
		if place != nil {
			r = max(r, wanted[place])
			wanted[place] = r
		}
		seen[k] = r + 1
		if r == len(all) {
			all = append(all, nil)
		}
		all[r] = append(all[r], i)
	}
	return all
}

// turns describes how items are written in one transaction, round by round: no two items of a round
// have one entity.
type turns[W any, K comparable, O any] struct {
	// check returns an item's entity and the place that it wants, if any. It returns false, and
	// fills in the outcome, to leave the item out.
	check func(item *W, o *O) (of K, place any, ok bool)
	write writeTurn[W, O]
	end   func(turns [][]int, out []O) error // nil, or it can roll back all rounds by an error
}

// writeTurn writes the items of a round, and fills in their outcomes.
type writeTurn[W, O any] func(ctx context.Context, tx *unit, items []W, turn []int, out []O) error

// inTurns writes the items, and returns the outcome of each.
func inTurns[W any, K comparable, O any](ctx context.Context, s *Store, at place, items []W, w turns[W, K, O]) ([]O, error) {
	out := make([]O, len(items))
	all := rounds(len(items), func(i int) (K, any, bool) { return w.check(&items[i], &out[i]) })
	if len(all) == 0 {
		return out, nil
	}
	err := s.write(ctx, at, func(tx *unit) error {
		for n, turn := range all {
			tx.turn = n
			for _, i := range turn {
				out[i] = *new(O) // reset by a retry of the transaction
			}
			if err := w.write(ctx, tx, items, turn, out); err != nil {
				return err
			}
		}
		if w.end == nil {
			return nil
		}
		return w.end(all, out)
	})
	return out, err
}

func checkMeta(m Meta) error {
	if !ValidActor(m.Actor) {
		return fmt.Errorf("%w: actor %.80q", ErrInvalid, m.Actor)
	}
	return nil
}

func wireTime(t time.Time) event.Time { return event.Time{Time: t.UTC()} }

func notFound(err error) error {
	if errors.Is(err, pgx.ErrNoRows) {
		return ErrNotFound
	}
	return err
}

// MaxActorBytes bounds the name of an actor.
const MaxActorBytes = 200

// ValidActor reports whether s can name an actor: 1 to MaxActorBytes bytes of printable UTF-8
// without blanks at its ends.
func ValidActor(s string) bool {
	if s == "" || len(s) > MaxActorBytes || strings.TrimSpace(s) != s || !utf8.ValidString(s) {
		return false
	}
	return strings.IndexFunc(s, func(r rune) bool { return !unicode.IsPrint(r) }) < 0
}

func checkID(form kinds.IDForm, id event.ID) error {
	if _, err := form.ParseID(string(id)); err != nil {
		return fmt.Errorf("%w: %w", ErrInvalid, err)
	}
	return nil
}

// checkUUID requires the form that PostgreSQL prints, because outcomes are matched to items by it.
func checkUUID(what, s string) error {
	if u, err := uuid.Parse(s); err != nil || u.String() != s {
		return fmt.Errorf("%w: %s %.80q is not a UUID in lower case", ErrInvalid, what, s)
	}
	return nil
}
