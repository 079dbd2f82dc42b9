package api

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/danielgtaylor/huma/v2"
	"github.com/jackc/pgx/v5"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/work"
)

const (
	tokenHeader    = "Tidings-Token"
	maxSessionRefs = 64 // entities that the tokens of a read may name
	// how long a read waits for the projection before it takes the entities from the truth
	sessionWait = 200 * time.Millisecond
	// for rows that the projection's consumer is writing; less than deadlock_timeout, so that the
	// read gives way to the consumer
	sessionLock  = "500ms"
	sessionLimit = 2 * time.Second // for all tries, if the consumer holds these rows each time
)

// WriteToken is part of every answer to a write.
type WriteToken struct {
	Token string `header:"Tidings-Token" doc:"Only of a write. Send it with a read, and the read includes this write. Opaque; it does not expire."`
}

// tokenOf returns the token of a write, or an empty one if the entity never existed.
func (s *server) tokenOf(ctx context.Context, ref event.Ref) (WriteToken, error) {
	if ref.Version == 0 {
		return WriteToken{}, nil
	}
	token, err := s.cursors.encode(tokenList(callerOf(ctx).TenantID), []event.Ref{ref})
	return WriteToken{Token: token}, err
}

func tokenList(tenant int64) list { return list{tenant: tenant, name: "write token"} }

// sessionRefs reads the tokens of a request.
func (s *server) sessionRefs(tenant int64, headers []string) ([]event.Ref, error) {
	var all []event.Ref
	for _, header := range headers {
		for token := range strings.SplitSeq(header, ",") {
			var refs []event.Ref
			if s.cursors.decode(tokenList(tenant), strings.TrimSpace(token), &refs) != nil {
				return nil, s.problems.problem(codeHeaderInvalid, "",
					FieldError{Detail: "expected tokens from answers to writes of this tenant", Header: tokenHeader})
			}
			all = append(all, refs...)
		}
	}
	if len(all) > maxSessionRefs {
		return nil, s.problems.problem(codeHeaderInvalid, "",
			FieldError{Detail: fmt.Sprintf("expected tokens of at most %d writes", maxSessionRefs), Header: tokenHeader})
	}
	return all, nil
}

// sessionParameters describes the header that every read of a projection takes.
func sessionParameters() []*huma.Param {
	return []*huma.Param{{Name: tokenHeader, In: "header", Schema: &huma.Schema{Type: huma.TypeString}, Description: fmt.Sprintf(
		"Tokens of writes, separated by commas, for at most %d entities: the answer includes these writes, regardless of the lag.",
		maxSessionRefs)}}
}

// mustSee returns the entities of the request's tokens that the consumer applies.
func (s *server) mustSee(ctx context.Context, consumer string) []event.Ref {
	var refs []event.Ref
	for _, r := range callerOf(ctx).session {
		if s.fleet[consumer].Wants(r.Type) {
			refs = append(refs, r)
		}
	}
	return refs
}

var (
	errBehind = errors.New("api: the projection is behind the token")
	errUndo   = errors.New("api: roll back the overlay")
)

// shared returns handle for reads: equal reads of a tenant at the same time, with the same tokens,
// share one answer.
func shared[I, O any](s *server, handle func(context.Context, *I) (*O, error)) func(context.Context, *I) (*O, error) {
	return func(ctx context.Context, in *I) (*O, error) {
		c := callerOf(ctx)
		if len(c.session) == 0 {
			return handle(ctx, in)
		}
		mine := false
		out, err, _ := s.same.Do(fmt.Sprint(c.TenantID, c.Roles, exchangeOf(ctx).target, c.session), func() (any, error) {
			mine = true
			return handle(ctx, in)
		})
		if err != nil && !mine { // it may be about the other request, whose client has gone
			return handle(ctx, in)
		}
		o, _ := out.(*O) // nil with an error
		return o, err
	}
}

// readProjection runs fn, which reads the projections of a consumer and of those in also, in a
// transaction of the tenant, on one snapshot. The snapshot includes the writes whose tokens the
// request has. readProjection waits up to sessionWait until the projections have applied them, and
// then reads as if they had (readAsIf). If a consumer holds the same rows, it tries again until
// sessionLimit. The reads of a tenant that wait or overlay have a quarter of the connections. So a
// paused consumer slows down only the tenants that send tokens.
func (s *server) readProjection(ctx context.Context, tenant int64, consumer string, fn func(tx pgx.Tx) error,
	also ...string) (at progress, err error) {
	from := []source{{consumer, s.mustSee(ctx, consumer)}}
	for _, name := range also {
		from = append(from, source{name, s.mustSee(ctx, name)})
	}
	start := time.Now()
	for wait := 5 * time.Millisecond; ; wait = min(2*wait, sessionWait) {
		at, err = s.readOnce(ctx, tenant, from, fn)
		if !errors.Is(err, errBehind) {
			return at, err
		}
		took := time.Since(start)
		if took >= sessionWait {
			at, err = s.readAsIf(ctx, tenant, from, fn)
			if took >= sessionLimit || !postgres.IsLockTimeout(err) && !postgres.IsConcurrency(err) {
				return at, err
			}
			wait = sessionWait // the consumer held these rows, and may have applied the writes now
		}
		if err := work.Sleep(ctx, wait); err != nil {
			return at, err
		}
	}
}

