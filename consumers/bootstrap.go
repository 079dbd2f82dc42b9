package consumers

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/work"
)

// Bootstrap is the claim of one instance to fill a projection from exports. The table
// consumer_bootstraps has how far it is, so any instance continues after a crash.
//
//	           Claim                      Reset                            Join
//	no offset ───────▶ filling ──▶ ... ◀──────── events expired   filling ──────▶ reads the streams
//
// Every transaction of the owner renews its claim and ends with ErrClaim if another instance has
// taken it.
type Bootstrap struct {
	Pool     *pgxpool.Pool
	Consumer string
	Owner    string        // of this instance
	Takeover time.Duration // after which another instance takes a claim without a sign of life
}

// ErrClaim reports a claim that another instance has taken.
var ErrClaim = errors.New("consumers: another instance fills the projection")

// Exported is how far the export of a tenant's kind is read.
type Exported struct {
	Tenant  int64
	Kind    string
	Cursor  string
	After   string
	Streams json.RawMessage
	Done    bool
}

// takeSQL renews the claim of its owner, or takes one without a sign of life. Index:
// consumer_bootstraps_pkey. Locks: the claim.
const takeSQL = `
UPDATE /* consumers.take_claim */ consumer_bootstraps SET owner = @owner, moved_at = clock_timestamp()
 WHERE consumer_name = @consumer AND tenant = 0 AND (owner = @owner OR moved_at < clock_timestamp() - @takeover::interval)`

// claimSQL makes the claim on a consumer without offsets. Index: consumer_bootstraps_pkey. Locks:
// the claim; it waits for a Join.
const claimSQL = `
INSERT /* consumers.claim */ INTO consumer_bootstraps (consumer_name, tenant, kind, owner)
SELECT @consumer, 0, '', @owner WHERE NOT EXISTS (SELECT FROM consumer_offsets WHERE consumer_name = @consumer)
    ON CONFLICT DO NOTHING`

// fillingSQL finds the claim. Index: consumer_bootstraps_pkey. Locks: none.
const fillingSQL = `SELECT /* consumers.filling */ EXISTS (SELECT FROM consumer_bootstraps WHERE consumer_name = @consumer)`

// errJoined rolls back a claim that waited for the Join of another one.
var errJoined = errors.New("consumers: the projection reads the streams")

// Claim claims the projection. mine reports that this instance fills it, and filled that it reads
// the streams already. If both are false, another instance fills it.
func (b *Bootstrap) Claim(ctx context.Context) (mine, filled bool, err error) {
	err = postgres.InTx(ctx, b.Pool, pgx.TxOptions{}, func(tx pgx.Tx) error {
		tag, err := tx.Exec(ctx, takeSQL, pgx.StrictNamedArgs{"consumer": b.Consumer, "owner": b.Owner,
			"takeover": pgtype.Interval{Microseconds: b.Takeover.Microseconds(), Valid: true}})
		if mine = err == nil && tag.RowsAffected() > 0; mine || err != nil {
			return err
		}
		if tag, err = tx.Exec(ctx, claimSQL, pgx.StrictNamedArgs{"consumer": b.Consumer, "owner": b.Owner}); err != nil {
			return err
		}
		if tag.RowsAffected() > 0 {
			joined, err := HasOffset(ctx, tx, b.Consumer)
			if mine = !joined; joined && err == nil {
				err = errJoined
			}
			return err
		}
		var filling bool
		err = tx.QueryRow(ctx, fillingSQL, pgx.StrictNamedArgs{"consumer": b.Consumer}).Scan(&filling)
		filled = !filling
		return err
	})
	if errors.Is(err, errJoined) {
		return false, true, nil
	}
	if err != nil {
		return false, false, fmt.Errorf("claim the bootstrap of consumer %s: %w", b.Consumer, err)
	}
	return mine, filled, nil
}

