package postgres_test

import (
	"context"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
)

func TestMain(m *testing.M) { testkit.Main(m) }

func TestInTenantSetsTheTenantForItsTransactionAlone(t *testing.T) {
	db, ctx := testkit.Postgres(t), t.Context()
	_, err := db.Pool(t, postgres.RoleOwner).Exec(ctx,
		`DO $$ BEGIN EXECUTE format('ALTER DATABASE %I SET default_transaction_isolation = ''repeatable read''',
			current_database()); END $$`)
	if err != nil {
		t.Fatal(err)
	}
	pool := db.Pool(t, postgres.RoleAPI) // its transactions must not follow somebody else's defaults
	settings := func(tx pgx.Tx) (got string, err error) {
		return got, tx.QueryRow(ctx, `SELECT concat_ws(' ', current_setting('tidings.tenant', true),
			current_setting('transaction_isolation'),
			current_setting('transaction_read_only'))`).Scan(&got)
	}
	for want, opts := range map[string]pgx.TxOptions{
		"42 read committed off": {},
		"42 repeatable read on": {IsoLevel: pgx.RepeatableRead, AccessMode: pgx.ReadOnly},
		"42 serializable off":   {IsoLevel: pgx.Serializable, AccessMode: pgx.ReadWrite, DeferrableMode: pgx.NotDeferrable},
		"42 read committed on":  {AccessMode: pgx.ReadOnly},
	} {
		for _, in := range []func(context.Context, *pgxpool.Pool, int64, pgx.TxOptions, func(pgx.Tx) error) error{
			postgres.InTenant, postgres.InShortTenant,
		} {
			err := in(ctx, pool, 42, opts, func(tx pgx.Tx) error {
				got, err := settings(tx)
				if err == nil && got != want {
					t.Errorf("%+v: got %q, want %q", opts, got, want)
				}
				return err
			})
			if err != nil {
				t.Errorf("%+v: %v", opts, err)
			}
		}
	}
	conn, err := pool.Acquire(ctx)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Release()
	err = pgx.BeginFunc(ctx, conn, func(tx pgx.Tx) error {
		got, err := settings(tx)
		if strings.Contains(got, "42") {
			t.Errorf("the tenant outlived its transaction: %q", got)
		}
		return err
	})
	if err != nil {
		t.Error(err)
	}
}
