package kinds

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/versioned"
)

// Database is one of the two that keep kinds: Truth or Projections.
type Database = *database

// database has what differs between the two: the object's table, and what there is for each kind.
type database struct {
	name         string
	table        *versioned.Table[stored]
	makeEdges    func(Edge) []Statement
	makeChildren func(Child) []Statement
	drop         func(name, plural string) []Statement
	rows         []tableRows
}

// The two databases. Apply writes the projections first: whoever reads an event of a kind finds the kind.
var (
	Truth Database = &database{"kinds", versioned.New[stored](definition("kinds", "object_version_id")), truthEdges, truthChildren, truthDrop, []tableRows{
		{"edges", "kind"}, {"children", "kind"}, {"children_archive", "kind"},
		{"outbox_messages", "aggregate_type"}, {"outbox_messages_dlq", "aggregate_type"}, {"outbox_messages_archive", "aggregate_type"}}}
	Projections Database = &database{"projection_kinds", versioned.New[stored](definition("projection_kinds", "history_version_id")), historyOfEdges, historyOfChildren, historyDrop, []tableRows{
		{"consumer_dead_letters", "aggregate_type"}}}
)

func definition(table, sequence string) versioned.Definition {
	return versioned.Definition{Table: table, Sequence: sequence, Key: []versioned.Column{{Name: "name", Type: "text"}}}
}

// stored is the one object of the table.
type stored struct {
	Name   string          `json:"name"`  // installation
	Kinds  json.RawMessage `json:"kinds"` // a file: those that are not built in
	Reason string          `json:"reason,omitempty"`
}

// The object's tenant and its name.
const (
	installation = 0
	objectName   = "installation"
)

// How often a Catalog reads the database by itself, and how long it leaves between two reads that somebody asks for.
const (
	pollInterval = 3 * time.Second
	minInterval  = 50 * time.Millisecond
)

// Catalog holds the kinds that are in force. It is safe for concurrent use.
type Catalog struct {
	pool *pgxpool.Pool
	from Database
	log  *slog.Logger

	now     atomic.Pointer[inForce]
	looking chan struct{} // held by the one that reads
	began   time.Time     // the last read that succeeded; held by looking
}

type inForce struct {
	version int64 // of the object; 0 for none
	set     *Set
}

// NewCatalog returns a catalog with the built-in kinds alone: call Load. The pool's login acts as tidings_api or tidings_system.
func NewCatalog(pool *pgxpool.Pool, from Database, log *slog.Logger) *Catalog {
	c := &Catalog{pool: pool, from: from, log: log.With("component", "kinds"), looking: make(chan struct{}, 1)}
	c.now.Store(&inForce{set: Builtin()})
	return c
}

// Now returns the kinds as they were last read.
func (c *Catalog) Now() *Set { return c.now.Load().set }

// Load reads the kinds for the first time.
func (c *Catalog) Load(ctx context.Context) error {
	_, err := c.Refresh(ctx)
	return err
}

// Refresh reads the kinds and reports whether they are others than when it was called. What was applied before the call is in force when it
// returns nil. Callers that come together share a read, and reads are at least 50 ms apart: whoever asks for kinds that are not there costs no more.
func (c *Catalog) Refresh(ctx context.Context) (changed bool, err error) {
	before, called := c.now.Load(), time.Now()
	select {
	case c.looking <- struct{}{}:
		defer func() { <-c.looking }()
	case <-ctx.Done():
		return false, ctx.Err()
	}
	if !c.began.After(called) {
		if err := c.read(ctx); err != nil {
			return false, err
		}
	}
	return c.now.Load() != before, nil
}

// read replaces what is in force if the object has another version. The caller holds looking.
func (c *Catalog) read(ctx context.Context) error {
	if wait := minInterval - time.Since(c.began); wait > 0 {
		select {
		case <-time.After(wait):
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	began := time.Now()
	var found inForce
	err := postgres.InTenant(ctx, c.pool, installation, pgx.TxOptions{AccessMode: pgx.ReadOnly}, func(tx pgx.Tx) (err error) {
		found, err = c.from.load(ctx, tx, c.now.Load())
		return err
	})
	if err != nil {
		return err
	}
	c.began = began
	if found.version != c.now.Load().version {
		c.now.Store(&found)
		c.log.InfoContext(ctx, "kinds changed", "version", found.version, "edges", len(found.set.Edges), "children", len(found.set.Children))
	}
	return nil
}

// load reads the object; at is what the caller has already, or nil.
func (w Database) load(ctx context.Context, tx pgx.Tx, at *inForce) (inForce, error) {
	v, err := w.table.Get(ctx, tx, installation, versioned.Key{objectName})
	if errors.Is(err, versioned.ErrNotFound) {
		return inForce{set: Builtin()}, nil
	}
	if err != nil {
		return inForce{}, fmt.Errorf("read kinds: %w", err)
	}
	if at != nil && at.version == v.Metadata.VersionID {
		return *at, nil
	}
	set, err := Builtin().Extend(v.Object.Kinds)
	if err != nil {
		return inForce{}, fmt.Errorf("the kinds of version %d do not go with this release: %w", v.Metadata.VersionID, err)
	}
	return inForce{v.Metadata.VersionID, set}, nil
}

// Run reads the kinds every few seconds until ctx ends.
func (c *Catalog) Run(ctx context.Context) error {
	failed := false
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(pollInterval/2 + rand.N(pollInterval)): // processes do not poll together
		}
		_, err := c.Refresh(ctx)
		if err != nil && ctx.Err() == nil && !failed {
			c.log.WarnContext(ctx, "kinds cannot be read: those read last stay in force", "err", err)
		}
		failed = err != nil
	}
}
