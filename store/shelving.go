package store

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/work"
	"github.com/tidings/tidings/kinds"
)

// ShelvingJob is the name of the job that calls Shelver.Run.
const ShelvingJob = "comment-archive"

// Lease is the right to shelve threads (package ops/jobs). Fence fails once another process holds
// it.
type Lease interface {
	Fence(ctx context.Context, tx pgx.Tx) error // called first in every transaction
	Continue() error                            // called before each slice; an error ends the run, and the next run resumes
	Count(what string, n int64)                 // counts committed work
}

// The names of the Shelver's counts.
const (
	CountThreadsShelved  = "threads shelved"
	CountCommentsShelved = "comments shelved"
	CountThreadsReturned = "threads returned"
)

// Shelver moves quiet threads to the shelf, and completes moves and returns that were
// interrupted.
type Shelver struct {
	pool    *pgxpool.Pool
	kinds   func() *kinds.Set
	log     *slog.Logger
	metrics *shelvingMetrics

	ask func(context.Context) (after time.Duration, err error)
	// after is how long nothing in a thread was written before it moves, for the present run. 0: no
	// thread moves.
	after                         time.Duration
	walkPage, moveRows, quietRows int
	reached                       func(step string) error // nil except in tests, which stop the work at a step
}

type shelvingMetrics struct {
	threads, comments, returned prometheus.Counter
}

// NewShelver returns an Shelver on pool, a pool of the truth that acts as postgres.RoleSystem.
// Each run and each plan calls after for the time that a thread must be quiet before it moves (0:
// no thread moves), and kinds for the present kinds. NewShelver starts nothing. reg may be nil.
func NewShelver(pool *pgxpool.Pool, after func(context.Context) (time.Duration, error), kinds func() *kinds.Set, log *slog.Logger,
	reg prometheus.Registerer) (*Shelver, error) {
	m := &shelvingMetrics{
		threads: prometheus.NewCounter(prometheus.CounterOpts{Name: "tidings_thread_archive_threads_total",
			Help: "Threads moved to the shelf."}),
		comments: prometheus.NewCounter(prometheus.CounterOpts{Name: "tidings_thread_archive_comments_total",
			Help: "Comments moved to the shelf."}),
		returned: prometheus.NewCounter(prometheus.CounterOpts{Name: "tidings_thread_archive_returned_threads_total",
			Help: "Threads whose return from the shelf this process completed. Sum all API processes and archivers."}),
	}
	if reg != nil {
		for _, c := range []prometheus.Collector{m.threads, m.comments, m.returned} {
			if err := reg.Register(c); err != nil {
				return nil, fmt.Errorf("register the metrics of shelving: %w", err)
			}
		}
	}
	return &Shelver{pool: pool, kinds: kinds, log: log.With("component", "comment-archive"), metrics: m, ask: after, walkPage: walkPage,
		moveRows: moveRows, quietRows: quietRows}, nil
}

const (
	// walkPage is the number of threads that one step reads, and so the most that it shelves.
	// Their stubs exist during the step, and writers bring back threads that have one.
	walkPage = 200

	// maxWalk is the most threads of a kind that a run reads. Reading a thread costs about 10 to 20
	// µs, and other jobs wait meanwhile.
	maxWalk = 100_000

	// settleTimeout is how long a run waits for writers that may not have seen its stubs.
	settleTimeout = 10 * time.Second
	settlePoll    = 20 * time.Millisecond

	// quietRows is the number of comments that one statement reads in search of a recent one.
	quietRows = 5000
)

type thread struct {
	tenant int64
	object event.ID
}

type stub struct {
	TenantID  int64
	ObjectID  event.ID
	ArchiveID int64
	State     string
	Moved     int64 // children
}

