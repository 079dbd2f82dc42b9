//go:build faults

package console_test

import (
	"context"
	"strings"
	"testing"

	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
)

// TestThePagesAnswerWhileATableIsLocked also checks that they name the session that holds the lock.
func TestThePagesAnswerWhileATableIsLocked(t *testing.T) {
	h := start(t)
	h.declare(t)
	ada := h.signIn(t, h.Tokens.Admin)
	tx, err := h.db.Pool(t, postgres.RoleOwner).Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = tx.Rollback(context.WithoutCancel(t.Context())) }() // the pool closes after it
	if _, err := tx.Exec(t.Context(), `SET LOCAL idle_in_transaction_session_timeout = 0;
		LOCK TABLE outbox_messages, outbox_partitions IN ACCESS EXCLUSIVE MODE`); err != nil {
		t.Fatal(err)
	}
	locked := "unknown, because another session locks a table"
	testkit.Eventually(t, "a reading that is newer than the lock", func() (bool, error) {
		text := page(t, ada, "/console/").text()
		return strings.Contains(text, "Blocked: session") && strings.Contains(text, "outbox: "+locked), nil
	})
	page(t, ada, "/console/partitions").says("partitions: "+locked, "EVENTS-0")
}
