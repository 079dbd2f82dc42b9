package history

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/versioned"
	"github.com/tidings/tidings/kinds"
	"github.com/tidings/tidings/store"
)

type head = versioned.Head[json.RawMessage]

// entityKey names an entity of a kind: its tenant and the values of its key columns.
type entityKey struct {
	tenant int64
	key    string
}

func keyOf(h head) entityKey { return entityKey{h.TenantID, strings.Join(h.Key, "/")} }

// RetainChildren applies retention to the history of a kind's children. If the truth no longer has
// a child, it marks the child's history as deleted once no version was added for terms.After. It
// purges the whole history of a child that has been deleted or erased for as long. The history of a
// living child stays at any age. Both pools act as the system role; they may be on two servers. See
// versioned.Retain.
func RetainChildren(ctx context.Context, truth, projection *pgxpool.Pool, k kinds.Child, terms versioned.Terms) error {
	return retain(ctx, Children(k).raw, projection, terms,
		func(ctx context.Context, tenant int64, heads []head, now map[entityKey]entityNow) error {
			var refs []event.Ref
			for _, h := range heads {
				refs = append(refs, event.Ref{Type: k.Name, Child: h.Key[0]})
			}
			states, err := store.GetChildren(ctx, truth, tenant, k, refs)
			for _, s := range states {
				now[entityKey{tenant, s.Object.ID}] = entityNow{s.Object.Version, s.Object.AuthorState != event.AuthorActive}
			}
			return err
		})
}

// RetainEdges is like RetainChildren for the history of a kind's edges: an active edge keeps its
// history.
func RetainEdges(ctx context.Context, truth, projection *pgxpool.Pool, k kinds.Edge, terms versioned.Terms) error {
	return retain(ctx, Edges(k).raw, projection, terms,
		func(ctx context.Context, tenant int64, heads []head, now map[entityKey]entityNow) error {
			var refs []event.Ref
			for _, h := range heads {
				from, err1 := event.ParseID(h.Key[0])
				to, err2 := event.ParseID(h.Key[1])
				if err1 != nil || err2 != nil {
					return fmt.Errorf("the key %q of a %s does not consist of numbers", h.Key, k.Name)
				}
				refs = append(refs, event.Ref{Type: k.Name, From: from, To: to})
			}
			states, err := store.GetEdges(ctx, truth, tenant, k, refs)
			for _, s := range states {
				now[entityKey{tenant, s.Object.From.String() + "/" + s.Object.To.String()}] = entityNow{s.Object.Version,
					!s.Object.Active()}
			}
			return err
		})
}

// entityNow is the current state of an entity in the truth.
type entityNow struct {
	version int64
	gone    bool
}

// retain compares the heads that are old enough with the truth, which read returns. It keeps a
// history whose next version is not applied yet.
func retain(ctx context.Context, table *raw, projection *pgxpool.Pool, terms versioned.Terms,
	read func(context.Context, int64, []head, map[entityKey]entityNow) error) error {
	choose := func(ends func(h head, now entityNow, there bool) bool) func(context.Context, []head) ([]head, error) {
		return func(ctx context.Context, heads []head) ([]head, error) {
			byTenant := make(map[int64][]head)
			for _, h := range heads {
				byTenant[h.TenantID] = append(byTenant[h.TenantID], h)
			}
			all := make(map[entityKey]entityNow, len(heads))
			for tenant, some := range byTenant {
				if err := read(ctx, tenant, some, all); err != nil {
					return nil, err
				}
			}
			return slices.DeleteFunc(heads, func(h head) bool {
				now, there := all[keyOf(h)]
				return !ends(h, now, there)
			}), nil
		}
	}
	return table.Retain(ctx, projection, versioned.Retention[json.RawMessage]{Terms: terms,
		Invalid: choose(func(_ head, _ entityNow, there bool) bool { return !there }),
		Ended: choose(func(h head, now entityNow, there bool) bool {
			return !there || now.gone && now.version == h.Position
		}),
	})
}
