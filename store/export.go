package store

import (
	"context"
	"errors"
	"fmt"
	"regexp"
	"strings"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/kinds"
	"github.com/tidings/tidings/outbox"
)

// Errors of exports.
var (
	// ErrErasing reports an unfinished erasure of the tenant. It takes events off the streams that
	// an export relies on.
	ErrErasing = errors.New("store: an erasure has not finished")
	// ErrExportOutdated reports that an erasure began after the export did. Begin the export again.
	ErrExportOutdated = errors.New("store: an erasure has begun since the export began")
)

// Export is the base of an export: the streams' positions before its first page is read. To get the
// truth, read all states of a kind afterwards, in any number of pages, and apply every event after
// Streams by its version:
//
//	published up to Streams  ──▶ committed before: every page has it, or a later version
//	published after it       ──▶ the reader gets it from the stream
//	committed, not published ──▶ likewise, later
//
// Only an erasure of edges deletes rows without an event, and it takes their events off the streams
// too. Erasures detects it.
type Export struct {
	At       time.Time
	Streams  []outbox.Position
	Erasures int64 // runs that have begun; negative if erasures delete no row of the kind
}

// ExportPlace is the end of a page in an export's order: an id and the rest of the key. The zero
// value precedes everything.
type ExportPlace struct {
	ID   event.ID
	Rest string
}

// Exported is a state as an event, with its place.
type Exported struct {
	Place ExportPlace
	Event event.Event
}

// erasuresSQL reads the number of runs of erasures that have begun for the tenant, and the number
// of unfinished erasures. Index: erasures_pkey, the tenant's. Locks: none.
const erasuresSQL = `
SELECT /* store.erasures */ now(), coalesce(sum(runs), 0)::bigint, count(*) FILTER (WHERE finished_at IS NULL)
  FROM erasures WHERE tenant_id = @tenant::bigint`

func erasuresOf(ctx context.Context, tx pgx.Tx, tenant int64) (now time.Time, runs, unfinished int64, err error) {
	err = tx.QueryRow(ctx, erasuresSQL, pgx.StrictNamedArgs{"tenant": tenant}).Scan(&now, &runs, &unfinished)
	if err != nil {
		err = fmt.Errorf("read the erasures of tenant %d: %w", tenant, err)
	}
	return now, runs, unfinished, err
}

// BeginExport begins an export. Call it before reading the first page. erasable: erasures delete
// rows of the kind (ErasesEdges).
func (s *Store) BeginExport(ctx context.Context, tenant int64, erasable bool) (e Export, err error) {
	err = s.read(ctx, tenant, func(tx pgx.Tx) error {
		now, runs, unfinished, err := erasuresOf(ctx, tx, tenant)
		switch {
		case err != nil:
			return err
		case erasable && unfinished > 0:
			return ErrErasing
		case !erasable:
			runs = -1
		}
		e = Export{At: now.UTC(), Erasures: runs}
		e.Streams, err = outbox.Positions(ctx, tx)
		return err
	})
	return e, err
}

// ErasesEdges reports whether the erasure of a person deletes edges of the kind.
func ErasesEdges(k kinds.Edge) bool { return len(k.EndsAt(kinds.Author)) > 0 }

// exportPage reads a page of an export, or returns ErrExportOutdated.
func exportPage[R any](ctx context.Context, s *Store, tenant int64, e Export, sql string, args pgx.StrictNamedArgs,
	state func(*R) (Exported, error)) (page []Exported, err error) {
	args["tenant"] = tenant
	err = s.read(ctx, tenant, func(tx pgx.Tx) error {
		if e.Erasures >= 0 {
			if _, runs, _, err := erasuresOf(ctx, tx, tenant); err != nil {
				return err
			} else if runs != e.Erasures {
				return ErrExportOutdated
			}
		}
		rows, _ := tx.Query(ctx, sql, args)
		all, err := pgx.CollectRows(rows, pgx.RowToAddrOfStructByPos[R])
		if err != nil {
			return fmt.Errorf("read a page of an export of tenant %d: %w", tenant, err)
		}
		page = make([]Exported, len(all))
		for i, row := range all {
			if page[i], err = state(row); err != nil {
				return err
			}
		}
		return nil
	})
	return page, err
}

// exportEdgesSQL reads a page of the tenant's edges. Index: edges_KIND_pkey, one range. Locks:
// none.
const exportEdgesSQL = `
SELECT /* store.export_edges */ tenant_id, from_id, to_id, status, version, created_at, positioned_at, updated_at, attributes
  FROM {edges} WHERE tenant_id = @tenant::bigint AND (from_id, to_id) > (@from::text, @to::text)
 ORDER BY from_id, to_id LIMIT @limit`

// ExportEdges reads at most limit edges of the kind after a place, in the order of origin and
// target, REMOVED ones too. A page with fewer than limit edges is the last. The states have no
// actor. ErrInvalid: the place is invalid. ErrExportOutdated: begin the export again.
func (s *Store) ExportEdges(ctx context.Context, tenant int64, k kinds.Edge, e Export, after ExportPlace, limit int) ([]Exported, error) {
	to, err := restID(after)
	if err != nil {
		return nil, err
	}
	return exportPage(ctx, s, tenant, e, edgesOf(k.Name, exportEdgesSQL), pgx.StrictNamedArgs{"from": after.ID, "to": to, "limit": limit},
		func(r *edgeRow) (Exported, error) {
			ev, err := EdgeEvent(k, &State[event.Edge]{tenant, r.wire()})
			return Exported{ExportPlace{r.From, r.To.String()}, ev}, err
		})
}

