package deadletter

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"math"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/postgres"
)

// The sources of dead letters.
const (
	Outbox    = "outbox"    // the relay could not publish the event
	Consumers = "consumers" // a consumer could not apply the event
)

// The actions of an operator on dead letters.
const (
	Retry   = "retry"
	Discard = "discard"
)

// MaxBatch is the limit of letters that one statement or transaction reads, retries or discards.
const MaxBatch = 500

// ErrNotFound reports a letter that does not exist. It never was there, or somebody retried or
// discarded it.
var ErrNotFound = errors.New("deadletter: there is no such dead letter")

// Letter is an event that the relay could not publish, or that a consumer could not apply.
type Letter struct {
	Source   string      // Outbox or Consumers
	ID       int64       // Outbox: its former id there. Consumers: within a partition, in the order of the stream
	Consumer string      // "" for the outbox
	Event    event.Event // only Get reads Payload
	Error    string      // the latest
	DeadAt   time.Time
	Group    string // the id of its group
	Retries  int    // earlier retries that failed
	// First reports that no earlier letter of its aggregate exists. A retry of consumers begins
	// with such a letter, and only it may be discarded. A letter of the outbox is always first.
	First bool

	Attempts   int       // only of the outbox
	InsertedAt time.Time // only of the outbox: when the row was written there

	Headers map[string][]string // only of consumers, and only Get reads them
}

// Action is the record of an operator's action on a letter. In a dry run At is zero, and NewID 0.
type Action struct {
	At            time.Time
	Actor         string
	Action        string // Retry or Discard
	ID            int64  // the letter's
	EventID       string
	TenantID      int64
	AggregateType string
	AggregateID   event.ID
	EventType     string
	NewID         int64 // the message's new id in the outbox; 0 if none
	Reason        string
	Token         string // with which an API's caller acted, whatever Actor says; "" for commands and the console
	Consumer      string // "" for the outbox
	Error         string // of a failed retry, after which a consumer's letter stayed
	Slot          int    // the message's slot
}

// Filter selects the letters that match every field that is set. The zero Filter selects all. Its
// JSON is stored with operations.
type Filter struct {
	TenantID      int64     `json:"-"`                  // 0: every tenant
	Consumer      string    `json:"consumer,omitempty"` // only letters of consumers have one
	Group         string    `json:"group,omitempty"`    // the id of a group
	IDs           []int64   `json:"ids,omitempty"`      // nil: any
	AggregateType string    `json:"aggregate_type,omitempty"`
	AggregateID   event.ID  `json:"aggregate_id,omitempty"`
	EventType     string    `json:"event_type,omitempty"`
	EventID       string    `json:"-"`                    // a UUID
	DeadBefore    time.Time `json:"dead_before,omitzero"` // died before this time
	DeadAfter     time.Time `json:"dead_after,omitzero"`  // died at this time or later
	First         bool      `json:"-"`                    // only the first of each aggregate
	After         int64     `json:"-"`                    // only higher ids
}

// filterSQL is the WHERE of every statement with a filter.
const filterSQL = `
       (@consumer::text IS NULL OR {consumer} = @consumer)
   AND (@tenant::bigint IS NULL OR d.tenant_id = @tenant)
   AND (@ids::bigint[] IS NULL OR d.id = ANY(@ids))
   AND (@aggregate_type::text IS NULL OR d.aggregate_type = @aggregate_type)
   AND (@aggregate_id::text IS NULL OR d.aggregate_id = @aggregate_id)
   AND (@event_type::text IS NULL OR d.event_type = @event_type)
   AND (@event_id::uuid IS NULL OR d.event_id = @event_id)
   AND (@group::uuid IS NULL OR d.group_id = @group)
   AND (@dead_before::timestamptz IS NULL OR d.dead_at < @dead_before)
   AND (@dead_after::timestamptz IS NULL OR d.dead_at >= @dead_after)
   AND NOT (@first AND {behind})
   AND d.id > @after`

