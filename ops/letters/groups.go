package letters

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/tidings/tidings/internal/deadletter"
)

// Group is the set of dead letters of one source, consumer, event type and cause.
type Group struct {
	*deadletter.Group
	Note *Note // nil if none
}

// Note is a note of an operator on a group.
type Note struct {
	Text  string
	Actor string
	At    time.Time
}

// GroupFilter selects groups.
type GroupFilter struct {
	TenantID  int64  // 0: all tenants
	Source    string // "" for both
	Consumer  string
	EventType string
	Text      string // part of the cause or of the last error
	// After is the last group of the previous page.
	After *GroupKey
}

// GroupKey is a group's position in the list.
type GroupKey struct {
	Last time.Time
	ID   string
}

func (k GroupKey) compare(o GroupKey) int {
	return cmp.Or(o.Last.Compare(k.Last), cmp.Compare(k.ID, o.ID))
}

// Key returns the group's position.
func (g *Group) Key() GroupKey { return GroupKey{g.Last, g.ID} }

// Groups returns at most limit groups that the filter selects, with their counts and the tenant's
// notes. The group with the latest letter comes first. more reports further groups. some reports
// that a source has more than deadletter.MaxGroups groups, so that Groups read only some of them.
func (d *Desk) Groups(ctx context.Context, f GroupFilter, limit int) (all []Group, more, some bool, err error) {
	for name, s := range d.sources {
		if f.Source != "" && f.Source != name {
			continue
		}
		groups, cut, err := s.reader.Groups(ctx, f.TenantID)
		if err != nil {
			return nil, false, false, err
		}
		some = some || cut
		for _, g := range groups {
			if one := (Group{Group: g}); f.has(&one) {
				all = append(all, one)
			}
		}
	}
	slices.SortFunc(all, func(a, b Group) int { return a.Key().compare(b.Key()) })
	if more = len(all) > limit; more {
		all = all[:limit]
	}
	if err := d.count(ctx, f.TenantID, all); err != nil {
		return nil, false, false, err
	}
	return all, more, some, d.annotate(ctx, f.TenantID, all)
}

func (f *GroupFilter) has(g *Group) bool {
	text := strings.ToLower(f.Text)
	return (f.Consumer == "" || f.Consumer == g.Consumer) && (f.EventType == "" || f.EventType == g.EventType) &&
		(text == "" || strings.Contains(strings.ToLower(g.Cause), text) || strings.Contains(strings.ToLower(g.Error), text)) &&
		(f.After == nil || g.Key().compare(*f.After) > 0)
}

// Group returns a group of the tenant's letters with its count and note, or nil if it has no
// letters. Tenant 0 means all tenants.
func (d *Desk) Group(ctx context.Context, tenant int64, source, id string) (*Group, error) {
	g, err := d.Reader(source).Group(ctx, tenant, id)
	if err != nil || g == nil {
		return nil, err
	}
	one := []Group{{Group: g}}
	if err := d.count(ctx, tenant, one); err != nil {
		return nil, err
	}
	return &one[0], d.annotate(ctx, tenant, one)
}

// Since counts the letters of a group that died at since or later, and those of them that had been
// retried before. Both counts stop at deadletter.MaxCount+1.
func (d *Desk) Since(ctx context.Context, tenant int64, g Group, since time.Time) (letters, again int64, err error) {
	one := *g.Group
	err = d.Reader(g.Source).CountGroups(ctx, tenant, []*deadletter.Group{&one}, since)
	return one.Count, one.Again, err
}

func (d *Desk) count(ctx context.Context, tenant int64, all []Group) error {
	for name, s := range d.sources {
		var of []*deadletter.Group
		for _, g := range all {
			if g.Source == name {
				of = append(of, g.Group)
			}
		}
		if err := s.reader.CountGroups(ctx, tenant, of, time.Time{}); err != nil {
			return err
		}
	}
	return nil
}

const (
	// notesSQL reads the notes on groups. Index: dead_letter_notes_pkey. Locks: none.
	notesSQL = `
SELECT /* letters.notes */ group_id::text, note, actor, written_at
  FROM dead_letter_notes WHERE tenant_id = @tenant AND group_id = ANY(@groups::uuid[])`
	// noteSQL writes the note on a group. Index: dead_letter_notes_pkey. Locks: the row.
	noteSQL = `
INSERT /* letters.note */ INTO dead_letter_notes (tenant_id, group_id, note, actor) VALUES (@tenant, @group::uuid, @note, @actor)
    ON CONFLICT (tenant_id, group_id) DO UPDATE SET note = excluded.note, actor = excluded.actor, written_at = now()`
	// unnoteSQL deletes the note on a group. Index: dead_letter_notes_pkey. Locks: the row.
	unnoteSQL = `DELETE /* letters.unnote */ FROM dead_letter_notes WHERE tenant_id = @tenant AND group_id = @group::uuid`
)

func (d *Desk) annotate(ctx context.Context, tenant int64, all []Group) error {
	if len(all) == 0 {
		return nil
	}
	ids := make([]string, len(all))
	for i, g := range all {
		ids[i] = g.ID
	}
	notes := make(map[string]Note)
	rows, _ := d.truth.Query(ctx, notesSQL, pgx.StrictNamedArgs{"tenant": tenant, "groups": ids})
	var id string
	var n Note
	if _, err := pgx.ForEachRow(rows, []any{&id, &n.Text, &n.Actor, &n.At}, func() error {
		notes[id] = n
		return nil
	}); err != nil {
		return fmt.Errorf("read the notes on %d groups of dead letters: %w", len(ids), err)
	}
	for i, g := range all {
		if n, ok := notes[g.ID]; ok {
			all[i].Note = &n
		}
	}
	return nil
}

// MaxNote is the limit of a note in bytes.
const MaxNote = 2000

// ErrNote reports a note that is too long.
var ErrNote = errors.New("letters: a note has at most 2000 bytes")

// SetNote writes the tenant's note on a group; with tenant 0 the operators' note. An empty text
// deletes it.
func (d *Desk) SetNote(ctx context.Context, tenant int64, group, text, actor string) error {
	text = strings.TrimSpace(strings.ToValidUTF8(strings.ReplaceAll(text, "\x00", ""), ""))
	if len(text) > MaxNote {
		return ErrNote
	}
	sql, args := noteSQL, pgx.StrictNamedArgs{"tenant": tenant, "group": group, "note": text, "actor": actor}
	if text == "" {
		sql, args = unnoteSQL, pgx.StrictNamedArgs{"tenant": tenant, "group": group}
	}
	if _, err := d.truth.Exec(ctx, sql, args); err != nil {
		return fmt.Errorf("write the note on group %s of dead letters: %w", group, err)
	}
	return nil
}
