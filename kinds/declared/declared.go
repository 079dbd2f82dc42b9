package declared

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/versioned"
	"github.com/tidings/tidings/kinds/catalog"
	"github.com/tidings/tidings/kinds/upstreams"
)

// Errors of this package. The call has changed nothing.
var (
	ErrNotFound = errors.New("there is no such upstream: `tidings upstream list` lists all of them")
	ErrRefused  = errors.New("the change is refused")
)

const installation = 0 // the tenant of the objects

var table = versioned.New[upstreams.Upstream](versioned.Definition{Table: "upstreams", Sequence: "object_version_id",
	Key: []versioned.Column{{Name: "name", Type: "text"}}})

// Request declares an upstream, or changes a declared one.
type Request struct {
	Upstream upstreams.Upstream // with the logins to add
	Revoke   []string           // logins to remove; others stay
	Actor    string
	DryRun   bool
}

// Added is the result of Add.
type Added struct {
	Changes []string `json:"changes"` // one line each; empty: the upstream was declared like this
	Version int64    `json:"version"` // of the upstream
	New     bool     `json:"new"`
}

var errDry = errors.New("dry run")

// Add declares an upstream, or changes it. Writers are held to it from the next transaction on. An
// upstream keeps its names, and each event version its schema, even after Remove. ErrRefused names
// all changes that would break this. pool acts as the system role.
func Add(ctx context.Context, pool *pgxpool.Pool, r Request) (done Added, err error) {
	u := r.Upstream
	if faults := u.Check(); len(faults) > 0 { // a login
		return done, faults[0]
	}
	err = postgres.InTx(ctx, pool, pgx.TxOptions{}, func(tx pgx.Tx) error {
		done = Added{}
		if err := catalog.LockNames(ctx, tx); err != nil {
			return err
		}
		set, err := catalog.InForce(ctx, tx)
		if err != nil {
			return err
		}
		if upstreams.Reserved(set, u.Name) {
			return fmt.Errorf("%w: %s is the name of a kind", ErrRefused, u.Name)
		}
		all, err := heads(ctx, tx)
		if err != nil {
			return err
		}
		i := slices.IndexFunc(all, func(h head) bool { return h.Object.Name == u.Name })
		u := u
		if i < 0 {
			if len(all) >= upstreams.MaxUpstreams {
				return fmt.Errorf("%w: there are %d upstreams, as many as there may be", ErrRefused, upstreams.MaxUpstreams)
			}
			done.New, done.Changes = true, []string{"upstream " + u.Name + ": added"}
		} else {
			was := all[i].Object
			var refused []string
			u.Logins = slices.DeleteFunc(slices.Concat(was.Logins, u.Logins), func(l string) bool { return slices.Contains(r.Revoke, l) })
			slices.Sort(u.Logins)
			u.Logins = slices.Compact(u.Logins)
			if done.Changes, refused = upstreams.Changes(&was, &u); len(refused) > 0 {
				return fmt.Errorf("%w:\n%s", ErrRefused, strings.Join(refused, "\n"))
			}
			if done.Version = all[i].Metadata.VersionID; len(done.Changes) == 0 {
				return nil
			}
		}
		ids, err := table.Upsert(ctx, tx, []versioned.Change[upstreams.Upstream]{{TenantID: installation, Object: u, By: r.Actor}})
		if err != nil {
			return fmt.Errorf("write the upstream %s: %w", u.Name, err)
		}
		if done.Version = ids[0]; r.DryRun {
			done.Version = 0
			return errDry
		}
		return nil
	})
	if errors.Is(err, errDry) {
		err = nil
	}
	return done, err
}

type head = versioned.Head[upstreams.Upstream]

// heads returns the last versions of all upstreams, removed ones too, by name.
func heads(ctx context.Context, tx pgx.Tx) ([]head, error) {
	return table.Heads(ctx, tx, head{}, upstreams.MaxUpstreams+1)
}