// Run works through the kinds. For each one it first completes the work of an interrupted run. Then
// it reads threads from where the last run ended, and shelves the quiet ones, until it has read
// every thread once or maxWalk threads. The order of kinds is random, so that a kind with much work
// does not hold back the others.
//
// Run ends early if lease.Continue returns an error. After an interruption at any point, the next
// run or the next writer resumes. A thread cannot move if somebody has inserted the same comment on
// the other side with SQL. Run skips it and returns that error last.
func (a *Shelver) Run(ctx context.Context, lease Lease) error {
	a, err := a.underTerms(ctx)
	if err != nil {
		return err
	}
	var errs []error
	all := slices.Collect(maps.Values(a.kinds().Children))
	rand.Shuffle(len(all), func(i, j int) { all[i], all[j] = all[j], all[i] })
	for _, k := range all {
		err := a.run(ctx, lease, shapeOf(k))
		errs = append(errs, err)
		if err != nil && !onBothSides(err) {
			break
		}
	}
	return errors.Join(errs...)
}

// underTerms returns a copy of the Shelver with the present quiet time.
func (a *Shelver) underTerms(ctx context.Context) (*Shelver, error) {
	now := *a
	var err error
	now.after, err = a.ask(ctx)
	return &now, err
}

func (a *Shelver) run(ctx context.Context, lease Lease, k childShape) error {
	err := a.finish(ctx, lease, k)
	if (err == nil || onBothSides(err)) && a.after > 0 {
		if walked := a.walk(ctx, lease, k); walked != nil {
			err = errors.Join(err, walked)
		}
	}
	if errors.Is(err, errUnsettled) && !onBothSides(err) {
		a.log.WarnContext(ctx, "shelving waits for a long transaction, the next run retries", "kind", k.Kind, "err", err)
		return nil
	}
	return err
}

// onBothSides reports whether err means that the same comment is already on the other side.
func onBothSides(err error) bool { return postgres.IsUnique(err, "") }

func (a *Shelver) walk(ctx context.Context, lease Lease, k childShape) (failed error) {
	at, err := a.walkPosition(ctx, k)
	if err != nil {
		return err
	}
	began, wrapped := at, false
	var shelving int64 // its id, once it has a thread
	for looked := 0; looked < maxWalk; {
		if err := errors.Join(ctx.Err(), lease.Continue()); err != nil {
			return errors.Join(failed, err)
		}
		page, last, n, err := a.scan(ctx, k, at, a.walkPage)
		if err != nil {
			return err
		}
		looked += n
		at = last
		if err := a.shelve(ctx, lease, k, &shelving, page, at); onBothSides(err) {
			failed = errors.Join(failed, err)
		} else if err != nil {
			return err
		}
		if wrapped && (at.tenant > began.tenant || at.tenant == began.tenant && at.object >= began.object) {
			return failed
		}
		if n < a.walkPage {
			if wrapped || began == (thread{}) {
				return failed
			}
			wrapped = true
		}
	}
	return failed
}

// Plan returns what a Run over all threads would shelve now. It changes nothing.
func (a *Shelver) Plan(ctx context.Context) (map[string]int64, error) {
	plan := map[string]int64{CountThreadsShelved: 0, CountCommentsShelved: 0}
	a, err := a.underTerms(ctx)
	if err != nil {
		return nil, err
	}
	if a.after == 0 {
		return plan, nil
	}
	for _, k := range a.kinds().AllChildren() {
		if err := a.plan(ctx, shapeOf(k), plan); err != nil {
			return nil, err
		}
	}
	return plan, nil
}

func (a *Shelver) plan(ctx context.Context, k childShape, plan map[string]int64) error {
	for at, n := (thread{}), a.walkPage; n == a.walkPage; {
		var page []thread
		var err error
		if page, at, n, err = a.scan(ctx, k, at, a.walkPage); err != nil {
			return err
		}
		for _, t := range page {
			quiet, children, err := a.quiet(ctx, k, t, ctx.Err)
			if err != nil {
				return err
			}
			if quiet {
				plan[CountThreadsShelved]++
				plan[CountCommentsShelved] += children
			}
		}
	}
	return nil
}