// Keep renews the claim until ctx ends or another instance has it.
func (b *Bootstrap) Keep(ctx context.Context) {
	for work.Sleep(ctx, b.Takeover/3) == nil {
		if err := b.tx(ctx, func(pgx.Tx) error { return nil }); errors.Is(err, ErrClaim) {
			return
		}
	}
}

// renewSQL renews the claim of its owner. Index: consumer_bootstraps_pkey. Locks: the claim.
const renewSQL = `
UPDATE /* consumers.renew_claim */ consumer_bootstraps SET moved_at = clock_timestamp()
 WHERE consumer_name = @consumer AND tenant = 0 AND owner = @owner`

// tx runs fn in a transaction that holds the claim.
func (b *Bootstrap) tx(ctx context.Context, fn func(tx pgx.Tx) error) error {
	return postgres.InTx(ctx, b.Pool, pgx.TxOptions{}, func(tx pgx.Tx) error {
		tag, err := tx.Exec(ctx, renewSQL, pgx.StrictNamedArgs{"consumer": b.Consumer, "owner": b.Owner})
		if err != nil {
			return fmt.Errorf("renew the claim on consumer %s: %w", b.Consumer, err)
		}
		if tag.RowsAffected() == 0 {
			return ErrClaim
		}
		return fn(tx)
	})
}

// progressSQL reads how far the exports are. Index: consumer_bootstraps_pkey. Locks: none.
const progressSQL = `
SELECT /* consumers.progress */ tenant, kind, cursor, after, streams, done FROM consumer_bootstraps
 WHERE consumer_name = @consumer AND tenant > 0 ORDER BY tenant, kind`

// Progress returns how far the exports are read.
func (b *Bootstrap) Progress(ctx context.Context) ([]Exported, error) { return b.progress(ctx, b.Pool) }

func (b *Bootstrap) progress(ctx context.Context, q postgres.Querier) ([]Exported, error) {
	rows, _ := q.Query(ctx, progressSQL, pgx.StrictNamedArgs{"consumer": b.Consumer})
	all, err := pgx.CollectRows(rows, pgx.RowToStructByPos[Exported])
	if err != nil {
		return nil, fmt.Errorf("read the bootstrap of consumer %s: %w", b.Consumer, err)
	}
	return all, nil
}

// saveProgressSQL records how far an export is read. Index: consumer_bootstraps_pkey. Locks: the
// row.
const saveProgressSQL = `
INSERT /* consumers.save_progress */ INTO consumer_bootstraps (consumer_name, tenant, kind, cursor, after, streams, done)
VALUES (@consumer, @tenant, @kind, @cursor, @after, @streams::jsonb, @done)
    ON CONFLICT (consumer_name, tenant, kind) DO UPDATE SET after = EXCLUDED.after, done = EXCLUDED.done`

// Save records that an export is read up to p, in the transaction in which store keeps its states.
func (b *Bootstrap) Save(ctx context.Context, p Exported, store func(tx pgx.Tx) error) error {
	return b.tx(ctx, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, saveProgressSQL, pgx.StrictNamedArgs{"consumer": b.Consumer, "tenant": p.Tenant, "kind": p.Kind,
			"cursor": p.Cursor, "after": p.After, "streams": string(p.Streams), "done": p.Done}); err != nil {
			return fmt.Errorf("record the bootstrap of consumer %s: %w", b.Consumer, err)
		}
		return store(tx)
	})
}

// endSQL deletes the claim and the progress. Index: consumer_bootstraps_pkey. Locks: the rows.
const endSQL = `DELETE /* consumers.end_bootstrap */ FROM consumer_bootstraps WHERE consumer_name = @consumer`

// Join ends the bootstrap: in one transaction, the consumer gets the offsets that starts returns
// for the exports, and the claim ends.
func (b *Bootstrap) Join(ctx context.Context, starts func([]Exported) (map[int]Start, error)) error {
	return b.tx(ctx, func(tx pgx.Tx) error {
		all, err := b.progress(ctx, tx)
		if err != nil {
			return err
		}
		at, err := starts(all)
		if err != nil {
			return err
		}
		if err := StartAt(ctx, tx, b.Consumer, at); err != nil {
			return err
		}
		return EndBootstrap(ctx, tx, b.Consumer)
	})
}