func restID(p ExportPlace) (id event.ID, err error) {
	if p.Rest == "" {
		return "", nil
	}
	if id, err = event.ParseID(p.Rest); err != nil {
		return "", fmt.Errorf("%w: place %.80q", ErrInvalid, p.Rest)
	}
	return id, nil
}

// exportChildrenSQL reads a page of the tenant's children in the order of their objects, shelved
// or not. In each snapshot a child is in exactly one of the two tables. Index: the one of the
// kind's Order and its counterpart on the shelf, one range each. Locks: none.
const exportChildrenSQL = `
SELECT /* store.export_children */ ` + childColumns + ` FROM (
  (SELECT * FROM {{.Table}}
    WHERE tenant_id = @tenant::bigint AND (object_id, {{.Order}}) > (@object::text, @place::{{.OrderType}})
    ORDER BY object_id, {{.Order}} LIMIT @limit)
  UNION ALL
  (SELECT * FROM {{.Shelf}}
    WHERE tenant_id = @tenant::bigint AND (object_id, {{.Order}}) > (@object::text, @place::{{.OrderType}})
    ORDER BY object_id, {{.Order}} LIMIT @limit)) c
 ORDER BY c.object_id, c.{{.Order}} LIMIT @limit`

var pathPlace = regexp.MustCompile(`^[0-9a-z/]+$`)

// ExportChildren is ExportEdges for children, by object, and within an object in the order of the
// kind's index: in a threaded kind a child precedes its replies. Erased and deleted children are
// included, with the content that events have.
func (s *Store) ExportChildren(ctx context.Context, tenant int64, k kinds.Child, e Export, after ExportPlace,
	limit int) ([]Exported, error) {
	shape := shapeOf(k)
	place := after.Rest
	switch {
	case place == "":
		place = shape.place(event.Child{})
	case k.Threaded && (len(place) > 2000 || !pathPlace.MatchString(place)):
		return nil, fmt.Errorf("%w: place %.80q", ErrInvalid, place)
	case !k.Threaded:
		if _, err := uuid.Parse(place); err != nil {
			return nil, fmt.Errorf("%w: place %.80q", ErrInvalid, place)
		}
	}
	return exportPage(ctx, s, tenant, e, shape.sql(exportChildrenSQL),
		pgx.StrictNamedArgs{"object": after.ID, "place": place, "limit": limit}, func(r *childRow) (Exported, error) {
			state := (&childState{tenant, *r}).state()
			ev, err := ChildEvent(k, &state)
			ev.Type = ChildEventType(state.Object)
			return Exported{ExportPlace{r.Object, shape.place(state.Object)}, ev}, err
		})
}

// ChildEventType returns the type of an event that leads to this state.
func ChildEventType(c event.Child) string {
	switch {
	case c.AuthorState == event.AuthorErased:
		return event.Erased
	case c.AuthorState == event.AuthorDeleted:
		return event.Deleted
	case c.Version == 1:
		return event.Created
	case c.Reason != "" || c.ModerationState != event.ModerationNone:
		return event.Moderated
	}
	return event.Edited
}

// exportSettingsSQL is scanSettingsSQL for one tenant.
// Index: threads_head_idx, threads_purged_pkey, one range each. Locks: none.
const exportSettingsSQL = `
SELECT /* store.export_settings */ kind, object
  FROM (SELECT post_id, kind, object FROM threads WHERE tenant_id = @tenant::bigint AND version_state IN ('LATEST', 'DELETED')
         UNION ALL
        SELECT post_id, kind, jsonb_build_object('kind', kind, 'post_id', post_id, 'version', version) FROM threads_purged p
         WHERE tenant_id = @tenant::bigint
           AND NOT EXISTS (SELECT FROM threads t WHERE t.tenant_id = p.tenant_id AND t.post_id = p.post_id AND t.kind = p.kind)) t
 WHERE (post_id, kind) > (@post::text, @kind::text COLLATE "C")
 ORDER BY post_id, kind LIMIT @limit`

type exportedSettings struct {
	Kind   string
	Object event.Thread
}

var kindPlace = regexp.MustCompile(`^[a-z0-9_]{0,63}$`)

// ExportSettings is ExportEdges for the settings of threads of every kind, by object and kind.
func (s *Store) ExportSettings(ctx context.Context, tenant int64, e Export, after ExportPlace, limit int) ([]Exported, error) {
	if !kindPlace.MatchString(after.Rest) {
		return nil, fmt.Errorf("%w: place %.80q", ErrInvalid, after.Rest)
	}
	return exportPage(ctx, s, tenant, e, exportSettingsSQL, pgx.StrictNamedArgs{"post": after.ID, "kind": after.Rest, "limit": limit},
		func(r *exportedSettings) (Exported, error) {
			state := settingsOf(tenant, r.Object)
			ev, err := SettingsEvent(&state)
			return Exported{ExportPlace{r.Object.PostID, r.Kind}, ev}, err
		})
}

// String returns the place as text for clients; ParsePlace reads it.
func (p ExportPlace) String() string { return string(p.ID) + "," + p.Rest }

// ParsePlace reads the text of String, or returns ErrInvalid. The part after the comma is validated
// when a page is read.
func ParsePlace(text string) (p ExportPlace, err error) {
	id, rest, _ := strings.Cut(text, ",")
	if text == "" {
		return p, nil
	}
	p.Rest = rest
	if p.ID, err = event.ParseID(id); err != nil {
		return p, fmt.Errorf("%w: place %.80q", ErrInvalid, text)
	}
	return p, nil
}