// Args returns the arguments of the filter's part of a statement (Table.Where).
func (f Filter) Args() pgx.StrictNamedArgs {
	return pgx.StrictNamedArgs{
		"consumer": postgres.IfSet(f.Consumer), "tenant": postgres.IfSet(f.TenantID), "ids": f.IDs,
		"aggregate_type": postgres.IfSet(f.AggregateType), "aggregate_id": postgres.IfSet(f.AggregateID),
		"event_type": postgres.IfSet(f.EventType), "event_id": postgres.IfSet(f.EventID), "group": postgres.IfSet(f.Group),
		"dead_before": postgres.IfSet(f.DeadBefore), "dead_after": postgres.IfSet(f.DeadAfter), "first": f.First, "after": f.After,
	}
}

// Table describes a source's table of letters, which has the alias d in the SQL expressions.
type Table struct {
	Source, Name    string
	Consumer, Error string // expressions
	Behind          string // expression: an earlier letter of the aggregate exists
	Any             string // condition on d that lets the index of the aggregates serve those of any consumer
	// Columns is the list of columns that only this table has, and Body that of the columns that
	// only Get reads. Fields returns the places of their values.
	Columns, Body string
	Fields        func(l *Letter) (columns, body []any)
}

const letterColumns = `d.id, {consumer}, d.event_id::text, d.tenant_id, d.aggregate_type, d.aggregate_id, d.event_type,
       d.event_version::int, {error}, d.dead_at, d.group_id::text, d.retries, NOT {behind}, {columns}`

const (
	// listSQL reads a page of letters without the columns of the body.
	//
	// Index: the table's primary key, or that of its aggregates.   Locks: none.
	listSQL = `
SELECT /* deadletter.list */ ` + letterColumns + `
  FROM {table} d
 WHERE ` + filterSQL + ` AND d.id <= @upto
 ORDER BY d.id LIMIT @limit`
	// countLettersSQL counts the letters that a filter selects, and reads all of them. Index: as
	// listSQL. Locks: none.
	countLettersSQL = `SELECT /* deadletter.count_letters */ count(*) FROM {table} d WHERE ` + filterSQL
	// getSQL reads one letter. Index: the table's primary key. Locks: none.
	getSQL = `
SELECT /* deadletter.get */ ` + letterColumns + `, {body}
  FROM {table} d
 WHERE d.id = @id AND (@tenant::bigint IS NULL OR d.tenant_id = @tenant)`
)

// sql fills in the names of the table.
func (t Table) sql(sql string) string {
	return strings.NewReplacer("{table}", t.Name, "{consumer}", t.Consumer, "{error}", t.Error, "{behind}", t.Behind, "{any}", t.Any,
		"{columns}", t.Columns, "{body}", t.Body).Replace(sql)
}

// Where returns the condition of a filter on the letters d, for the statements of the table's
// owner.
func (t Table) Where() string { return t.sql(filterSQL) }

// Statements returns the statements on the table. Tests prepare them.
func (t Table) Statements() []string {
	all := []string{t.sql(listSQL), t.sql(countLettersSQL), t.sql(getSQL)}
	for _, sql := range []string{groupsSQL, countSQL, groupSQL, walkSQL, listGroupSQL, idsOfGroupsSQL, idsOfAggregateSQL, windowSQL} {
		all = append(all, t.ofTenant(sql, 0), t.ofTenant(sql, 1))
	}
	return all
}

// fields returns the places of all columns but those of the body, and then those.
func (t Table) fields(l *Letter) (columns, body []any) {
	l.Source = t.Source
	columns, body = t.Fields(l)
	return append([]any{&l.ID, &l.Consumer, &l.Event.ID, &l.Event.TenantID, &l.Event.AggregateType, &l.Event.AggregateID, &l.Event.Type,
		&l.Event.Version, &l.Error, &l.DeadAt, &l.Group, &l.Retries, &l.First}, columns...), body
}

// Reader reads the letters of a source. It is safe for concurrent use.
//
// With a pool of postgres.RoleSystem it reads those of every tenant. With one of postgres.RoleAPI,
// row-level security shows it only those of the tenant that the caller names.
type Reader struct {
	pool  *pgxpool.Pool
	table Table

	window, windows, most int // pageWindow, pageWindows and MaxCount, except in tests
}

