package relay

import (
	"cmp"
	"context"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/kinds/declared"
	"github.com/tidings/tidings/outbox"
)

// names has the names that upstreams chose for their events. It is safe for concurrent use.
type names struct {
	pool   *pgxpool.Pool
	source string // of events whose upstream chose none

	mu   sync.Mutex
	seen map[string]naming // by aggregate type
}

// naming is that of an aggregate type. An upstream never changes its own.
type naming struct {
	event.Naming
	until time.Time // when to look an aggregate type up again that is no upstream; zero: never
}

// undeclaredFor is how long an aggregate type counts as no upstream. Before the declaration of one
// only an operator can have written rows of it, so an older answer harms few events.
const undeclaredFor = time.Second

// of returns the naming of each row's events, by aggregate type. It reads those of types that the
// relay has not met.
func (n *names) of(ctx context.Context, rows []outbox.Row) (map[string]event.Naming, error) {
	all, unknown, now := make(map[string]event.Naming), make(map[string]bool), time.Now()
	n.mu.Lock()
	for i := range rows {
		t := rows[i].AggregateType
		if known, ok := n.seen[t]; ok && (known.until.IsZero() || now.Before(known.until)) {
			all[t] = known.Naming
		} else {
			unknown[t] = true
		}
	}
	n.mu.Unlock()
	if len(unknown) == 0 {
		return all, nil
	}
	read, err := declared.Namings(ctx, n.pool, slices.Collect(maps.Keys(unknown)))
	if err != nil {
		return nil, err
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.seen == nil {
		n.seen = make(map[string]naming)
	}
	for t := range unknown {
		found := naming{Naming: read[t]}
		if _, declared := read[t]; !declared {
			found.until = now.Add(undeclaredFor)
		}
		found.Source = cmp.Or(found.Source, n.source)
		n.seen[t], all[t] = found, found.Naming
	}
	return all, nil
}