// Remove ends an upstream: the table refuses its events from the next transaction on. Those that it
// has are published. It returns ErrNotFound. pool acts as the system role.
func Remove(ctx context.Context, pool *pgxpool.Pool, name, actor, reason string) error {
	return postgres.InTx(ctx, pool, pgx.TxOptions{}, func(tx pgx.Tx) error {
		if err := catalog.LockNames(ctx, tx); err != nil {
			return err
		}
		v, err := table.Get(ctx, tx, installation, versioned.Key{name})
		if errors.Is(err, versioned.ErrNotFound) || err == nil && v.Object.Removed {
			return fmt.Errorf("%s: %w", name, ErrNotFound)
		}
		if err != nil {
			return err
		}
		v.Object.Reason, v.Object.Removed, v.Object.Logins = reason, true, []string{}
		_, err = table.Upsert(ctx, tx, []versioned.Change[upstreams.Upstream]{{TenantID: installation, Object: v.Object, By: actor}})
		return err
	})
}

// List returns the declared upstreams by name.
func List(ctx context.Context, pool *pgxpool.Pool) (all []upstreams.Upstream, err error) {
	err = read(ctx, pool, func(tx pgx.Tx) error {
		heads, err := heads(ctx, tx)
		all = all[:0]
		for _, h := range heads {
			if !h.Object.Removed {
				all = append(all, h.Object)
			}
		}
		return err
	})
	return all, err
}

// namingsSQL reads the names that upstreams chose, of removed ones too. Index: upstreams_head_idx.
// Locks: none.
const namingsSQL = `
SELECT /* upstreams.namings */ name, object ->> 'type_prefix', object ->> 'source' FROM upstreams
 WHERE tenant_id = 0 AND name = ANY(@names) AND version_state = 'LATEST'`

// Namings returns the names of the events of those aggregate types that are upstreams, removed ones
// too: events of theirs may still be pending. An upstream never changes them. pool acts as
// tidings_relay or tidings_system.
func Namings(ctx context.Context, pool *pgxpool.Pool, aggregateTypes []string) (map[string]event.Naming, error) {
	all := make(map[string]event.Naming)
	rows, _ := pool.Query(ctx, namingsSQL, pgx.StrictNamedArgs{"names": aggregateTypes})
	var name string
	var n event.Naming
	_, err := pgx.ForEachRow(rows, []any{&name, &n.TypePrefix, &n.Source}, func() error {
		all[name] = n
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("read the names of events of upstreams: %w", err)
	}
	return all, nil
}

// Version is one version of an upstream.
type Version struct {
	Version int64
	By      string
	At      time.Time
	Reason  string
	Removed bool
	Changes []string // from the previous version
}

// History returns every version of an upstream, oldest first, or ErrNotFound.
func History(ctx context.Context, pool *pgxpool.Pool, name string) (all []Version, err error) {
	err = read(ctx, pool, func(tx pgx.Tx) error {
		all = nil
		var before *upstreams.Upstream
		for after := int64(0); ; {
			const page = 100
			some, err := table.History(ctx, tx, installation, versioned.Key{name}, after, page)
			if err != nil {
				return err
			}
			for i := range some {
				v := &some[i]
				one := Version{Version: v.Metadata.VersionID, By: v.Metadata.CreatedBy, At: v.Metadata.LastUpdateTime,
					Reason:  v.Object.Reason,
					Removed: v.Object.Removed, Changes: []string{"upstream " + name + ": added"}}
				if before != nil {
					one.Changes, _ = upstreams.Changes(before, &v.Object)
				}
				all, before, after = append(all, one), &v.Object, v.Position
			}
			if len(some) < page {
				break
			}
		}
		if len(all) == 0 {
			return fmt.Errorf("%s: %w", name, ErrNotFound)
		}
		return nil
	})
	return all, err
}

func read(ctx context.Context, pool *pgxpool.Pool, fn func(tx pgx.Tx) error) error {
	return postgres.InTenant(ctx, pool, installation, pgx.TxOptions{AccessMode: pgx.ReadOnly}, fn)
}
