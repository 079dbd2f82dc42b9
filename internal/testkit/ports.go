package testkit

import (
	"fmt"
	"testing"

	"github.com/tidings/tidings/internal/pglocal"
)

// FreeAddr returns an address on loopback for a server that the test starts later
// (pglocal.FreePort).
func FreeAddr(t testing.TB) string {
	t.Helper()
	port, err := pglocal.FreePort()
	if err != nil {
		t.Fatal(err)
	}
	return fmt.Sprintf("127.0.0.1:%d", port)
}