// walkedSQL reads how far the search for quiet threads has come. Index: child_archive_walk_pkey.
// Locks: none.
const walkedSQL = `SELECT /* store.archive_walked */ after_tenant, after_object FROM child_archive_walk WHERE kind = '{{.Kind}}'`

func (a *Shelver) walkPosition(ctx context.Context, k childShape) (at thread, err error) {
	err = a.pool.QueryRow(ctx, k.sql(walkedSQL)).Scan(&at.tenant, &at.object)
	if errors.Is(err, pgx.ErrNoRows) {
		return thread{}, nil
	}
	if err != nil {
		return at, fmt.Errorf("read how far the search for quiet threads has come: %w", err)
	}
	return at, nil
}

// lookSQL steps from thread to thread at a cost that does not depend on their size, and reports
// which may be quiet. A thread may be quiet if its newest branch has no recent write, and it has no
// stub and no recent return. Index: children_KIND_path_key or children_KIND_object_idx,
// archived_threads_pkey: probes for each thread. Locks: none.
const lookSQL = `
WITH RECURSIVE walk AS (
  (SELECT tenant_id, object_id, 1 AS n FROM {{.Table}} WHERE (tenant_id, object_id) > (@tenant::bigint, @object::text)
    ORDER BY tenant_id, object_id LIMIT 1)
  UNION ALL
  SELECT c.tenant_id, c.object_id, w.n + 1
    FROM walk w CROSS JOIN LATERAL (
         SELECT tenant_id, object_id FROM {{.Table}} WHERE (tenant_id, object_id) > (w.tenant_id, w.object_id)
          ORDER BY tenant_id, object_id LIMIT 1) c
   WHERE w.n < @limit::int
)
SELECT /* store.archive_look */ w.tenant_id, w.object_id, l.updated_at < now() - @after::interval AND NOT EXISTS (
         SELECT FROM archived_threads a
          WHERE a.tenant_id = w.tenant_id AND a.kind = '{{.Kind}}' AND a.object_id = w.object_id
            AND (a.state <> 'RETURNED' OR a.returned_at >= now() - @after::interval) OFFSET 0)
  FROM walk w CROSS JOIN LATERAL (
       SELECT updated_at FROM {{.Table}} c WHERE c.tenant_id = w.tenant_id AND c.object_id = w.object_id ORDER BY {{.Order}} DESC LIMIT 1) l
 ORDER BY w.n`

// scan returns which of the next threads may be quiet, the last thread read (zero at the end of the
// table), and how many it read.
func (a *Shelver) scan(ctx context.Context, k childShape, at thread, limit int) (page []thread, last thread, n int, err error) {
	rows, _ := a.pool.Query(ctx, k.sql(lookSQL), pgx.StrictNamedArgs{"tenant": at.tenant, "object": at.object,
		"after": a.after, "limit": limit})
	var quiet bool
	_, err = pgx.ForEachRow(rows, []any{&last.tenant, &last.object, &quiet}, func() error {
		n++
		if quiet {
			page = append(page, last)
		}
		return nil
	})
	if err != nil {
		return nil, at, 0, fmt.Errorf("read %d threads after object %s of tenant %d: %w", limit, at.object, at.tenant, err)
	}
	if n < limit {
		last = thread{}
	}
	return page, last, n, nil
}

// quietSQL reads some children of a thread, from its end backward.
// Index: children_KIND_path_key or children_KIND_object_idx, one range. Locks: none.
const quietSQL = `
SELECT /* store.archive_quiet */ count(*), coalesce(bool_or(updated_at >= now() - @after::interval), false), coalesce(min(at::text), '')
  FROM (SELECT updated_at, {{.Order}} AS at FROM {{.Table}}
         WHERE tenant_id = @tenant::bigint AND object_id = @object::text
           AND {{if .Threaded}}path < @before::text COLLATE "C"{{else}}child_id < @before::text::uuid{{end}}
         ORDER BY {{.Order}} DESC LIMIT @limit) page`

