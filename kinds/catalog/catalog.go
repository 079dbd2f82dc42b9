package catalog

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
	"github.com/tidings/tidings/internal/versioned"
	"github.com/tidings/tidings/internal/work"
	"github.com/tidings/tidings/kinds"
)

// Database is one of the two databases that keep kinds: Truth or Projections.
type Database = *database

// database has the differences between the two: the table of the stored object, and the tables of
// each kind.
type database struct {
	name         string
	table        *versioned.Table[stored]
	makeEdges    func(kinds.Edge) []Statement
	makeChildren func(kinds.Child) []Statement
	narrow       func(*kinds.Set) []Statement // sets the constraints of ids
	drop         func(name, plural string) []Statement
	rows         []tableRows
}

// The two databases. Apply writes the projections first, so that a reader of an event finds the
// event's kind.
var (
	Truth Database = &database{"kinds", versioned.New[stored](definition("kinds", "object_version_id")), truthEdges,
		truthChildren, truthNarrow, truthDrop, []tableRows{
			{"edges", "kind"}, {"children", "kind"}, {"children_archive", "kind"}, {"threads", "kind"},
			{"outbox_messages", "aggregate_type"}, {"outbox_messages_dlq", "aggregate_type"},
			{"outbox_messages_archive", "aggregate_type"}}}
	Projections Database = &database{"projection_kinds", versioned.New[stored](definition("projection_kinds", "history_version_id")),
		historyOfEdges, historyOfChildren, noIDs, historyDrop, []tableRows{
			{"consumer_dead_letters", "aggregate_type"}}}
)

func definition(table, sequence string) versioned.Definition {
	return versioned.Definition{Table: table, Sequence: sequence, Key: []versioned.Column{{Name: "name", Type: "text"}}}
}

// stored is the only object of the table.
type stored struct {
	Name   string          `json:"name"`  // installation
	Kinds  json.RawMessage `json:"kinds"` // a file: the kinds that are not built in
	Reason string          `json:"reason,omitempty"`
}

// The object's tenant and its name.
const (
	installation = 0
	objectName   = "installation"
)

// A Catalog reads the database by itself every pollInterval. Between two reads on request it waits
// minInterval.
const (
	pollInterval = 3 * time.Second
	minInterval  = 50 * time.Millisecond
)

// Catalog has the kinds in force. It is safe for concurrent use.
type Catalog struct {
	pool *pgxpool.Pool
	from Database
	log  *slog.Logger

	now     atomic.Pointer[inForce]
	looking chan struct{} // held by the caller that reads
	began   time.Time     // start of the last successful read; guarded by looking
}

type inForce struct {
	version int64 // of the object; 0 for none
	set     *kinds.Set
}

// New returns a catalog that has only the built-in kinds until Load. The pool's login acts
// as tidings_api or tidings_system.
func New(pool *pgxpool.Pool, from Database, log *slog.Logger) *Catalog {
	c := &Catalog{pool: pool, from: from, log: log.With("component", "kinds"), looking: make(chan struct{}, 1)}
	c.now.Store(&inForce{set: kinds.Builtin()})
	return c
}

// Now returns the kinds as they were last read.
func (c *Catalog) Now() *kinds.Set { return c.now.Load().set }

// Load reads the kinds for the first time.
func (c *Catalog) Load(ctx context.Context) error {
	_, err := c.Refresh(ctx)
	return err
}

// Refresh reads the kinds and reports whether they have changed since it was called. When it
// returns nil, kinds that were applied before the call are in force. Concurrent callers share a
// read, and reads are at least 50 ms apart. This bounds the cost of requests for unknown kinds.
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

// read replaces the kinds in force if the stored object has another version. The caller holds
// looking.
func (c *Catalog) read(ctx context.Context) error {
	if work.Sleep(ctx, minInterval-time.Since(c.began)) != nil {
		return ctx.Err()
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
		c.log.InfoContext(ctx, "kinds changed", "version", found.version, "edges", len(found.set.Edges), "children",
			len(found.set.Children))
	}
	return nil
}

// load reads the stored object. at is the version that the caller already has, or nil.
func (w Database) load(ctx context.Context, tx pgx.Tx, at *inForce) (inForce, error) {
	v, err := w.table.Get(ctx, tx, installation, versioned.Key{objectName})
	if errors.Is(err, versioned.ErrNotFound) {
		return inForce{set: kinds.Builtin()}, nil
	}
	if err != nil {
		return inForce{}, fmt.Errorf("read kinds: %w", err)
	}
	if at != nil && at.version == v.Metadata.VersionID {
		return *at, nil
	}
	set, err := kinds.Builtin().ExtendJSON(v.Object.Kinds)
	if err != nil {
		return inForce{}, fmt.Errorf("the kinds of version %d are not valid in this release: %w", v.Metadata.VersionID, err)
	}
	return inForce{v.Metadata.VersionID, set}, nil
}

// InForce reads the kinds in force in the truth of tx, which acts as tidings_system. A database
// with the outbox alone has the built-in ones, so that no upstream takes the name of one.
func InForce(ctx context.Context, tx pgx.Tx) (*kinds.Set, error) {
	var some bool
	if err := tx.QueryRow(ctx, `SELECT to_regclass('kinds') IS NOT NULL`).Scan(&some); err != nil || !some {
		return kinds.Builtin(), err
	}
	now, err := Truth.load(ctx, tx, nil)
	return now.set, err
}

// Run reads the kinds every few seconds until ctx ends.
func (c *Catalog) Run(ctx context.Context) error {
	failed := false
	for work.Sleep(ctx, pollInterval/2+rand.N(pollInterval)) == nil { // processes do not poll together
		_, err := c.Refresh(ctx)
		if err != nil && ctx.Err() == nil && !failed {
			c.log.WarnContext(ctx, "cannot read the kinds: those of the last read stay in force", "err", err)
		}
		failed = err != nil
	}
	return nil
}
