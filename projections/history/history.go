package history

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"sync"

	"github.com/jackc/pgx/v5"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/versioned"
	"github.com/tidings/tidings/kinds"
	"github.com/tidings/tidings/projections"
)

// Name is the name of the projection and of its consumer, the archiver.
const Name = "archiver"

const sequence = "history_version_id"

// Projection applies the events of edges and children of every current kind. It has no state of its
// own.
type Projection struct {
	kinds  func() *kinds.Set
	beside bool // others may record the same entities at the same time
}

// New returns a projection. It calls now for the current kinds whenever it needs them; now is
// usually catalog.Catalog.Now.
func New(now func() *kinds.Set) *Projection { return &Projection{kinds: now} }

var _ projections.Record = (*Projection)(nil)

// ForReplay returns the projection for a replay, which records entities that the live consumer may
// record at the same time. Each call of its Apply waits for other transactions with the same
// histories, and keeps them out until its transaction ends.
func (p *Projection) ForReplay() projections.Projection {
	return &Projection{kinds: p.kinds, beside: true}
}

// raw is a history as stored: its objects are JSON with the names of the kind.
type raw = versioned.Table[json.RawMessage]

// rawTables has the histories by table and key columns.
var rawTables sync.Map

func rawOf(kind string, author bool, keys ...versioned.Column) *raw {
	id := fmt.Sprint(kind, author, keys)
	if t, ok := rawTables.Load(id); ok {
		return t.(*raw)
	}
	def := versioned.Definition{Table: kind + "_history", Sequence: sequence, Version: "version", Key: keys,
		Purged: kind + "_history_purged"}
	if author {
		def.Indexes = [][]versioned.Column{{{Name: "author_id", Type: "text"}}}
	}
	t, _ := rawTables.LoadOrStore(id, versioned.New[json.RawMessage](def))
	return t.(*raw)
}

// Table is the history of the entities of a kind.
type Table[T any] struct {
	kind   string
	raw    *raw
	decode func([]byte) (T, error)
}

// Children returns the history of a kind's children. Its key is the child's id.
func Children(k kinds.Child) *Table[event.Child] {
	n := k.Names()
	return &Table[event.Child]{k.Name, rawOf(k.Name, true, versioned.Column{Name: n.ID, Type: "uuid"}), n.Parse}
}

// Edges returns the history of a kind's edges. Its key is (origin, target).
func Edges(k kinds.Edge) *Table[event.Edge] {
	n := k.Names()
	return &Table[event.Edge]{k.Name, rawOf(k.Name, false, versioned.Column{Name: n.From, Type: "text"},
		versioned.Column{Name: n.To, Type: "text"}), n.Parse}
}

// Recent is versioned.Table.Recent.
func (t *Table[T]) Recent(ctx context.Context, tx pgx.Tx, tenant int64, key versioned.Key, before int64,
	limit int) ([]versioned.Version[T], error) {
	all, err := t.raw.Recent(ctx, tx, tenant, key, before, limit)
	return t.versions(all, err)
}

// Query is versioned.Table.Query.
func (t *Table[T]) Query(ctx context.Context, tx pgx.Tx, tenant int64, fields []versioned.Field, after versioned.Key,
	limit int) ([]versioned.Version[T], error) {
	all, err := t.raw.Query(ctx, tx, tenant, fields, after, limit)
	return t.versions(all, err)
}

func (t *Table[T]) versions(all []versioned.Version[json.RawMessage], err error) ([]versioned.Version[T], error) {
	if err != nil {
		return nil, err
	}
	out := make([]versioned.Version[T], len(all))
	for i, v := range all {
		out[i] = versioned.Version[T]{Metadata: v.Metadata, Position: v.Position}
		if out[i].Object, err = t.decode(v.Object); err != nil {
			return nil, fmt.Errorf("version %d in the history of %s: %w", v.Metadata.VersionID, t.kind, err)
		}
	}
	return out, nil
}

// Name returns the projection's name.
func (*Projection) Name() string { return Name }

// Wants reports whether the projection applies events of the aggregate type.
func (p *Projection) Wants(aggregateType string) bool {
	set := p.kinds()
	_, child := set.Child(aggregateType)
	_, edge := set.Edge(aggregateType)
	return child || edge
}

// Apply records one version per event, in the caller's transaction. A payload that does not decode,
// or that has no actor, is a permanent error. Cost: three statements per table for any number of
// events.
func (p *Projection) Apply(ctx context.Context, tx pgx.Tx, events []event.Event) error {
	set := p.kinds()
	entries := make(map[string][]versioned.Entry[json.RawMessage]) // by kind
	for i := range events {
		entry, err := entryOf(set, &events[i])
		if err != nil {
			return err
		}
		kind := events[i].AggregateType
		entries[kind] = append(entries[kind], entry)
	}
	for _, kind := range slices.Sorted(maps.Keys(entries)) {
		var table *raw
		if k, ok := set.Child(kind); ok {
			table = Children(k).raw
		} else {
			table = Edges(set.Edges[kind]).raw
		}
		if p.beside {
			if err := table.LockAll(ctx, tx); err != nil {
				return err
			}
		}
		if _, err := table.Record(ctx, tx, entries[kind]); err != nil {
			return err
		}
	}
	return nil
}

// entryOf returns the version that the event carries.
func entryOf(set *kinds.Set, e *event.Event) (entry versioned.Entry[json.RawMessage], err error) {
	entry.TenantID = e.TenantID
	var version int64
	if k, ok := set.Child(e.AggregateType); ok {
		c, err := e.DecodeChild(k.Names())
		if err != nil {
			return entry, err
		}
		entry.By, entry.At, entry.Deleted, version = c.Actor, c.UpdatedAt.Time, c.AuthorState != event.AuthorActive, c.Version
		if entry.Object, err = c.Encode(k.Names()); err != nil {
			return entry, err
		}
	} else if k, ok := set.Edge(e.AggregateType); ok {
		edge, err := e.DecodeEdge(k.Names())
		if err != nil {
			return entry, err
		}
		entry.By, entry.At, entry.Deleted, version = edge.Actor, edge.UpdatedAt.Time, !edge.Active(), edge.Version
		if entry.Object, err = edge.Encode(k.Names()); err != nil {
			return entry, err
		}
	} else {
		return entry, event.Permanent(fmt.Errorf("event %s: there is no kind %s", e.ID, e.AggregateType))
	}
	if entry.By == "" {
		return entry, event.Permanent(fmt.Errorf("event %s: version %d of a %s has no actor", e.ID, version, e.AggregateType))
	}
	return entry, nil
}