// quiet reports whether the thread has no recent write and, if so, how many comments it has. It
// reads the whole thread if necessary, and calls more between two pages, whose error ends it.
func (a *Shelver) quiet(ctx context.Context, k childShape, t thread, more func() error) (quiet bool, comments int64, err error) {
	before := "~" // sorts after every path
	if !k.Threaded {
		before = "ffffffff-ffff-ffff-ffff-ffffffffffff"
	}
	for {
		var n int64
		var written bool
		err := a.pool.QueryRow(ctx, k.sql(quietSQL), pgx.StrictNamedArgs{
			"tenant": t.tenant, "object": t.object, "after": a.after, "before": before, "limit": a.quietRows,
		}).Scan(&n, &written, &before)
		if err != nil {
			return false, 0, fmt.Errorf("check whether the thread under %s of tenant %d is quiet: %w", t.object, t.tenant, err)
		}
		comments += n
		if written {
			return false, 0, nil
		}
		if n < int64(a.quietRows) {
			return true, comments, nil
		}
		if err := more(); err != nil {
			return false, comments, err
		}
	}
}

// shelve moves the quiet threads of page. If the run's time is up while it reads a thread, it
// skips that thread, and the next run continues after it. So a thread that takes longer to read
// than a run lasts is not shelved.
func (a *Shelver) shelve(ctx context.Context, lease Lease, k childShape, shelving *int64, page []thread, at thread) error {
	var quiet []thread
	var spent error
	for _, t := range page {
		is, read, err := a.quiet(ctx, k, t, lease.Continue)
		if isTimeUp(lease, err) {
			a.log.WarnContext(ctx, "skipped a thread that takes longer to read than a run may last", "kind", k.Kind, "tenant", t.tenant,
				"object", t.object, "rows", read)
			at, spent = t, err
			break
		}
		if err != nil {
			return err
		}
		if is {
			quiet = append(quiet, t)
		}
	}
	if *shelving == 0 && len(quiet) > 0 {
		if err := a.pool.QueryRow(ctx, `SELECT nextval('child_archive_id')`).Scan(shelving); err != nil {
			return fmt.Errorf("take the id of a shelving: %w", err)
		}
	}
	stubs, err := a.mark(ctx, lease, k, *shelving, quiet, at)
	if err != nil || spent != nil || len(stubs) == 0 {
		return errors.Join(spent, err)
	}
	return a.move(ctx, lease, k, stubs)
}

// isTimeUp reports whether err means that the run's time is up.
func isTimeUp(lease Lease, err error) bool {
	spent := lease.Continue()
	return spent != nil && errors.Is(err, spent)
}

// markSQL inserts the stubs, which tell writers to bring threads back first.
// Index: archived_threads_pkey, archived_threads_stub_idx. Locks: none but the new rows.
const markSQL = `
INSERT /* store.archive_mark */ INTO archived_threads (tenant_id, kind, object_id, archive_id)
SELECT w.tenant_id, '{{.Kind}}', w.object_id, @archive::bigint
  FROM unnest(@tenants::bigint[], @objects::text[]) AS w(tenant_id, object_id) ORDER BY 1, w.object_id COLLATE "C"
    ON CONFLICT DO NOTHING
RETURNING tenant_id, object_id, archive_id, state, children`

// walkSQL records how far the search has come. Index: child_archive_walk_pkey. Locks: the row.
const walkSQL = `
INSERT /* store.archive_walk */ INTO child_archive_walk AS w (kind, after_tenant, after_object) VALUES ('{{.Kind}}', @tenant, @object)
    ON CONFLICT (kind) DO UPDATE SET after_tenant = excluded.after_tenant, after_object = excluded.after_object`

