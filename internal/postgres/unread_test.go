package postgres_test

import (
	"net/url"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
)

// TestAProcessThatTakesNoAnswerKeepsNoLock: it is frozen while the server sends it more than the
// sockets hold. No other timeout ends a statement that sends.
func TestAProcessThatTakesNoAnswerKeepsNoLock(t *testing.T) {
	t.Parallel()
	db := testkit.Postgres(t)
	owner := db.Pool(t, postgres.RoleOwner)
	u, err := url.Parse(db.URL)
	if err != nil {
		t.Fatal(err)
	}
	p := testkit.NewProxy(t, u.Host)
	u.Host = p.Addr()
	cfg := postgres.Config{MaxConns: 2, ConnectTimeout: 10 * time.Second, StatementTimeout: time.Second}
	pool, err := postgres.OpenWith(t.Context(), u.String(), cfg, postgres.RoleSystem, "test", map[string]string{"tcp_user_timeout": "1000"})
	if err != nil {
		t.Fatal(err)
	}
	read := make(chan error, 1)
	go func() {
		read <- postgres.InTx(t.Context(), pool, pgx.TxOptions{}, func(tx pgx.Tx) error {
			if _, err := tx.Exec(t.Context(), `SELECT pg_advisory_xact_lock(4711)`); err != nil {
				return err
			}
			p.LoseAnswers()
			_, err := tx.Exec(t.Context(), `SELECT repeat('x', 1000000) FROM generate_series(1, 60)`)
			return err
		})
	}()
	testkit.Eventually(t, "the server to send", func() (sends bool, err error) {
		return sends, owner.QueryRow(t.Context(), `SELECT EXISTS (SELECT FROM pg_stat_activity
			WHERE datname = current_database() AND wait_event = 'ClientWrite')`).Scan(&sends)
	})
	testkit.Eventually(t, "its lock to be free", func() (free bool, err error) {
		return free, owner.QueryRow(t.Context(), `SELECT pg_try_advisory_xact_lock(4711)`).Scan(&free)
	})
	p.Cut()
	if err := <-read; err == nil {
		t.Error("the process has read its answer")
	}
	pool.Close()

	var limit string
	if err := db.Pool(t, postgres.RoleAPI).QueryRow(t.Context(), `SHOW tcp_user_timeout`).Scan(&limit); err != nil || limit != "30000" {
		t.Errorf("the server ends connections that take nothing after %s ms, %v; want 30000", limit, err)
	}
}
