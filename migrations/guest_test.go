package migrations_test

import (
	"errors"
	"testing"

	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
	"github.com/tidings/tidings/migrations"
)

func TestTheOutboxIsAloneInItsSchema(t *testing.T) {
	t.Parallel()
	db := testkit.EmptyPostgres(t)
	if _, err := migrations.UpIn(t.Context(), db.URL, migrations.Outbox, "guest", testkit.Logger(t)); err != nil {
		t.Fatal(err)
	}
	var tables, elsewhere int
	if err := pool(t, db.URL, postgres.RoleOwner).QueryRow(t.Context(), `
		SELECT count(*) FILTER (WHERE relnamespace = 'guest'::regnamespace), count(*) FILTER (WHERE relnamespace = 'public'::regnamespace)
		  FROM pg_class`).Scan(&tables, &elsewhere); err != nil || tables == 0 || elsewhere != 0 {
		t.Errorf("%d relations in the schema and %d in public, %v", tables, elsewhere, err)
	}
	in := db.In(t, "guest").Pool(t, postgres.RoleRelay)
	if err := migrations.Check(t.Context(), in, migrations.Outbox); err != nil {
		t.Error(err)
	}
	if err := migrations.Check(t.Context(), in, migrations.Truth); !errors.Is(err, migrations.ErrOutdated) {
		t.Errorf("check of the truth: %v, want ErrOutdated", err)
	}
}
