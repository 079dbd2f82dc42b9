package audit

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

// Limits of texts in a record, in bytes.
const (
	MaxReasonBytes = 2000
	maxTextBytes   = 2000
)

// ErrNotFound reports an act that no Begin recorded.
var ErrNotFound = errors.New("audit: no such act")

// ErrInvalid reports an act that lacks a reason, or whose reason is longer than MaxReasonBytes.
var ErrInvalid = errors.New("audit: an act needs a reason of at most " + strconv.Itoa(MaxReasonBytes) + " bytes of text")

// Act is one act and its record.
type Act struct {
	ID          int64      // of the record; rises with each Begin, which sets it
	ActID       uuid.UUID  // names the act: a repeated id is done once
	Started     time.Time  // Begin sets it
	Finished    *time.Time // nil: in progress, or its process has ended
	TenantID    int64      // the tenant that it concerns; 0: the installation
	TokenTenant int64      // the tenant of the operator's token; 0: a system token
	TokenName   string
	Fingerprint string // of the operator's token
	Name        string // the kind of act, for example "consumer.pause"
	Target      string // the object of the act
	Reason      string
	Outcome     string // a sentence; empty while in progress
	Failed      bool
}

const columns = `id, act_id, started_at, finished_at, tenant_id, token_tenant, token_name, fingerprint, act, target, reason, ` +
	`coalesce(outcome, ''), failed`

func scan(row pgx.CollectableRow) (a Act, err error) {
	err = row.Scan(&a.ID, &a.ActID, &a.Started, &a.Finished, &a.TenantID, &a.TokenTenant, &a.TokenName, &a.Fingerprint, &a.Name, &a.Target,
		&a.Reason, &a.Outcome, &a.Failed)
	return a, err
}

// beginSQL records the beginning of an act, once. Index: operator_acts_act_key. Locks: the new row.
const beginSQL = `
INSERT /* audit.begin */ INTO operator_acts (act_id, tenant_id, token_tenant, token_name, fingerprint, act, target, reason)
VALUES (@act_id::uuid, @tenant::bigint, @token_tenant::bigint, @token_name::text, @fingerprint::text, @act::text, @target::text,
	@reason::text)
ON CONFLICT (act_id) DO NOTHING RETURNING ` + columns

// Begin records an act before it is done, and returns the record. If an act with this id was begun
// before, first is false and record is that act's: do nothing then. pool acts as
// postgres.RoleSystem.
func Begin(ctx context.Context, pool *pgxpool.Pool, a Act) (record Act, first bool, err error) {
	a.Reason = strings.TrimSpace(a.Reason)
	if a.Reason == "" || len(a.Reason) > MaxReasonBytes || !utf8.ValidString(a.Reason) || strings.ContainsRune(a.Reason, 0) {
		return Act{}, false, ErrInvalid
	}
	rows, _ := pool.Query(ctx, beginSQL, pgx.StrictNamedArgs{"act_id": a.ActID, "tenant": a.TenantID, "token_tenant": a.TokenTenant,
		"token_name": a.TokenName, "fingerprint": a.Fingerprint, "act": a.Name, "target": text(a.Target), "reason": a.Reason})
	record, err = pgx.CollectExactlyOneRow(rows, scan)
	if errors.Is(err, pgx.ErrNoRows) {
		record, err = Get(ctx, pool, a.ActID)
		return record, false, err
	}
	if err != nil {
		return Act{}, false, fmt.Errorf("record the act %s: %w", a.Name, err)
	}
	return record, true, nil
}

// finishSQL records the outcome of an act, once. Index: operator_acts_act_key. Locks: the act.
const finishSQL = `
UPDATE /* audit.finish */ operator_acts SET finished_at = now(), outcome = @outcome::text, failed = @failed::boolean
 WHERE act_id = @act_id::uuid AND finished_at IS NULL`

// Finish records the outcome of a begun act. The first outcome remains. pool acts as
// postgres.RoleSystem.
func Finish(ctx context.Context, pool *pgxpool.Pool, id uuid.UUID, outcome string, failed bool) error {
	if _, err := pool.Exec(ctx, finishSQL, pgx.StrictNamedArgs{"act_id": id, "outcome": text(outcome), "failed": failed}); err != nil {
		return fmt.Errorf("record the outcome of act %s: %w", id, err)
	}
	return nil
}

// text returns s in a form that the database accepts, cut to maxTextBytes.
func text(s string) string {
	s = strings.ReplaceAll(strings.ToValidUTF8(s, "\uFFFD"), "\x00", "\uFFFD")
	for len(s) > maxTextBytes {
		_, size := utf8.DecodeLastRuneInString(s)
		s = s[:len(s)-size]
	}
	return s
}

