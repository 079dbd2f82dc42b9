package postgres_test

import (
	"context"
	"errors"
	"net"
	"net/url"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgproto3"

	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
)

// proxy forwards connections to PostgreSQL. It changes their start-up parameters and the server's
// messages, and returns its URL.
func proxy(t *testing.T, to string, start func(parameters map[string]string), back func(pgproto3.BackendMessage)) string {
	t.Helper()
	u, err := url.Parse(to)
	if err != nil {
		t.Fatal(err)
	}
	target := u.Host
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	serve := func(in net.Conn) {
		out, err := net.Dial("tcp", target)
		if err != nil {
			_ = in.Close()
			return
		}
		closeBoth := func() { _, _ = in.Close(), out.Close() }
		defer context.AfterFunc(ctx, closeBoth)()
		defer closeBoth()
		client, server := pgproto3.NewBackend(in, in), pgproto3.NewFrontend(out, out)
		first, err := client.ReceiveStartupMessage()
		startup, ok := first.(*pgproto3.StartupMessage)
		if err != nil || !ok {
			return
		}
		start(startup.Parameters)
		server.Send(startup)
		if server.Flush() != nil {
			return
		}
		wg.Go(func() {
			defer closeBoth()
			b := make([]byte, 64<<10)
			for {
				n, err := in.Read(b)
				if _, werr := out.Write(b[:n]); err != nil || werr != nil {
					return
				}
			}
		})
		for {
			m, err := server.Receive()
			if err != nil {
				return
			}
			back(m)
			client.Send(m)
			if client.Flush() != nil {
				return
			}
		}
	}
	wg.Go(func() {
		for {
			in, err := listener.Accept()
			if err != nil {
				return
			}
			wg.Go(func() { serve(in) })
		}
	})
	t.Cleanup(func() {
		stop()
		_ = listener.Close()
		wg.Wait()
	})
	u.Host = listener.Addr().String()
	return u.String()
}

func TestAConnectionProvesWhatItIsBeforeItsFirstUse(t *testing.T) {
	db := testkit.Postgres(t)
	if _, err := db.Pool(t, postgres.RoleOwner).Exec(t.Context(), `DO $$ BEGIN
		CREATE ROLE prove_exempt BYPASSRLS; GRANT tidings_api TO prove_exempt;
		EXCEPTION WHEN duplicate_object THEN NULL; END $$`); err != nil {
		t.Fatal(err)
	}
	nothing, same := func(map[string]string) {}, func(pgproto3.BackendMessage) {}
	for what, c := range map[string]struct {
		start func(map[string]string)
		back  func(pgproto3.BackendMessage)
		role  postgres.Role
		err   error
		says  string
	}{
		"a plain proxy":           {nothing, same, postgres.RoleAPI, nil, ""},
		"one that drops the role": {func(p map[string]string) { delete(p, "role") }, same, postgres.RoleAPI, nil, ""},
		"one that drops the time limit": {func(p map[string]string) { delete(p, "statement_timeout") }, same, postgres.RoleAPI,
			postgres.ErrUnproven, "statement_timeout"},
		"one that drops the idle limit": {func(p map[string]string) { delete(p, "idle_in_transaction_session_timeout") }, same,
			postgres.RoleSystem, postgres.ErrUnproven, "idle_in_transaction"},
		"one that asks for more isolation": {func(p map[string]string) { p["default_transaction_isolation"] = "serializable" }, same,
			postgres.RoleSystem, postgres.ErrUnproven, "isolation"},
		"one that turns row security off": {func(p map[string]string) { p["row_security"] = "off" }, same, postgres.RoleAPI,
			postgres.ErrUnproven, "row_security"},
		"a role that it does not bind": {nothing, same, "prove_exempt", postgres.ErrUnproven, "exempt"},
		"a role that nobody has made":  {nothing, same, "prove_nobody", postgres.ErrUnmigrated, "tidings migrate"},
		"a pooler, which makes keys for canceling of its own": {nothing, func(m pgproto3.BackendMessage) {
			if key, ok := m.(*pgproto3.BackendKeyData); ok {
				key.ProcessID++
			}
		}, postgres.RoleAPI, postgres.ErrPooler, "PgBouncer"},
	} {
		t.Run(what, func(t *testing.T) {
			cfg := postgres.Config{MaxConns: 2, ConnectTimeout: 10 * time.Second, StatementTimeout: time.Minute}
			pool, err := postgres.Open(t.Context(), proxy(t, db.URL, c.start, c.back), cfg, c.role, "test")
			if err != nil {
				t.Fatal(err)
			}
			defer pool.Close()
			var user string
			err = pool.QueryRow(t.Context(), `SELECT current_user`).Scan(&user)
			switch {
			case !errors.Is(err, c.err):
				t.Errorf("%v, want %v", err, c.err)
			case err != nil && !strings.Contains(err.Error(), c.says):
				t.Errorf("%q does not name %s", err, c.says)
			case err == nil && user != string(c.role):
				t.Errorf("the connection acts as %s", user)
			}
		})
	}
}
