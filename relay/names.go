package relay

import (
	"context"
	"maps"
	"sync"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/kinds/upstreams"
	"github.com/tidings/tidings/outbox"
)

// names has the names that upstreams chose for their events. It is safe for concurrent use.
type names struct {
	pool *pgxpool.Pool

	mu       sync.Mutex
	declared map[string]event.Naming // by aggregate type
	others   map[string]bool         // aggregate types without a declaration when they were last looked up
}

// refresh reads the declarations.
func (n *names) refresh(ctx context.Context) error {
	all, err := upstreams.Namings(ctx, n.pool)
	if err != nil {
		return err
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.declared == nil || !maps.Equal(all, n.declared) {
		n.declared, n.others = all, make(map[string]bool)
	}
	return nil
}

// of returns the naming of each row's events, by aggregate type. An upstream is declared before its
// first event, so one read suffices for an aggregate type that the relay has not met.
func (n *names) of(ctx context.Context, rows []outbox.Row) (map[string]event.Naming, error) {
	for read := false; ; read = true {
		n.mu.Lock()
		declared, unknown := n.declared, false
		for i := range rows {
			t := rows[i].AggregateType
			if _, is := declared[t]; is || n.others[t] {
				continue
			}
			if unknown = true; read {
				n.others[t] = true
			}
		}
		n.mu.Unlock()
		if !unknown || read {
			return declared, nil
		}
		if err := n.refresh(ctx); err != nil {
			return nil, err
		}
	}
}