// NewReader returns a Reader of the table.
func NewReader(pool *pgxpool.Pool, t Table) Reader {
	return Reader{pool, t, pageWindow, pageWindows, MaxCount}
}

// List yields the first letters that the filter selects, by id and without the fields that only Get
// reads: at most limit, or with a negative limit all. It reads them in pages, so a letter that dies
// meanwhile may have an id of an earlier page. An error is the last element.
func (r *Reader) List(ctx context.Context, f Filter, limit int) iter.Seq2[Letter, error] {
	return postgres.Pages(limit, MaxBatch, func(limit int) (page []Letter, err error) {
		if page, err = r.list(ctx, f, math.MaxInt64, limit); err != nil {
			return nil, err
		}
		if len(page) > 0 {
			f.After = page[len(page)-1].ID
		}
		return page, nil
	})
}

// planned makes PostgreSQL plan a statement for its arguments each time. A plan for any arguments
// uses no index that only some filters need, and may then read every letter.
const planned = pgx.QueryExecModeCacheDescribe

// list returns the first letters that the filter selects, up to an id.
func (r *Reader) list(ctx context.Context, f Filter, upto int64, limit int) (page []Letter, err error) {
	args := f.Args()
	args["upto"], args["limit"] = upto, limit
	err = r.read(ctx, f.TenantID, func(tx pgx.Tx) (err error) {
		rows, _ := tx.Query(ctx, r.table.sql(listSQL), planned, args)
		page, err = r.collect(rows)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("list the dead letters of the %s after %d: %w", r.table.Source, f.After, err)
	}
	return page, nil
}

func (r *Reader) collect(rows pgx.Rows) ([]Letter, error) {
	return pgx.CollectRows(rows, func(row pgx.CollectableRow) (l Letter, err error) {
		columns, _ := r.table.fields(&l)
		return l, row.Scan(columns...)
	})
}

// Count returns the number of letters that the filter selects. It reads all of them.
func (r *Reader) Count(ctx context.Context, f Filter) (n int64, err error) {
	err = r.read(ctx, f.TenantID, func(tx pgx.Tx) error {
		return tx.QueryRow(ctx, r.table.sql(countLettersSQL), planned, f.Args()).Scan(&n)
	})
	if err != nil {
		return 0, fmt.Errorf("count the dead letters of the %s: %w", r.table.Source, err)
	}
	return n, nil
}

// Get returns a letter of the tenant with all its fields, or ErrNotFound. Tenant 0 means any
// tenant.
func (r *Reader) Get(ctx context.Context, tenant, id int64) (l Letter, err error) {
	err = r.read(ctx, tenant, func(tx pgx.Tx) error {
		columns, body := r.table.fields(&l)
		row := tx.QueryRow(ctx, r.table.sql(getSQL), pgx.StrictNamedArgs{"id": id, "tenant": postgres.IfSet(tenant)})
		err := row.Scan(append(columns, body...)...)
		if errors.Is(err, pgx.ErrNoRows) {
			return ErrNotFound
		}
		return err
	})
	if err != nil {
		return Letter{}, fmt.Errorf("read dead letter %d of the %s: %w", id, r.table.Source, err)
	}
	return l, nil
}

// read runs fn in a transaction that only reads.
func (r *Reader) read(ctx context.Context, tenant int64, fn func(tx pgx.Tx) error) error {
	return InTx(ctx, r.pool, tenant, pgx.ReadOnly, fn)
}

// InTx runs fn in a transaction of the tenant, or without a tenant if it is 0.
func InTx(ctx context.Context, pool *pgxpool.Pool, tenant int64, mode pgx.TxAccessMode, fn func(tx pgx.Tx) error) error {
	if tenant == 0 {
		return postgres.InTx(ctx, pool, pgx.TxOptions{AccessMode: mode}, fn)
	}
	return postgres.InTenant(ctx, pool, tenant, pgx.TxOptions{AccessMode: mode}, fn)
}