// getSQL reads one act. Index: operator_acts_act_key. Locks: none.
const getSQL = `SELECT /* audit.get */ ` + columns + ` FROM operator_acts WHERE act_id = @act_id::uuid`

// Get returns the record of an act, or ErrNotFound. pool acts as postgres.RoleSystem.
func Get(ctx context.Context, pool *pgxpool.Pool, id uuid.UUID) (Act, error) {
	rows, _ := pool.Query(ctx, getSQL, pgx.StrictNamedArgs{"act_id": id})
	a, err := pgx.CollectExactlyOneRow(rows, scan)
	if errors.Is(err, pgx.ErrNoRows) {
		return Act{}, ErrNotFound
	}
	if err != nil {
		return Act{}, fmt.Errorf("read act %s: %w", id, err)
	}
	return a, nil
}

// Filter selects the acts that List returns. The zero Filter selects all.
type Filter struct {
	Tenant      *int64    // the tenant that they concern; nil: any
	Name        string    // the kind of act; empty: any
	TokenName   string    // the operator's token; empty: any
	Text        string    // part of the target or the reason, in any case
	From, Until time.Time // of their beginning: at From or later, before Until; zero: no bound
	Before      int64     // only ids below it; 0: any id
}

// listSQL reads acts, newest first. Index: operator_acts_pkey backwards, operator_acts_tenant_idx
// for one tenant; the other conditions filter. Locks: none.
const listSQL = `
SELECT /* audit.list */ ` + columns + `
  FROM operator_acts
 WHERE (@before::bigint = 0 OR id < @before) AND (@tenant::bigint IS NULL OR tenant_id = @tenant) AND (@act::text = '' OR act = @act)
   AND (@token::text = '' OR token_name = @token)
   AND (@text::text = '' OR position(lower(@text) IN lower(target)) > 0 OR position(lower(@text) IN lower(reason)) > 0)
   AND (@from::timestamptz IS NULL OR started_at >= @from) AND (@until::timestamptz IS NULL OR started_at < @until)
 ORDER BY id DESC LIMIT @limit::int`

// List returns up to limit acts of the filter, newest first. For the next page set Before to the
// last act's ID. pool acts as postgres.RoleSystem.
func List(ctx context.Context, pool *pgxpool.Pool, f Filter, limit int) ([]Act, error) {
	rows, _ := pool.Query(ctx, listSQL, pgx.StrictNamedArgs{"before": f.Before, "tenant": f.Tenant, "act": f.Name,
		"token": f.TokenName, "text": f.Text, "from": bound(f.From), "until": bound(f.Until), "limit": limit})
	all, err := pgx.CollectRows(rows, scan)
	if err != nil {
		return nil, fmt.Errorf("list the acts of operators: %w", err)
	}
	return all, nil
}

// lastSQL reads the newest finished act of a name on each target. Index: operator_acts_target_idx
// backwards, one range per target. Locks: none.
const lastSQL = `
SELECT /* audit.last */ a.* FROM unnest(@targets::text[]) AS t(target), LATERAL (
  SELECT ` + columns + ` FROM operator_acts WHERE act = @act::text AND target = t.target AND finished_at IS NOT NULL
   ORDER BY id DESC LIMIT 1) a`

// Last returns the newest finished act of the name, by target. A target without one is missing.
// pool acts as postgres.RoleSystem.
func Last(ctx context.Context, pool *pgxpool.Pool, act string, targets []string) (map[string]Act, error) {
	rows, _ := pool.Query(ctx, lastSQL, pgx.StrictNamedArgs{"act": act, "targets": targets})
	all, err := pgx.CollectRows(rows, scan)
	if err != nil {
		return nil, fmt.Errorf("read the last acts %s: %w", act, err)
	}
	last := make(map[string]Act, len(all))
	for _, a := range all {
		last[a.Target] = a
	}
	return last, nil
}

func bound(t time.Time) *time.Time {
	if t.IsZero() {
		return nil
	}
	return &t
}

// exportPage is the number of acts that Export reads with one statement.
const exportPage = 1000

// Export calls fn for each act of the filter, newest first. It reads pages, so that no statement
// runs for long. It ends with the first error of fn.
func Export(ctx context.Context, pool *pgxpool.Pool, f Filter, fn func(Act) error) error {
	for {
		page, err := List(ctx, pool, f, exportPage)
		if err != nil {
			return err
		}
		for _, a := range page {
			if err := fn(a); err != nil {
				return err
			}
			f.Before = a.ID
		}
		if len(page) < exportPage {
			return nil
		}
	}
}