// EndBootstrap ends the claim on a consumer. Its owner finds that out with its next transaction.
func EndBootstrap(ctx context.Context, tx pgx.Tx, consumer string) error {
	if _, err := tx.Exec(ctx, endSQL, pgx.StrictNamedArgs{"consumer": consumer}); err != nil {
		return fmt.Errorf("end the bootstrap of consumer %s: %w", consumer, err)
	}
	return nil
}

// restartSQL deletes the progress, and leaves the claim. Index: consumer_bootstraps_pkey. Locks:
// the rows.
const restartSQL = `
DELETE /* consumers.restart_bootstrap */ FROM consumer_bootstraps WHERE consumer_name = @consumer AND tenant > 0`

// Restart begins the exports again, for example because one no longer joins the streams. clear
// empties the projection's tables.
func (b *Bootstrap) Restart(ctx context.Context, clear func(ctx context.Context, tx pgx.Tx) error) error {
	return b.tx(ctx, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, restartSQL, pgx.StrictNamedArgs{"consumer": b.Consumer}); err != nil {
			return fmt.Errorf("begin the bootstrap of consumer %s again: %w", b.Consumer, err)
		}
		return clear(ctx, tx)
	})
}

// atSQL reports whether a consumer is at a position. Index: consumer_offsets_pkey. Locks: none;
// Hold has locked the row.
const atSQL = `
SELECT /* consumers.at */ NOT EXISTS (SELECT FROM consumer_offsets WHERE consumer_name = @consumer AND partition_key = @stream
                  AND (closed OR last_processed_id <> @seq))`

// dropLettersSQL deletes the dead letters of a consumer. Index:
// consumer_dead_letters_aggregate_idx. Locks: the rows; the offsets are held.
const dropLettersSQL = `DELETE /* consumers.drop_letters */ FROM consumer_dead_letters WHERE consumer_name = @consumer`

// resetSQL makes the claim on a consumer that has offsets. Index: consumer_bootstraps_pkey. Locks:
// the claim.
const resetSQL = `
INSERT /* consumers.reset */ INTO consumer_bootstraps (consumer_name, tenant, kind, owner) VALUES (@consumer, 0, '', @owner)`

// Reset begins a bootstrap of a consumer whose next events expired (Deps.Expired), unless it has
// moved on since, or an instance has begun one. clear empties the projection's tables. The offsets
// stay: what the consumer reads meanwhile is newer than the exports, and Join moves the others
// forward.
func (b *Bootstrap) Reset(ctx context.Context, expired Start, clear func(ctx context.Context, tx pgx.Tx) error) error {
	return postgres.InTx(ctx, b.Pool, pgx.TxOptions{}, func(tx pgx.Tx) error {
		if _, err := Hold(ctx, tx, b.Consumer); err != nil {
			return err
		}
		var at, filling bool
		if err := tx.QueryRow(ctx, fillingSQL, pgx.StrictNamedArgs{"consumer": b.Consumer}).Scan(&filling); err != nil || filling {
			return err
		}
		if err := tx.QueryRow(ctx, atSQL, pgx.StrictNamedArgs{"consumer": b.Consumer, "stream": expired.Stream,
			"seq": int64(expired.Seq)}).Scan(&at); err != nil || !at {
			return err
		}
		if _, err := tx.Exec(ctx, resetSQL, pgx.StrictNamedArgs{"consumer": b.Consumer, "owner": b.Owner}); err != nil {
			return err
		}
		if _, err := tx.Exec(ctx, dropLettersSQL, pgx.StrictNamedArgs{"consumer": b.Consumer}); err != nil {
			return err
		}
		return clear(ctx, tx)
	})
}