func (a *Shelver) mark(ctx context.Context, lease Lease, k childShape, shelving int64, threads []thread,
	at thread) (stubs []stub, err error) {
	tenants, objects := make([]int64, len(threads)), make([]event.ID, len(threads))
	for n, t := range threads {
		tenants[n], objects[n] = t.tenant, t.object
	}
	err = postgres.InTx(ctx, a.pool, pgx.TxOptions{}, func(tx pgx.Tx) error {
		if err := lease.Fence(ctx, tx); err != nil {
			return err
		}
		if _, err := tx.Exec(ctx, k.sql(walkSQL), pgx.StrictNamedArgs{"tenant": at.tenant, "object": at.object}); err != nil {
			return fmt.Errorf("record how far the search for quiet threads has come: %w", err)
		}
		if len(threads) == 0 {
			return nil
		}
		rows, _ := tx.Query(ctx, k.sql(markSQL), pgx.StrictNamedArgs{"archive": shelving, "tenants": tenants, "objects": objects})
		stubs, err = pgx.CollectRows(rows, pgx.RowToStructByPos[stub])
		if err != nil {
			return fmt.Errorf("insert %d stubs of shelving %d: %w", len(threads), shelving, err)
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	return stubs, a.at("marked")
}

// settle waits until no running transaction may insert a child without having seen the stubs, which
// are committed. Such a transaction has its id already: a create takes it in the statement before
// the one that checks the stub and inserts (postgres.WriteInTenants, childCreateSQL). errUnsettled:
// a transaction of this server runs for too long.
func (a *Shelver) settle(ctx context.Context) error {
	var before string
	if err := a.pool.QueryRow(ctx, `SELECT pg_current_xact_id()::text`).Scan(&before); err != nil {
		return fmt.Errorf("read the next transaction id: %w", err)
	}
	for end := time.Now().Add(settleTimeout); time.Now().Before(end); {
		var settled bool
		err := a.pool.QueryRow(ctx, `SELECT pg_snapshot_xmin(pg_current_snapshot()) >= $1::text::xid8`, before).Scan(&settled)
		if err != nil {
			return fmt.Errorf("check for transactions before %s: %w", before, err)
		}
		if settled {
			return a.at("settled")
		}
		if err := a.at("waiting"); err != nil {
			return err
		}
		if err := work.Sleep(ctx, settlePoll); err != nil {
			return err
		}
	}
	return errUnsettled
}

// errUnsettled ends a run; the next run continues with the waiting threads.
var errUnsettled = fmt.Errorf("store: a transaction of the database's server has been running for more than %s", settleTimeout)

// move shelves threads whose stubs are ARCHIVING, except those with a write before the writer
// could see the stub.
func (a *Shelver) move(ctx context.Context, lease Lease, k childShape, stubs []stub) (failed error) {
	if err := a.settle(ctx); err != nil {
		return err
	}
	for _, s := range stubs {
		if err := a.moveThread(ctx, lease, k, s); onBothSides(err) {
			failed = errors.Join(failed, err)
		} else if err != nil {
			return err
		}
	}
	return failed
}

func (a *Shelver) moveThread(ctx context.Context, lease Lease, k childShape, s stub) error {
	quiet := s.Moved > 0 // it was quiet when its first children moved, and since then writers see its stub
	if !quiet {
		var err error
		quiet, _, err = a.quiet(ctx, k, thread{s.TenantID, s.ObjectID}, lease.Continue)
		if isTimeUp(lease, err) { // bring it back, so that no later run begins with it again
			_, back := a.bringBack(ctx, lease, k, s, returnedByJob)
			return errors.Join(err, back)
		}
		if err != nil {
			return err
		}
	}
	if !quiet || a.after == 0 {
		_, err := a.bringBack(ctx, lease, k, s, returnedByJob)
		return err
	}
	for more := true; more; {
		err := errors.Join(ctx.Err(), lease.Continue())
		if err != nil {
			return err
		}
		if more, err = a.moveSome(ctx, lease, k, s); err != nil {
			return fmt.Errorf("shelve the thread under %s of tenant %d: %w", s.ObjectID, s.TenantID, err)
		}
	}
	return nil
}

// moveLockSQL locks the stub of a thread that is being shelved. Its commit does not wait for the
// disk, which would be most of the cost of a small thread. A crash of the server rolls back whole
// moves, and every answer to a writer follows them in the same log. Index: archived_threads_pkey.
// Locks: the stub.
const moveLockSQL = `
SELECT /* store.archive_lock */ set_config('synchronous_commit', 'off', true) FROM archived_threads
 WHERE tenant_id = @tenant::bigint AND kind = '{{.Kind}}' AND object_id = @object::text AND archive_id = @archive::bigint
   AND state = 'ARCHIVING'
   FOR NO KEY UPDATE`

// moveSQL moves the first children of a thread to the shelf unchanged. It locks them in key
// order, as writers do, because a writer that began before the stub existed may still run. Index:
// children_KIND_path_key or children_KIND_object_idx, children_KIND_pkey. Locks: the children.
const moveSQL = `
WITH page AS (
  SELECT child_id FROM {{.Table}} WHERE tenant_id = @tenant::bigint AND object_id = @object::text ORDER BY {{.Order}} LIMIT @limit
), held AS (
  SELECT c.child_id FROM {{.Table}} c JOIN page p ON c.tenant_id = @tenant::bigint AND c.child_id = p.child_id
   ORDER BY c.child_id FOR UPDATE OF c
), gone AS (
  DELETE FROM {{.Table}} c USING held h WHERE c.tenant_id = @tenant::bigint AND c.child_id = h.child_id RETURNING c.*
)
INSERT /* store.archive_move */ INTO {{.Shelf}} (` + movedColumns + `) SELECT ` + movedColumns + ` FROM gone`

// moveStateSQL records how far the move has come. Index: archived_threads_pkey. Locks: the stub.
const moveStateSQL = `
UPDATE /* store.archive_state */ archived_threads
   SET state = CASE WHEN @all::boolean THEN 'ARCHIVED' ELSE state END, children = children + @moved
 WHERE tenant_id = @tenant::bigint AND kind = '{{.Kind}}' AND object_id = @object::text AND archive_id = @archive::bigint`

// moveSome moves up to moveRows comments of a thread in one transaction, and reports whether there
// may be more. It moves nothing if the thread is already returning.
func (a *Shelver) moveSome(ctx context.Context, lease Lease, k childShape, s stub) (more bool, err error) {
	var moved int64
	var all bool
	err = postgres.InTx(ctx, a.pool, pgx.TxOptions{}, func(tx pgx.Tx) error {
		moved, all = 0, false
		if err := lease.Fence(ctx, tx); err != nil {
			return err
		}
		tag, err := tx.Exec(ctx, k.sql(moveLockSQL), pgx.StrictNamedArgs{"tenant": s.TenantID, "object": s.ObjectID,
			"archive": s.ArchiveID})
		if err != nil {
			return fmt.Errorf("lock the stub of the thread: %w", err)
		}
		if tag.RowsAffected() == 0 {
			return nil
		}
		tag, err = tx.Exec(ctx, k.sql(moveSQL), pgx.StrictNamedArgs{"tenant": s.TenantID, "object": s.ObjectID, "limit": a.moveRows})
		if err != nil {
			return fmt.Errorf("move up to %d comments: %w", a.moveRows, err)
		}
		moved = tag.RowsAffected()
		all = moved < int64(a.moveRows)
		_, err = tx.Exec(ctx, k.sql(moveStateSQL), pgx.StrictNamedArgs{
			"tenant": s.TenantID, "object": s.ObjectID, "archive": s.ArchiveID, "all": all, "moved": moved,
		})
		if err != nil {
			return fmt.Errorf("record the state of the move: %w", err)
		}
		return a.at("moving")
	})
	if err != nil {
		return false, err
	}
	if moved > 0 {
		a.metrics.comments.Add(float64(moved))
		lease.Count(CountCommentsShelved, moved)
	}
	if all {
		a.metrics.threads.Inc()
		lease.Count(CountThreadsShelved, 1)
	}
	return moved > 0 && !all, a.at("moved")
}

// bringBack brings a thread back, in any state of its stub, and returns the number of comments that
// it moved.
func (a *Shelver) bringBack(ctx context.Context, lease Lease, k childShape, s stub, by string) (moved int64, err error) {
	for back := false; !back; {
		if err := ctx.Err(); err != nil {
			return moved, err
		}
		if moved > 0 { // a thread that has moved nothing yet returns without a check
			if err := lease.Continue(); err != nil {
				return moved, err
			}
		}
		var n int64
		err := postgres.InTx(ctx, a.pool, pgx.TxOptions{}, func(tx pgx.Tx) (err error) {
			if err := lease.Fence(ctx, tx); err != nil {
				return err
			}
			if n, back, err = k.returnChunk(ctx, tx, s.TenantID, s.ObjectID, by, a.moveRows); err != nil {
				return err
			}
			return a.at("returning")
		})
		if err != nil {
			return moved, fmt.Errorf("bring back the thread under %s of tenant %d: %w", s.ObjectID, s.TenantID, err)
		}
		moved += max(n, 0)
		if back && n >= 0 {
			a.metrics.returned.Inc()
			lease.Count(CountThreadsReturned, 1)
		}
		if err := a.at("returned"); err != nil {
			return moved, err
		}
	}
	return moved, nil
}

// unfinishedSQL reads stubs of threads that are moving in either direction.
// Index: archived_threads_unfinished_idx, one range. Locks: none.
const unfinishedSQL = `
SELECT /* store.archive_unfinished */ tenant_id, object_id, archive_id, state, children FROM archived_threads
 WHERE state IN ('ARCHIVING', 'RETURNING') AND kind = '{{.Kind}}' AND (tenant_id, object_id) > (@tenant::bigint, @object::text)
 ORDER BY tenant_id, object_id LIMIT @limit`

// finish completes the threads that are moving in either direction, each once, page by page.
func (a *Shelver) finish(ctx context.Context, lease Lease, k childShape) (failed error) {
	for at, n := (thread{}), a.walkPage; n == a.walkPage; {
		if err := lease.Continue(); err != nil {
			return errors.Join(failed, err)
		}
		rows, _ := a.pool.Query(ctx, k.sql(unfinishedSQL),
			pgx.StrictNamedArgs{"tenant": at.tenant, "object": at.object, "limit": a.walkPage})
		stubs, err := pgx.CollectRows(rows, pgx.RowToStructByPos[stub])
		if err != nil {
			return fmt.Errorf("read the stubs of threads that are moving: %w", err)
		}
		if n = len(stubs); n == 0 {
			return failed
		}
		at = thread{stubs[n-1].TenantID, stubs[n-1].ObjectID}
		var there []stub
		for _, s := range stubs {
			if s.State == stateArchiving {
				there = append(there, s)
			} else if _, err := a.bringBack(ctx, lease, k, s, returnedByJob); onBothSides(err) {
				failed = errors.Join(failed, err)
			} else if err != nil {
				return err
			}
		}
		if len(there) == 0 {
			continue
		}
		if err := a.move(ctx, lease, k, there); onBothSides(err) {
			failed = errors.Join(failed, err)
		} else if err != nil {
			return err
		}
	}
	return failed
}

// shelvedStubsSQL reads the threads of a shelving that have not returned.
// Index: archived_threads_archive_idx, one range. Locks: none.
const shelvedStubsSQL = `
SELECT /* store.archive_stubs */ tenant_id, object_id, archive_id, state, children FROM archived_threads
 WHERE archive_id = @archive AND kind = '{{.Kind}}' AND (tenant_id, object_id) > (@tenant::bigint, @object::text) AND state <> 'RETURNED'
 ORDER BY tenant_id, object_id LIMIT @limit`

// Undo brings back every thread of the shelving, and returns the numbers of threads and children.
// It may be repeated. The threads count as written just now, so they do not move again before they
// have been quiet for as long as any other. It returns ErrNotFound if no thread was ever moved
// under that id.
func (a *Shelver) Undo(ctx context.Context, lease Lease, shelving int64) (threads, children int64, err error) {
	var known bool
	var failed error
	err = a.pool.QueryRow(ctx, `SELECT EXISTS (SELECT FROM archived_threads WHERE archive_id = $1)`, shelving).Scan(&known)
	if err != nil {
		return 0, 0, fmt.Errorf("read shelving %d: %w", shelving, err)
	}
	if !known {
		return 0, 0, fmt.Errorf("shelving %d: %w", shelving, ErrNotFound)
	}
	for _, k := range a.kinds().AllChildren() {
		t, c, err := a.undo(ctx, lease, shapeOf(k), shelving)
		threads, children, failed = threads+t, children+c, errors.Join(failed, err)
		if err != nil && !onBothSides(err) {
			return threads, children, err
		}
	}
	return threads, children, failed
}

func (a *Shelver) undo(ctx context.Context, lease Lease, k childShape, shelving int64) (threads, children int64, failed error) {
	for at := (thread{}); ; {
		rows, _ := a.pool.Query(ctx, k.sql(shelvedStubsSQL),
			pgx.StrictNamedArgs{"archive": shelving, "tenant": at.tenant, "object": at.object, "limit": a.walkPage})
		stubs, err := pgx.CollectRows(rows, pgx.RowToStructByPos[stub])
		if err != nil {
			return threads, children, fmt.Errorf("read the threads of shelving %d: %w", shelving, err)
		}
		if len(stubs) == 0 {
			return threads, children, failed
		}
		for _, s := range stubs {
			at = thread{s.TenantID, s.ObjectID}
			n, err := a.bringBack(ctx, lease, k, s, returnedByUndo)
			children += n
			if onBothSides(err) { // the others return
				failed = errors.Join(failed, err)
				continue
			}
			if err != nil {
				return threads, children, err
			}
			threads++
		}
	}
}

// Shelving is a summary of one run that shelved threads.
type Shelving struct {
	ArchiveID int64     `json:"archive_id"`
	StartedAt time.Time `json:"started_at"`
	Threads   int64     `json:"threads"`
	Comments  int64     `json:"comments"`
	Returned  int64     `json:"threads_returned"`
}

// shelvingsSQL sums up the newest shelvings.
// Index: archived_threads_archive_idx, the ranges of those shelvings. Locks: none.
const shelvingsSQL = `
SELECT /* store.archives */ archive_id, min(started_at), count(*), sum(children)::bigint, count(*) FILTER (WHERE state = 'RETURNED')
  FROM archived_threads WHERE archive_id > (SELECT max(archive_id) FROM archived_threads) - @limit::bigint
 GROUP BY archive_id ORDER BY archive_id DESC`

// Shelvings returns summaries of the last limit shelvings, newest first. A run that moved nothing
// has none. pool acts as postgres.RoleSystem.
func Shelvings(ctx context.Context, pool *pgxpool.Pool, limit int) ([]Shelving, error) {
	rows, _ := pool.Query(ctx, shelvingsSQL, pgx.StrictNamedArgs{"limit": limit})
	all, err := pgx.CollectRows(rows, pgx.RowToStructByPos[Shelving])
	if err != nil {
		return nil, fmt.Errorf("read the last shelvings: %w", err)
	}
	return all, nil
}

// at calls a test's hook after a step; its error ends the work there.
func (a *Shelver) at(step string) error {
	if a.reached == nil {
		return nil
	}
	return a.reached(step)
}

const stateArchiving = "ARCHIVING"