// source is a projection that a read is of, and the entities that it must have.
type source struct {
	consumer string
	refs     []event.Ref
}

func (f source) demands() bool { return len(f.refs) > 0 }

func consumersOf(from []source) []string {
	names := make([]string, len(from))
	for i, f := range from {
		names[i] = f.consumer
	}
	return names
}

// readOnce is one try of readProjection. It returns errBehind if a projection has not reached its
// refs.
func (s *server) readOnce(ctx context.Context, tenant int64, from []source,
	fn func(tx pgx.Tx) error) (at progress, err error) {
	if slices.ContainsFunc(from, source.demands) {
		leave, err := s.overlays.enter(ctx, tenant, quarter(s.projections))
		if err != nil {
			return at, err
		}
		defer leave()
	}
	err = postgres.InShortTenant(ctx, s.projections, tenant, pgx.TxOptions{IsoLevel: pgx.RepeatableRead, AccessMode: pgx.ReadOnly},
		func(tx pgx.Tx) (err error) {
			if at, err = s.readProgress(ctx, tx, tenant, consumersOf(from)...); err != nil {
				return err
			}
			for _, f := range from {
				if !f.demands() {
					continue
				}
				if reached, err := s.fleet[f.consumer].Reached(ctx, tx, f.refs); err != nil {
					return err
				} else if !reached {
					return errBehind
				}
			}
			return fn(tx)
		})
	return at, err
}

// readAsIf is readProjection on the projections as they would be with the entities' states from the
// truth. The projection's own code applies these states in the transaction of fn, which is rolled
// back at the end. So one piece of code decides what a write changes
// (docs/adr/0007-reading-ones-writes.md).
func (s *server) readAsIf(ctx context.Context, tenant int64, from []source,
	fn func(tx pgx.Tx) error) (at progress, err error) {
	// One read at a time for each entity. Otherwise each waits for the entity's rows and holds a
	// connection.
	for _, key := range entities(tenant, from) {
		leave, err := s.overlays.enter(ctx, key, 1)
		if err != nil {
			return at, err
		}
		defer leave()
	}
	leave, err := s.overlays.enter(ctx, tenant, quarter(s.projections))
	if err != nil {
		return at, err
	}
	defer leave()
	states := make([][]event.Event, len(from))
	for i, f := range from {
		if !f.demands() {
			continue
		}
		if states[i], err = s.store.States(ctx, tenant, s.kinds, f.refs); err != nil {
			return at, err
		}
		s.metrics.overlaid.WithLabelValues(f.consumer).Inc()
	}
	err = postgres.InShortTenant(ctx, s.projections, tenant, pgx.TxOptions{IsoLevel: pgx.RepeatableRead}, func(tx pgx.Tx) (err error) {
		if _, err := tx.Exec(ctx, `SET LOCAL lock_timeout = '`+sessionLock+`'`); err != nil {
			return err
		}
		if at, err = s.readProgress(ctx, tx, tenant, consumersOf(from)...); err != nil {
			return err
		}
		for i, f := range from {
			if !f.demands() {
				continue
			}
			if err := s.fleet[f.consumer].Apply(ctx, tx, states[i]); err != nil {
				return fmt.Errorf("apply %d states of the truth over %s: %w", len(states[i]), f.consumer, err)
			}
		}
		if err := fn(tx); err != nil {
			return err
		}
		return errUndo
	})
	if !errors.Is(err, errUndo) {
		return at, err
	}
	return at, nil
}

// entities returns the keys of the refs' entities, each once and in an order that is the same for
// all callers.
func entities(tenant int64, from []source) (keys []string) {
	for _, f := range from {
		for _, r := range f.refs {
			r.Version = 0
			keys = append(keys, fmt.Sprint(tenant, f.consumer, r))
		}
	}
	slices.Sort(keys)
	return slices.Compact(keys)
}

// caps bounds how many callers work at once under one key.
type caps struct {
	mu sync.Mutex
	of map[any]*capped
}

type capped struct {
	places chan struct{}
	here   int // callers that have a place or wait for one
}

func newCaps() *caps { return &caps{of: make(map[any]*capped)} }

// enter waits until fewer than most callers are in. A caller that is in calls leave once.
func (c *caps) enter(ctx context.Context, key any, most int) (leave func(), err error) {
	c.mu.Lock()
	at := c.of[key]
	if at == nil {
		at = &capped{places: make(chan struct{}, most)}
		c.of[key] = at
	}
	at.here++
	c.mu.Unlock()
	gone := func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		if at.here--; at.here == 0 {
			delete(c.of, key)
		}
	}
	select {
	case at.places <- struct{}{}:
		return func() { <-at.places; gone() }, nil
	case <-ctx.Done():
		gone()
		return nil, ctx.Err()
	}
}
